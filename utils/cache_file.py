"""Files that a run keeps for later ones, such as decoded images or an index."""

import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from utils.errors import UserError


def write_atomically(path: Path, save: Callable[[BinaryIO], Any], remedy: str) -> None:
    """Call save(file), so that no later run may find a partial file. Makes the folder.

    Raises UserError, which ends with the remedy, if it cannot be written.
    """
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")  # nodes may share the folder
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            save(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise UserError(f"cannot write {path}: {error.strerror}; {remedy}") from None
