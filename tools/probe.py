"""python -m tools.probe OUT SCRIPT FLAGS ...: run a script as it is and note its steps' parts.

Nothing in the script changes: the marks hang on what every script calls, supervise(), backward()
and optimizer.step(). On CUDA they are events on the device's own clock, so that nothing waits for
them. OUT/rank-N.json: for each epoch a list of steps, a step being seconds of
[waiting for data, forward with loss, backward with its communication, optimizer with clipping,
the rest]. The checkpoint of the epoch before is waited for, outside of the time: these epochs are
short, and what writing costs is tools.bench_checkpoint's to measure.
"""

import json
import os
import resource
import runpy
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import utils.supervise
from utils.saving import finish_saving

PARTS = ["data", "forward", "backward", "optimizer", "rest"]
# What the time up to each kind of mark was spent on.
SPENT_ON = {"batch": 0, "backward": 1, "backward done": 2, "step": 3, "step done": 3, "ask": 4}


class Probe:
    """Collects marks; install() hangs them on what the scripts call."""

    def __init__(self):
        self.epochs, self.first_step, self.device = [], None, None

    def mark(self, what):
        if self.device == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.epochs[-1].append((what, event))
        else:
            self.epochs[-1].append((what, time.perf_counter()))

    def install(self):
        supervise, backward = utils.supervise.supervise, torch.Tensor.backward

        def marked_supervise(loader, *args):
            finish_saving()  # before the epoch's clock starts
            return marked(loader, *args)

        def marked(loader, *args):
            self.device = loader.device.type
            self.epochs.append([])
            batches = iter(supervise(loader, *args))
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

        def marked_backward(*args, **kwargs):
            if not self.epochs:  # prepare_ddp(), before the first step
                return backward(*args, **kwargs)
            self.mark("backward")
            backward(*args, **kwargs)
            self.mark("backward done")

        utils.supervise.supervise = marked_supervise
        torch.Tensor.backward = marked_backward
        register_optimizer_step_pre_hook(lambda *_: self.mark("step"))
        register_optimizer_step_post_hook(lambda *_: self.mark("step done"))

    def steps(self, marks):
        """The marks of an epoch -> its steps, as in the module's docstring."""
        steps = []
        for (_, before), (what, now) in pairwise(marks):
            cuda = self.device == "cuda"
            seconds = before.elapsed_time(now) / 1e3 if cuda else now - before
            if what == "batch":
                steps.append([0.0] * len(PARTS))
            if steps:
                steps[-1][SPENT_ON[what]] += seconds
        return steps

    def write(self, folder):
        cuda = self.device == "cuda"
        if cuda:
            torch.cuda.synchronize()
        memory = torch.cuda.max_memory_allocated() if cuda else 0
        found = {
            "epochs": [self.steps(marks) for marks in self.epochs],
            "first_step": self.first_step,
            "memory": memory or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name() if cuda else "cpu",
        }
        rank = os.environ.get("RANK", "0")
        (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(found))


def main():
    folder, script, *flags = sys.argv[1:]
    sys.argv = [script, *flags]
    probe = Probe()
    probe.install()
    runpy.run_path(script, run_name="__main__")
    probe.write(folder)


if __name__ == "__main__":
    main()
