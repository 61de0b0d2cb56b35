"""Saves within an epoch: at time intervals, and on signals, which stop the run."""

import os
import signal
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from utils.distributed import control_group, is_main_process
from utils.errors import say
from utils.guards import Guard
from utils.reports import write_error_file
from utils.signals import SECONDS_OF_ONE_REQUEST, SIGNALS

CLOCK = 1  # a reason to save; SIGNAL is a larger one
SIGNAL = 2


class SaveOnSignal(Guard):
    """Saves every cfg.save_minutes; and on SIGTERM, SIGUSR1, SIGHUP or Ctrl-C, after which the run
    stops with exit code 75, and the same command continues it. A second signal ends the process.

    All ranks save at the same step: they compare their reasons while the next step runs, so that
    none has to wait.
    """

    def at_start(self, checkpoint: Any) -> None:
        self.reason, self.agreed = torch.tensor(0), 0
        self.work: dist.Work | None = None
        self.saved_at, self.signalled_at, self.pid = time.monotonic(), 0.0, os.getpid()
        # Neither a thread nor a notebook may set handlers.
        if threading.current_thread() is threading.main_thread() and not hasattr(sys, "ps1"):
            for number in SIGNALS:
                signal.signal(number, self._note)

    def _note(self, number, frame):
        now = time.monotonic()
        self.signalled_at = self.signalled_at or now
        is_second = now - self.signalled_at > SECONDS_OF_ONE_REQUEST
        if is_second or os.getpid() != self.pid:  # a fork, such as a process of a Pool
            os._exit(128 + number)

    def after_step(self, checkpoint: Any) -> None:
        if self.work:
            self.work.wait()
        reason: Any = self.reason.tolist()  # item() would be an operation
        self.agreed = max(self.agreed, reason)
        minutes = checkpoint.cfg.save_minutes
        is_late = minutes > 0 and time.monotonic() - self.saved_at > 60 * minutes
        self.reason = torch.tensor(SIGNAL if self.signalled_at else CLOCK * is_late)
        if dist.is_initialized() and dist.get_world_size() > 1:
            self.work = dist.all_reduce(
                self.reason, dist.ReduceOp.MAX, control_group(), async_op=True
            )
        if self.agreed:
            checkpoint.request_save()

    def after_save(self, checkpoint: Any) -> None:
        self.saved_at, agreed, self.agreed = time.monotonic(), self.agreed, 0
        if self.work:
            self.work.wait()
        if self.reason < SIGNAL:
            self.reason = torch.tensor(0)  # this save also serves the interval
        if agreed < SIGNAL or checkpoint.epoch == checkpoint.cfg.epochs:
            return
        checkpoint.wait()
        place = f"epoch {checkpoint.epoch}, after step {checkpoint.state['loader'].step}"
        text = f"stopped by a signal in {place}, and saved: the same command continues the run"
        if is_main_process():
            say(text, sys.stderr)
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            write_error_file(text, "stopped")  # for torchrun's report
        raise SystemExit(75)  # EX_TEMPFAIL of sysexits.h: try again
