"""Run a script unchanged and record what this rank holds, and how long its stages compute.

    python -m lab.bench.held OUT SCRIPT FLAGS ...

OUT/rank-N.json has the bytes of parameters, gradients and optimizer state after the first step. For
a pipeline on CPUs, it also has [seconds of the schedule, seconds in which stages computed] for each
step.
"""

import json
import os
import sys
import time
from pathlib import Path

from torch.distributed.pipelining import PipelineStage

from lab.bench.hooks import run_script
from utils.checkpoint import Checkpointer
from utils.rungs.pipeline import Pipeline


def local_bytes(tensors):
    """The bytes of tensors, and of this rank's parts of DTensors."""
    return sum(getattr(t, "_local_tensor", t).nbytes for t in tensors if t is not None)


def held_bytes(model, optimizer):
    """{kind: bytes} of what a rank holds throughout all steps."""
    parameters = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "parameters": local_bytes(parameters),
        "gradients": local_bytes(p.grad for p in parameters),
        "optimizer state": local_bytes(v for v in states if v.dim()),  # not the step count
    }


def install(result):
    """Make every script fill `result`, a dict, with "held" and, for a pipeline, "steps"."""
    save_point, pipeline_step = Checkpointer.step, Pipeline.step
    result["steps"], active = [], []

    def record(checkpoint):
        if "held" not in result:
            result["held"] = held_bytes(checkpoint.state["model"], checkpoint.optimizer)
        save_point(checkpoint)

    def timed_step(*args):
        active.append(0.0)
        start = time.perf_counter()
        outputs = pipeline_step(*args)
        result["steps"].append([time.perf_counter() - start, active.pop()])
        return outputs

    def timed(compute):
        def run(*args, **kwargs):
            start = time.perf_counter()
            outputs = compute(*args, **kwargs)
            if active:  # not in evaluation
                active[0] += time.perf_counter() - start
            return outputs

        return run

    Checkpointer.step, Pipeline.step = record, timed_step
    for name in ("forward_one_chunk", "backward_one_chunk"):
        setattr(PipelineStage, name, timed(getattr(PipelineStage, name)))


def main():
    folder, script, *flags = sys.argv[1:]
    result = {}
    path = Path(folder) / f"rank-{os.environ.get('RANK', '0')}.json"
    install(result)

    def write():
        path.write_text(json.dumps(result))

    run_script(script, flags, lambda loader, batches: batches, write)


if __name__ == "__main__":
    main()
