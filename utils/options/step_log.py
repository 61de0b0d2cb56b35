"""--log-steps: rows within an epoch, one after every N optimizer steps, in output_dir/steps.jsonl.

Each row has "epoch", "step" and "samples", both counted from the epoch's start, skipped ones
included; and for the steps since the last row, or since the start of the epoch, over all ranks:
what the task summarizes, with the "loss"; "samples_per_second"; "data_seconds", for which a rank
has waited for data, on average.
"gradient_norm" belongs to the row's last step, before it was clipped: of runs with --clip-norm, and
of steps whose gradients were finite. "lr" is for the next step, and "memory" the most bytes
that rank 0 has used so far, on its GPU, or as a process that trains on a CPU.
"""

import json
import math
import os
import resource
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from utils.distributed import all_reduce, dp_world_size, is_main_process
from utils.errors import UserError, warn
from utils.hooks import AsyncCopy, Checkpoint, Hook
from utils.metrics import read_metrics, write_rows
from utils.options.timed_reader import timed_reader


class StepLog(Hook):
    """Adds a row after every `every` steps. A resumed run neither repeats nor loses rows.

    The sums of all ranks are copied without waiting for the device, and the row is written when
    they have arrived: at the latest by the next row, a save, or the end of the epoch.

    totals: the sums over all ranks at the last row of this epoch, as a list; empty before it.
    """

    def __init__(self, cfg: Any, state: Mapping[str, Any]) -> None:
        self.every = cfg.log_steps
        self.path = Path(cfg.output_dir) / "steps.jsonl"
        self.save_errors = cfg.save_errors
        self.loader = state["loader"]
        self.meter = state["meter"]
        self.scheduler = state["scheduler"]
        self.reader: Any = None
        self.totals = []
        self.pending: Any = None
        self.last_time: Any = None
        self.waited = 0.0  # for data, on this rank, at the last row

    def state_dict(self) -> dict[str, Any]:
        return {"totals": self.totals}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.totals = state["totals"]

    def after_load(self, checkpoint: Checkpoint) -> None:
        """Drop the rows of the steps that the run is about to repeat."""
        self.reader = timed_reader(self.loader)
        here = checkpoint.epoch, self.loader.start
        rows = read_metrics(self.path)
        kept = [row for row in rows if (row["epoch"], row.get("step", 0)) <= here]
        write_rows(self.path, kept)
        self.last_step = self.loader.start
        self.last_time = None

    def after_step(self, checkpoint: Checkpoint) -> None:
        step = self.loader.step
        if self.last_time is None:  # the first step of an epoch, here
            self.last_time = self.loader.started
        if step % self.every == 0:
            if self.pending:
                self._write_pending(checkpoint.hooks)
            self._begin_row()
        if self.pending and (checkpoint.is_due() or self.pending["readout"].is_done()):
            self._write_pending(checkpoint.hooks)
        if step == len(self.loader):
            self.totals = []
            self.last_step = 0
            self.last_time = None
            self.waited = 0.0

    def _begin_row(self):
        loader, snapshot = self.loader, self.meter.snapshot()
        numbers = loader.samples, self.reader.waited - self.waited
        self.waited = self.reader.waited
        vector = torch.cat([*(snapshot.new_full((1,), number) for number in numbers), snapshot])
        noted = [full_tensor(value).to(snapshot).reshape(1) for value in self.meter.noted.values()]
        self.pending = {
            "epoch": loader.epoch,
            "step": loader.step,
            "lr": self.scheduler.get_last_lr()[0],
            "names": list(self.meter.noted),
            "readout": AsyncCopy(torch.cat([all_reduce(vector), *noted])),
        }

    def _write_pending(self, hooks):
        row, self.pending = self.pending, None
        names, values = row.pop("names"), row.pop("readout").wait().tolist()
        sums_end = len(values) - len(names)
        samples, waited, *totals = values[:sums_end]
        noted = zip(names, values[sums_end:], strict=True)
        now, step = time.perf_counter(), row["step"]
        before = self.totals or [0.0] * len(totals)
        window = torch.tensor(totals, dtype=torch.float64) - torch.tensor(
            before, dtype=torch.float64
        )
        speed = (step - self.last_step) * self.loader.global_batch / (now - self.last_time)
        self.totals = totals
        self.last_step = step
        self.last_time = now
        if not is_main_process():
            return
        row |= {"samples": int(samples), **self.meter.summarize(window)}
        row |= {name: value for name, value in noted if math.isfinite(value)}  # JSON has no NaN
        row |= {"samples_per_second": speed, "data_seconds": waited / dp_world_size()}
        row["memory"] = peak_memory(self.loader.device)
        try:
            _append(self.path, json.dumps(row) + "\n")
        except OSError as error:
            text = f"cannot write {self.path}: {error.strerror}"
            if self.save_errors == "stop":
                raise UserError(text) from None
            warn(f"{text}; the run continues")
        for hook in hooks:
            hook.after_row(row)


def _append(path, text):
    """Append to a file. If that fails, it stays as it is: half a row would damage the next one."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        with suppress(OSError):
            os.truncate(path, size)
        raise


def full_tensor(value: Tensor) -> Tensor:
    """A tensor as every rank has it; all ranks call it together."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has used so far: on its GPU, or else in main memory."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
