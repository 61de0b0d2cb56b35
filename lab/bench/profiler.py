"""Profile a script, unchanged, with PyTorch's profiler.

    python -m lab.bench.profiler OUT SCRIPT FLAGS ...

Records steps of the second epoch on rank 0; the first epoch is a warm-up. OUT/profile.md shows how
much of the time the GPU is busy, kernels and launches per step, and the operations that take
longest. (https://docs.pytorch.org/docs/stable/profiler.html)
"""

import os
import sys
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, schedule

from lab.bench.hooks import run_script

SKIPPED, STEPS = 8, 20  # steps; the start of the profiler itself is slow
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")


def busy(intervals):
    """The share of the time from the first start to the last end that any (start, end) covers."""
    covered, reached = 0.0, min(start for start, _ in intervals)
    first = reached
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered / (reached - first)


def report(profiler, steps):
    """The text of profile.md."""
    events = profiler.events()
    kernels = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    summary, sort_by = "no GPU kernels: CPU operations", "self_cpu_time_total"
    if kernels:
        share = busy([(e.time_range.start, e.time_range.end) for e in kernels])
        launches = sum(e.name.startswith(LAUNCHES) for e in events)
        summary = f"{torch.cuda.get_device_name()}: busy {share:.1%} of the time; per step, "
        summary += f"{len(kernels) / steps:.0f} kernels and {launches / steps:.0f} launches"
        sort_by = "self_cuda_time_total"
    table = profiler.key_averages().table(sort_by=sort_by, row_limit=25, max_name_column_width=60)
    return f"{steps} steps, torch {torch.__version__}; {summary}.\n\n```\n{table}\n```\n"


def main():
    folder, script, *flags = sys.argv[1:]
    path = Path(folder) / "profile.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    is_first_rank = os.environ.get("RANK", "0") == "0"
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    epochs = 0

    def around(loader, batches):
        nonlocal epochs
        epochs += 1
        steps = min(STEPS, len(loader) - SKIPPED)
        if epochs != 2 or not is_first_rank or steps < 1:
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

    run_script(script, flags, around)
    if is_first_rank and not path.exists():
        sys.exit(
            f"error: nothing was profiled: this process has to run a second epoch of more than "
            f"{SKIPPED} steps (--epochs 2 --resume never; not train_ddp_spawn.py, which trains in "
            "other processes)"
        )


if __name__ == "__main__":
    main()
