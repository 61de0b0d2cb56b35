"""--verify-saves: read each checkpoint back from the disk before it replaces the last one."""

import errno
import os
from pathlib import Path
from typing import Any

from utils.checkpoint_file import read_checkpoint, replace_durably, save_atomically
from utils.errors import UserError
from utils.hooks import Checkpoint, Hook


class VerifiedFiles(Hook):
    """Writes files with save_verified()."""

    def write(self, checkpoint: Checkpoint, contents: dict[str, Any], path: Path) -> bool:
        save_verified(contents, path)
        return True


def save_verified(checkpoint: dict[str, Any], path: Path) -> None:
    """Like save_atomically(), but read the file back from the disk before it replaces another.

    Raises OSError if it differs.
    """
    unverified = path.with_name(f"{path.stem}.unverified.pt.tmp")
    try:
        save_atomically(checkpoint, unverified)
        if hasattr(os, "posix_fadvise"):  # the system's memory may hold what the disk does not
            with open(unverified, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            read_checkpoint(unverified)
        except UserError as error:
            raise OSError(errno.EIO, f"the file differs when it is read back: {error}") from None
        replace_durably(unverified, path)
    finally:
        unverified.unlink(missing_ok=True)
