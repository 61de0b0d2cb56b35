"""What it costs to watch a run, in microseconds of host time per step.

    python -m lab.bench.watching

Each row trains train_1gpu.py with a model so small that the host's time is nearly the whole step.
The hooks that a row is about work during every other block of steps, and rest in the blocks
between, so that neighbors differ in nothing else. The time within the hooks is also measured
directly; it leaves out what a logger's thread takes meanwhile. Rows whose packages are not
installed are left out.
"""

import argparse
import json
import os
import pty
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

BLOCK, PAIRS = 20, 60  # steps; pairs of blocks, after one pair that warms up
# {row: (flags, whether stderr is a terminal, the package that it needs)}
LOGGED = {"log_steps": 10}
ROWS = {
    "a line every 15 s (default)": ({}, False, None),
    "the bar (default, on a terminal)": ({}, True, "tqdm"),
    "--log-steps 10": (LOGGED, False, None),
    "--log-steps 1": ({"log_steps": 1}, False, None),
    "--log-steps 10 --logger tensorboard": (LOGGED | {"logger": "tensorboard"}, False, None),
    "--log-steps 10 --logger wandb": (LOGGED | {"logger": "wandb"}, False, "wandb"),
    "--log-steps 10 --logger trackio": (LOGGED | {"logger": "trackio"}, False, "trackio"),
    "--log-steps 10 --logger mlflow": (LOGGED | {"logger": "mlflow"}, False, "mlflow"),
    "--timing": ({"timing": True}, False, None),
    "all of it (bar, step log, tensorboard, timing)": (
        LOGGED | {"logger": "tensorboard", "timing": True},
        True,
        "tqdm",
    ),
}
WATCHING = ("Progress", "StepLog", "Loggers", "Timing")
HEAD = ["watched by", "us per step in the hooks", "of the step", "whole step, relative"]


def worker(path, flags):
    """Train in this process, and write to `path` the seconds of a step in each block, and those
    within the hooks in an average step while they worked."""
    import utils.options

    build, blocks, spent = utils.options.build_hooks, [], []

    def build_switched(*arguments):
        hooks = build(*arguments)
        for hook in hooks:
            if type(hook).__name__ in WATCHING:
                hook.after_step = switched(hook.after_step)
        return hooks

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

    utils.options.build_hooks = build_switched
    run_script("train_1gpu.py", flags, around)
    in_hooks = sum(spent) / (BLOCK * (len(blocks) // 2))
    Path(path).write_text(json.dumps([blocks, in_hooks]))


def measure(flags, on_terminal):
    """(seconds per step without, with) the hooks, two lists of neighboring blocks, and the seconds
    within the hooks."""
    with tempfile.TemporaryDirectory(prefix="watching-") as folder:
        flags = FLAGS | {"output_dir": f"{folder}/run", "save_minutes": 0} | flags
        batch = FLAGS["global_batch_size"]
        flags |= {"synthetic_samples": (2 * BLOCK * (PAIRS + 1) + 1) * batch, "resume": "never"}
        command = [sys.executable, "-m", "lab.bench.watching", "--worker", f"{folder}/blocks.json"]
        leader, follower = pty.openpty()
        environment = os.environ | {"WANDB_MODE": "offline", "TRACKIO_DIR": folder}
        environment |= {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}
        process = subprocess.Popen(
            [*command, *flag_list(flags)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=follower if on_terminal else subprocess.DEVNULL,
        )
        os.close(follower)
        code = process.wait()
        os.close(leader)
        if code:
            raise RuntimeError(f"{command} failed with exit code {code}")
        blocks, in_hooks = json.loads(Path(f"{folder}/blocks.json").read_text())
    return blocks[2::2], blocks[3::2], in_hooks


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
    for name, (without, watched, in_hooks) in result["rows"].items():
        share = in_hooks / statistics.median(without)
        middle, low, high = paired(without, watched)
        cells = f"{in_hooks * 1e6:.0f}", f"{share:.2%}", f"{middle:.3f} ({low:.3f} to {high:.3f})"
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
    for name, (flags, on_terminal, package) in ROWS.items():
        if package and not find_spec(package):
            continue
        result["rows"][name] = measure(flags, on_terminal)
        print(f"{name}: {result['rows'][name][2] * 1e6:.0f} us", flush=True)
    write_table(result, f"{notes(result)}\n\n{table(result)}\n", args.output, "watching")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], sys.argv[3:])
    else:
        end_runs_on_sigterm()
        main()
