"""Adapters in a frozen model with tied weights, a global count of tokens, safetensors."""

import json
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler


class Instructions(Dataset):
    """A prompt, which is not trained on, and an answer, which is."""

    def __len__(self):
        return 300

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(index)
        prompt, answer = torch.randint(2, 7, (2,), generator=g).tolist()
        tokens = torch.randint(1, 30, (prompt + answer,), generator=g)
        labels = torch.cat([torch.full((prompt,), -100), tokens[prompt:]])
        return {
            "input_ids": F.pad(tokens, (0, 12 - len(tokens))),
            "labels": F.pad(labels, (0, 12 - len(labels)), value=-100),
        }


class Endless(Sampler):
    """One permutation after another, from a position on, without an end."""

    def __init__(self, length, rank, world_size, position=0):
        self.length, self.rank, self.world_size = length, rank, world_size
        self.position = position

    def __iter__(self):
        number = 0
        usable = self.length // self.world_size * self.world_size
        while True:
            g = torch.Generator().manual_seed(77 + number)
            order = torch.randperm(self.length, generator=g)[:usable].tolist()
            for i, index in enumerate(order[self.rank :: self.world_size]):
                if number * (usable // self.world_size) + i >= self.position:
                    yield index
            number += 1


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.lora_a.t() @ self.lora_b.t()


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 24)
        self.up = LoRALinear(nn.Linear(24, 48))
        self.down = LoRALinear(nn.Linear(48, 24))
        self.head = nn.Linear(24, 30, bias=False)
        self.head.weight = self.embed.weight
        self.embed.requires_grad_(False)

    def forward(self, input_ids):
        x = self.embed(input_ids).cumsum(1) / 4
        return self.head(x + self.down(F.silu(self.up(x))))


def save(folder, model, optimizer, scheduler, step):
    new = folder.with_suffix(".partial")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    adapters = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    save_file(adapters, new / "adapter_model.safetensors")
    state = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save(state, new / "training_state.bin")
    (new / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    new.rename(folder)


def main():
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    model = LanguageModel().cuda()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=5e-3, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1, (n + 1) / 6))
    step, batch_size = 0, 8
    checkpoints = sorted(path for path in Path(".").glob("checkpoint-*") if not path.suffix)
    if checkpoints:
        last = checkpoints[-1]
        missing = model.load_state_dict(load_file(last / "adapter_model.safetensors"), strict=False)
        assert not missing.unexpected_keys
        state = torch.load(last / "training_state.bin", map_location="cpu")
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        step = json.loads((last / "trainer_state.json").read_text())["global_step"]
    ddp = nn.parallel.DistributedDataParallel(model)
    dataset = Instructions()
    sampler = Endless(len(dataset), rank, world_size, position=step * batch_size)
    batches = iter(DataLoader(dataset, batch_size=batch_size, sampler=sampler))
    while step < 60:
        batch = next(batches)
        labels = batch["labels"][:, 1:].cuda()
        count = (labels != -100).sum()
        dist.all_reduce(count)
        logits = ddp(batch["input_ids"].cuda())[:, :-1]
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = total * world_size / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 4 == 0 and rank == 0:
            print(json.dumps({"step": step, "loss": loss.item()}))
            save(Path(f"checkpoint-{step:05d}"), model, optimizer, scheduler, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
