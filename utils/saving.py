"""Saving by rank 0 alone, whole or not at all, while training goes on. Needs torch, distributed.py.

A file is written to a temporary name, flushed to the disk and renamed, so that a crash at any
moment leaves the previous file or the new one. Training waits for a copy of the tensors only; a
thread writes them.
"""

import atexit
import ctypes
import os
import resource
import signal
import threading
from contextlib import suppress
from pathlib import Path

import torch

from utils.distributed import UserError, at_end, fail_together, is_main_process

_writer = None  # rank 0's thread, until somebody has waited for it


def save_on_master(obj, path, then=None):
    """torch.save(obj, path) by rank 0, in the background; then() follows on rank 0.

    obj: tensors, numbers and strings in dicts and lists; may be changed as soon as this returns.
    All ranks call it together, and wait here for the file before this one. OSError (disk full,
    read-only) raises UserError on rank 0 and PeerError on the others: at the next call of
    save_on_master() or finish_saving(), at the latest when main() ends (report_errors).
    """
    global _writer
    finish_saving()
    at_end(finish_saving)
    atexit.register(say_unseen)
    if is_main_process():
        _writer = _Writer(copied(obj), Path(path), then)
        _writer.start()


def finish_saving():
    """Wait until all that was saved is on the disk; all ranks call it together."""
    global _writer
    with fail_together():
        if _writer:
            writer, _writer = _writer, None
            writer.wait()
            if writer.error:
                raise writer.error


def copied(value):
    """A tree of dicts and lists with a copy of each tensor, in the CPU's memory."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied(item) for item in value)
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return value


class _Writer(threading.Thread):
    """Writes one file. No daemon: Python, too, waits for it before it exits.

    SIGTERM (preemption, a failed peer) ends the process as ever, but not before the file is on the
    disk. This thread sees to that, because the main thread may be waiting in a collective, where
    Python runs no signal handlers: Python leaves the signal's number in a pipe at once.
    """

    def __init__(self, obj, path, then):
        super().__init__(name="saving")
        self.obj, self.path, self.then, self.error = obj, path, then, None
        self.signals = None  # the pipe; None: somebody else handles SIGTERM
        self.yielding = not torch.cuda.is_initialized() and _may_return()

    def start(self):
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self.signals = os.pipe()
            for end in self.signals:
                os.set_blocking(end, False)
            self.previous = signal.set_wakeup_fd(self.signals[1], warn_on_full_buffer=False)
            signal.signal(signal.SIGTERM, lambda *_: self.join())
        super().start()

    def run(self):
        if self.yielding:
            _schedule(threading.get_native_id(), os.SCHED_IDLE)
        try:
            _save_atomically(self.obj, self.path)
            if self.then:
                self.then()
        except OSError as error:
            self.error = UserError(f"cannot finish saving {self.path}: {error}")
        except Exception as error:
            self.error = error
        self.obj = None  # its memory
        if self.signals:
            with suppress(BlockingIOError):
                if signal.SIGTERM in os.read(self.signals[0], 4096):
                    say_unseen()
                    _terminate_by_default()
                    os.kill(os.getpid(), signal.SIGTERM)
            _terminate_by_default()

    def wait(self):
        if self.yielding and self.is_alive():
            _schedule(self.native_id, os.SCHED_OTHER)
        self.join()
        if self.signals:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(self.previous)
            for end in self.signals:
                os.close(end)
            self.signals = None


def say_unseen():
    """Why the last file could not be saved, where the process ends before anybody has asked."""
    if _writer and _writer.error:
        os.write(2, f"error: {_writer.error}\n".encode(errors="surrogateescape"))


def _terminate_by_default():
    """What signal.signal(SIGTERM, SIG_DFL) does, from a thread that is not the main one."""
    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)


def _schedule(thread, policy):
    """A thread that takes a core from training on the CPU stops it: the other threads of a step
    spin while they wait for the one that lost its core. So the writer computes when nobody else
    does (SCHED_IDLE), until somebody waits for it."""
    with suppress(OSError):  # it has just ended
        os.sched_setscheduler(thread, policy, os.sched_param(0))


def _may_return():
    """From SCHED_IDLE: on Linux, as root or with a limit that says so. Who may not stays as is."""
    if not hasattr(os, "SCHED_IDLE"):
        return False
    return os.geteuid() == 0 or resource.getrlimit(resource.RLIMIT_NICE)[0] >= 20


def _save_atomically(obj, path):
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            torch.save(obj, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)  # the rename itself
        os.close(folder)
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            temporary.unlink()
        # torch.save hides "disk full" behind a RuntimeError about positions in the file.
        reason = error if isinstance(error, OSError) else error.__context__
        if not isinstance(reason, OSError):
            raise
        raise UserError(
            f"cannot save {path}: {reason.strerror}; what was saved before is still there"
        ) from None
