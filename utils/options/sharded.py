"""--save-sharded: checkpoints to which every rank writes its own part of the tensors.

A folder of parts, with an index, is written by torch.distributed.checkpoint
(https://docs.pytorch.org/docs/stable/distributed.checkpoint.html); the checkpoint file names the
folder and holds everything else. The index is a pickle, which could run code: it is read with a
list of the classes that may be in it.
"""

import pickle
import shutil
import uuid
import warnings
import zipfile
import zlib
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem, metadata

from utils.distributed import all_gather_object, control_group, fail_together, is_main_process
from utils.errors import UserError, warn
from utils.hooks import Checkpoint, FileForm

# What an index consists of. Not BytesStorageMetadata: PyTorch unpickles what it describes.
_KINDS: list[Any] = [torch.Size, filesystem._StorageInfo, metadata._MEM_FORMAT_ENCODING]
_KINDS += [metadata.Metadata, metadata.MetadataIndex, metadata.StorageMeta]
_KINDS += [metadata.TensorStorageMetadata, metadata.TensorProperties]
_KINDS += [metadata.ChunkStorageMetadata]
KINDS = {(kind.__module__, kind.__name__): kind for kind in _KINDS}


class ShardedFiles(FileForm):
    """Moves the tensors of each checkpoint out of its file, into a folder of parts."""

    def to_file(self, checkpoint: Checkpoint, contents: dict[str, Any]) -> dict[str, Any]:
        return save_sharded(contents, checkpoint.folder)


def save_sharded(checkpoint: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Write the tensors of "model" and "optimizer" into a new folder of parts in `folder`.

    Returns the checkpoint without them, and with "parts": {"folder", "files": {name: checksum}}.
    All ranks call it together. Raises UserError, on all ranks, if a part cannot be written.
    """
    # Always a new folder: if overwriting older parts were interrupted, the result would be a mix.
    name = f"epoch-{checkpoint['epoch']:04d}-{uuid.uuid4().hex[:8]}.parts"
    name = all_gather_object(name)[0]
    with fail_together(), _explained(folder / name):
        if is_main_process():
            remove_unused_parts(folder)  # of a run that was killed while saving
            (folder / name).mkdir()  # PyTorch would make `folder`, too, if somebody has deleted it
    tensors, rest = split_tensors(checkpoint)
    return rest | {"parts": {"folder": name, "files": _save_parts(folder / name, tensors)}}


def check_sharded(path: Path, checkpoint: dict[str, Any]) -> None:
    """Raise UserError if a part of the checkpoint in the file `path` is missing or damaged."""
    folder = _folder_of(path, checkpoint)
    for name, checksum in checkpoint["parts"]["files"].items():
        part = folder / name
        if not part.exists() or _checksum(part) != checksum:
            raise UserError(f"{part} is {'damaged' if part.exists() else 'missing'}")


def load_sharded(
    path: Path,
    checkpoint: dict[str, Any],
    like: tuple[dict[str, Any], dict[str, Any]] = ({}, {"state": {}}),
) -> dict[str, Any]:
    """The checkpoint in the file `path` with its tensors, sharded and on devices as in `like`.

    like: the state dicts of model and optimizer, by parameter name. A tensor that `like` does not
    have, or has in a different shape, is read as a whole, to the CPU. Each rank reads what it
    needs, independently.
    """
    folder = _folder_of(path, checkpoint)
    places, _ = split_tensors(dict(zip(("model", "optimizer"), like, strict=True)))
    tensors = {}
    reader = _Reader(folder, checkpoint["parts"]["files"])
    for name, stored in reader.index.state_dict_metadata.items():
        place = places.get(name)
        if place is None or place.shape != stored.size:
            place = torch.empty(stored.size)
        tensors[name] = torch.empty_like(place, dtype=stored.properties.dtype)
    try:
        with _expected_warnings():
            dcp.load(tensors, storage_reader=reader, no_dist=True)
    except dcp.CheckpointException as error:
        raise UserError(f"cannot read {folder}: {_reasons(error)}") from None
    return join_tensors(tensors, checkpoint)


def _folder_of(path, checkpoint):
    """The folder of the parts. Raises UserError if it, or a part, would be elsewhere."""
    parts = checkpoint["parts"]
    for name in (parts["folder"], *parts["files"]):
        if name != PurePath(name).name or name == "..":
            raise UserError(f"{path} names {name}, which is not in its folder: do not trust it")
    return path.parent / parts["folder"]


class _Index(pickle.Unpickler):
    def find_class(self, module, name):
        if module.startswith("pathlib"):  # differs between versions of Python, and is not used
            return PurePath
        if name == "_get_layout":
            return lambda layout: torch.strided
        dtype = getattr(torch, name, None) if module == "torch" else None
        if not isinstance(dtype, torch.dtype) and (module, name) not in KINDS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which could run code")
        return KINDS.get((module, name), dtype)


class _Reader(dcp.FileSystemReader):
    """PyTorch's, which reads only `files` of the folder, and no pickle except by _Index."""

    def __init__(self, folder, files):
        super().__init__(folder)
        path = folder / ".metadata"
        try:
            with open(path, "rb") as file:
                self.index = _Index(file).load()
            others = {place.relative_path for place in self.index.storage_data.values()}
            if others := others.difference(files):
                raise pickle.UnpicklingError(f"it names other files: {others}")
        except Exception as error:  # of many kinds, if it is not what PyTorch writes
            reason = str(error) or type(error).__name__
            raise UserError(f"{path} cannot be read as an index of tensors: {reason}") from None

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        return self.index


def part_of(model: nn.Module, path: Path, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint in the file `path` with the tensors of `model`, a part of the saved one."""
    if "parts" in checkpoint:
        checkpoint = load_sharded(path, checkpoint)
        del checkpoint["parts"]
    names = model.state_dict().keys()
    optimizer = checkpoint["optimizer"]
    states = {name: state for name, state in optimizer["state"].items() if name in names}
    tensors = {name: tensor for name, tensor in checkpoint["model"].items() if name in names}
    return checkpoint | {"model": tensors, "optimizer": optimizer | {"state": states}}


def remove_unused_parts(folder: Path) -> None:
    """Remove the parts of checkpoints that are gone, and of runs that were killed while saving.

    Removes nothing, and warns, if a file cannot be read for a reason that may pass.
    """
    unused = set(folder.glob("*.parts"))
    for path in folder.glob("*.pt") if unused else ():
        try:
            unused.discard(folder / _parts_of(path))
        except (OSError, MemoryError) as error:
            warn(f"no parts are removed, as {path}: {error}")
            return
    for path in unused:
        shutil.rmtree(path)


def _parts_of(path):
    """The folder that a checkpoint names; "" if it names none, or is damaged. Raises OSError or
    MemoryError if it cannot be read now."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)["parts"]["folder"]
    except RuntimeError:  # PyTorch's, of damage and of errors of the disk
        with suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
            if archive.testzip() is None:
                raise OSError("it is not damaged, but PyTorch cannot read it") from None
    except (LookupError, TypeError, EOFError, pickle.UnpicklingError):
        pass  # not a sharded checkpoint
    return ""


def split_tensors(checkpoint: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a checkpoint as a flat dict, and the checkpoint without them.

    The tensors come from "model", {name: tensor}, and from "optimizer", whose "state" is
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
    alone = not dist.is_initialized()
    try:
        with _expected_warnings():
            group = control_group()  # a step's timeout may be too short for the disk
            dcp.save(tensors, checkpoint_id=folder, process_group=group, no_dist=alone)
    except dcp.CheckpointException as error:
        shutil.rmtree(folder, ignore_errors=True)  # or a full disk would stay full
        text = f"cannot save {folder}: {_reasons(error)}; the checkpoint before it is still there"
        raise UserError(text) from None
    with fail_together(), _explained(folder):
        rank = 0 if alone else dist.get_rank()
        paths = list(folder.glob(f"__{rank}_*"))
        if is_main_process():
            paths.append(folder / ".metadata")
        written = {path.name: _checksum(path) for path in paths}
    files = {}
    for others in all_gather_object(written):
        files |= others
    with fail_together(), _explained(folder):
        unseen = [name for name in files if not (folder / name).exists()]
        if unseen and is_main_process():
            raise UserError(
                f"{folder / unseen[0]} was written on another node, and rank 0 does not see it: "
                f"put output_dir on a file system that all nodes share"
            )
    return files


@contextmanager
def _explained(folder):
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot save {folder}: {error.strerror}") from None


def _reasons(error):
    return "; ".join({str(reason) for reason, _ in error.failures.values()})


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
