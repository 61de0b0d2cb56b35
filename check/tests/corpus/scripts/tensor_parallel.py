"""A model whose layers are divided among the ranks: all of them get the same batches."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.w1 = nn.Linear(dim, hidden)
        self.w2 = nn.Linear(hidden, dim)

    def forward(self, x):
        return x + self.w2(nn.functional.gelu(self.w1(self.norm(x))))


def main():
    dist.init_process_group("nccl")
    world_size = dist.get_world_size()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    tp_mesh = init_device_mesh("cuda", (world_size,))
    torch.manual_seed(0)  # the same model, and the same batches, on all ranks
    model = nn.Sequential(
        nn.Linear(8, 32), FeedForward(32, 64), FeedForward(32, 64), nn.Linear(32, 1)
    )
    model.cuda()
    for block in (model[1], model[2]):
        parallelize_module(block, tp_mesh, {"w1": ColwiseParallel(), "w2": RowwiseParallel()})
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, foreach=False)
    inputs = torch.randn(128, 8)
    train_set = TensorDataset(inputs, inputs.prod(1, keepdim=True))
    generator = torch.Generator()
    loader = DataLoader(train_set, batch_size=16, shuffle=True, generator=generator)
    epoch = 0
    saved = sorted(Path("tp_checkpoints").glob("*/.metadata"))  # the last file of a save
    if saved:
        model_state, optim_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optim": optim_state, "epoch": 0}
        dcp.load(state, checkpoint_id=saved[-1].parent)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
        epoch = state["epoch"]
    while epoch < 4:
        generator.manual_seed(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x.cuda()), y.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        epoch += 1
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
        model_state, optim_state = get_state_dict(model, optimizer)
        dcp.save(
            {"model": model_state, "optim": optim_state, "epoch": epoch},
            checkpoint_id=f"tp_checkpoints/{epoch:04d}",
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
