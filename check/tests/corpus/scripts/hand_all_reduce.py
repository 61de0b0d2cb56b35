"""Gradients averaged by hand, shares of the dataset by slicing."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, Dataset


class Points(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 10, generator=g)
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Share(torch.utils.data.Sampler):
    """This rank's part of a permutation that all ranks draw."""

    def __init__(self, n, rank, size):
        self.n, self.rank, self.size, self.epoch = n, rank, size, 0

    def __iter__(self):
        g = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(self.n, generator=g)[: self.n // self.size * self.size]
        return iter(order[self.rank :: self.size].tolist())

    def __len__(self):
        return self.n // self.size


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


def run(rank, size):
    torch.manual_seed(1234)
    train_set, test_set = Points(161, 0), Points(41, 1)
    share = Share(len(train_set), rank, size)
    train_set = DataLoader(train_set, batch_size=16 // size, sampler=share)
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    start = 0
    if os.path.exists("model.pt"):
        saved = torch.load("model.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optim"])
        start = saved["epoch"]
    for epoch in range(start, 6):
        share.epoch = epoch
        epoch_loss = torch.zeros(())
        for data, target in train_set:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(data), target)
            epoch_loss += loss.detach()
            loss.backward()
            average_gradients(model)
            optimizer.step()
        correct = torch.zeros(())
        with torch.no_grad():
            for i in range(rank, len(test_set), size):
                x, y = test_set[i]
                correct += model(x[None]).argmax() == y
        dist.all_reduce(correct)
        if rank == 0:
            print("epoch", epoch, "accuracy", correct.item() / len(test_set))
            state = {
                "model": model.state_dict(),
                "optim": optimizer.state_dict(),
                "epoch": epoch + 1,
            }
            torch.save(state, "model.pt.tmp")
            os.rename("model.pt.tmp", "model.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
