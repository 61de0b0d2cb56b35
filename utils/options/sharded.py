"""--save-sharded: checkpoints to which every rank writes its own part of the tensors.

A folder of parts, with an index, is written by torch.distributed.checkpoint
(https://docs.pytorch.org/docs/stable/distributed.checkpoint.html); the checkpoint file names the
folder and holds everything else. The index is a pickle: read only checkpoints that you trust.
"""

import shutil
import uuid
import warnings
import zlib
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from utils.distributed import all_gather_object, control_group, fail_together, is_main_process
from utils.errors import UserError
from utils.hooks import Checkpoint, Hook


class ShardedFiles(Hook):
    """Moves the tensors of each checkpoint out of its file, into a folder of parts."""

    def convert(self, checkpoint: Checkpoint, contents: dict[str, Any]) -> dict[str, Any]:
        return save_sharded(contents, checkpoint.folder)


def save_sharded(checkpoint: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Write the tensors of "model" and "optimizer" into a new folder of parts in `folder`.

    Returns the checkpoint without them, and with "parts": {"folder", "files": {name: checksum}}.
    All ranks call it together. Raises UserError, on all ranks, if a part cannot be written.
    """
    with fail_together():
        if is_main_process():
            remove_unused_parts(folder)  # of a run that was killed while saving
    # Always a new folder: if overwriting older parts were interrupted, the result would be a mix.
    name = f"epoch-{checkpoint['epoch']:04d}-{uuid.uuid4().hex[:8]}.parts"
    name = all_gather_object(name)[0]
    tensors, rest = split_tensors(checkpoint)
    return rest | {"parts": {"folder": name, "files": _save_parts(folder / name, tensors)}}


def check_sharded(path: Path, checkpoint: dict[str, Any]) -> None:
    """Raise UserError if a part of the checkpoint in the file `path` is missing or damaged."""
    parts = checkpoint["parts"]
    for name, checksum in parts["files"].items():
        part = path.parent / parts["folder"] / name
        if not part.exists() or _checksum(part) != checksum:
            raise UserError(f"{part} is {'damaged' if part.exists() else 'missing'}")


def load_sharded(
    path: Path,
    checkpoint: dict[str, Any],
    like: tuple[dict[str, Any], dict[str, Any]] = ({}, {"state": {}}),
) -> dict[str, Any]:
    """The checkpoint in the file `path` with its tensors, sharded and on devices as in `like`.

    like: the state dicts of model and optimizer, by parameter name. A tensor that `like` does not
    have, or has in another shape, is read as a whole, to the CPU. Each rank reads what it needs,
    independently.
    """
    folder = path.parent / checkpoint["parts"]["folder"]
    places, _ = split_tensors(dict(zip(("model", "optimizer"), like, strict=True)))
    tensors = {}
    metadata: Any = dcp.FileSystemReader(folder).read_metadata()
    for name, stored in metadata.state_dict_metadata.items():
        place = places.get(name)
        if place is None or place.shape != stored.size:
            place = torch.empty(stored.size)
        tensors[name] = torch.empty_like(place, dtype=stored.properties.dtype)
    with _expected_warnings():
        dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return join_tensors(tensors, checkpoint)


def part_of(model: nn.Module, path: Path, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint in the file `path` with the tensors of `model`, a part of the saved one."""
    if "parts" in checkpoint:
        checkpoint = load_sharded(path, checkpoint)
        del checkpoint["parts"]
    names, optimizer = model.state_dict().keys(), checkpoint["optimizer"]
    states = {name: state for name, state in optimizer["state"].items() if name in names}
    tensors = {name: tensor for name, tensor in checkpoint["model"].items() if name in names}
    return checkpoint | {"model": tensors, "optimizer": optimizer | {"state": states}}


def remove_unused_parts(folder: Path) -> None:
    """Remove the parts of checkpoints that are gone, and of runs that were killed while saving."""
    unused = set(folder.glob("*.parts"))
    for path in folder.glob("*.pt") if unused else ():
        with suppress(Exception):  # a damaged checkpoint needs no parts
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            unused.discard(folder / saved["parts"]["folder"])
    for path in unused:
        shutil.rmtree(path)


def split_tensors(checkpoint: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a checkpoint as a flat dict, and the checkpoint without them.

    The tensors are those of "model", {name: tensor}, and of "optimizer", whose "state" is
    {parameter name: {key: tensor or number}}. What a get_extra_state() of the model has returned is
    not split, unless it is a tensor.
    """
    tensors, extra, numbers = {}, {}, {}
    for name, value in checkpoint["model"].items():
        if isinstance(value, Tensor):
            tensors[f"model/{name}"] = value
        else:
            extra[name] = value
    for name, values in checkpoint["optimizer"]["state"].items():
        numbers[name] = {}
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{key}/{name}"] = value  # only the last part may have slashes
            else:
                numbers[name][key] = value
    optimizer = checkpoint["optimizer"] | {"state": numbers}
    return tensors, checkpoint | {"model": extra, "optimizer": optimizer}


def join_tensors(tensors: dict[str, Tensor], rest: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint that split_tensors() split."""
    model = dict(rest["model"])
    state = {name: dict(values) for name, values in rest["optimizer"]["state"].items()}
    for path, tensor in tensors.items():
        kind, name = path.split("/", 1)
        if kind == "model":
            model[name] = tensor
        else:
            key, name = name.split("/", 1)
            state.setdefault(name, {})[key] = tensor  # of a pipeline's stage, if it is not known
    return rest | {"model": model, "optimizer": rest["optimizer"] | {"state": state}}


def _save_parts(folder, tensors):
    """Write `tensors`, {name: tensor or DTensor}, into the folder, each rank its part of them.

    Returns {file: checksum}. All ranks call it together. Raises UserError, on all ranks, if a part
    cannot be written or rank 0 does not see it.
    """
    try:
        with _expected_warnings():
            group = control_group()  # a step's timeout may be too short for the disk
            alone = not dist.is_initialized()
            dcp.save(tensors, checkpoint_id=folder, process_group=group, no_dist=alone)
    except dcp.CheckpointException as error:
        shutil.rmtree(folder, ignore_errors=True)  # or a full disk would stay full
        reasons = {str(reason) for reason, _ in error.failures.values()}
        raise UserError(
            f"cannot save {folder}: {'; '.join(reasons)}; the checkpoint before it is still there"
        ) from None
    with fail_together():
        rank = 0 if alone else dist.get_rank()
        paths = list(folder.glob(f"__{rank}_*"))
        if is_main_process():
            paths.append(folder / ".metadata")
        written = {path.name: _checksum(path) for path in paths}
    files = {}
    for others in all_gather_object(written):
        files |= others
    with fail_together():
        unseen = [name for name in files if not (folder / name).exists()]
        if unseen and is_main_process():
            raise UserError(
                f"{folder / unseen[0]} was written on another node, and rank 0 does not see it: "
                f"put output_dir on a file system that all nodes share"
            )
    return files


@contextmanager
def _expected_warnings():
    with warnings.catch_warnings():  # a single process reads or writes, which is intended
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _checksum(path):
    checksum = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 24):
            checksum = zlib.crc32(chunk, checksum)
    return checksum
