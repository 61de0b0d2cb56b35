"""Saves between two steps: by the clock, and on SIGTERM, SIGUSR1 or Ctrl-C, which stop the run.

SLURM, Kubernetes and providers of spot instances send SIGTERM some seconds before they kill a job.
If it reaches any rank, all ranks save at the same step and exit with code 75. The same command
continues the run.
"""

import atexit
import json
import os
import signal
import threading
import time
import weakref
from contextlib import suppress

import torch
import torch.distributed as dist

from utils import distributed, errors
from utils.errors import PeerError

SIGNALS = (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)
# Two signals within this time are one request: SLURM signals all processes, and torchrun, which is
# one of them, passes it on.
SECONDS_OF_ONE_REQUEST = 2.0
CLOCK = 1  # a reason to save; larger ones are the numbers of signals
_handlers = {}  # {number: what handled it before}


class Preempted(PeerError):
    """The run is saved and reported as stopped; it has not failed."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again


class Interrupts:
    """Decides when `checkpoint`, a Checkpointer, saves between two steps. While it is open, a first
    signal stops the run after a save; a second one ends the process, and so does a first one if
    another rank has failed. A file that is being written is completed.
    """

    def __init__(self, checkpoint):
        self.checkpoint = weakref.proxy(checkpoint)  # the thread outlives it
        checkpoint.is_due, checkpoint.after_save = self.due, self.after_save
        self.signal, self.received = 0, 0.0  # of this rank
        self.saved_at = time.monotonic()
        self.reason, self.work, self.agreed = torch.tensor(0), None, 0  # of all ranks
        atexit.register(setattr, self, "work", None)  # or the thread would keep its group alive
        if threading.current_thread() is not threading.main_thread():
            return  # Python does not allow handlers there
        # A handler runs between two operations of the main thread, which may wait for other ranks.
        # The number of the signal arrives in this pipe at once.
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in SIGNALS:
            _handlers.setdefault(number, signal.signal(number, _ignore))
        threading.Thread(target=self._listen, args=(reader,), daemon=True).start()

    def _listen(self, reader):
        while number := os.read(reader, 1)[0]:
            if number not in SIGNALS:  # SIGCHLD, for which DataLoader has a handler
                continue
            if self.signal and time.monotonic() - self.received < SECONDS_OF_ONE_REQUEST:
                continue
            if self.signal or _peer_has_failed():
                with suppress(ReferenceError):
                    if self.checkpoint.pending:
                        self.checkpoint.pending.exception()  # waits for the file
                os._exit(128 + number)
            self.signal, self.received = number, time.monotonic()

    def due(self):
        """Whether to save after this step. All ranks call it after every step, and agree.

        They start to compare their reasons, and decide in the next step, so that none has to wait.
        """
        if self.work:
            self.work.wait()
        self.agreed = self.reason.item()
        seconds = 0 if self.agreed else time.monotonic() - self.saved_at
        late = seconds >= 60 * self.checkpoint.cfg.save_minutes
        self.reason = torch.tensor(max(self.signal, CLOCK * late))
        if dist.is_initialized():
            group = distributed._control_group
            self.work = dist.all_reduce(self.reason, dist.ReduceOp.MAX, group, async_op=True)
        return self.agreed > 0

    def after_save(self):
        """Stop the run if a signal was the reason to save. All ranks call it.

        Raises Preempted, once the file is on the disk.
        """
        checkpoint, self.saved_at = self.checkpoint, time.monotonic()
        if checkpoint.epoch == checkpoint.cfg.epochs:  # the run is over: signals act as before it
            _restore_handlers()
        elif self.agreed > CLOCK:
            checkpoint.wait()
            without = ", without --resume never," if checkpoint.cfg.resume == "never" else ""
            _report(
                f"stopped by {signal.Signals(self.agreed).name} after epoch {checkpoint.epoch}, "
                f"step {checkpoint.state['loader'].step}, and saved in {checkpoint.folder}: the "
                f"same command{without} continues the run"
            )
            raise Preempted


def shield_worker():
    """Let a worker of a DataLoader outlive SIGTERM and SIGUSR1, unless its own rank sends them.

    Schedulers signal all processes, but the rank needs its workers until it has saved. If the rank
    is killed, the worker ends at once, not with a traceback or up to five seconds later.
    """
    distributed.die_with_parent()
    numbers = {signal.SIGUSR1, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    threading.Thread(target=_end_with_rank, args=(numbers, os.getppid()), daemon=True).start()


def _end_with_rank(numbers, rank):
    while signal.sigwaitinfo(numbers).si_pid != rank:
        pass
    os._exit(0)


def _ignore(number, frame):
    pass


def _restore_handlers():
    if _handlers:
        signal.set_wakeup_fd(-1)
    while _handlers:
        signal.signal(*_handlers.popitem())


os.register_at_fork(after_in_child=_restore_handlers)


def _peer_has_failed():
    return errors.failure_store is not None and errors.failure_store.check(["failures"])


def _report(text):
    if distributed.is_main_process():
        os.write(2, f"{text}\n".encode())
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # for torchrun's report
        details = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with open(f"{path}.tmp", "w") as file:
            json.dump({"message": {"message": text, "extraInfo": details}}, file)
        os.replace(f"{path}.tmp", path)  # the launcher may read it at any moment
