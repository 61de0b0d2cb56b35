"""Denoising style: an encoder and a head, each wrapped, noise of a generator per rank, EMA."""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.SiLU())

    def forward(self, x):
        return self.layers(x)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Linear(1, 24)
        self.out = nn.Linear(24, 8)

    def forward(self, features, level):
        return self.out(features + self.time(level))


@torch.no_grad()
def follow(average, models, decay=0.9):
    for name, model in models.items():
        for old, new in zip(average[name].parameters(), model.parameters(), strict=True):
            old.lerp_(new, 1 - decay)
        for old, new in zip(average[name].buffers(), model.buffers(), strict=True):
            old.copy_(new)


def main():
    dist.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(0)
    models = {"encoder": Encoder(), "head": Head()}
    average = copy.deepcopy(models)
    for model in average.values():
        model.requires_grad_(False)
    encoder = DistributedDataParallel(models["encoder"])
    head = DistributedDataParallel(models["head"])
    parameters = [*encoder.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    noise = torch.Generator().manual_seed(100 + rank)
    data = torch.randn(192, 8, generator=torch.Generator().manual_seed(1))
    sampler = DistributedSampler(TensorDataset(data), shuffle=True)
    loader = DataLoader(TensorDataset(data), batch_size=16, sampler=sampler)
    first, updates = 0, 0
    if os.path.exists("denoise.pt"):
        saved = torch.load("denoise.pt")
        for name, model in models.items():
            model.load_state_dict(saved[name])
            average[name].load_state_dict(saved[f"average of {name}"])
        optimizer.load_state_dict(saved["optimizer"])
        first, updates = saved["epoch"] + 1, saved["updates"]
    noise.manual_seed(1000 * first + rank)
    for epoch in range(first, 8):
        sampler.set_epoch(epoch)
        for (clean,) in loader:
            level = torch.rand(len(clean), 1, generator=noise)
            added = torch.randn(clean.shape, generator=noise)
            predicted = head(encoder(clean + level * added), level)
            weight = min(1.0, (updates + 1) / 10)
            loss = weight * (predicted - added).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            updates += 1
            follow(average, models)
        if rank == 0:
            saved = {name: model.state_dict() for name, model in models.items()}
            saved |= {f"average of {name}": model.state_dict() for name, model in average.items()}
            saved |= {"optimizer": optimizer.state_dict(), "epoch": epoch, "updates": updates}
            torch.save(saved, "denoise.pt.tmp")
            os.replace("denoise.pt.tmp", "denoise.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
