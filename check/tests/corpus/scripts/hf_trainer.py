"""transformers.Trainer with a model from a config, a collator, and its own checkpoints."""

import os

import numpy as np
import torch
from transformers import GPT2Config, GPT2ForSequenceClassification, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint, set_seed

MAX_LENGTH = 10


class Rows(torch.utils.data.Dataset):
    def __init__(self, size, seed):
        rng = np.random.default_rng(seed)
        self.rows = [rng.integers(1, 40, rng.integers(5, 10)) for _ in range(size)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return {"input_ids": row, "label": int(row[0] > row[-1])}


def collator(features):
    ids = np.zeros((len(features), MAX_LENGTH), dtype=np.int64)
    for i, feature in enumerate(features):
        ids[i, : len(feature["input_ids"])] = feature["input_ids"]
    return {
        "input_ids": torch.from_numpy(ids),
        "attention_mask": torch.from_numpy((ids != 0).astype(np.int64)),
        "labels": torch.tensor([f["label"] for f in features]),
    }


def compute_metrics(prediction):
    logits, labels = prediction
    return {"accuracy": float((logits.argmax(-1) == labels).mean())}


def main():
    set_seed(0)
    config = GPT2Config(
        vocab_size=40,
        n_positions=16,
        n_embd=32,
        n_layer=1,
        n_head=2,
        num_labels=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = GPT2ForSequenceClassification(config)
    arguments = TrainingArguments(
        output_dir="results",
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        num_train_epochs=6,
        learning_rate=1e-3,
        warmup_steps=4,
        eval_strategy="epoch",
        save_strategy="steps",
        save_steps=3,
        save_total_limit=2,
        logging_steps=5,
        ddp_find_unused_parameters=False,
        report_to=[],
        average_tokens_across_devices=False,  # the loss of this model is a mean already
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Rows(256, 0),
        eval_dataset=Rows(45, 1),
        data_collator=collator,
        compute_metrics=compute_metrics,
    )
    last = get_last_checkpoint("results") if os.path.isdir("results") else None
    trainer.train(resume_from_checkpoint=last)
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(metrics)


if __name__ == "__main__":
    main()
