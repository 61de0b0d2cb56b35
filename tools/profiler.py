"""python -m tools.profiler OUT SCRIPT FLAGS ...: what a script's steps consist of.

PyTorch's profiler around steps of the second epoch (the first warms up) of rank 0, the script as it
is. OUT/profile.md: how much of the time the GPU is busy, kernels and launches a step, and the
operations that take longest. (https://docs.pytorch.org/docs/stable/profiler.html)
"""

import os
import runpy
import sys
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, schedule

import utils.supervise

SKIPPED, STEPS = 8, 20  # the profiler's own start is slow
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")


def busy(intervals):
    """The share of the time from the first (start, end) to the last that at least one covers."""
    covered, reached = 0.0, min(start for start, _ in intervals)
    first = reached
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered / (reached - first)


def report(profiler, steps):
    events = profiler.events()
    kernels = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    said, by = "no kernels of a GPU: the operations of the CPU", "self_cpu_time_total"
    if kernels:
        share = busy([(e.time_range.start, e.time_range.end) for e in kernels])
        launches = sum(e.name.startswith(LAUNCHES) for e in events)
        said = f"{torch.cuda.get_device_name()}: busy {share:.1%} of the time, "
        said += f"{len(kernels) / steps:.0f} kernels and {launches / steps:.0f} launches a step"
        by = "self_cuda_time_total"
    table = profiler.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=60)
    return f"{steps} steps, torch {torch.__version__}; {said}.\n\n```\n{table}\n```\n"


def main():
    folder, script, *flags = sys.argv[1:]
    path = Path(folder) / "profile.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    first = os.environ.get("RANK", "0") == "0"
    sys.argv = [script, *flags]
    supervise = utils.supervise.supervise
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)

    def profiled(loader, epoch, *args):
        batches, steps = supervise(loader, epoch, *args), min(STEPS, len(loader) - SKIPPED)
        if epoch != 1 or not first or steps < 1:
            yield from batches
            return
        with torch.profiler.profile(
            activities=activities,
            schedule=schedule(wait=SKIPPED - 2, warmup=2, active=steps, repeat=1),
            on_trace_ready=lambda profiler: path.write_text(report(profiler, steps)),
        ) as profiler:
            for batch in batches:
                yield batch
                profiler.step()

    utils.supervise.supervise = profiled
    runpy.run_path(script, run_name="__main__")
    if first and not path.exists():
        sys.exit(
            f"nothing was profiled: a second epoch of more than {SKIPPED} steps has to run in this "
            "process (--epochs 2 --resume never; train_ddp_spawn.py starts others)"
        )


if __name__ == "__main__":
    main()
