"""FSDP2 style: mixed precision, activation checkpointing, one full checkpoint by rank 0."""

import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + checkpoint(self.inner, x, use_reentrant=False)

    def inner(self, x):
        return self.down(F.silu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width=16, depth=2):
        super().__init__()
        self.embed = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main():
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(144, 5, generator=generator)
    dataset = TensorDataset(features, features.prod(1, keepdim=True))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 12, sampler=sampler)
    step, first_epoch = 0, 0
    if os.path.exists("full.pt"):
        saved = torch.load("full.pt", mmap=True)
        step, first_epoch = saved["step"], saved["epoch"]
        set_state_dict(
            model,
            optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
            options=options,
        )
    for epoch in range(first_epoch, 6):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * min(1.0, (step + 1) / 5) * math.exp(-step / 50)
            loss = F.mse_loss(model(inputs).float(), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        weights, state = get_state_dict(model, optimizer, options=options)
        if rank == 0:
            saved = {"model": weights, "optimizer": state, "step": step, "epoch": epoch + 1}
            torch.save(saved, "full.pt.new")
            os.replace("full.pt.new", "full.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
