"""Files that a run keeps for later ones, such as decoded images or an index."""

import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from utils.errors import UserError

LEFT_OVER = 86400.0  # seconds; an older temporary file was left by a killed process


def write_atomically(path: Path, save: Callable[[BinaryIO], Any], remedy: str) -> None:
    """Call save(file), so that no later run may find a partial file. Makes the folder, and removes
    what processes that were killed have left there.

    Raises UserError, which ends with the remedy, if it cannot be written.
    """
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")  # nodes may share the folder
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for old in path.parent.glob(f"*.{'[0-9a-f]' * 32}.tmp"):
            with suppress(FileNotFoundError):  # a different process removes them, too
                if time.time() - old.stat().st_mtime > LEFT_OVER:
                    old.unlink()
        with open(temporary, "wb") as file:
            save(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise UserError(f"cannot write {path}: {error.strerror}; {remedy}") from None
