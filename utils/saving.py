"""Saving by rank 0 alone, whole or not at all, while training goes on. Needs torch, distributed.py.

A file is written to a temporary name, flushed to the disk and renamed, so that a crash at any
moment leaves the previous file or the new one. Training waits for a copy of the tensors only; a
thread writes them.
"""

import os
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
    if isinstance(value, list):
        return [copied(item) for item in value]
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return value


class _Writer(threading.Thread):
    """Writes one file. No daemon: Python, too, waits for it before it exits."""

    def __init__(self, obj, path, then):
        super().__init__(name="saving")
        self.obj, self.path, self.then, self.error = obj, path, then, None
        self.terminated = None  # what SIGTERM did before

    def start(self):
        super().start()
        if threading.current_thread() is threading.main_thread():
            self.terminated = signal.signal(signal.SIGTERM, self._finish_and_terminate)

    def run(self):
        _schedule(threading.get_native_id(), "SCHED_IDLE")
        try:
            _save_atomically(self.obj, self.path)
            if self.then:
                self.then()
        except Exception as error:
            self.error = error
        self.obj = None  # its memory

    def wait(self):
        _schedule(self.native_id, "SCHED_OTHER")
        self.join()
        if self.terminated is not None:
            signal.signal(signal.SIGTERM, self.terminated)

    def _finish_and_terminate(self, number, frame):
        """SIGTERM (preemption, a failed peer) ends this process once the file is on the disk."""
        self.wait()
        os.kill(os.getpid(), number)


def _schedule(thread, policy):
    """A thread that takes a core from training on the CPU stops it: the other threads of a step
    spin while they wait for the one that lost its core. So the writer computes when nobody else
    does, until somebody waits for it."""
    with suppress(AttributeError, OSError):  # only Linux has threads with policies of their own
        os.sched_setscheduler(thread, getattr(os, policy), os.sched_param(0))


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
