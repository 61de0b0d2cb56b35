"""Pipeline stages with a schedule: only the last rank sees the loss."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils.data import DataLoader, TensorDataset

MICROBATCHES = 4


def build_layers():
    layers = [nn.Linear(10, 24)]
    for _ in range(4):
        layers += [nn.Tanh(), nn.Linear(24, 24)]
    return [*layers, nn.Tanh(), nn.Linear(24, 3)]


def loss_fn(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    torch.manual_seed(17)
    layers = build_layers()
    per_stage = (len(layers) + world_size - 1) // world_size
    module = nn.Sequential(*layers[rank * per_stage : (rank + 1) * per_stage]).to(device)
    stage = PipelineStage(module, rank, world_size, device)
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=loss_fn)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    x = torch.randn(160, 10)
    dataset = TensorDataset(x, x[:, :3].argmax(1))
    start = 0
    path = f"stage{rank}.pt"
    if os.path.exists("stage0.pt"):
        saved = torch.load(path)
        module.load_state_dict(saved["module"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["epoch"]
    for epoch in range(start, 5):
        order = torch.Generator().manual_seed(epoch)
        loader = DataLoader(dataset, batch_size=16, shuffle=True, generator=order)
        losses = []
        for inputs, targets in loader:
            optimizer.zero_grad()
            arguments = (inputs,) if stage.is_first else ()
            extra = {"target": targets, "losses": losses} if stage.is_last else {}
            schedule.step(*arguments, **extra)
            optimizer.step()
        if stage.is_last:
            print(f"epoch {epoch}: loss {torch.stack(losses).mean().item():.4f}")
        state = {
            "module": module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "epoch": epoch + 1,
        }
        torch.save(state, path + ".tmp")
        os.replace(path + ".tmp", path)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
