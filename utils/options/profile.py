"""--profile FIRST:LAST: traces of the steps FIRST to LAST, by PyTorch's profiler, and a summary.

Steps count from 1, from the start of the process on. Each rank writes a trace to
output_dir/profile/rankN.json.gz, which https://ui.perfetto.dev shows; the main process prints the
operations that take longest, and writes that to output_dir/profile/summary.txt. What happens
between the steps is included: a save, and from one epoch to the next, the evaluation. The profiled
steps are slower than others (https://docs.pytorch.org/docs/stable/profiler.html).
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from utils.config import ConfigError
from utils.distributed import is_main_process
from utils.errors import say
from utils.guards import Guard

MOST_ROWS = 15  # of the summary
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")


class Profile(Guard):
    """Records some steps of this process. steps: "FIRST:LAST". Raises ConfigError if they are not
    two numbers."""

    def __init__(self, steps: str) -> None:
        match = re.fullmatch("([0-9]+):([0-9]+)", steps)
        self.first, self.last = map(int, match.groups()) if match else (0, 0)
        if not 2 <= self.first <= self.last:
            raise ConfigError(
                f"--profile {steps}: name the first and the last step, such as 10:20. Step 1 "
                f"cannot be profiled"
            )
        self.step = 0
        self.profiler: Any = None  # while it records

    def after_step(self, checkpoint: Any) -> None:
        self.step += 1
        if self.step == self.first - 1:
            activities = [ProfilerActivity.CPU]
            if checkpoint.state["loader"].device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self.profiler = torch.profiler.profile(activities=activities)
            self.profiler.start()
        elif self.profiler and self.step == self.last:
            self._finish(checkpoint.folder / "profile")

    def after_save(self, checkpoint: Any) -> None:
        if checkpoint.epoch < checkpoint.cfg.epochs:
            return
        if self.profiler and self.step >= self.first:
            self._finish(checkpoint.folder / "profile")
        elif self.step < self.first and is_main_process():
            say(f"--profile: the run had {self.step} steps, so there is nothing to show")

    def _finish(self, folder):
        profiler, self.profiler = self.profiler, None
        profiler.stop()
        folder.mkdir(exist_ok=True)
        rank = dist.get_rank() if dist.is_initialized() else 0
        profiler.export_chrome_trace(str(folder / f"rank{rank}.json.gz"))
        if is_main_process():
            text = f"steps {self.first} to {self.step}: "
            text += summary(profiler, self.step - self.first + 1)
            (folder / "summary.txt").write_text(text, encoding="utf-8")
            say(f"{text}traces of all ranks: {folder}")


def summary(profiler: torch.profiler.profile, steps: int) -> str:
    """What took longest in a number of steps, as text of one screen."""
    kernels = kernels_of(profiler.events())
    shares = shares_of_kernels(kernels)
    if shares:
        launches = sum(event.name.startswith(LAUNCHES) for event in profiler.events())
        head = f"{torch.cuda.get_device_name()}, {shares['computing']:.0%} computing, "
        head += f"{shares['communicating']:.0%} communicating only, {shares['idle']:.0%} idle; per "
        head += f"step, {len(kernels) / steps:.0f} kernels and {launches / steps:.0f} launches"
    else:
        head = "on the CPU, in the main thread and in the threads of communication"
    times = [
        (event.self_device_time_total if kernels else event.self_cpu_time_total, event)
        for event in profiler.key_averages()
    ]
    times.sort(key=lambda pair: -pair[0])
    total = sum(microseconds for microseconds, _ in times)
    lines = [head, "", "  ms per step   share   calls per step   operation"]
    for microseconds, event in times[:MOST_ROWS]:
        lines.append(
            f"{microseconds / steps / 1e3:13.3f} {microseconds / total:7.1%} "
            f"{event.count / steps:16.1f}   {event.key[:48]}"
        )
    return "\n".join([*lines, ""])


def kernels_of(events: Iterable[Any]) -> list[tuple[str, float, float]]:
    """[(name, start, end)] of what ran on GPUs among the events of a profiler."""
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]


def shares_of_kernels(kernels: Sequence[tuple[str, float, float]]) -> dict[str, float] | None:
    """How the time of a GPU divides: {"computing", "communicating", "idle": shares of 1}. NCCL's
    kernels, which also wait for other ranks, count where no other kernel runs. None if there are no
    kernels."""
    if not kernels:
        return None
    computing = [(start, end) for name, start, end in kernels if not name.startswith("nccl")]
    spans = [(start, end) for _, start, end in kernels]
    whole = max(end for _, end in spans) - min(start for start, _ in spans)
    busy, computed = covered(spans), covered(computing)
    return {
        "computing": computed / whole,
        "communicating": (busy - computed) / whole,
        "idle": 1.0 - busy / whole,
    }


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The time that any of the intervals (start, end) covers."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
