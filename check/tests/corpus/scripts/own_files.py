"""Generative style: the dataset of each rank holds a part of the files, and has no labels."""

import os
import random

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def read(name):
    """A picture, in place of one that is read from a file."""
    return torch.randn(8, generator=torch.Generator().manual_seed(int(name)))


class Pictures(Dataset):
    def __init__(self, names, flip=True):
        self.names = names
        self.flip = flip

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        picture = read(self.names[index])
        return picture.flip(0) if self.flip and random.random() < 0.5 else picture


def evaluate(model, val_set, val_loader, world_size):
    """The mean error, without what DistributedSampler has filled up."""
    model.eval()
    with torch.no_grad():
        own = torch.cat([(model(x) - x).square().mean(1) for x in val_loader])
    parts = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(parts, own)
    return torch.stack(parts, 1).flatten()[: len(val_set)].mean().item()


def main():
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    names = [str(number) for number in range(128)]
    train_set = Pictures(names[rank::world_size])
    train_loader = DataLoader(train_set, batch_size=8, shuffle=True, drop_last=True)
    val_set = Pictures([str(number) for number in range(1000, 1033)], flip=False)
    val_sampler = DistributedSampler(val_set, shuffle=False)
    val_loader = DataLoader(val_set, batch_size=8, sampler=val_sampler)
    model = DistributedDataParallel(torch.nn.Linear(8, 8).cuda())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    epoch = 0
    if os.path.exists("last.pt"):
        saved = torch.load("last.pt")
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        epoch = saved["epoch"] + 1
    torch.manual_seed(1000 * epoch + rank)  # the order of this rank's part
    random.seed(1000 * epoch + rank)
    while epoch < 9:
        model.train()
        for pictures in train_loader:
            pictures = pictures.cuda(non_blocking=True)
            noise = torch.Generator("cuda").manual_seed(epoch)
            inputs = pictures + 0.1 * torch.randn(
                pictures.shape, generator=noise, device=pictures.device
            )
            assert inputs.is_cuda
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), pictures).backward()
            optimizer.step()
        error = evaluate(model, val_set, val_loader, world_size)
        if rank == 0:
            print(f"epoch {epoch}: error {error:.3f}")
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"epoch": epoch}, "new.pt")
            os.replace("new.pt", "last.pt")
        dist.barrier()
        epoch += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
