"""--timing: what the time of each rank is spent on, and what limits the run.

The row of an epoch in metrics.jsonl then has "time": {"total": seconds since the row before it},
and for each of the following, a list of the ranks' seconds; they add up to the total.

    data           waiting for a batch, or making it
    computing      forward and backward passes, optimizer, metrics
    communicating  waiting for other processes: for their data, or because they are slower
    host           a GPU waiting for the CPU to launch kernels
    cores          a thread waiting for a core that other threads use (not counted on GPUs)
    saving         waiting for checkpoints
    validation     the evaluation, which is not divided further
    other          a single process waiting for something else, such as a disk

The row also has "limited_by", a sentence. The first step of a process, which sets up much, is left
out. No step waits for any of this: on a CPU, the clocks of the main thread are read once per epoch,
since a thread that waits uses no CPU time; on a GPU, PyTorch's profiler records the kernels of a
few steps in the middle of the epoch.
"""

import math
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median_low
from threading import get_native_id
from typing import Any

import numpy
import torch
from torch.profiler import ProfilerActivity

from utils.config import ConfigError
from utils.distributed import (
    all_gather_object,
    cores_per_rank,
    is_main_process,
    launched_world_size,
)
from utils.errors import say
from utils.guards import Guard
from utils.options.profile import kernels_of, shares_of_kernels

NAMES = {
    "data": "waiting for data",
    "computing": "computing",
    "communicating": "communicating",
    "host": "waiting for the host",
    "cores": "waiting for cores",
    "saving": "saving",
    "validation": "validation",
    "other": "other",
}
STEPS = 8  # that the profiler records
# The shares of the time from which on something is worth a sentence. Ordinary runs on one machine
# communicate for up to a third of the time, and saving or data below a tenth is not worth a change.
WORTH = {"data": 0.15, "rank": 0.15, "communicating": 0.4, "host": 0.3, "cores": 0.2}
WORTH |= {"saving": 0.2}


def read_clocks() -> Any:
    """Seconds of the wall clock; those that this thread has used a core; those that it has waited
    for one, 0 where the kernel does not count them: an array of three numbers
    (https://docs.kernel.org/scheduler/sched-stats.html)."""
    queue = 0.0
    with suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/self/task/{get_native_id()}/schedstat").read_text(encoding="utf-8")
        queue = int(text.split()[1]) / 1e9
    return numpy.array([time.perf_counter(), time.thread_time(), queue])


class Timing(Guard):
    """Divides the time from one row to the next."""

    def at_start(self, checkpoint: Any) -> None:
        if checkpoint.cfg.profile:
            raise ConfigError("--timing would measure the profiler: pass --profile or --timing")
        self.loader = checkpoint.state["loader"]
        self.is_cuda = self.loader.device.type == "cuda"
        self.start: Any = None  # the clocks at the end of the first step, later at the last row
        self.before: Any = None  # when a save or the evaluation may begin, after the last step
        self.profiler: Any = None  # while it records
        self.shares: Any = None  # of its kernels
        checkpoint.state["metrics"].columns.append(self._add_columns)

    def after_step(self, checkpoint: Any) -> None:
        loader = self.loader
        if self.start is None:
            self._begin(read_clocks())
        elif self.is_cuda:
            self._sample(loader.step - len(loader) // 2)
        self.before = None
        if checkpoint.is_due():
            if loader.step == len(loader) and loader.device.type != "cpu":
                torch.accelerator.synchronize(loader.device)  # or validation would wait for it
            self.before = read_clocks()

    def _begin(self, now):
        self.start, self.saving, self.shares = now, numpy.zeros(3), None
        self.loaded = numpy.array([self.loader.waited, self.loader.computed, 0.0])

    def _sample(self, step):
        now = read_clocks()
        if step == 0:
            self.profiler = torch.profiler.profile(activities=[ProfilerActivity.CUDA])
            self.profiler.start()
        elif self.profiler and (step == STEPS or self.loader.step == len(self.loader)):
            self.profiler.stop()
            self.shares = shares_of_kernels(kernels_of(self.profiler.events()))
            self.profiler = None
        self.start = self.start + (read_clocks() - now)  # without the start and stop of a profiler

    def after_save(self, checkpoint: Any) -> None:
        now = read_clocks()
        if self.start is not None:
            self.saving += now - self.before
        self.before = now

    def _add_columns(self, row):
        now, loader = read_clocks(), self.loader
        self.before = now if self.before is None else self.before  # a `break` has ended the epoch
        loaded = numpy.array([loader.waited, loader.computed, 0.0]) - self.loaded
        mine = self._divide(self.before - self.start, self.saving, loaded)
        mine["validation"] = float(now[0] - self.before[0])
        self.before = now
        self._begin(now)
        hosts, ranks = zip(*all_gather_object((socket.gethostname(), mine)), strict=True)
        places = [f"rank {rank}" for rank in range(len(hosts))]
        if len(set(hosts)) > 1:
            places = [f"{place} on {host}" for place, host in zip(places, hosts, strict=True)]
        seconds = {name: [rank[name] for rank in ranks] for name in NAMES}
        row["time"] = {"total": max(sum(rank.values()) for rank in ranks), **seconds}
        workers = loader.reader.num_workers if loader.source_device.type == "cpu" else None
        row["limited_by"] = diagnose(row["time"], places, workers)
        if is_main_process():
            say(f"time: {_text(row['time'])}; {row['limited_by']}")

    def _divide(self, passed, saving, loaded):
        """{name: seconds} of the training, from the differences of clocks: of all of it, of its
        saves, and of its waiting for data."""
        seconds = dict.fromkeys(NAMES, 0.0)
        training, cpu, queue = (passed - saving).tolist()
        seconds["saving"], (waited, made, _) = float(saving[0]), loaded.tolist()
        if self.is_cuda:
            # If the epoch was too short, or resumed too late, there are no shares.
            shares = self.shares or {"idle": 0.0, "computing": 0.0, "communicating": 0.0}
            for name in ("computing", "communicating"):
                seconds[name] = shares[name] * training
            # The host may wait for data while the GPU still has work.
            seconds["data"] = min(waited, shares["idle"] * training)
            seconds["host"] = shares["idle"] * training - seconds["data"]
            seconds["other"] = 0.0 if self.shares else training
            return seconds
        last = "communicating" if launched_world_size() > 1 else "other"
        spent = [("data", waited), ("computing", cpu - made), ("cores", queue), (last, training)]
        for name, value in spent:
            seconds[name] = min(max(value, 0.0), training)
            training -= seconds[name]
        return seconds


def _text(times):
    """The mean over the ranks, as shares."""
    mean = {name: sum(times[name]) / len(times[name]) for name in NAMES}
    parts = sorted(((seconds, NAMES[name]) for name, seconds in mean.items()), reverse=True)
    total = times["total"]
    return ", ".join(f"{s / total:.0%} {name}" for s, name in parts if s >= 0.005 * total)


def diagnose(times: dict[str, Any], places: Sequence[str], workers: int | None) -> str:
    """A sentence on what limits a run most, and what to try. See find_limits()."""
    if not any(times["computing"]):
        return "too few steps to tell"
    found = find_limits(times, places, workers)
    return max(found.values())[1] if found else "nothing stands out"


def find_limits(
    times: dict[str, Any], places: Sequence[str], workers: int | None
) -> dict[str, tuple[float, str]]:
    """What is worth a sentence: {name in WORTH: (seconds that it costs, sentence)}.

    times: "time" of a row. places: what to call each rank. workers: loader processes of a rank, or
    None if it has no use for them.
    """
    total = times["total"]
    # What communication itself takes: ranks also wait for those that compute longer, or lack cores.
    sent = max(0.0, min(times["communicating"]) - max(times["cores"]))
    computing = [a + b for a, b in zip(times["computing"], times["host"], strict=True)]
    most, usual = max(computing), median_low(computing)
    slow, crowded = places[computing.index(most)], places[_worst(times["cores"])]
    host, cores, saving = min(times["host"]), max(times["cores"]), max(times["saving"])
    found = {
        "data": _data(times["data"], total, places, workers),
        "rank": (
            most - usual,
            f"{slow} computes {most / max(usual, 1e-9):.1f} times as long as the median: the "
            f"others wait for it",
        ),
        "communicating": (
            sent,
            f"{sent / total:.0%} communicating: fewer, larger steps (--global-batch-size, "
            f"train_ddp_accum.py), or see docs/choosing.md",
        ),
        "host": (
            host,
            f"the GPUs wait for the host for {host / total:.0%} of the time: larger batches, "
            f"--compile default, or train_1gpu_graph.py",
        ),
        "cores": (
            cores,
            f"{crowded} waits for cores for {cores / total:.0%} of the time: end what else runs "
            f"there, or try fewer --num-threads or --num-workers",
        ),
        "saving": (
            saving,
            f"{saving / total:.0%} saving: save less often (--save-epochs, --save-steps, "
            f"--save-minutes), or to a faster disk",
        ),
    }
    return {name: found[name] for name in found if found[name][0] >= WORTH[name] * total}


def _worst(seconds):
    return seconds.index(max(seconds))


def _data(seconds, total, places, workers):
    most, usual = max(seconds), median_low(seconds)
    share = f"{most / total:.0%}"
    if most > 2 * usual + 0.05 * total:
        text = f"{places[_worst(seconds)]} waits for data for {share} of the time, others for "
        text += f"{usual / total:.0%}: look at its disk, its cores and its samples"
        return most - usual, text
    text = f"{share} waiting for data: "
    if workers is None:
        return most, text + "cheaper transforms"
    # What all workers make in `total` seconds, or this process in `most`, is needed in the rest.
    needed = (workers * total if workers else most) / (total - most)
    needed = max(math.ceil(needed), workers + 1)
    text += f"--num-workers {needed} (now {workers})"
    if needed >= cores_per_rank():
        text += f", of {cores_per_rank()} cores per rank, or samples that are cheaper to read"
    return most, text
