"""Measure what a checkpoint costs: seconds to save and to load, and how long training waits.

    python -m lab.bench.checkpoint

One process trains on one batch of images, `--steps` steps at a time. After the second step, it
saves a checkpoint. Two modes take turns: asynchronous, as in the scripts, and waiting for the file.
The cost of a save is how much longer these steps take than the same number of median steps.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import tasks.images as task
from lab.bench.limits import training_step
from lab.bench.report import write_table
from lab.bench.runner import machine, setting, take_turns
from tools.lib.markdown import markdown_table
from tools.lib.runs import flag_list
from utils.checkpoint import Checkpointer
from utils.config import load_config
from utils.data import build_loader
from utils.distributed import select_device
from utils.optim import build_optimizer
from utils.runtime import configure_torch
from utils.sampler import EpochSampler

MODES = ["asynchronous", "waiting"]
HEAD = ["model", "MB", "asynchronous: call, s", "cost, s", "waiting: call, s", "cost, s"]
HEAD += ["load, s"]


def cost_of_saving(step, steps, checkpoint, synchronize, *, wait):
    """Seconds of the call that saves, and how much longer the steps take because of it."""
    seconds, call = [], 0.0
    for i in range(steps):
        start = time.perf_counter()
        step()
        synchronize()
        if i == 1:
            checkpoint.epoch = 0  # it saves the same epoch in each repeat
            called = time.perf_counter()
            checkpoint.save(1)
            if wait:
                checkpoint.wait()
            call = time.perf_counter() - called
        seconds.append(time.perf_counter() - start)
    checkpoint.wait()
    return call, sum(seconds) - steps * statistics.median(seconds)


def measure(cfg, steps, repeats):
    """Save and load the checkpoints of one model. Returns the numbers of a row."""
    device = select_device(cfg.device)
    configure_torch(cfg)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    torch.manual_seed(0)
    cfg = replace(cfg, dataset="synthetic", synthetic_samples=cfg.global_batch_size)
    train_set, _ = task.build_datasets(cfg)
    sampler = EpochSampler(train_set, seed=0)
    loader = build_loader(train_set, sampler, cfg.global_batch_size, device, cfg, train=True)
    model = task.build_model(cfg, train_set).to(device)
    optimizer = build_optimizer(model, cfg)
    step = training_step(model, optimizer, *next(iter(loader)))
    state = {"model": model, "optimizer": optimizer, "loader": loader, "data": {}}
    checkpoint = Checkpointer(cfg, state)
    checkpoint.load()
    jobs = {
        mode: partial(cost_of_saving, step, steps, checkpoint, synchronize, wait=mode == "waiting")
        for mode in MODES
    }
    take_turns(jobs, 1)  # warm up
    runs, errors = take_turns(jobs, repeats)
    if errors:
        raise RuntimeError(f"saving failed: {errors}")
    size = (Path(cfg.output_dir) / "last.pt").stat().st_size
    start = time.perf_counter()
    checkpoint.load()
    synchronize()
    return {"runs": runs, "load": time.perf_counter() - start, "bytes": size}


def main():
    parser = argparse.ArgumentParser(prog="python -m lab.bench.checkpoint", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--models", default="resnet18,resnet50")
    parser.add_argument(
        "--steps", type=int, default=12, help="more than twice as many as run during a save"
    )
    parser.add_argument("--repeats", type=int, default=5, help="epochs in each mode (default: 5)")
    parser.add_argument("--set", metavar="NAME=VALUE", action="append", default=[])
    parser.add_argument("--output", default="runs/bench-checkpoint", help="folder of the reports")
    args = parser.parse_args()
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    rows, result = [], machine() | {"models": {}}
    for name in args.models.split(","):
        flags = {"model": name, "save_minutes": 0} | dict(map(setting, args.set))
        cfg = load_config(task.Settings, None, flag_list(flags))
        with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=folder) as place:
            numbers = measure(replace(cfg, output_dir=place), args.steps, args.repeats)
        result["models"][name] = numbers
        medians = [
            statistics.median(times[i] for times in numbers["runs"][mode])
            for mode in MODES
            for i in (0, 1)
        ]
        seconds = [f"{s:.2f}" for s in [*medians, numbers["load"]]]
        rows.append([name, f"{numbers['bytes'] / 1e6:.0f}", *seconds])
        print("  ".join(rows[-1]), flush=True)
    text = f"{', '.join(result['gpus']) or result['cpu']}, torch {result['torch']}, medians of "
    text += f"{args.repeats} interleaved epochs.\n\n{markdown_table(HEAD, rows)}\n"
    write_table(result, text, folder, "checkpoint")


if __name__ == "__main__":
    main()
