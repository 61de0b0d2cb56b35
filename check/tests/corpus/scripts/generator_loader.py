"""Generator style: functions only, batches from a Python generator that divides them by rank."""

import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, STEPS, SAVE_EVERY, LENGTH, VOCABULARY = 8, 60, 4, 12, 17


def setup():
    if "RANK" not in os.environ:
        return 0, 1
    dist.init_process_group(backend="gloo", init_method="env://")
    return dist.get_rank(), dist.get_world_size()


def make_corpus():
    generator = torch.Generator().manual_seed(3)
    return torch.randint(VOCABULARY, (3000,), generator=generator)


def batches(corpus, first_step, rank, world_size):
    """Endless batches. The positions of a global batch depend on the step alone."""
    step = first_step
    while True:
        generator = torch.Generator().manual_seed(1000 + step)
        starts = torch.randint(len(corpus) - LENGTH - 1, (BATCH * world_size,), generator=generator)
        own = starts[rank::world_size]
        rows = torch.stack([corpus[start : start + LENGTH + 1] for start in own.tolist()])
        yield rows[:, :-1], rows[:, 1:]
        step += 1


def build_model():
    torch.manual_seed(0)
    embedding = nn.Embedding(VOCABULARY, 16)
    return nn.Sequential(embedding, nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, VOCABULARY))


def rate(step):
    return 0.01 * 0.5 * (1 + math.cos(math.pi * step / STEPS))


def save(path, step, model, optimizer):
    checkpoint = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(checkpoint, path + ".part")
    os.replace(path + ".part", path)


def main(path="gen.pt"):
    rank, world_size = setup()
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate(0))
    first_step = 0
    if os.path.exists(path):
        checkpoint = torch.load(path)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first_step = checkpoint["step"]
    train = DDP(model) if world_size > 1 else model
    loader = batches(make_corpus(), first_step, rank, world_size)
    for step in range(first_step, STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        inputs, targets = next(loader)
        loss = F.cross_entropy(train(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if (step + 1) % SAVE_EVERY == 0:
            if rank == 0:
                print(f"step {step + 1}: loss {loss.item():.4f}")
                save(path, step + 1, model, optimizer)
            if world_size > 1:
                dist.barrier()
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
