"""What it costs to watch a run, in microseconds of host time per step.

    python -m lab.bench.watching

Each row trains train_1gpu.py with a model so small that the host's time is nearly the whole step.
The guards that a row is about work during every other block of steps, and rest in the blocks
between, so that neighbors differ in nothing else. The time within them is also measured directly;
it leaves out what a logger's thread takes meanwhile. Rows whose packages are not installed are left
out.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from lab.bench.hooks import run_script
from lab.bench.operations import FLAGS
from lab.bench.report import write_table
from lab.bench.runner import machine
from tools.lib.markdown import markdown_table
from tools.lib.runs import ROOT, end_runs_on_sigterm, flag_list
from utils.checkpoint import Checkpointer

BLOCK, PAIRS = 20, 60  # steps; pairs of blocks, after one pair that warms up
LOGGED = {"log_steps": 10}
ROWS = {  # {row: (flags, the package that it needs)}
    "a line every 15 s (default)": ({}, None),
    "--log-steps 10": (LOGGED, None),
    "--log-steps 1": ({"log_steps": 1}, None),
    **{
        f"--log-steps 10 --logger {name}": (LOGGED | {"logger": name}, name)
        for name in ("tensorboard", "wandb", "trackio", "mlflow")
    },
    "--timing": ({"timing": True}, None),
}
WATCHING = ("Progress", "StepLog", "Loggers", "Timing")
HEAD = ["watched by", "us per step in the guards", "of the step", "whole step, relative"]


def worker(path, flags):
    """Train in this process, and write to `path` the seconds of a step in each block, and those
    within the guards in an average step while they worked."""
    load, blocks, spent = Checkpointer.load, [], []

    def load_and_switch(checkpoint):
        start_epoch = load(checkpoint)
        for guard in checkpoint.guards:
            if type(guard).__name__ in WATCHING:
                guard.after_step = switched(guard.after_step)
        return start_epoch

    def switched(after_step):
        def maybe(checkpoint):
            if len(blocks) % 2:
                start = time.perf_counter()
                after_step(checkpoint)
                spent.append(time.perf_counter() - start)

        return maybe

    def around(loader, batches):
        start = time.perf_counter()
        for number, batch in enumerate(batches):
            if number and number % BLOCK == 0:
                now = time.perf_counter()
                blocks.append((now - start) / BLOCK)
                start = now
            yield batch

    Checkpointer.load = load_and_switch
    run_script("train_1gpu.py", flags, around)
    in_guards = sum(spent) / (BLOCK * (len(blocks) // 2))
    Path(path).write_text(json.dumps([blocks, in_guards]))


def measure(flags):
    """(seconds per step without, with) the guards, two lists of neighboring blocks, and the seconds
    within them."""
    with tempfile.TemporaryDirectory(prefix="watching-") as folder:
        flags = FLAGS | {"output_dir": f"{folder}/run", "save_minutes": 0} | flags
        batch = FLAGS["global_batch_size"]
        flags |= {"synthetic_samples": (2 * BLOCK * (PAIRS + 1) + 1) * batch}
        command = [sys.executable, "-m", "lab.bench.watching", "--worker", f"{folder}/blocks.json"]
        environment = os.environ | {"WANDB_MODE": "offline", "TRACKIO_DIR": folder}
        environment |= {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run(
            [*command, *flag_list(flags)], cwd=ROOT, env=environment, check=True, **silent
        )
        blocks, in_guards = json.loads(Path(f"{folder}/blocks.json").read_text())
    return blocks[2::2], blocks[3::2], in_guards


def paired(without, watched, draws=2000):
    """The median of the ratios of neighbors, and its 95 % bootstrap interval."""
    ratios = [b / a for a, b in zip(without, watched, strict=True)]
    generator = random.Random(0)
    medians = sorted(
        statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(draws)
    )
    return statistics.median(ratios), medians[round(0.025 * draws)], medians[round(0.975 * draws)]


def table(result):
    """The rows as a table in Markdown."""
    rows = []
    for name, (without, watched, in_guards) in result["rows"].items():
        share = in_guards / statistics.median(without)
        middle, low, high = paired(without, watched)
        cells = f"{in_guards * 1e6:.0f}", f"{share:.2%}", f"{middle:.3f} ({low:.3f} to {high:.3f})"
        rows.append([name, *cells])
    return markdown_table(HEAD, rows)


def notes(result):
    """How the rows were measured, as text."""
    step = statistics.median(s for without, *_ in result["rows"].values() for s in without)
    return (
        f"train_1gpu.py, {FLAGS['model']}, {FLAGS['global_batch_size']} images, one thread of "
        f"{result['cpu']}, torch {result['torch']}; a step takes {step * 1e3:.1f} ms. Medians of "
        f"{PAIRS} pairs of blocks of {BLOCK} steps, with and without, and the 95 % interval."
    )


def main():
    parser = argparse.ArgumentParser(prog="python -m lab.bench.watching", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--output", default="runs/bench-watching", help="folder of the reports")
    args = parser.parse_args()
    result = machine() | {"rows": {}}
    for name, (flags, package) in ROWS.items():
        if package and not find_spec(package):
            continue
        result["rows"][name] = measure(flags)
        print(f"{name}: {result['rows'][name][2] * 1e6:.0f} us", flush=True)
    write_table(result, f"{notes(result)}\n\n{table(result)}\n", args.output, "watching")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], sys.argv[3:])
    else:
        end_runs_on_sigterm()
        main()
