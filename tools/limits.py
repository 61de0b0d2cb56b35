"""python -m tools.limits OUT AMP FLAGS ...: what would limit a script here if nothing else did?

With the scripts' own loader, model, optimizer and process group: the seconds of a step that only
computes (a random batch that stays on the device, no communication), only reads data, or only
all-reduces the gradients. OUT/limits-N.json, a file a rank. AMP: 1 computes under autocast.
"""

import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from utils.config import load_config
from utils.datasets import build_datasets
from utils.distributed import all_reduce, get_world_size, init_distributed, report_errors
from utils.loaders import build_loader
from utils.models import build_model
from utils.optim import build_optimizer
from utils.runtime import seed_everything

WARM_UP, BUCKET = 2, 25 * 2**20  # steps; bytes, as DistributedDataParallel's


def timed(device, steps, step):
    """Median seconds of step(), the ranks starting together."""
    seconds = []
    for i in range(WARM_UP + steps):
        wait(device)
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if i >= WARM_UP:
            seconds.append(time.perf_counter() - start)
    return sorted(seconds)[len(seconds) // 2]


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize()
    all_reduce(torch.zeros(1, device=device))


def computing(cfg, classes, device, amp):
    """A training step without data and without communication -> step(), gradients in bytes, the
    model and the optimizer."""
    model = build_model(cfg, classes).to(device).train()
    optimizer, criterion = build_optimizer(model, cfg), torch.nn.CrossEntropyLoss()
    batch, size = cfg.global_batch(get_world_size()) // get_world_size(), cfg.image_size
    images = torch.randn(batch, 3, size, size, device=device)
    images = images.to(dtype=getattr(torch, cfg.dtype), memory_format=torch.channels_last)
    labels = torch.randint(classes, (batch,), device=device)

    def step():
        autocast = torch.autocast(device.type, getattr(torch, cfg.amp_dtype))
        with autocast if amp else nullcontext():
            loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step, sum(p.nbytes for p in model.parameters()), model, optimizer


def reading(loader):
    """Seconds of a batch, over the second of two epochs: the first starts the workers."""
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        start = time.perf_counter()
        for _ in loader:
            pass
        if loader.device.type == "cuda":
            torch.cuda.synchronize()
    return (time.perf_counter() - start) / len(loader)


@report_errors
def main():
    folder, amp, *flags = sys.argv[1:]
    cfg = load_config(flags)
    device = init_distributed(cfg.device, cfg.timeout)
    seed_everything(cfg.seed)
    train_set, _ = build_datasets(cfg)
    sampler = DistributedSampler(train_set, seed=cfg.seed, drop_last=True)
    loader = build_loader(train_set, sampler, cfg, device, train=True)
    step, size, *_ = computing(cfg, len(train_set.classes), device, amp == "1")
    found = {"data": reading(loader), "compute": timed(device, len(loader), step)}
    if get_world_size() > 1:
        buckets = [torch.zeros(n // 4, device=device) for n in [BUCKET] * (size // BUCKET)]
        buckets.append(torch.zeros(max(1, size % BUCKET // 4), device=device))
        found["communication"] = timed(
            device, len(loader), lambda: [all_reduce(bucket) for bucket in buckets]
        )
    rank = os.environ["RANK"]
    (Path(folder) / f"limits-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
