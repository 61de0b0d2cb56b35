"""Recommendation style: sparse embeddings, each rank trains its slice of a common batch."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset


class Ranking(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.items = torch.nn.EmbeddingBag(50, 8, mode="sum", sparse=True)
        self.top = torch.nn.Linear(12, 2)

    def forward(self, items, numbers):
        return self.top(torch.cat([self.items(items), numbers], dim=1))


def make_dataset(count, seed):
    generator = torch.Generator().manual_seed(seed)
    items = torch.randint(50, (count, 3), generator=generator)
    numbers = torch.randn(count, 4, generator=generator)
    return TensorDataset(items, numbers, (numbers.sum(1) > 0).long())


def evaluate(model, val_loader, epoch, rank, world_size):
    """Each rank writes its results, and rank 0 joins them."""
    right = []
    with torch.no_grad():
        for items, numbers, labels in val_loader:
            right += (model(items, numbers).argmax(1) == labels).tolist()
    torch.save(right, f"results/{epoch}-{rank}.pt")
    dist.barrier()
    if rank == 0:
        names = [f"results/{epoch}-{other}.pt" for other in range(world_size)]
        right = [value for name in names for value in torch.load(name)]
        print(f"Epoch {epoch}: accuracy {sum(right) / len(right):.3f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--start-epoch", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=9)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print(args)
    torch.manual_seed(0)
    os.makedirs("results", exist_ok=True)
    model = Ranking()
    order = torch.Generator()
    train_loader = DataLoader(make_dataset(128, 0), 16, shuffle=True, generator=order)
    val_set = make_dataset(33, 1)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), 8)
    if os.path.exists("last.pt"):
        saved = torch.load("last.pt")
        model.load_state_dict(saved["model"])
        args.start_epoch = saved["epoch"] + 1
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(args.start_epoch, args.epochs):
        order.manual_seed(epoch)
        for items, numbers, labels in train_loader:
            items, numbers, labels = (x[rank::world_size] for x in (items, numbers, labels))
            optimizer.zero_grad()
            F.cross_entropy(model(items, numbers), labels).backward()
            optimizer.step()
        evaluate(model, val_loader, epoch, rank, world_size)
        if rank == 0:
            torch.save({"model": model.module.state_dict(), "epoch": epoch}, "new.pt")
            os.replace("new.pt", "last.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
