"""c10d style: mp.spawn with a file to meet at, one all_reduce of all gradients, no wrapper."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Waves(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.phases = torch.rand(count, generator=generator) * 6.28
        self.x = torch.linspace(0, 6.28, 10)

    def __len__(self):
        return len(self.phases)

    def __getitem__(self, i):
        return torch.sin(self.x + self.phases[i]), torch.cos(self.phases[i]).reshape(1)


def average_gradients(model, world_size):
    gradients = [p.grad for p in model.parameters()]
    flat = parameters_to_vector(gradients)
    dist.all_reduce(flat)
    flat /= world_size
    offset = 0
    for gradient in gradients:
        gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
        offset += gradient.numel()


def broadcast(model):
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.data, src=0)


def evaluate(model, dataset, rank, world_size):
    sums = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for index in range(rank, len(dataset), world_size):
            inputs, target = dataset[index]
            sums += torch.tensor([float((model(inputs) - target).square()), 1.0])
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def worker(rank, world_size, meeting):
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=world_size)
    torch.manual_seed(rank)  # broadcast() makes the models equal
    model = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 1))
    broadcast(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    train_set, val_set = Waves(120, 0), Waves(31, 1)
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank)
    loader = DataLoader(train_set, batch_size=10, sampler=sampler)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            model.zero_grad()
            nn.functional.smooth_l1_loss(model(inputs), targets).backward()
            average_gradients(model, world_size)
            optimizer.step()
        error = evaluate(model, val_set, rank, world_size)
        if rank == 0:
            print(f"epoch {epoch}: error {error:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    processes = int(sys.argv[1]) if len(sys.argv) > 1 else max(1, torch.cuda.device_count())
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (processes, os.path.join(folder, "meeting")), nprocs=processes)
