"""How many cores a rank may count on. Needs torch and distributed.py."""

import functools
import os
import sys
import time
from pathlib import Path

from utils.distributed import (
    all_gather_object,
    available_cores,
    get_local_world_size,
    is_main_process,
)

STAT = Path("/proc/stat")


def cores_of_rank():
    """The cores that this rank may compute on: its share of those that nobody else keeps busy.

    The same number on all ranks, measured once in 0.1 s of rest; all ranks call it together.
    Threads beyond the free cores do not merely gain nothing: OpenMP's threads wait for each other
    by spinning, and a step then takes ten times as long (docs/performance.md).
    """
    return _cores_of_rank(os.getpid())


@functools.cache
def _cores_of_rank(_pid):  # which a forked process does not share
    all_gather_object(None)  # the ranks rest together, or they would count each other
    available, busy = available_cores(), _busy_cores(0.1)
    # A quota (containers) leaves fewer cores than can be seen: the busy ones may be the others.
    free = max(1, min(available, len(_ticks()) - busy) if busy else available)
    if free < available and is_main_process():
        print(
            f"{busy} cores are busy with something else: using {free} of {available} "
            f"(--num-threads sets the threads of a rank)",
            file=sys.stderr,  # what tools print may be JSON
            flush=True,
        )
    return max(1, min(all_gather_object(free // get_local_world_size())))


def _busy_cores(seconds):
    """How many of this process's cores others use, on average over `seconds`; 0 where unknown."""
    before = _ticks()
    time.sleep(seconds)
    after = _ticks()
    passed = [[now - then for now, then in zip(after[i], before[i], strict=True)] for i in before]
    return round(sum(1 - idle / total for idle, total in passed if total))


def _ticks():
    """{core: (idle, all) ticks since it was switched on} of the cores of this process."""
    if not STAT.exists():  # only Linux has it
        return {}
    cores, ticks = os.sched_getaffinity(0), {}
    for line in STAT.read_text().splitlines():
        name, *counts = line.split()
        number = name.removeprefix("cpu")
        if name != number and number.isdigit() and int(number) in cores:
            counts = [int(count) for count in counts[:8]]  # the rest is counted in these already
            ticks[int(number)] = counts[3] + counts[4], sum(counts)  # idle, waiting for a disk
    return ticks
