"""One run at a time in an output folder; --resume never moves an earlier run's files aside."""

import errno
import fcntl
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from utils.distributed import fail_together, is_main_process
from utils.errors import UserError

RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")  # by --max-restarts, --requeue
WRITTEN = ("metrics.jsonl", "steps.jsonl", "starts.jsonl", "audit.jsonl", "loggers.json")
WRITTEN += ("tensorboard", "profile", "config.yaml", "best.pt", "last.pt", "epoch-[0-9]*")
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # of file systems without flock
_locks = {}  # {folder: file}, held while this process lives


def claim_output_dir(cfg: Any) -> None:
    """Create cfg.output_dir, and lock it for this run; see claim(). All ranks call it together."""
    with fail_together():
        if is_main_process():
            claim(Path(cfg.output_dir), cfg.resume)


def write_text(path: Path, text: str) -> None:
    """Replace a text file as a whole. Raises UserError if it fails."""
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def claim(folder: Path, resume: str) -> None:
    """Create the folder, and lock it against a second run for as long as this process lives.

    resume: cfg.resume; with "never", what a run wrote moves to folder/previous-TIME, unless
    torchrun or SLURM has restarted a job that began like that. Raises UserError if another run
    holds the lock, or the folder cannot be written. Only the main process calls it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _lock(folder)
        for leftover in folder.glob("*.pt.tmp*"):  # of a run that was killed
            leftover.unlink()
        if resume == "never" and all(os.environ.get(name, "0") == "0" for name in RESTARTS):
            _set_aside(folder)
    except BlockingIOError:
        owner = (folder / ".lock").read_text() or "another run"
        raise UserError(f"{owner} is writing to {folder}: pass another --output-dir") from None
    except OSError as error:
        raise UserError(f"cannot write to --output-dir {folder}: {error.strerror}") from None


def _lock(folder):
    key = folder.resolve()
    if key not in _locks or not os.fstat(_locks[key]).st_nlink:  # deleted, with its folder
        _locks[key] = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(_locks[key], fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / ".lock").write_text(f"process {os.getpid()} on {socket.gethostname()}")
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        print(
            f"warning: the file system of {folder} has no locks ({error.strerror}): make sure that "
            f"no other run uses this --output-dir",
            file=sys.stderr,
        )


def _set_aside(folder):
    old = [path for pattern in WRITTEN for path in folder.glob(pattern)]
    if old:
        aside = folder / time.strftime("previous-%Y%m%d-%H%M%S")
        aside.mkdir()
        for path in old:
            path.rename(aside / path.name)
