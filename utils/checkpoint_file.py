"""The files of checkpoints: complete or absent on the disk, and refused if they are damaged.

A checkpoint is a dict of tensors, numbers, strings, lists and dicts, which torch.load reads with
weights_only=True: "model" (plain names, full tensors), "optimizer" (by parameter name), whatever
else a script's `state` holds, and "config", "epoch" (epochs done), "id" (random), "format".

output_dir/epoch-0007.pt   after 7 epochs; the newest cfg.keep_last of them are kept
output_dir/last.pt         the newest checkpoint, possibly from within an epoch
output_dir/best.pt         the one with the best validation metric
output_dir/*.parts/        the tensors of sharded checkpoints (utils/options/sharded.py)
"""

import errno
import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from utils.errors import UserError, required_by, warn
from utils.files import matching, replacing, unused

FORMAT = 3
CHECKPOINTS = ("best.pt", "last.pt", "epoch-[0-9]*", "previous-epoch-*")
WRITTEN = ("metrics.jsonl", "steps.jsonl", "starts.jsonl", "audit.jsonl", "loggers.json")
WRITTEN += ("tensorboard", "profile", "config.yaml")
NOT_PASSING = (None, errno.EINVAL, errno.ENOENT, errno.EISDIR)  # the file itself is the cause


class Unreadable(UserError):
    """The system could not read a file, which does not mean that the file is damaged."""


def save_atomically(obj: Any, path: Path) -> None:
    """torch.save to a file that replaces `path` once it is complete. Raises OSError, or
    RuntimeError if the disk is full."""
    with replacing(path) as file:
        torch.save(obj, file)


def read_checkpoint(path: str | Path, join_parts: bool = True) -> dict[str, Any]:
    """A checkpoint as a dict on the CPU. Raises UserError if it is damaged or of a different
    format, and Unreadable if the system fails to read it.

    The checksum of each record is verified: torch.load alone would not notice a flipped bit.
    join_parts: whether to read the tensors of a sharded checkpoint, too.
    """
    path = Path(path)
    try:
        return _read(path, join_parts)
    except UserError:
        raise
    except Exception as error:  # zip, pickle and OS errors of many kinds
        is_memory = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
        if is_memory or getattr(error, "errno", None) not in NOT_PASSING:
            reason = getattr(error, "strerror", "no memory is left")
            raise Unreadable(f"{path} cannot be read now: {reason}") from None
        raise UserError(f"{path} cannot be read as a checkpoint: {_reason(error, path)}") from None


def _read(path, join_parts):
    with open(path, "rb") as file:  # given PyTorch its name, errors of the disk would lose theirs
        with zipfile.ZipFile(file) as archive:
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} fails its checksum")
        file.seek(0)
        try:
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            reason = _reason(error, path)
            text = f"{path} is whole, but cannot be read as a checkpoint: {reason}"
            raise UserError(text) from None
    if not isinstance(checkpoint, dict) or checkpoint.get("format") != FORMAT:
        raise UserError(f"{path} is not a checkpoint of format {FORMAT}")
    if "parts" in checkpoint:
        parts_module(path).check_sharded(path, checkpoint)
        if join_parts:
            checkpoint = parts_module(path).load_sharded(path, checkpoint)
    return checkpoint


def parts_module(path: Path) -> Any:
    """The module for sharded checkpoints, which a copy may lack. path: of what needs it."""
    with required_by(str(path)):
        import utils.options.sharded as sharded
    return sharded


def _reason(error, file):
    """Why torch.load has raised an error for a file, as a short text."""
    if isinstance(error, pickle.UnpicklingError):
        with suppress(Exception):
            if types := sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file)):
                return f"torch.load(weights_only=True) refuses {', '.join(types)}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def with_plain_numbers(value: Any) -> Any:
    """`value`, with Python's numbers in place of NumPy's, which weights_only=True refuses."""

    def plain(leaf):
        return leaf.item() if isinstance(leaf, numpy.generic) else leaf

    return _map_leaves(plain, value)


def refuse_unreadable(contents: dict[str, Any]) -> None:
    """Raise UserError if torch.load would not read the contents of a checkpoint. Each part is
    written to memory and read back, without its tensors, unless they are of classes of others."""

    def without_tensors(leaf):
        if type(leaf) is OrderedDict:  # of a module, for example
            return _map_leaves(without_tensors, dict(leaf))
        if isinstance(leaf, DTensor) and name not in ("model", "optimizer"):  # which are gathered
            raise TypeError("a DTensor is only the part of this rank: take its full_tensor()")
        return None if type(leaf) in (Tensor, nn.Parameter, DTensor) else leaf

    for name, value in contents.items():
        file = io.BytesIO()
        try:
            torch.save(_map_leaves(without_tensors, value), file)
            torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        except Exception as error:  # of any type: methods of the user's classes are called
            reason = _reason(error, io.BytesIO(file.getvalue()))
            raise UserError(
                f"a checkpoint would hold {name!r}, and could not be read: {reason}. Convert it to "
                f"tensors, numbers, strings, lists and dicts"
            ) from None


def _map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """`value` with function(leaf) in place of each value in its dicts, lists and tuples."""
    if type(value) is dict:
        return {function(name): _map_leaves(function, each) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map_leaves(function, each) for each in value)
    return function(value)


def prepare_folder(folder: Path, resume: str) -> None:
    """Create the folder. With --resume never, or if there are metrics but no checkpoint to resume,
    move what a run wrote to folder/previous-TIME. Raises UserError if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        checkpoints, metrics = matching(folder, CHECKPOINTS), folder / "metrics.jsonl"
        has_rows = metrics.exists() and metrics.stat().st_size > 0
        is_lost = resume == "auto" and has_rows and all(p.suffix != ".pt" for p in checkpoints)
        old = checkpoints + matching(folder, WRITTEN)
        if old and (resume == "never" or is_lost):
            aside = unused(folder, "previous-%Y%m%d-%H%M%S")
            aside.mkdir()
            for path in old:
                path.rename(aside / path.name)
    except OSError as error:
        raise UserError(f"cannot write to --output-dir {folder}: {error.strerror}") from None


def sorted_by_epoch(folder: Path) -> list[Path]:
    """The checkpoints of whole epochs in a folder, the oldest first."""
    return sorted(filter(_epoch_of, folder.glob("epoch-*.pt")), key=_epoch_of)


def _epoch_of(path):
    """The number in epoch-N.pt, or 0 for a file with a different name, which is not ours."""
    number = path.stem.removeprefix("epoch-")
    return int(number) if number.isdecimal() else 0


def keep_newest(folder: Path, count: int, epoch: int) -> None:
    """Remove the checkpoints of whole epochs, except for the newest `count` up to `epoch`.

    Checkpoints of later epochs are damaged, or the run was continued from an older checkpoint on
    purpose. They get names that no resume looks at.
    """
    paths = sorted_by_epoch(folder)
    later = [path for path in paths if _epoch_of(path) > epoch]
    for path in later:
        aside = path.replace(path.with_name(f"previous-{path.name}"))
        warn(f"the run has gone back to epoch {epoch}: {path} is {aside.name} now")
    for path in paths[: len(paths) - len(later)][:-count]:
        path.unlink()


def newest_good_checkpoint(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """(path, checkpoint without the tensors of its parts), or None where there is no file at all.

    A damaged file is skipped with a warning. Raises UserError if all are damaged, or if the system
    fails to read one.
    """
    existing = [*folder.glob("last.pt"), *sorted_by_epoch(folder)[::-1], *folder.glob("best.pt")]
    for path in existing:
        try:
            return path, read_checkpoint(path, join_parts=False)
        except Unreadable as error:  # an older one would repeat work, and then replace this one
            remedy = "start the run again, or remove the file to continue from the one before it"
            raise UserError(f"{error}; {remedy}") from None
        except UserError as error:
            warn(f"{error}; trying the checkpoint before it")
    if existing:
        raise UserError(f"no checkpoint in {folder} can be read: pass --resume never to start over")
    return None
