"""--save-sharded: checkpoints to which every rank writes its own part of the tensors.

torch.distributed.checkpoint writes them to a new folder output_dir/*.parts, with an index
(https://docs.pytorch.org/docs/stable/distributed.checkpoint.html); the checkpoint file names the
folder, and holds everything else. The index is a pickle, which could run code: it is read with a
list of the classes that may be in it.
"""

import pickle
import shutil
import uuid
import warnings
import zlib
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from utils.distributed import all_gather_object, control_group, fail_together, is_main_process
from utils.errors import UserError, warn

# What an index consists of. Not BytesStorageMetadata: PyTorch unpickles what it describes.
_CLASSES: list[Any] = [torch.Size, filesystem._StorageInfo, metadata._MEM_FORMAT_ENCODING]
_CLASSES += [metadata.Metadata, metadata.MetadataIndex, metadata.StorageMeta]
_CLASSES += [metadata.TensorStorageMetadata, metadata.TensorProperties]
_CLASSES += [metadata.ChunkStorageMetadata]
CLASSES = {(kind.__module__, kind.__name__): kind for kind in _CLASSES}

ALONE = "torch.distributed is disabled"  # a warning if a single process reads, as is intended


class ShardedWeights:
    """Puts the tensors of `weights`, a utils.checkpoint.Weights or a form of one, into a folder of
    parts in `folder`. All ranks call each method together."""

    def __init__(self, weights: Any, folder: Path) -> None:
        self.weights, self.folder = weights, folder

    def state_dict(self) -> dict[str, Any]:
        """Write the parts. Returns "model" and "optimizer" without their tensors, and "parts":
        {"folder": its name, "files": {name: checksum}}.

        Raises UserError, on all ranks, if a part cannot be written.
        """
        # Always a new folder: if overwriting older parts were interrupted, they would be a mix.
        name = all_gather_object(f"{uuid.uuid4().hex}.parts")[0]
        tensors, rest = split_tensors(self.weights.state_dict())
        return rest | {"parts": {"folder": name, "files": _write(self.folder / name, tensors)}}

    def load_state_dict(self, contents: dict[str, Any], with_groups: bool = True) -> None:
        """See Weights; the contents are those that join_parts() returns."""
        self.weights.load_state_dict(contents, with_groups)


def _write(folder, tensors):
    is_alone = not dist.is_initialized()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ALONE)
            group = control_group(patient=True)  # a step's timeout may be too short for the disk
            dcp.save(tensors, checkpoint_id=folder, process_group=group, no_dist=is_alone)
    except dcp.CheckpointException as error:
        shutil.rmtree(folder, ignore_errors=True)  # or a full disk would stay full
        raise UserError(f"cannot write {folder}: {_reasons(error)}") from None
    with fail_together(patient=True):
        paths = [*folder.glob(f"__{0 if is_alone else dist.get_rank()}_*")]
        paths += [folder / ".metadata"] * is_main_process()
        written = {path.name: _checksum(path) for path in paths}
    return {name: value for each in all_gather_object(written) for name, value in each.items()}


def check_parts(folder: Path, contents: dict[str, Any]) -> None:
    """Raise UserError if a part of a checkpoint in `folder` is missing or damaged.

    contents: of the checkpoint's file.
    """
    parts = _folder_of(folder, contents)
    for name, checksum in contents["parts"]["files"].items():
        if not (parts / name).exists():
            raise UserError(f"{parts / name} is missing: all nodes must share the folder")
        if _checksum(parts / name) != checksum:
            raise UserError(f"{parts / name} is damaged")


def join_parts(
    folder: Path, contents: dict[str, Any], model: nn.Module | None = None
) -> dict[str, Any]:
    """The contents of a checkpoint in `folder`, with their tensors in place of "parts".

    Without a model, the tensors are whole, on the CPU. With a model, each tensor is on the device
    of the parameter or buffer of its name, and divided among the ranks as that is, so that each
    rank reads only its part; one that has a different shape is whole, on the CPU, and one that the
    model lacks, as a stage of a pipeline does, is on the device "meta". Each rank reads for itself.
    """
    parts = _folder_of(folder, contents)
    reader = _Reader(parts, contents["parts"]["files"])
    places = None if model is None else get_model_state_dict(model)
    tensors = {}
    for path, stored in reader.index.state_dict_metadata.items():
        tensors[path] = _place(path, stored, places)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ALONE)
            read = {path: tensor for path, tensor in tensors.items() if not tensor.is_meta}
            dcp.load(read, storage_reader=reader, no_dist=True)
    except dcp.CheckpointException as error:
        raise UserError(f"cannot read {parts}: {_reasons(error)}") from None
    whole = join_tensors(tensors, contents)
    del whole["parts"]
    return whole


def _place(path, stored, places):
    """The memory into which a tensor is read."""
    dtype, name = stored.properties.dtype, path.split("/", 1)[1]
    if path.startswith("optimizer/"):
        name = name.split("/", 1)[1]
    if places is not None and name not in places:
        return torch.empty(stored.size, dtype=dtype, device="meta")
    is_step = path.startswith("optimizer/step/")  # on the CPU, also of a parameter of one number
    if places is None or is_step or places[name].shape != stored.size:
        return torch.empty(stored.size, dtype=dtype)
    return torch.empty_like(places[name], dtype=dtype)


def _folder_of(folder, contents):
    """The folder of the parts. Raises UserError if it, or a part, would be elsewhere."""
    parts = contents["parts"]
    for name in (parts["folder"], *parts["files"]):
        if name != PurePath(name).name or name == "..":
            raise UserError(f"a checkpoint in {folder} names {name}, elsewhere: do not trust it")
    return folder / parts["folder"]


class _Index(pickle.Unpickler):
    def find_class(self, module, name):
        if module.startswith("pathlib"):  # differs between versions of Python, and is not used
            return PurePath
        if name == "_get_layout":
            return lambda layout: torch.strided
        dtype = getattr(torch, name, None) if module == "torch" else None
        if not isinstance(dtype, torch.dtype) and (module, name) not in CLASSES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which could run code")
        return CLASSES.get((module, name), dtype)


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
            raise UserError(f"{path} cannot be read as an index of tensors: {error!r}") from None

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        return self.index


def remove_unused_parts(folder: Path) -> None:
    """Remove the parts of checkpoints that are gone, and of runs that were killed while saving.

    Removes nothing, and warns, if a file cannot be read: it may need them.
    """
    unused = set(folder.glob("*.parts"))
    for path in folder.glob("*.pt") if unused else ():
        try:
            contents = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            unused.discard(folder / contents["parts"]["folder"])
        except (LookupError, TypeError, pickle.UnpicklingError):  # not a sharded checkpoint
            continue
        except (OSError, RuntimeError, EOFError) as error:
            warn(f"no parts are removed, as {path} cannot be read: {error}")
            return
    for path in unused:
        shutil.rmtree(path)


def split_tensors(contents: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a checkpoint as a flat dict, and the checkpoint without them.

    The tensors come from "model", {name: tensor}, and from "optimizer", whose "state" is
    {parameter name: {key: tensor or number}}. What a get_extra_state() of the model has returned is
    not split, unless it is a tensor.
    """
    tensors, extra, numbers = {}, {}, {}
    for name, value in contents["model"].items():
        if isinstance(value, Tensor):
            tensors[f"model/{name}"] = value
        else:
            extra[name] = value
    for name, values in contents["optimizer"]["state"].items():
        numbers[name] = {}
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{key}/{name}"] = value  # only the last part may have slashes
            else:
                numbers[name][key] = value
    optimizer = contents["optimizer"] | {"state": numbers}
    return tensors, contents | {"model": extra, "optimizer": optimizer}


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


def _reasons(error):
    return "; ".join({str(reason) for reason, _ in error.failures.values()})


def _checksum(path):
    checksum = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 24):
            checksum = zlib.crc32(chunk, checksum)
    return checksum
