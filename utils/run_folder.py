"""Only one run at a time writes to an output folder."""

import errno
import fcntl
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from utils.distributed import fail_together, is_main_process
from utils.errors import UserError, warn
from utils.files import matching, unused, write_text
from utils.hooks import Checkpoint, Hook

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

    def after_load(self, checkpoint: Checkpoint) -> None:
        """The run is accepted: a config.yaml that no run wrote gets a different name."""
        if is_main_process():
            _keep_edited_config(self.folder / "config.yaml")

    def before_save(self, checkpoint: Checkpoint, between_steps: bool) -> None:
        """Raises UserError, on all ranks, if the folder was deleted or replaced, unless the run is
        to outlive that: then it is created and locked again."""
        with fail_together():
            if is_main_process() and not _is_locked(self.folder):
                if self.cfg.save_errors == "stop":
                    raise UserError(f"{self.folder} was deleted, or replaced by a different folder")
                lock_folder(self.cfg)
                write_text(self.folder / "config.yaml", self.cfg.dump())
                warn(f"{self.folder} was deleted, and is created again")


def lock_folder(cfg: Any) -> None:
    """Create cfg.output_dir, and lock it against a second run for as long as this process lives.

    Raises UserError if another run holds the lock, or the folder cannot be written. Only the main
    process calls it.
    """
    folder = Path(cfg.output_dir)
    try:
        folder.resolve().mkdir(parents=True, exist_ok=True)  # also that to which a link leads
        _lock(folder)
        for leftover in filter(Path.is_file, matching(folder, LEFTOVERS)):
            leftover.unlink()
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
            try:
                kept = path.rename(unused(path.parent, "config-%Y%m%d-%H%M%S.yaml"))
            except OSError as error:
                raise UserError(f"cannot rename {path}: {error.strerror}") from None
            warn(f"{path} was written or edited by a person, and is now {kept}")


def _is_locked(folder):
    """Whether the lock that this process holds is that of the folder, which may be a new one."""
    try:
        return os.path.samestat(os.fstat(_locks[folder.resolve()]), (folder / ".lock").stat())
    except (FileNotFoundError, NotADirectoryError, KeyError):
        return False
    except OSError:  # it could not be read now
        return True


def _lock(folder):
    key = folder.resolve()
    if not _is_locked(folder):
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
