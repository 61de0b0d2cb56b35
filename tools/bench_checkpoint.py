"""python -m tools.bench_checkpoint: what a checkpoint costs: seconds to save, to load, to wait.

One process trains on random images, `--steps` steps at a time; after the second it asks for a
checkpoint, which is written beside the training (as the scripts do) or waited for, in turns. What
that costs is what the steps together take longer than as many median ones.
"""

import argparse
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from tools.bench import machine, setting
from tools.bench_report import write_table
from tools.limits import computing
from tools.runs import flag_list
from utils.checkpoint import load_checkpoint, save_checkpoint
from utils.config import load_config
from utils.distributed import get_device
from utils.runtime import seed_everything
from utils.saving import copied, finish_saving
from utils.threads import cores_of_rank

WAYS = ["beside training", "waited for"]


def epoch(step, steps, save, wait, waited):
    """Seconds of the call that saves, and what the steps take longer because of it."""
    seconds, call = [], 0.0
    for i in range(steps):
        start = time.perf_counter()
        step()
        wait()
        if i == 1:
            asked = time.perf_counter()
            save()
            if waited:
                finish_saving()
            call = time.perf_counter() - asked
        seconds.append(time.perf_counter() - start)
    finish_saving()
    return call, sum(seconds) - steps * statistics.median(seconds)


def main():
    parser = argparse.ArgumentParser(prog="python -m tools.bench_checkpoint", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--models", default="resnet18,resnet50")
    parser.add_argument(
        "--steps", type=int, default=12, help="more than twice as many as the writing lasts"
    )
    parser.add_argument("--repeats", type=int, default=5, help="epochs of each (default: 5)")
    parser.add_argument("--set", metavar="NAME=VALUE", action="append", default=[])
    parser.add_argument("--output", default="runs/bench-checkpoint", help="folder of the reports")
    args = parser.parse_args()
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    head = ["model", "MB", "a copy, s", "the call, s", "cost beside training, s"]
    head += ["cost if waited for, s", "to the disk, s", "load, s"]
    lines = [f"| {' | '.join(head)} |"]
    lines.append("|---" * len(head) + "|")
    found = machine() | {"command": " ".join(sys.argv[1:]), "models": {}}
    for name in args.models.split(","):
        flags = dict(map(setting, args.set)) | {"model": name}
        cfg = load_config(flag_list(flags))
        device = get_device(cfg.device)
        if device.type == "cpu":
            torch.set_num_threads(cores_of_rank())
        wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        seed_everything(0)
        step, _, model, optimizer = computing(cfg, 10, device, amp=False)
        state = {"model": model, "optimizer": optimizer}
        runs = {way: [] for way in WAYS}
        with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=folder) as place:
            save = partial(save_checkpoint, place, state, 1)
            for repeat in range(args.repeats + 1):  # the first warms up
                for way in WAYS:
                    times = epoch(step, args.steps, save, wait, way == "waited for")
                    if repeat:
                        runs[way].append(times)
            size = (Path(place) / "last.pt").stat().st_size / 1e6
            start = time.perf_counter()
            load_checkpoint(place, state)
            wait()
            loaded = time.perf_counter() - start
        start = time.perf_counter()
        copied([model.state_dict(), optimizer.state_dict()])
        copy = time.perf_counter() - start
        call, cost = (
            [statistics.median(times[i] for times in runs[way]) for way in WAYS] for i in (0, 1)
        )
        numbers = [copy, call[0], *cost, call[1], loaded]
        lines.append(f"| {name} | {size:.0f} | {' | '.join(f'{n:.2f}' for n in numbers)} |")
        found["models"][name] = {"runs": runs, "load": loaded, "copy": copy}
        print(lines[-1], flush=True)
    text = f"{', '.join(found['gpus']) or found['cpu']}, torch {found['torch']}, medians of "
    text += f"{args.repeats} epochs in turns.\n\n" + "\n".join(lines) + "\n"
    write_table(found, text, folder, "checkpoint")


if __name__ == "__main__":
    main()
