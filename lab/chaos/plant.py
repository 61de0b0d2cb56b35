"""What happens inside a rank: the fault, after the step for which it is planned."""

import errno
import io
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import torch

import utils.checkpoint
import utils.data
from tools.lib.runs import family
from utils.checkpoint import Checkpointer
from utils.guards.preemption import SaveOnSignal
from utils.metrics import MetricLogger

SMALL_DISK = 2**25  # bytes
FILLER = ".filler"  # in output_dir: a file that fills the disk


def plant(faults, log, tag=None):
    """Plant `faults`, a list of Faults as dicts, in this rank.

    log: the file to which each fault is written when it happens. tag: the RUN_TAG of all processes
    of the run; None: they form a session.
    """
    by_step = {fault["step"]: fault for fault in faults}
    real, steps = Checkpointer.step, itertools.count(1)

    def step(checkpoint):
        fault = by_step.get(next(steps))
        if fault:
            checkpoint.wait()  # so that a replay of this fault resumes from the same step
            if int(os.environ.get("RANK", "0")) == fault["rank"]:
                record(log, fault, checkpoint)
                ACTIONS[fault["kind"]](checkpoint, fault | {"tag": tag})
        real(checkpoint)

    Checkpointer.step = step


def record(log, fault, checkpoint):
    """Append a line to `log`: which fault, when, after which epoch and step."""
    place = {"epoch": checkpoint.epoch, "step": checkpoint.state["loader"].read}
    line = {"number": fault["number"], "time": time.monotonic(), **place}
    with open(log, "a") as file:
        file.write(json.dumps(line) + "\n")


def session(leader):
    """The ids of the processes of a session, except for zombies."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended
            state, _, _, sid = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(sid) == leader and state != "Z":
                pids.append(int(folder.name))
    return pids


def _kill(checkpoint, fault):
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_launcher(checkpoint, fault):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)  # the rank must not end by itself


def _signal(number, target):
    def act(checkpoint, fault):
        if target == "launcher":
            os.kill(os.getppid(), number)
        elif target == "all":
            everyone = family(fault["tag"]) if fault["tag"] else session(os.getsid(0))
            # From another process: workers obey their own rank.
            command = ["kill", f"-{number}", *map(str, everyone)]
            subprocess.run(command, stderr=subprocess.DEVNULL)
        else:
            os.kill(os.getpid(), number)
        (guard,) = (guard for guard in checkpoint.guards if isinstance(guard, SaveOnSignal))
        end = time.monotonic() + 60  # a replay needs the handler to have run here
        while guard.signalled_at is None and time.monotonic() < end:
            time.sleep(0.001)

    return act


def _pause(checkpoint, fault):
    subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def _stop(checkpoint, fault):
    """Stop the rank before its next batch."""
    utils.data.start_batch = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)


def _slow(checkpoint, fault):
    time.sleep(1)


def _raise(checkpoint, fault):
    raise RuntimeError("planted by chaos")


def _leave(checkpoint, fault):
    os._exit(0)


def _nan(checkpoint, fault):
    parameters = checkpoint.model.parameters()
    parts = (p.to_local() if hasattr(p, "to_local") else p for p in parameters)
    with torch.no_grad():  # a rank's shard of a small tensor may be empty
        next(part for part in parts if part.numel()).fill_(float("nan"))


def _full_disk(checkpoint, fault):
    """Fill the file system if it is small; otherwise, the next save fails as if it were full."""
    space = os.statvfs(checkpoint.folder)
    if space.f_blocks * space.f_frsize > SMALL_DISK:
        _replace_save(_fail)
        return
    with suppress(OSError), open(checkpoint.folder / FILLER, "wb", buffering=0) as file:
        while True:
            file.write(bytes(2**12))


def _fail(file):
    file.truncate(100)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _replace_save(after):
    """Make the next torch.save into a file call after(file)."""
    save = torch.save

    def save_and_fail(obj, file, **settings):
        save(obj, file, **settings)
        if hasattr(file, "fileno") and not isinstance(file, io.BytesIO):  # which pickles tensors
            file.flush()
            after(file)

    torch.save = save_and_fail


def _kill_save(checkpoint, fault):
    """Kill the rank in the middle of the file, or when it is complete but not renamed yet."""

    def kill(file):
        if fault["fraction"] < 0.7 and file.seekable():  # unlike DCP's stream
            file.truncate(file.tell() // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    _replace_save(kill)


def _kill_rename(checkpoint, fault):
    """Kill the rank before last.pt is renamed at the end of an epoch, or right after that."""
    link = utils.checkpoint.link_atomically

    def link_or_kill(name, path):
        if name.name != "last.pt" or fault["fraction"] < 0.5:
            link(name, path)
        if name.name == "last.pt":
            os.kill(os.getpid(), signal.SIGKILL)

    utils.checkpoint.link_atomically = link_or_kill


def _kill_row(checkpoint, fault):
    log = MetricLogger.log

    def log_and_kill(*args, **settings):
        log(*args, **settings)
        os.kill(os.getpid(), signal.SIGKILL)

    MetricLogger.log = log_and_kill


def _fail_once(module, name, number=errno.EIO):
    """Make the next call of a function of the module raise OSError."""
    function = getattr(module, name)

    def fail(*args, **settings):
        setattr(module, name, function)
        raise OSError(number, os.strerror(number))

    setattr(module, name, fail)


def _eio_link(checkpoint, fault):
    _fail_once(os, "link", errno.EPERM)  # as on a file system without links
    _fail_once(shutil, "copyfile")


def _kill_worker(checkpoint, fault):
    workers = multiprocessing.active_children()
    min(workers, key=lambda worker: worker.pid).kill()
    time.sleep(0.2)  # for SIGCHLD, on which DataLoader raises


ACTIONS = {
    "kill-rank": _kill,
    "kill-launcher": _kill_launcher,
    "pause": _pause,
    "stop": _stop,
    "slow": _slow,
    "raise": _raise,
    "leave": _leave,
    "nan": _nan,
    "full-disk": _full_disk,
    "kill-save": _kill_save,
    "kill-rename": _kill_rename,
    "kill-row": _kill_row,
    "eio-fsync": lambda checkpoint, fault: _fail_once(os, "fsync"),
    "eio-rename": lambda checkpoint, fault: _fail_once(os, "replace"),
    "eio-link": _eio_link,
    "kill-worker": _kill_worker,
    **{
        f"{name}-{target}": _signal(getattr(signal, f"SIG{name.upper()}"), target)
        for name in ("term", "usr1", "int")
        for target in ("rank", "launcher", "all")
    },
}
