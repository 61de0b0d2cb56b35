"""Saves within an epoch: at time intervals, and on signals, which stop the run.

SLURM, Kubernetes and providers of spot instances send SIGTERM some seconds before they kill a job.
If it, SIGUSR1, SIGHUP or Ctrl-C reaches any rank, all ranks save at the same step and exit with
code 75. The same command continues the run.
"""

import atexit
import os
import signal
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from utils.distributed import control_group, is_main_process
from utils.errors import SilentExit, write_to_stderr
from utils.hooks import Checkpoint, Hook
from utils.reports import a_rank_has_failed, explain_errors, write_error_file
from utils.signals import SECONDS_OF_ONE_REQUEST, SIGNALS

CLOCK = 0.5  # a reason to save; larger ones are the numbers of signals, from SIGHUP, 1, on
_handlers = {}  # {number: what handled it before}


class Preempted(SilentExit):
    """The run is saved and reported as stopped; it has not failed."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again


class Interrupts(Hook):
    """Decides when a Checkpointer saves between two steps. The first signal saves and stops the
    run. A second one, or the first after another rank has failed, ends the process at once, but
    completes a file that is being written.
    """

    def __init__(self, cfg: Any, state: Mapping[str, Any]) -> None:
        self.minutes = cfg.save_minutes
        self.signal, self.received = 0, 0.0  # of this rank
        self.saved_at = time.monotonic()
        self.reason, self.agreed = torch.tensor(0.0), 0.0  # of all ranks
        self.work: dist.Work | None = None
        atexit.register(setattr, self, "work", None)  # or the thread would keep its group alive

    def after_load(self, checkpoint: Checkpoint) -> None:
        """Handle signals from now on."""
        self.saved_at = time.monotonic()
        is_over = checkpoint.epoch >= checkpoint.cfg.epochs
        if is_over or threading.current_thread() is not threading.main_thread():
            return  # in other threads, Python does not allow handlers
        explain_errors(lambda error: _restore_handlers())  # main() ends, but not the notebook
        # A handler runs between two operations of the main thread, which may wait for other ranks.
        # The number of the signal arrives in this pipe at once.
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in SIGNALS:
            _handlers.setdefault(number, signal.signal(number, _ignore))
        arguments = reader, weakref.ref(checkpoint)  # the thread outlives it
        threading.Thread(target=self._listen, args=arguments, daemon=True).start()

    def _listen(self, reader, checkpoint):
        while number := os.read(reader, 1)[0]:
            if number not in SIGNALS:  # SIGCHLD, for which DataLoader has a handler
                continue
            if self.signal and time.monotonic() - self.received < SECONDS_OF_ONE_REQUEST:
                continue
            if self.signal or a_rank_has_failed():
                pending = checkpoint() and checkpoint().pending
                if pending:
                    pending.exception()  # waits for the file
                os._exit(128 + number)
            self.signal, self.received = number, time.monotonic()

    def after_step(self, checkpoint: Checkpoint) -> None:
        """Request a save if any rank has a reason. All ranks call it after every step, and agree.

        They start to compare their reasons, and decide in the next step, so that none has to wait.
        """
        if self.work:
            self.work.wait()
        self.agreed = self.reason.item()
        reason = float(self.signal)
        is_late = time.monotonic() - self.saved_at >= 60 * self.minutes
        if is_late and not reason and not self.agreed:
            reason = CLOCK
        self.reason = torch.tensor(reason)
        if dist.is_initialized():
            group = control_group()
            self.work = dist.all_reduce(self.reason, dist.ReduceOp.MAX, group, async_op=True)
        if self.agreed:
            checkpoint.request_save(ends_run=self.agreed > CLOCK)

    def after_save(self, checkpoint: Checkpoint) -> None:
        """Stop the run if a signal was the reason to save. All ranks call it.

        Raises Preempted, once the file is on the disk.
        """
        self.saved_at = time.monotonic()
        if checkpoint.epoch == checkpoint.cfg.epochs:  # the run is over: signals act as before it
            _restore_handlers()
        elif self.agreed > CLOCK:
            checkpoint.wait()
            without = ", without --resume never," if checkpoint.cfg.resume == "never" else ""
            name = signal.Signals(int(self.agreed)).name
            _report(
                f"stopped by {name} after epoch {checkpoint.epoch}, "
                f"step {checkpoint.state['loader'].step}, and saved in {checkpoint.folder}: the "
                f"same command{without} continues the run"
            )
            if "RANK" not in os.environ:  # in a notebook: the process does not end
                _restore_handlers()
            raise Preempted


def _ignore(number, frame):
    pass


def _restore_handlers():
    if threading.current_thread() is not threading.main_thread():
        return
    if _handlers:
        signal.set_wakeup_fd(-1)
    while _handlers:
        signal.signal(*_handlers.popitem())


os.register_at_fork(after_in_child=_restore_handlers)


def _report(text):
    if is_main_process():
        write_to_stderr(f"{text}\n")
    if "TORCHELASTIC_ERROR_FILE" in os.environ:  # for torchrun's report
        write_error_file(text, "stopped")
