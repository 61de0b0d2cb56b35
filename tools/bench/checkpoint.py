"""Measure what a checkpoint costs: seconds to save, to load, and for which training waits.

    python -m tools.bench.checkpoint

One process trains on random images, `--steps` steps at a time; after the second step it saves a
checkpoint, alternately asynchronously, as the scripts do, and waiting for the file. The cost of a
save is how much longer these steps take than the same number of median steps.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from tools.bench.limits import training_step
from tools.bench.report import markdown_table, write_table
from tools.bench.runner import machine, setting, take_turns
from tools.runs import flag_list
from utils.checkpoint import Checkpointer
from utils.config import Config, load_config
from utils.distributed import get_device
from utils.runtime import configure_torch

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
    device = get_device(cfg.device)
    configure_torch(cfg)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    torch.manual_seed(0)
    step, model, optimizer = training_step(cfg, 10, device)
    state = {"model": model, "optimizer": optimizer}
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
    parser = argparse.ArgumentParser(prog="python -m tools.bench.checkpoint", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--models", default="resnet18,resnet50")
    parser.add_argument(
        "--steps", type=int, default=12, help="more than twice as many as run during a save"
    )
    parser.add_argument("--repeats", type=int, default=5, help="epochs of each (default: 5)")
    parser.add_argument("--set", metavar="NAME=VALUE", action="append", default=[])
    parser.add_argument("--output", default="runs/bench-checkpoint", help="folder of the reports")
    args = parser.parse_args()
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    rows, result = [], machine() | {"models": {}}
    for name in args.models.split(","):
        flags = {"model": name, "save_minutes": 0} | dict(map(setting, args.set))
        cfg = load_config(Config, flag_list(flags))
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
