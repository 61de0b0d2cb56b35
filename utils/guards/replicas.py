"""Do all ranks run the same code on the same data, and still hold the same model, bit for bit?"""

import sys
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from utils.checkpoint import unwrap
from utils.distributed import all_gather_object, dp_world_size, require_same
from utils.errors import UserError
from utils.guards import Guard

OF_A_NODE = ("device", "data_dir", "cache_dir")  # settings that may differ
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class CompareSetup(Guard):
    """Raises UserError, on all ranks, if they are about to train different things; or if the task
    counts different numbers of targets, as plain numbers, on them."""

    def at_start(self, checkpoint: Any) -> None:
        facts = vars(checkpoint.cfg) | checkpoint.state["data"]
        facts = {name: value for name, value in facts.items() if name not in OF_A_NODE}
        facts["steps per epoch"] = len(checkpoint.state["loader"])
        require_same(torch=torch.__version__, code=_checksum_of_code(), **facts)
        self.count = checkpoint.state["meter"].count
        self.epoch = checkpoint.epoch
        self.steps = 0

    def after_step(self, checkpoint: Any) -> None:
        loader, meter = checkpoint.state["loader"], checkpoint.state["meter"]
        if self.epoch != checkpoint.epoch:  # which a `break` may have ended
            self.count, self.epoch = 0.0, checkpoint.epoch
        self.steps += 1
        # In the first step, a rank would wait for one whose gradients are incomplete, which
        # DistributedDataParallel reports in the second.
        if (self.steps == 2 or loader.step == len(loader)) and dp_world_size() > 1:
            remedy = ": return a tensor from it"
            require_same(remedy, **{"count() of the task": meter.count - self.count})


class CompareReplicas(CompareSetup):
    """CompareSetup, and raises UserError, on all ranks, if they no longer hold the same parameters,
    buffers and optimizer state: at the start, before each save, and after the last step of an
    epoch, because an evaluation would hide that buffers differ."""

    def at_start(self, checkpoint: Any) -> None:
        super().at_start(checkpoint)
        self.before_save(checkpoint, between_steps=False)

    def after_step(self, checkpoint: Any) -> None:
        super().after_step(checkpoint)
        loader = checkpoint.state["loader"]
        if loader.step == len(loader):
            self.before_save(checkpoint, between_steps=True)

    def before_save(self, checkpoint: Any, between_steps: bool) -> None:
        compare_replicas(checkpoint.state["model"], checkpoint.optimizer, between_steps)


def _checksum_of_code():
    """Of the script, and of all modules that it has imported from its folder."""
    script = Path(sys.argv[0]).resolve()
    files = {script}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None) or ""
        if "site-packages" not in file:  # or resolve() would take 0.1 s
            files.add(Path(file).resolve())
    paths = [path for path in sorted(files) if path.is_relative_to(script.parent)]
    return zlib.crc32(b"".join(path.read_bytes() for path in paths if path.is_file()))


def compare_replicas(
    model: nn.Module, optimizer: torch.optim.Optimizer, between_steps: bool = False
) -> None:
    """Raise UserError, on all ranks, if their tensors differ in a single bit; of DTensors, if those
    of ranks with the same shard do. between_steps: without the statistics of BatchNorms, which
    DistributedDataParallel makes equal in the next forward pass."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    named = dict(_named(unwrap(model), optimizer, between_steps))
    sums = zip(map(_shard_number, named.values()), checksums([*named.values()]), strict=True)
    ranks = all_gather_object(list(sums))
    for number, name in enumerate(named):
        seen: dict[Any, int] = {}  # {shard: its checksum}
        for rank, theirs in enumerate(ranks):
            shard, value = theirs[number]
            if seen.setdefault(shard, value) != value:
                raise UserError(
                    f"the ranks no longer hold the same model: rank {rank} differs in {name}. "
                    f"Check that every gradient and every buffer is synchronized, and that every "
                    f"rank uses the same seed"
                )


def checksums(tensors: list[Tensor]) -> list[int]:
    """An integer per tensor, which changes with any bit of any one of its elements; of a DTensor,
    of this rank's shard. Waits once for the device.

    It is the sum of all elements' bits, as integers, each times an odd number, modulo 2**64: a
    change of one element always shows, because odd numbers have an inverse.
    """
    sums = [_checksum(t.to_local() if isinstance(t, DTensor) else t) for t in tensors]
    return torch.stack([value.to(sums[0].device) for value in sums]).tolist()


def _checksum(tensor):
    size = tensor.element_size()
    if tensor.nbytes % 8 == 0 and tensor.storage_offset() * size % 8 == 0:
        size = 8  # several elements at a time
    values = tensor.detach().reshape(-1).contiguous().view(_INTEGERS[size])
    total = values.new_zeros((), dtype=torch.int64)
    length = 1 << (16 if values.is_cpu else 22)  # fits into a CPU's cache, and takes little memory
    for start in range(0, len(values), length):
        bits = values[start : start + length].long()
        first = 2 * start + 1
        odd = torch.arange(first, first + 2 * len(bits), 2, device=values.device)
        total += (bits * odd).sum()
    return total


def _shard_number(tensor):
    """Which part of a DTensor this rank holds; () for a tensor. Where the mesh is a slice of a
    larger one, as FSDP's in two dimensions, all slices hold the same."""
    if not isinstance(tensor, DTensor):
        return ()
    places = zip(tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True)
    return tuple(place for place, placement in places if not placement.is_replicate())


def _named(model, optimizer, between_steps):
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, name in names.items():
        yield name, parameter
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield f"{name} ({key})", value
    for prefix, module in model.named_modules():
        if between_steps and isinstance(module, _BatchNorm):
            continue
        left_out = {*module._non_persistent_buffers_set}  # caches
        left_out |= {*getattr(module, "local_buffers", ())}  # which the user lets differ
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in left_out:
                yield name, buffer
