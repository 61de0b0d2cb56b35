"""Run a script unchanged, and time its epochs as a whole.

    python -m lab.bench.epochs OUT SCRIPT FLAGS ...

OUT/epochs.json holds the seconds of each epoch and the GPU's peak memory. An epoch lasts from the
end of one evaluation (the first epoch: from its first batch) to the end of the next. It includes
the call that saves a checkpoint, whose file is written in the background, the training and the
evaluation. This works with one process only.
"""

import json
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch

from lab.bench.hooks import run_script
from utils.metrics import MetricLogger


def main():
    folder, script, *flags = sys.argv[1:]
    times, log = [], MetricLogger.log

    def timed_log(*args, **kwargs):  # the CPU has waited for the numbers
        times.append(time.perf_counter())
        return log(*args, **kwargs)

    def around(loader, batches):
        if not times:
            times.append(time.perf_counter())
        yield from batches

    def write():
        memory = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0
        result = {"seconds": [b - a for a, b in pairwise(times)], "memory": memory}
        (Path(folder) / "epochs.json").write_text(json.dumps(result))

    MetricLogger.log = timed_log
    run_script(script, flags, around, write)


if __name__ == "__main__":
    main()
