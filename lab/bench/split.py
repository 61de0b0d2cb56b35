"""What the ranks hold when a model is divided among them, and the bubble of a pipeline.

    python -m lab.bench.split

Runs the scripts on a small vision transformer, on two processes, and writes DIR/split.md and
DIR/split.json. The bubble is the time in which the ranks do not compute while the schedule runs,
relative to the time in which they do. Equal stages, with messages that take no time, would have
(stages - 1) / micro-batches. It is measured on CPUs, and needs an idle core for each rank.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch

from lab.bench.report import write_table
from lab.bench.runner import machine
from tools.lib.markdown import markdown_table
from tools.lib.runs import end_runs_on_sigterm, finish_run, start_run

RANKS = 2
FLAGS = {"dataset": "synthetic", "synthetic_samples": 1280, "model": "vit_tiny", "epochs": 2}
FLAGS |= {"global_batch_size": 128, "optimizer": "adamw", "lr": 0.001, "resume": "never"}
FLAGS |= {"device": "cpu"}
ROWS = [("train_ddp.py", {}), ("train_fsdp.py", {}), ("train_tp.py", {})]
ROWS += [
    ("train_pp.py", {"schedule": schedule, "micro_batches": count})
    for schedule, count in (("GPipe", 2), ("1F1B", 2), ("1F1B", 4), ("1F1B", 8), ("1F1B", 16))
]
KINDS = ["parameters", "gradients", "optimizer state"]
HEAD = ["script", "settings", *(f"{kind}, kB" for kind in KINDS), "images/s", "bubble"]
HEAD += ["(stages - 1) / micro-batches"]


def measure(script, flags, folder):
    """One run: {kind: bytes on each rank}, "images_per_second", and a pipeline's "bubble"."""
    folder.mkdir()
    settings = FLAGS | flags | {"output_dir": folder / "run"}
    process = start_run(["-m", "lab.bench.held", folder, script], RANKS, settings)
    run = finish_run(process, folder / "run", limit=600)
    if run.code:
        raise RuntimeError(run.stderr)
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    last = run.rows[-1]
    sample = {kind: [rank["held"][kind] for rank in ranks] for kind in KINDS}
    sample["images_per_second"] = last["train_samples"] / last["train_seconds"]
    steps = list(zip(*(rank["steps"] for rank in ranks), strict=True))
    if steps and not torch.cuda.is_available():
        totals = [[sum(values) for values in zip(*step, strict=True)] for step in steps]
        sample["bubble"] = statistics.median(total / busy - 1 for total, busy in totals)
    return sample


def cells(script, flags, sample):
    """A row of the table."""
    held = [" + ".join(f"{n / 1e3:,.0f}" for n in sample[kind]) for kind in KINDS]
    settings = " ".join(f"{name}={value}" for name, value in flags.items())
    bubble = ideal = ""
    if "bubble" in sample:
        bubble, ideal = f"{sample['bubble']:.2f}", f"{(RANKS - 1) / flags['micro_batches']:.2f}"
    speed = f"{sample['images_per_second']:,.0f}"
    return [f"`{script}`", settings, *held, speed, bubble, ideal]


def main():
    parser = argparse.ArgumentParser(prog="python -m lab.bench.split", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--output", default="runs/bench-split", help="folder of the reports")
    args = parser.parse_args()
    result, rows = machine() | {"rows": []}, []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for number, (script, flags) in enumerate(ROWS):
            sample = measure(script, flags, Path(folder) / str(number))
            result["rows"].append({"script": script, "flags": flags} | sample)
            rows.append(cells(script, flags, sample))
            print("  ".join(rows[-1]), flush=True)
    text = f"{result['cpu']}, torch {result['torch']}, {RANKS} processes, one run of each row."
    write_table(result, f"{text}\n\n{markdown_table(HEAD, rows)}\n", args.output, "split")


if __name__ == "__main__":
    end_runs_on_sigterm()
    main()
