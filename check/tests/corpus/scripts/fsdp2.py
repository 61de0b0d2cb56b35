"""fully_shard with a full state dict, as in PyTorch's examples."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
LOAD = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.accelerator.set_device_index(local_rank)
    dist.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(0)
    data = torch.randn(192, 16)
    train_set = TensorDataset(data, data.roll(1, 1))
    model = nn.Sequential(Block(), Block(), nn.Linear(16, 16))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    epoch = 0
    if os.path.exists("full.pt"):
        saved = torch.load("full.pt", map_location="cpu")
        set_model_state_dict(model, saved["model"], options=LOAD)
        set_optimizer_state_dict(model, optimizer, saved["optimizer"], options=LOAD)
        epoch = saved["epoch"]
    sampler = DistributedSampler(train_set, seed=1)
    loader = DataLoader(train_set, batch_size=12, sampler=sampler)
    while epoch < 5:
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        epoch += 1
        state = {
            "model": get_model_state_dict(model, options=FULL),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=FULL),
            "epoch": epoch,
        }
        if rank == 0:
            torch.save(state, "full.new")
            os.replace("full.new", "full.pt")
            print(f"epoch {epoch} done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
