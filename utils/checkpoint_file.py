"""The files of checkpoints: complete or absent on the disk, and refused if they are damaged.

A checkpoint is a dict of tensors, numbers, strings, lists and dicts, which torch.load reads with
weights_only=True: "model" (plain names, full tensors), "optimizer" (by parameter name), whatever
else a script's `state` holds, and "config", "epoch" (epochs done), "format".

output_dir/epoch-0007.pt   after 7 epochs; the newest cfg.keep_last of them are kept
output_dir/last.pt         the newest checkpoint, possibly from within an epoch
output_dir/best.pt         the one with the best validation metric
output_dir/*.parts/        the tensors of sharded checkpoints (utils/options/sharded.py)
"""

import os
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch

from utils.errors import UserError, required_by

FORMAT = 3


def save_atomically(obj: Any, path: Path) -> None:
    """torch.save to a temporary file, flushed to the disk and renamed: a crash at any moment leaves
    the previous file or the new one. Raises OSError, or RuntimeError if the disk is full."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(obj, file)
            file.flush()
            os.fsync(file.fileno())
        replace_durably(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_durably(temporary: Path, path: Path) -> None:
    """Rename a file, and flush the rename itself to the disk."""
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def link_atomically(name: Path, path: Path) -> None:
    """Make `name` a second name of the file `path`; a copy where links do not work."""
    temporary = name.with_name(f"{name.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(path, temporary)
    except OSError:
        shutil.copyfile(path, temporary)
    os.replace(temporary, name)


def read_checkpoint(path: str | Path, join_parts: bool = True) -> dict[str, Any]:
    """A checkpoint as a dict on the CPU. Raises UserError if it is damaged or in another format.

    The checksum of each record is verified: torch.load alone would not notice a flipped bit.
    join_parts: whether to read the tensors of a sharded checkpoint, too.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} fails its checksum")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # zip, pickle and OS errors of many kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} cannot be read as a checkpoint: {reason}") from None
    if not isinstance(checkpoint, dict) or checkpoint.get("format") != FORMAT:
        raise UserError(f"{path} is not a checkpoint of format {FORMAT}")
    if "parts" in checkpoint:
        with required_by(f"reading {path}"):
            from utils.options.sharded import check_sharded, load_sharded
        check_sharded(path, checkpoint)
        if join_parts:
            checkpoint = load_sharded(path, checkpoint)
    return checkpoint


def sorted_by_epoch(folder: Path) -> list[Path]:
    """The checkpoints of whole epochs in a folder, the oldest first."""
    return sorted(folder.glob("epoch-[0-9]*.pt"), key=lambda path: int(path.stem.split("-")[1]))


def newest_good_checkpoint(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """(path, checkpoint without the tensors of its parts), or None where there is no file at all.

    A damaged file is skipped with a warning. Raises UserError if all are damaged.
    """
    existing = [*folder.glob("last.pt"), *sorted_by_epoch(folder)[::-1], *folder.glob("best.pt")]
    for path in existing:
        try:
            return path, read_checkpoint(path, join_parts=False)
        except UserError as error:
            print(f"warning: {error}; trying the checkpoint before it", file=sys.stderr)
    if existing:
        raise UserError(f"no checkpoint in {folder} can be read: pass --resume never to start over")
    return None
