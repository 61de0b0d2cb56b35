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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median_low
from threading import get_native_id
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity

from utils.distributed import (
    all_gather_object,
    cores_per_rank,
    is_main_process,
    launched_world_size,
)
from utils.errors import say
from utils.hooks import Checkpoint, Hook
from utils.options.profile import kernels_of, shares_of_kernels
from utils.options.timed_reader import timed_reader

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
MOST_RANKS = 8  # in the table at the end
# The shares of the time from which on something is worth a sentence. Ordinary runs on one machine
# communicate for up to a third of the time, and saving or data below a tenth is not worth a change.
WORTH = {"data": 0.15, "rank": 0.15, "communicating": 0.4, "host": 0.3, "cores": 0.2}
WORTH |= {"saving": 0.2}


class Clocks(NamedTuple):
    """Seconds of the wall clock; those that this thread has used a core; those that it has waited
    for one, 0 where the kernel does not count them."""

    wall: float = 0.0
    cpu: float = 0.0
    queue: float = 0.0

    def __sub__(self, other: "Clocks") -> "Clocks":
        return Clocks(*(a - b for a, b in zip(self, other, strict=True)))

    def __add__(self, other: tuple[Any, ...]) -> "Clocks":
        return Clocks(*(a + b for a, b in zip(self, other, strict=True)))


def read_clocks() -> Clocks:
    """The Clocks of this thread (https://docs.kernel.org/scheduler/sched-stats.html)."""
    queue = 0.0
    with suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/self/task/{get_native_id()}/schedstat").read_text(encoding="utf-8")
        queue = int(text.split()[1]) / 1e9
    return Clocks(time.perf_counter(), time.thread_time(), queue)


class Timing(Hook):
    """Divides the time from one row to the next."""

    def __init__(self, cfg: Any, state: Mapping[str, Any]) -> None:
        self.epochs = cfg.epochs
        self.loader = state["loader"]
        self.reader = timed_reader(self.loader)
        self.is_cuda = self.loader.device.type == "cuda"
        self.start: Any = None  # the Clocks at the end of the first step, later at the last row
        self.before = Clocks()  # when a save may begin
        self.saving, self.loaded = Clocks(), Clocks()  # since the start
        self.profiler: Any = None  # while it records
        self.shares: Any = None  # of its kernels
        self.rows = []  # "time" of all epochs of this process

    def after_step(self, checkpoint: Checkpoint) -> None:
        loader = self.loader
        if self.start is None:
            self.start = read_clocks()
            self.loaded = Clocks() - self._loaded_in_epoch()
        elif self.is_cuda:
            self._sample(loader.step - len(loader) // 2)
        if checkpoint.is_due():
            self.before = read_clocks()
        if loader.step == len(loader):
            self.loaded += self._loaded_in_epoch()
            if loader.device.type != "cpu":
                # Otherwise, validation would wait for training.
                torch.accelerator.synchronize(loader.device)
                self.before = read_clocks()

    def _loaded_in_epoch(self):
        return Clocks(self.reader.waited, self.reader.computed)

    def _sample(self, step):
        now = read_clocks()
        if step == 0:
            self.profiler = torch.profiler.profile(activities=[ProfilerActivity.CUDA])
            self.profiler.start()
        elif self.profiler and (step == STEPS or self.loader.step == len(self.loader)):
            self.profiler.stop()
            self.shares = shares_of_kernels(kernels_of(self.profiler.events()))
            self.profiler = None
        self.start += read_clocks() - now  # without the start and stop of a profiler

    def before_row(self, row: dict[str, Any]) -> None:
        now = read_clocks()
        mine = self._divide(self.before - self.start)
        mine["validation"] = now.wall - self.before.wall
        self.start = self.before = now
        self.saving = Clocks()
        self.loaded = Clocks()
        self.shares = None
        hosts, ranks = zip(*all_gather_object((socket.gethostname(), mine)), strict=True)
        total = max(sum(rank.values()) for rank in ranks)
        seconds = {name: [rank[name] for rank in ranks] for name in NAMES}
        row["time"] = {"total": total, **seconds}
        row["limited_by"] = diagnose(row["time"], self._places(hosts), self._workers())
        self.rows.append(row["time"])

    def _divide(self, passed):
        """{name: seconds} of the training between two Clocks, whose difference is `passed`."""
        seconds = dict.fromkeys(NAMES, 0.0)
        seconds["saving"] = self.saving.wall
        training = passed.wall - self.saving.wall
        if self.is_cuda and self.shares is None:  # the epoch was too short, or resumed too late
            seconds["other"] = training
            return seconds
        if self.is_cuda:
            shares = self.shares
            idle = shares["idle"] * training
            # The host may wait for data while the GPU still has work.
            seconds["data"] = min(self.loaded.wall, idle)
            seconds["host"] = idle - seconds["data"]
            seconds["computing"] = shares["computing"] * training
            seconds["communicating"] = shares["communicating"] * training
            return seconds
        seconds["data"] = min(self.loaded.wall, training)
        left = training - seconds["data"]
        computing = passed.cpu - self.saving.cpu - self.loaded.cpu
        seconds["computing"] = min(max(computing, 0.0), left)
        left -= seconds["computing"]
        seconds["cores"] = min(max(passed.queue - self.saving.queue, 0.0), left)
        left -= seconds["cores"]
        seconds["communicating" if launched_world_size() > 1 else "other"] = left
        return seconds

    def _places(self, hosts):
        """What names each rank in a sentence."""
        if len(set(hosts)) == 1:
            return [f"rank {rank}" for rank in range(len(hosts))]
        return [f"rank {rank} on {host}" for rank, host in enumerate(hosts)]

    def _workers(self):
        """The number of loader processes of a rank; None if the dataset is on the device."""
        return self.loader.reader.num_workers if self.loader.name == "workers" else None

    def after_row(self, row: dict[str, Any]) -> None:
        if "time" in row and is_main_process():
            time_of_all = row["time"]
            mean = {name: sum(time_of_all[name]) / len(time_of_all[name]) for name in NAMES}
            text = ", ".join(
                f"{seconds / time_of_all['total']:.0%} {NAMES[name]}"
                for name, seconds in sorted(mean.items(), key=lambda item: -item[1])
                if seconds >= 0.005 * time_of_all["total"]
            )
            say(f"time: {text}; {row['limited_by']}")

    def after_save(self, checkpoint: Checkpoint) -> None:
        now = read_clocks()
        if self.start is not None:
            self.saving += now - self.before
        self.before = now
        if checkpoint.epoch == self.epochs and self.rows and is_main_process():
            last = self.saving.wall
            say(f"time of the ranks, without the last save of {last:.2f} s:\n{table(self.rows)}")


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
    host, saving = min(times["host"]), max(times["saving"])
    found = {
        "data": _data(times["data"], total, places, workers),
        "rank": _slow_rank(computing, places),
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
        "cores": _cores(times["cores"], total, places),
        "saving": (
            saving,
            f"{saving / total:.0%} saving: save less often (--save-epochs, --save-steps, "
            f"--save-minutes), or to a faster disk",
        ),
    }
    return {name: found[name] for name in found if found[name][0] >= WORTH[name] * total}


def _data(seconds, total, places, workers):
    worst = seconds.index(max(seconds))
    share = f"{seconds[worst] / total:.0%}"
    usual = median_low(seconds)
    if seconds[worst] > 2 * usual + 0.05 * total:
        text = f"{places[worst]} waits for data for {share} of the time, others for "
        text += f"{usual / total:.0%}: look at its disk, its cores and its samples"
        return seconds[worst] - usual, text
    text = f"{share} waiting for data: "
    if workers is None:
        return seconds[worst], text + "cheaper transforms"
    rest = total - seconds[worst]
    # What all workers make in `total` seconds, or this process in seconds[worst], is needed in
    # `rest` seconds.
    needed = workers * total / rest if workers else seconds[worst] / rest
    needed = max(math.ceil(needed), workers + 1)
    text += f"--num-workers {needed} (now {workers})"
    if needed >= cores_per_rank():
        text += f", of {cores_per_rank()} cores per rank, or samples that are cheaper to read"
    return seconds[worst], text


def _slow_rank(computing, places):
    most, usual = max(computing), median_low(computing)
    text = f"{places[computing.index(most)]} computes {most / max(usual, 1e-9):.1f} times as long "
    text += "as the median: the others wait for it"
    return most - usual, text


def _cores(seconds, total, places):
    worst = seconds.index(max(seconds))
    share = f"{seconds[worst] / total:.0%}"
    text = f"{places[worst]} waits for cores for {share} of the time: end what else runs there, or "
    text += "try fewer --num-threads or --num-workers"
    return seconds[worst], text


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Seconds of each rank in all `rows` together, as text; of many ranks, those that compute
    longest."""
    names = [name for name in NAMES if any(any(row[name]) for row in rows)]
    ranks = range(len(rows[0]["computing"]))
    sums = {name: [sum(row[name][rank] for row in rows) for rank in ranks] for name in NAMES}
    shown = sorted(ranks, key=lambda rank: -sums["computing"][rank])[:MOST_RANKS]
    lines = ["        " + "".join(f"{name:>14}" for name in names)]
    for rank in sorted(shown):
        cells = [f"{sums[name][rank]:12.1f} s" for name in names]
        lines.append(f"rank {rank:<3}" + "".join(cells))
    if len(shown) < len(ranks):
        lines.append(f"and {len(ranks) - len(shown)} ranks that compute less")
    return "\n".join(lines)
