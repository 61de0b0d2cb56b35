"""What the benchmarks share: the loop that interleaves runs, and the runs that are measured."""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import torch
import torchvision

from tasks.images import Settings
from tools.lib.ladder import ONE_PROCESS
from tools.lib.runs import ROOT, finish_run, flag_list, last_line, start_run
from utils.config import load_config
from utils.distributed import cores_per_rank

TIME_LIMIT = 1800  # seconds that a run may take


def take_turns(jobs, repeats, describe=None, select=None):
    """Run all jobs in turn, `repeats` times.

    jobs: {name: function without arguments}. describe: sample -> text, for the progress output.
    select: the samples of the first turn -> the names of the jobs that are worth repeating.
    Returns {name: samples} and {name: error}. A job that raises RuntimeError or AssertionError is
    not repeated; Ctrl-C ends the loop, and the samples so far are returned.
    """
    samples, errors = {name: [] for name in jobs}, {}
    start, count, done = time.monotonic(), len(jobs) * repeats, 0
    try:
        for turn in range(repeats):
            if select and turn == 1:
                jobs = {name: jobs[name] for name in select(samples)}
                count = done + len(jobs) * (repeats - 1)
            for name, job in jobs.items():
                done += 1
                if name in errors:
                    continue
                try:
                    samples[name].append(job())
                except (RuntimeError, AssertionError) as error:
                    errors[name] = last_line(str(error))
                    print(f"{name}: {error}", file=sys.stderr, flush=True)
                    continue
                if describe:
                    left = (time.monotonic() - start) / done * (count - done)
                    text = f"{name}: {describe(samples[name][-1])}; {done} of {count} runs"
                    print(f"{text}, {left:.0f} s left", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted: the report has what was measured so far", file=sys.stderr, flush=True)
    return samples, errors


class Runner:
    """Runs scripts on this machine, all with the same settings.

    flags: settings of every row; a row's own take precedence. steps: per epoch of synthetic images.
    limit: seconds that a run may take.
    """

    def __init__(self, flags, folder, steps, limit=TIME_LIMIT):
        self.flags, self.folder, self.steps, self.count = flags, Path(folder), steps, 0
        self.limit = limit
        self.cores = sorted(os.sched_getaffinity(0))

    def row(self, row):
        """One run of a row. Returns a sample: a dict of numbers."""
        flags, batch = self._settings(row)
        nproc = None if row.script in ONE_PROCESS else row.world_size
        run, ranks, started = self._run("lab.bench.probe", row.name, nproc, [row.script], flags)
        steps = [step for rank in ranks for step in rank["epochs"][1]]
        last = run.rows[-1]
        return {
            "images_per_second": last["train_samples"] / last["train_seconds"],
            "step_seconds": statistics.median(sum(step) for step in steps),
            "parts": [statistics.mean(part) for part in zip(*steps, strict=True)],
            "steps": [sum(step) for step in ranks[0]["epochs"][1]],
            "accuracy": last["val_accuracy"],
            "train_accuracy": last["train_accuracy"],
            "samples": last["train_samples"],
            "global_batch_size": batch,
            "updates": len(ranks[0]["epochs"][1]),
            "memory": sum(rank["memory"] for rank in ranks),
            "threads": ranks[0]["threads"],
            "start_up": max(rank["first_step"] for rank in ranks) - started,
            "device": ranks[0]["device"],
        }

    def epochs(self, row, count):
        """One run of a row on one process, `count` epochs long. Returns, among others, the median
        seconds of training alone and of whole epochs (lab/bench/epochs.py), without the first."""
        flags, _ = self._settings(row)
        nproc = None if row.script in ONE_PROCESS else 1
        flags["epochs"] = count
        run, results, _ = self._run("lab.bench.epochs", row.name, nproc, [row.script], flags)
        return {
            "train": statistics.median(metrics["train_seconds"] for metrics in run.rows[1:]),
            "whole": statistics.median(results[0]["seconds"][1:]),
            "total": sum(results[0]["seconds"]),
            "samples": run.rows[0]["train_samples"],
            "val_samples": run.rows[0]["val_samples"],
            "train_accuracy": run.rows[-1]["train_accuracy"],
            "val_accuracy": run.rows[-1]["val_accuracy"],
            "memory": results[0]["memory"],
        }

    def limits(self, row):
        """One run of what limits rows like this one. Returns {limit: images/s}."""
        flags, batch = self._settings(row)
        known = {field.name for field in fields(Settings)} | {"config"}
        arguments = ["plain"]
        if row.autocast:
            known.add("amp_dtype")
            arguments = ["autocast"]
        flags = {name: value for name, value in flags.items() if name in known}
        name = f"limits of {row.name}"
        _, ranks, _ = self._run("lab.bench.limits", name, row.world_size, arguments, flags)
        return {name: batch / max(rank[name] for rank in ranks) for name in ranks[0]}

    def peer(self, name, world_size, flags, arguments):
        """One run of lab.bench.peer. Returns the results of its ranks."""
        flags = self.flags | flags
        cfg = load_config(Settings, None, flag_list(flags))
        flags, _ = self._with_steps(flags, cfg, world_size)
        return self._run("lab.bench.peer", name, world_size, arguments, flags)[1]

    def _settings(self, row):
        flags = self.flags | row.flags
        return self._with_steps(flags, row.load_config(flags), row.world_size)

    def _with_steps(self, flags, cfg, world_size):
        """All flags of a run with these settings, and its global batch size."""
        batch = cfg.global_batch_size
        if cfg.dataset == "synthetic":
            flags = {"synthetic_samples": self.steps * batch} | flags
        return flags | {"epochs": 2, "save_minutes": 0, "resume": "never"}, batch

    def _run(self, module, name, nproc, arguments, flags):
        """Run a module on `nproc` processes. Returns the Run, its ranks' results and its start."""
        self.count += 1
        out = self.folder / str(self.count)
        out.mkdir()
        started = time.time()
        process = start_run(
            ["-m", module, out, *arguments],
            nproc,
            flags | {"output_dir": out / "run"},
            cwd=ROOT,
            cores=self.cores,
            launcher="tools.launch",
        )
        run = finish_run(process, out / "run", self.limit)
        if run.code:
            raise RuntimeError(f"{name} failed with exit code {run.code}:\n{run.stderr}")
        ranks = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
        return run, ranks, started


def output_of(*command):
    """What a command prints, or "" if it fails or is not installed."""
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return ""
    return "" if run.returncode else run.stdout.strip()


def machine():
    """The hardware and the versions that the speed depends on."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(": ")[1] for line in lines if line.startswith("model name")]
        model = names[0] if names else model
    commit = output_of("git", "rev-parse", "--short", "HEAD")
    return {
        "cpu": model,
        "cores": cores_per_rank(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "commit": commit or "no git",
        "load": os.getloadavg()[0],  # of other programs, at the start
        "command": " ".join(sys.argv[1:]),
    }


def process_counts(text=None):
    """The numbers of processes to measure: "1,2,4", or by default those that the machine has."""
    if text:
        return [int(n) for n in text.split(",")]
    most = torch.cuda.device_count() or min(cores_per_rank(), 4)
    return [n for n in (1, 2, 4, 8) if n <= most]


def setting(text):
    """NAME=VALUE -> (name, value); true and false become booleans."""
    name, _, value = text.partition("=")
    return name, {"true": True, "false": False}.get(value, value)
