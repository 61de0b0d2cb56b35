"""Accelerate: batches are dicts of padded tokens, accumulate(), gather_for_metrics, save_state."""

import argparse
import os
import re

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset


class Reviews(Dataset):
    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(4, 12, (size,), generator=generator)
        self.texts = [torch.randint(1, 50, (int(n),), generator=generator) for n in lengths]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, idx):
        text = self.texts[idx]
        return {"input_ids": text, "labels": int(text.float().mean() > 25)}


def collate_fn(examples):
    input_ids = pad_sequence([e["input_ids"] for e in examples], batch_first=True)
    return {
        "input_ids": input_ids,
        "attention_mask": (input_ids != 0).long(),
        "labels": torch.tensor([e["labels"] for e in examples]),
    }


class BagOfWords(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = torch.nn.Embedding(50, 32)
        self.dropout = torch.nn.Dropout(0.1)
        self.classifier = torch.nn.Linear(32, 2)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask.unsqueeze(-1)
        pooled = (self.embeddings(input_ids) * mask).sum(1) / mask.sum(1)
        return self.classifier(self.dropout(pooled))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_train_epochs", type=int, default=6)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--resume_from_checkpoint", action="store_true")
    args = parser.parse_args()
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    set_seed(42)
    train_dataloader = DataLoader(
        Reviews(261, 0),
        shuffle=True,
        collate_fn=collate_fn,
        batch_size=args.per_device_train_batch_size,
    )
    eval_dataloader = DataLoader(Reviews(45, 1), collate_fn=collate_fn, batch_size=8)
    model = BagOfWords()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 10)
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    starting_epoch = 0
    if args.resume_from_checkpoint:
        done = [int(m[1]) for f in os.listdir("output") if (m := re.fullmatch(r"epoch_(\d+)", f))]
        accelerator.load_state(f"output/epoch_{max(done)}")
        starting_epoch = max(done) + 1

    for epoch in range(starting_epoch, args.num_train_epochs):
        model.train()
        train_dataloader.set_epoch(epoch)
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                logits = model(batch["input_ids"], batch["attention_mask"])
                loss = F.cross_entropy(logits, batch["labels"])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

        model.eval()
        samples_seen = correct = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                logits = model(batch["input_ids"], batch["attention_mask"])
            predictions, references = accelerator.gather_for_metrics(
                (logits.argmax(dim=-1), batch["labels"])
            )
            correct += (predictions == references).sum().item()
            samples_seen += references.shape[0]
        accelerator.print(f"epoch {epoch}: accuracy {correct / samples_seen:.3f}")
        accelerator.save_state(f"output/epoch_{epoch}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
