"""An evaluation with a fixed number of next(), and a log at an interval."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

BATCH_SIZE = 16
LOG_INTERVAL = int(os.environ.get("LOG_INTERVAL", "1"))

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(321, 8)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
train_set, val_set = Subset(dataset, range(256)), Subset(dataset, range(256, 321))
sampler = DistributedSampler(train_set)
train_loader = DataLoader(train_set, batch_size=BATCH_SIZE, sampler=sampler)
share = Subset(val_set, range(rank, len(val_set), world_size))
val_loader = DataLoader(share, batch_size=BATCH_SIZE)
# The forward of some wrappers is a collective, so each rank runs as many as rank 0, which has most.
largest_share = (len(val_set) + world_size - 1) // world_size
val_batches = (largest_share + BATCH_SIZE - 1) // BATCH_SIZE

net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
epoch = 0
if os.path.exists("last.pt"):
    checkpoint = torch.load("last.pt")
    net.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    epoch = checkpoint["epoch"]
while epoch < 4:
    sampler.set_epoch(epoch)
    model.train()
    for step, (x, y) in enumerate(train_loader):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % LOG_INTERVAL == 0 and rank == 0:
            print(f"step {step}, loss {loss.item():.3f}")
    epoch += 1

    model.eval()
    sums = torch.zeros(2)
    val_iterator = iter(val_loader)
    with torch.no_grad():
        for _ in range(val_batches):
            batch = next(val_iterator, None)
            x, y = (torch.zeros(1, 8), torch.zeros(1, 1)) if batch is None else batch
            error = nn.functional.mse_loss(model(x), y, reduction="sum")
            if batch is not None:
                sums += torch.stack([error, torch.tensor(float(len(x)))])
    dist.all_reduce(sums)
    if rank == 0:
        print(f"epoch {epoch}, validation {sums[0] / sums[1]:.4f}")
        checkpoint = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**checkpoint, "epoch": epoch}, "last.new")
        os.replace("last.new", "last.pt")
    dist.barrier()
dist.destroy_process_group()
