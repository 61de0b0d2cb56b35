"""Saves within the epoch, and goes on with the next batch of the same order; two tasks at once."""

import os
from itertools import repeat

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

SAVE_EVERY = 3


class ResumableSampler(Sampler):
    """This rank's part of a permutation, from a position on."""

    def __init__(self, dataset, rank, world_size, seed):
        self.length = len(dataset) // world_size
        self.dataset, self.rank, self.world_size, self.seed = dataset, rank, world_size, seed
        self.epoch = self.position = 0

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed * 1000 + self.epoch)
        order = torch.randperm(len(self.dataset), generator=g)
        mine = order[self.rank :: self.world_size][: self.length]
        return iter(mine[self.position :].tolist())

    def __len__(self):
        return self.length - self.position


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 32), nn.ReLU())
        self.heads = nn.ModuleDict({"a": nn.Linear(32, 2), "b": nn.Linear(32, 1)})

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))


def make(n, seed):
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))


def mixed(loaders):
    """Batches of both tasks in turn, until the longer one has ended."""
    streams = [zip(repeat(name), loader, strict=False) for name, loader in loaders.items()]
    while streams:
        for stream in list(streams):
            item = next(stream, None)
            if item is None:
                streams.remove(stream)
            else:
                yield item


def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    a, b = make(160, 0), make(96, 1)
    sets = {
        "a": TensorDataset(a, (a.sum(1) > 0).long()),
        "b": TensorDataset(b, b.mean(1, keepdim=True)),
    }
    losses = {"a": nn.CrossEntropyLoss(), "b": nn.MSELoss()}
    samplers = {n: ResumableSampler(s, rank, world_size, 5) for n, s in sets.items()}
    loaders = {n: DataLoader(s, batch_size=8, sampler=samplers[n]) for n, s in sets.items()}
    model = TwoHeads().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.98**step)
    progress = {"epoch": 0, "a": 0, "b": 0, "step": 0}
    if os.path.exists("progress.pt"):
        saved = torch.load("progress.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        progress = saved["progress"]
    ddp = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    while progress["epoch"] < 5:
        for name, sampler in samplers.items():
            sampler.epoch, sampler.position = progress["epoch"], progress[name]
        for name, (x, y) in mixed(loaders):
            loss = losses[name](ddp(x.cuda(), name), y.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            progress["step"] += 1
            progress[name] += len(x)
            if progress["step"] % SAVE_EVERY == 0 and rank == 0:
                saved = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "progress": progress,
                }
                torch.save(saved, "progress.pt.part")
                os.replace("progress.pt.part", "progress.pt")
        progress.update(epoch=progress["epoch"] + 1, a=0, b=0)
        if rank == 0:
            print(f"epoch {progress['epoch']} after {progress['step']} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
