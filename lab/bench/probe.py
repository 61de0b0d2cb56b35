"""Run a script unchanged and record how long the parts of its steps take.

    python -m lab.bench.probe OUT SCRIPT FLAGS ...

The marks are set in what every script calls: the loader, backward() and optimizer.step(). On CUDA
they are events on the device's own clock, so that nothing waits for them; a step that is one CUDA
graph counts as "the rest". OUT/rank-N.json has, for each epoch, one list of seconds per step:
[waiting for data, forward with the loss, backward with its communication, optimizer with clipping,
the rest]. Between epochs, the run waits until its checkpoint is on the disk, because the epochs are
short; lab.bench.checkpoint measures what a save costs.
"""

import json
import os
import resource
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lab.bench.hooks import PARTS, run_script
from utils.checkpoint import Checkpointer

# For each kind of mark, the index in PARTS of what the time before it was spent on.
SPENT_ON = {"batch": 0, "backward": 1, "backward done": 2, "step": 3, "step done": 3, "ask": 4}


class Probe:
    """Collects marks; install() sets them in what the scripts call."""

    def __init__(self):
        self.epochs, self.first_step, self.device = [], None, None

    def mark(self, kind):
        """Record the current time, on the device's clock."""
        if not self.epochs:  # before the first step
            return
        if self.device == "cuda":
            if torch.cuda.is_current_stream_capturing():  # a replay would not record it again
                return
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.epochs[-1].append((kind, event))
        else:
            self.epochs[-1].append((kind, time.perf_counter()))

    def install(self):
        """Set the marks around backward() and optimizer.step(); make saving wait for the file."""
        backward, save = torch.Tensor.backward, Checkpointer.save

        def marked_backward(*args, **kwargs):
            self.mark("backward")
            backward(*args, **kwargs)
            self.mark("backward done")

        def save_and_wait(checkpointer, *args, **kwargs):
            save(checkpointer, *args, **kwargs)
            checkpointer.wait()

        torch.Tensor.backward, Checkpointer.save = marked_backward, save_and_wait
        register_optimizer_step_pre_hook(lambda *_: self.mark("step"))
        register_optimizer_step_post_hook(lambda *_: self.mark("step done"))

    def around(self, loader, batches):
        """The batches of an epoch, with a mark before and after each."""
        self.device = loader.device.type
        self.epochs.append([])
        batches = iter(batches)
        while True:
            self.mark("ask")
            batch = next(batches, None)
            if batch is None:
                return
            self.mark("batch")
            yield batch
            if self.first_step is None:
                if self.device == "cuda":
                    torch.cuda.synchronize()
                self.first_step = time.time()

    def steps(self, marks):
        """The marks of an epoch -> seconds of PARTS, one list per step."""
        steps = []
        for (_, before), (kind, now) in pairwise(marks):
            cuda = self.device == "cuda"
            seconds = before.elapsed_time(now) / 1e3 if cuda else now - before
            if kind == "batch":
                steps.append([0.0] * len(PARTS))
            if steps:
                steps[-1][SPENT_ON[kind]] += seconds
        return steps

    def write(self, folder):
        """Write this rank's rank-N.json."""
        cuda = self.device == "cuda"
        if cuda:
            torch.cuda.synchronize()
        memory = torch.cuda.max_memory_allocated() if cuda else 0
        result = {
            "epochs": [self.steps(marks) for marks in self.epochs],
            "first_step": self.first_step,
            "memory": memory or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name() if cuda else "cpu",
        }
        rank = os.environ.get("RANK", "0")
        (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(result))


def main():
    folder, script, *flags = sys.argv[1:]
    probe = Probe()
    probe.install()
    run_script(script, flags, probe.around, partial(probe.write, folder))


if __name__ == "__main__":
    main()
