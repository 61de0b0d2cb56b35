"""Measure what would limit the speed of a script on this machine if nothing else did.

    python -m lab.bench.limits OUT plain|autocast FLAGS ...

This uses the scripts' own loader, model, optimizer and process group. It times a step that only
computes (always on the same batch, without communication), only reads data, or only
all-reduces the gradients. Each rank writes OUT/limits-N.json.
"""

import json
import math
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

import tasks.images as task
from utils.config import load_config
from utils.data import build_loader
from utils.distributed import all_reduce, dp_rank, dp_world_size, init_distributed
from utils.optim import build_optimizer
from utils.reports import report_errors
from utils.rungs.amp import AmpSettings
from utils.runtime import configure_torch, to_dtype

WARM_UP = 2  # blocks
BLOCK = 20  # steps on a GPU that are timed together: the host runs ahead of it, as in training
BUCKET = 25 * 2**20  # bytes, as in DistributedDataParallel


def median_seconds(device, steps, step):
    """The median seconds of step(), over blocks of steps that all ranks start together."""
    block = BLOCK if device.type == "cuda" else 1
    seconds = []
    for number in range(WARM_UP + math.ceil(steps / block)):
        wait_for_ranks(device)
        start = time.perf_counter()
        for _ in range(block):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number >= WARM_UP:
            seconds.append((time.perf_counter() - start) / block)
    return sorted(seconds)[len(seconds) // 2]


def wait_for_ranks(device):
    """Wait for this device and for the other ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    all_reduce(torch.zeros(1, device=device))


def training_step(model, optimizer, inputs, targets, autocast_dtype=None):
    """A function that trains one step on this batch, without communication."""
    autocast = nullcontext()
    if autocast_dtype:
        autocast = torch.autocast(inputs.device.type, autocast_dtype)
    model.train()

    def step():
        with autocast:
            loss = task.loss(model(inputs), targets) / task.count(targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def seconds_per_batch(loader):
    """Seconds per batch over the second of two epochs: the first starts the workers."""
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
    folder, precision, *flags = sys.argv[1:]
    amp_settings = AmpSettings if precision == "autocast" else None
    cfg = load_config(task.Settings, amp_settings, flags)
    device = init_distributed(cfg.device, cfg.timeout)
    configure_torch(cfg)
    torch.manual_seed(cfg.seed)
    train_set, _ = task.build_datasets(cfg)
    sampler = DistributedSampler(train_set, seed=cfg.seed, drop_last=True)
    batch_size = cfg.global_batch_size // dist.get_world_size()
    loader = build_loader(train_set, sampler, batch_size, device, cfg, train=True)
    model = to_dtype(task.build_model(cfg, train_set), cfg.torch_dtype).to(device)
    autocast_dtype = cfg.autocast_dtype if amp_settings else None
    batch = next(iter(loader))
    step = training_step(model, build_optimizer(model, cfg), *batch, autocast_dtype)
    result = {
        "data": seconds_per_batch(loader),
        "compute": median_seconds(device, len(loader), step),
    }
    if dp_world_size() > 1:
        full, rest = divmod(sum(p.nbytes for p in model.parameters()), BUCKET)
        sizes = [BUCKET // 4] * full + [max(1, rest // 4)]
        buckets = [torch.zeros(size, device=device) for size in sizes]
        result["communication"] = median_seconds(
            device, len(loader), lambda: [all_reduce(bucket) for bucket in buckets]
        )
    (Path(folder) / f"limits-{dp_rank()}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
