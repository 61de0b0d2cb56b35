"""How far a run is: a bar on a terminal if tqdm is installed, otherwise a line every 15 seconds.

Needs distributed.py, errors.py and hooks.py.
"""

import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from utils.distributed import is_main_process
from utils.errors import say
from utils.hooks import AsyncCopy, Checkpoint, Hook
from utils.reports import explain_errors

SECONDS_BETWEEN_LINES = 15.0
SECONDS_BETWEEN_BARS = 0.5
NARROW = 120  # columns, below which a bar leaves out what one can do without


class Progress(Hook):
    """Shows the step, the loss, samples per second and the time left, on the main process.

    The loss is the mean since it was last shown, over the samples of rank 0: the mean over all
    ranks would need communication. It is copied without waiting for the device, and shown once it
    has arrived.
    """

    def __init__(self, cfg: Any, state: Mapping[str, Any]) -> None:
        self.loader, self.meter, self.epochs = state["loader"], state["meter"], cfg.epochs
        self.is_main = is_main_process()
        self.epoch, self.seconds_between_epochs = None, 0.0
        self.last_step_at: float | None = None
        self.readout: AsyncCopy | None = None
        self.shown: Any = 0.0  # the snapshot of the meter at the last readout
        self.due = 0.0
        self.bar: Any = None
        self.new_bar, self.patience = None, SECONDS_BETWEEN_LINES
        if self.is_main and _columns() > 0:
            with suppress(ImportError):  # an extra
                from tqdm import tqdm

                self.new_bar, self.patience = tqdm, SECONDS_BETWEEN_BARS
                explain_errors(lambda error: self._close())

    def after_step(self, checkpoint: Checkpoint) -> None:
        if not self.is_main:
            return
        now, loader = time.monotonic(), self.loader
        if self.epoch != loader.epoch:
            self._start_epoch(now)
        if self.readout is None and now >= self.due:
            snapshot = self.meter.snapshot()
            self.readout, self.shown = AsyncCopy(snapshot - self.shown), snapshot
        if self.readout is not None and self.readout.is_done():
            self._show(self.meter.summarize(self.readout.values)["loss"], now)
            self.readout, self.due = None, now + self.patience
        if loader.step == len(loader):
            self.last_step_at = now
            self._close()

    def before_save(self, checkpoint: Checkpoint, between_steps: bool) -> None:
        self._close()  # the run may end after the save, and say why

    def _start_epoch(self, now):
        if self.last_step_at is not None:
            self.seconds_between_epochs = now - self.last_step_at
        # After the first step, in which torch.compile may have worked.
        self.epoch, self.first_step, self.started = self.loader.epoch, self.loader.step, now
        self.readout, self.shown, self.due = None, 0.0, now + self.patience

    def _show(self, loss, now):
        loader = self.loader
        step, steps = loader.step, len(loader)
        is_narrow = self.new_bar is not None and _columns() < NARROW
        shown = [f"loss {loss:.4f}"]
        if loader.batch_size < loader.global_batch and not is_narrow:
            shown[0] += " (rank 0)"
        if step > self.first_step:
            seconds_per_step = (now - self.started) / (step - self.first_step)
            left = (steps - step) * seconds_per_step
            epochs = self.epochs - self.epoch - 1
            left_in_run = left + epochs * (steps * seconds_per_step + self.seconds_between_epochs)
            shown.append(f"{loader.global_batch / seconds_per_step:,.0f} samples/s")
            if not is_narrow:
                shown.insert(0, f"{_duration(left)} in the epoch")
            shown.insert(0, f"{_duration(left_in_run)} left in the run")
        text = ", ".join(shown)
        if self.new_bar is None:
            say(f"epoch {self.epoch}: step {step} of {steps}, {text}", sys.stderr)
            return
        with suppress(OSError):  # the terminal is gone
            if self.bar is None:
                form = "{desc} {bar} {n_fmt}/{total_fmt}{postfix}"
                options = dict(total=steps, leave=False, bar_format=form, dynamic_ncols=True)
                self.bar = self.new_bar(desc=f"epoch {self.epoch}", **options)
            self.bar.n = step
            self.bar.set_postfix_str(text)

    def _close(self):
        bar, self.bar = self.bar, None
        if bar is not None:
            with suppress(OSError):
                bar.close()


def _columns():
    """The width of the terminal; 0 if stderr is none, or does not know it, as in a container."""
    try:
        return os.get_terminal_size(2).columns
    except OSError:
        return 0


def _duration(seconds):
    """12:34, or 1:12:34."""
    return str(timedelta(seconds=round(seconds))).removeprefix("0:")
