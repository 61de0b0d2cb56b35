"""Tensors spread over the ranks (DTensor), and checkpoints of which every rank writes its own part.

Needs torch and distributed.py. The parts are torch.distributed.checkpoint's
(https://docs.pytorch.org/docs/stable/distributed.checkpoint.html), whose index is a pickle: read
only folders that you trust.
"""

import warnings
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, distribute_tensor

from utils.distributed import UserError, all_gather_object, fail_together, is_main_process


def whole(value):
    """`value`, a tensor or a tree of dicts and lists, with the parts of each DTensor put together.

    All ranks call it together.
    """
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole(item) for item in value]
    if isinstance(value, DTensor):  # to the mesh: offloaded shards lie where NCCL cannot gather
        return value.to(value.device_mesh.device_type).full_tensor()
    return value


def placed_like(tensor, reference):
    """A copy of a whole `tensor`: on the device, in the memory format and in the parts of
    `reference`. Parts are cut from this rank's copy, without communication."""
    if isinstance(reference, DTensor):
        mesh, placements = reference.device_mesh, reference.placements
        parts = distribute_tensor(tensor.contiguous(), mesh, placements, src_data_rank=None)
        return parts.to(reference.device)
    return torch.empty_like(reference, dtype=tensor.dtype).copy_(tensor)


def split_tensors(checkpoint):
    """-> the tensors of "model" and of "optimizer" by name, and the checkpoint without them."""
    tensors = {f"model.{name}": tensor for name, tensor in checkpoint["model"].items()}
    optimizer = checkpoint.get("optimizer", {"state": {}})
    for number, values in optimizer["state"].items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor):  # SGD without momentum holds None
                tensors[f"optimizer.{number}.{name}"] = value
    return tensors, checkpoint | {"model": {}, "optimizer": optimizer | {"state": {}}}


def join_tensors(tensors, rest):
    """The checkpoint again: split_tensors undone."""
    model, state = {}, {}
    for name, tensor in tensors.items():
        kind, name = name.split(".", 1)
        if kind == "model":
            model[name] = tensor
        else:
            number, name = name.split(".", 1)
            state.setdefault(int(number), {})[name] = tensor
    return rest | {"model": model, "optimizer": rest["optimizer"] | {"state": state}}


def save_parts(folder, tensors):
    """Write `tensors` (by name) into a new folder, each rank its part. Returns {file: checksum}.

    All ranks call it together. UserError, on all, where a part cannot be written.
    """
    try:
        dcp.save(tensors, checkpoint_id=folder, no_dist=not dist.is_initialized())
    except dcp.CheckpointException as error:
        reasons = {str(reason) for reason, _ in error.failures.values()}
        raise UserError(
            f"cannot save {folder}: {'; '.join(reasons)}; what was saved before is still there"
        ) from None
    with fail_together():
        files = {p.name: _checksum(p) for p in Path(folder).iterdir()} if is_main_process() else {}
    return all_gather_object(files)[0]


def check_parts(folder, files):
    """UserError where a file of save_parts() is missing or damaged."""
    for name, checksum in files.items():
        path = Path(folder) / name
        if not path.exists() or _checksum(path) != checksum:
            raise UserError(f"{path} is {'damaged' if path.exists() else 'missing'}")


def stored_tensors(folder):
    """What save_parts() wrote: tensors without memory (device meta), by name."""
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: torch.empty(item.size, dtype=item.properties.dtype, device="meta")
        for name, item in stored.items()
    }


def load_parts(folder, tensors):
    """Fill `tensors` (by name; whole or in any parts) from the folder, each rank on its own."""
    with warnings.catch_warnings():  # that it is not distributed, which is what is asked for
        warnings.simplefilter("ignore")
        dcp.load(tensors, checkpoint_id=folder, no_dist=True)


def _checksum(path):
    checksum = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 24):
            checksum = zlib.crc32(chunk, checksum)
    return checksum
