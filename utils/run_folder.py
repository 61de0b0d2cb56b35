"""Only one run at a time writes to an output folder, and no run overwrites what an earlier one
wrote: --resume never moves its files aside."""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from utils.distributed import fail_together, is_main_process, is_restart
from utils.errors import UserError, warn
from utils.files import write_text
from utils.hooks import Checkpoint, Hook

WRITTEN = ("metrics.jsonl", "steps.jsonl", "starts.jsonl", "audit.jsonl", "loggers.json")
WRITTEN += ("tensorboard", "profile", "config.yaml")
CHECKPOINTS = ("best.pt", "last.pt", "epoch-[0-9]*", "previous-epoch-*")
LEFTOVERS = ("last.pt.tmp", "best.pt.tmp", "epoch-[0-9][0-9][0-9][0-9].pt.tmp")  # if it is killed
LEFTOVERS += ("*.jsonl.tmp", "loggers.json.tmp", "config.yaml.tmp")
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # of file systems without flock
_locks = {}  # {folder: file}, held while this process lives


class OutputFolder(Hook):
    """Creates and locks cfg.output_dir: see lock_folder()."""

    def __init__(self, cfg: Any, state: Mapping[str, Any]) -> None:
        self.cfg, self.folder = cfg, Path(cfg.output_dir)
        with fail_together():
            if is_main_process():
                lock_folder(cfg)

    def before_save(self, checkpoint: Checkpoint, between_steps: bool) -> None:
        """If the run is to outlive that its folder was deleted, create it again."""
        is_tolerant = self.cfg.save_errors == "warn" and is_main_process()
        if is_tolerant and not self.folder.exists():
            with suppress(UserError):
                lock_folder(self.cfg)
                write_text(self.folder / "config.yaml", self.cfg.dump())
                warn(f"{self.folder} was deleted, and is created again")


def lock_folder(cfg: Any) -> None:
    """Create cfg.output_dir, and lock it against a second run for as long as this process lives.

    With --resume never, or if there are metrics but no checkpoint to resume, what a run wrote moves
    to folder/previous-TIME, unless the job that began like that is restarted. A config.yaml that no
    run wrote gets a different name. Raises UserError if another run holds the lock, or the folder
    cannot be written. Only the main process calls it.
    """
    folder = Path(cfg.output_dir)
    try:
        folder.resolve().mkdir(parents=True, exist_ok=True)  # also that to which a link leads
        _lock(folder)
        for leftover in filter(Path.is_file, _matching(folder, LEFTOVERS)):
            leftover.unlink()
        is_lost = cfg.resume == "auto" and _has_only_metrics(folder)
        if not is_restart() and (cfg.resume == "never" or is_lost):
            _set_aside(folder)
        _keep_edited_config(folder / "config.yaml")
    except BlockingIOError:
        owner = (folder / ".lock").read_text(encoding="utf-8") or "another run"
        raise UserError(f"{owner} is writing to {folder}: pass another --output-dir") from None
    except OSError as error:
        raise UserError(f"cannot write to --output-dir {folder}: {error.strerror}") from None


def _keep_edited_config(path):
    """Rename a config.yaml with comments, for example, in whose place the run writes its own."""
    with suppress(FileNotFoundError, ValueError, yaml.YAMLError):
        text = path.read_text(encoding="utf-8")
        if text != yaml.safe_dump(yaml.safe_load(text), sort_keys=False):
            kept = path.rename(_unused(path.parent, "config-%Y%m%d-%H%M%S.yaml"))
            warn(f"{path} was written or edited by a person, and is now {kept}")


def _has_only_metrics(folder):
    metrics = folder / "metrics.jsonl"
    has_rows = metrics.exists() and metrics.stat().st_size > 0
    return has_rows and not _matching(folder, CHECKPOINTS)


def _lock(folder):
    key = folder.resolve()
    if key not in _locks or not os.fstat(_locks[key]).st_nlink:  # deleted, with its folder
        _locks[key] = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(_locks[key], fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / ".lock").write_text(
            f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8"
        )
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        warn(
            f"the file system of {folder} has no locks ({error.strerror}): make sure that no other "
            f"run uses this --output-dir"
        )


def _set_aside(folder):
    old = _matching(folder, WRITTEN + CHECKPOINTS)
    if old:
        aside = _unused(folder, "previous-%Y%m%d-%H%M%S")
        aside.mkdir()
        for path in old:
            path.rename(aside / path.name)


def _matching(folder, patterns):
    return [path for pattern in patterns for path in folder.glob(pattern)]


def _unused(folder, form):
    """A path in a folder whose name has the time, in the form of time.strftime()."""
    path = folder / time.strftime(form)
    while path.exists():  # of a start in the same second, or before the clock was set back
        path = path.with_stem(f"{path.stem}-again")
    return path
