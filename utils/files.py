"""Files that a crash at any moment leaves whole, as they were before or as they are now."""

import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from utils.errors import UserError


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a file that replaces `path` once it is complete and on the disk. Raises OSError."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _replace_durably(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a text file as a whole. Raises UserError if it fails."""
    try:
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def link_atomically(name: Path, path: Path) -> None:
    """Make `name` a second name of the file `path`; a copy where links do not work."""
    temporary = name.with_name(f"{name.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        try:
            os.link(path, temporary)
        except OSError:
            shutil.copyfile(path, temporary)
            _flush(temporary)
        _replace_durably(temporary, name)
    finally:
        temporary.unlink(missing_ok=True)


def matching(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """The paths in a folder that match one of the patterns of Path.glob()."""
    return [path for pattern in patterns for path in folder.glob(pattern)]


def unused(folder: Path, form: str) -> Path:
    """A path in a folder whose name has the time, in the form of time.strftime()."""
    path = folder / time.strftime(form)
    while path.exists():  # of a start in the same second, or before the clock was set back
        path = path.with_stem(f"{path.stem}-again")
    return path


def _replace_durably(temporary, path):
    """Rename a file, and flush the rename itself to the disk."""
    os.replace(temporary, path)
    _flush(path.parent)


def _flush(path):
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
