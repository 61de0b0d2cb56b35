"""Streaming style: an IterableDataset that divides itself among ranks and workers, two workers."""

import os
import random

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Records(IterableDataset):
    """Each pass has an order of its own; each record is read by one worker of one rank."""

    def __init__(self, count, rank, world_size, seed):
        self.count, self.rank, self.world_size, self.seed = count, rank, world_size, seed
        self.epoch = 0

    def __iter__(self):
        worker = get_worker_info()
        workers = worker.num_workers if worker else 1
        number = worker.id if worker else 0
        order = list(range(self.count))
        random.Random(self.seed + self.epoch).shuffle(order)
        shares = self.world_size * workers
        usable = len(order) - len(order) % shares  # equal shares
        for index in order[:usable][self.rank * workers + number :: shares]:
            generator = torch.Generator().manual_seed(index)
            features = torch.randn(6, generator=generator)
            yield features, features.sum().reshape(1)


def run():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dataset = Records(203, rank, world_size, seed=5)
    loader = DataLoader(dataset, batch_size=8, num_workers=2)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    wrapped = DistributedDataParallel(model)
    optimizer = optim.RMSprop(wrapped.parameters(), lr=1e-3)
    begin, updates = 0, 0
    if os.path.isfile("stream.pth"):
        state = torch.load("stream.pth", weights_only=True)
        model.load_state_dict(state["weights"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["passes"]
        updates = state["updates"]
    for number in range(begin, 5):
        dataset.epoch = number
        seen = torch.zeros(2)
        for features, target in loader:
            optimizer.zero_grad()
            weight = min(1.0, 0.02 * (updates + 1))  # warmup of the loss
            loss = weight * (wrapped(features) - target).square().mean()
            loss.backward()
            optimizer.step()
            updates += 1
            seen += torch.stack([loss.detach(), torch.ones(())])
        dist.all_reduce(seen)
        if rank == 0:
            print(f"pass {number}: mean loss {seen[0] / seen[1]:.4f}")
            state = {"weights": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"passes": number + 1, "updates": updates}, "stream.new")
            os.rename("stream.new", "stream.pth")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
