"""Run a script unchanged, and time its epochs as a whole.

    python -m tools.bench.epochs OUT SCRIPT FLAGS ...

OUT/epochs.json: the seconds of each epoch, from the end of one evaluation to the end of the next
one: with the call that saves a checkpoint, whose file is written meanwhile, the training and the
evaluation. The first begins with the first batch. And the GPU's peak memory. For one process.
"""

import json
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch

from tools.bench.hooks import run_script
from utils.metrics import MetricLogger


def main():
    folder, script, *flags = sys.argv[1:]
    times, log = [], MetricLogger.log

    def timed_log(*args, **kwargs):  # of numbers, for which the CPU has waited
        times.append(time.perf_counter())
        return log(*args, **kwargs)

    def around(loader, batches):
        if not times:
            times.append(time.perf_counter())
        yield from batches

    MetricLogger.log = timed_log
    run_script(script, flags, around)
    memory = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0
    result = {"seconds": [b - a for a, b in pairwise(times)], "memory": memory}
    (Path(folder) / "epochs.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
