"""--log-steps: rows within an epoch, one after every N optimizer steps, in output_dir/steps.jsonl.

Each row has "epoch", "step" and "samples", both counted from the epoch's start, skipped ones
included; and for the steps since the last row, or since the start of the epoch, over all ranks:
what the task summarizes, with the "loss"; "samples_per_second"; "data_seconds", for which a rank
has waited for data, on average. "lr" is for the next step, and "memory" the most bytes that rank 0
has used so far, on its GPU, or as a process that trains on a CPU.
"""

import json
import os
import resource
import sys
import time
from typing import Any

import torch

from utils.distributed import all_reduce, dp_world_size, fail_together, is_main_process
from utils.guards import Guard


class StepLog(Guard):
    """Writes a row after every cfg.log_steps steps. A resumed run neither repeats nor loses rows.

    The sums of all ranks are copied without waiting for the device, and the row is written with the
    next one, or when a save is due.

    totals: the sums over all ranks at the last row of this epoch, as a list; empty before it.
    """

    def __init__(self) -> None:
        self.totals: list[float] = []
        self.size: int | None = None  # bytes of the file when the checkpoint was written
        self.pending: tuple[Any, ...] | None = None
        self.waited = 0.0  # for data, at the last step

    def state_dict(self) -> dict[str, Any]:
        size = self.path.stat().st_size if is_main_process() and self.path.exists() else 0
        return {"totals": self.totals, "size": size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.totals, self.size = state["totals"], state["size"]

    def at_start(self, checkpoint: Any) -> None:
        """Drop the rows of the steps that the run is about to repeat."""
        self.path, self.epoch = checkpoint.folder / "steps.jsonl", checkpoint.epoch
        self.start: Any = None  # step, time and seconds waited at the last row
        if checkpoint.state["loader"].step == 0:
            self.totals = []  # were of the epoch before
            self.size = self.size if checkpoint.epoch else 0
        with fail_together():
            if is_main_process() and self.path.exists() and self.size is not None:
                os.truncate(self.path, min(self.size, self.path.stat().st_size))

    def after_step(self, checkpoint: Any) -> None:
        loader = checkpoint.state["loader"]
        if self.epoch != checkpoint.epoch:
            self.epoch, self.totals, self.start = checkpoint.epoch, [], None
        self.start = self.start or (loader.step - 1, loader.started, self.waited)
        self.waited = loader.waited
        if loader.step % checkpoint.cfg.log_steps == 0:
            self._write_pending(checkpoint)
            self._begin_row(checkpoint)
        if checkpoint.is_due():
            self._write_pending(checkpoint)

    def _begin_row(self, checkpoint):
        loader, meter = checkpoint.state["loader"], checkpoint.state["meter"]
        step, started, waited = self.start
        self.start = loader.step, time.perf_counter(), loader.waited
        numbers = [loader.samples, loader.waited - waited, meter.count]
        sums = all_reduce(torch.cat([meter.vector.new_tensor(numbers), meter.vector]))
        copied = None if sums.is_cpu else torch.Event(sums.device)
        values = sums.to("cpu", non_blocking=True)
        if copied:
            copied.record()
        row = {"epoch": loader.epoch, "step": loader.step}
        row["lr"] = float(checkpoint.optimizer.param_groups[0]["lr"])
        speed = (loader.step - step) * loader.global_batch / (self.start[1] - started)
        self.pending = row, speed, values, copied

    def _write_pending(self, checkpoint):
        if self.pending is None:
            return
        (row, speed, values, copied), self.pending = self.pending, None
        if copied:
            copied.synchronize()
        samples, waited, *totals = values.tolist()
        before = self.totals or [0.0] * len(totals)
        count, *sums = (after - earlier for after, earlier in zip(totals, before, strict=True))
        self.totals = totals
        if not is_main_process():
            return
        meter, device = checkpoint.state["meter"], checkpoint.state["loader"].device
        named = meter.sums(torch.tensor(sums, dtype=torch.float64), count)
        row["samples"] = int(samples)
        row |= {name: float(value) for name, value in meter.task.summarize(named).items()}
        row |= {"samples_per_second": speed, "data_seconds": waited / dp_world_size()}
        row["memory"] = peak_memory(device)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has used so far: on its GPU, or else in main memory."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
