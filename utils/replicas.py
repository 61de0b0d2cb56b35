"""Do all ranks run the same code on the same data, and still hold the same model, bit for bit?"""

import sys
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from utils.batches import same_values
from utils.checkpoint import unwrap
from utils.checkpoint_file import refuse_unreadable, with_plain_numbers
from utils.config import Saving
from utils.distributed import all_gather_object
from utils.errors import UserError
from utils.hooks import Checkpoint, Hook

OF_A_RANK = {"output_dir", "profile", "logger"}
SETTINGS_OF_ALL = {field.name for field in fields(Saving)} - OF_A_RANK
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_setup(cfg: Any, state: Mapping[str, Any]) -> None:
    """Raise UserError, on all ranks, if they differ in settings that decide the weights, or when
    and what ranks tell each other; in facts about the data, the number of steps per epoch, or the
    version of torch; or in the code of the script or of a module in its folder. All ranks call it
    together.

    If ranks differ, collectives may silently combine unrelated values.
    """
    refuse_unreadable(with_plain_numbers(state["data"]))  # nor could arrays be compared
    code = _checksums_of_code()
    mine = cfg.fixed_on_resume() | state["data"]
    for name in SETTINGS_OF_ALL:
        mine[name] = getattr(cfg, name)
    mine |= {"steps per epoch": len(state["loader"]), "torch": torch.__version__, "files": code}
    for rank, theirs in enumerate(all_gather_object(mine)):
        for name in mine | theirs:
            if same_values(mine.get(name), theirs.get(name)):
                continue
            if name == "files":
                changed = dict(code.items() ^ theirs["files"].items())
                raise UserError(f"rank {rank} has different code: {', '.join(sorted(changed))}")
            raise UserError(
                f"rank {rank} has {name} {theirs.get(name)!r}, not {mine.get(name)!r}: the ranks "
                f"must agree on that"
            )


def _checksums_of_code():
    """{file: checksum} of the script, and of all modules that it has imported from its folder."""
    script = Path(sys.argv[0]).resolve()
    files = {script}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None) or "/"
        if "site-packages" in file or "dist-packages" in file:  # thousands, on a slow file system
            continue
        path = Path(file).resolve()
        if path.is_relative_to(script.parent):
            files.add(path)
    return {
        str(path.relative_to(script.parent)): zlib.crc32(path.read_bytes())
        for path in sorted(files)
        if path.is_file()
    }


class CompareSetup(Hook):
    """Raises UserError, on all ranks, if they are about to train different things."""

    def __init__(self, cfg: Any, state: Mapping[str, Any]) -> None:
        check_setup(cfg, state)


class CompareReplicas(CompareSetup):
    """Also raises UserError, on all ranks, if they no longer hold the same parameters, buffers and
    optimizer state: at the start, every cfg.check_replicas_every steps, before each save, and after
    the last step of an epoch, because the forward passes of an evaluation would hide that a rank's
    buffers differ: DistributedDataParallel broadcasts the buffers of rank 0. After the second step,
    in which DistributedDataParallel names parameters without a gradient, they compare buffers."""

    def __init__(self, cfg: Any, state: Mapping[str, Any]) -> None:
        super().__init__(cfg, state)
        self.every = cfg.check_replicas_every  # -1: never, 0: not every N steps
        self.steps = 0
        self.model, self.optimizer = state["model"], state["optimizer"]

    def after_load(self, checkpoint: Checkpoint) -> None:
        self.before_save(checkpoint, between_steps=False)

    def after_step(self, checkpoint: Checkpoint) -> None:
        loader = checkpoint.state["loader"]
        self.steps += 1
        is_due = self.every > 0 and loader.step % self.every == 0
        if is_due or loader.step == len(loader):
            self.before_save(checkpoint, between_steps=True)
        elif self.steps == 2 and self.every >= 0:
            check_replicas(self.model, None, between_steps=True)

    def before_save(self, checkpoint: Checkpoint, between_steps: bool) -> None:
        if self.every >= 0:
            check_replicas(self.model, self.optimizer, between_steps)


def check_replicas(
    model: nn.Module, optimizer: Optimizer | None, between_steps: bool = False
) -> None:
    """Raise UserError, on all ranks, if their parameters, buffers or optimizer state differ in a
    single bit. All ranks call it together. optimizer: None: compare the buffers alone.

    Each rank compares its shard of a DTensor with the ranks that hold the same shard, if there are
    any. between_steps: the statistics of BatchNorms are not compared. Unless these are
    synchronized, each rank has its own until DistributedDataParallel broadcasts rank 0's.
    """
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    named = [] if alone else list(_tensors(model, optimizer, between_steps))
    if not named:  # one process, or every rank has different shards
        return
    names, tensors = zip(*named, strict=True)
    shards = [_shard_number(tensor) for tensor in tensors]
    ranks = all_gather_object(list(zip(shards, checksums(tensors), strict=True)))
    different = [
        i
        for i, values in enumerate(zip(*ranks, strict=True))
        if len(set(values)) > len({shard for shard, _ in values})
    ]
    if different:
        rank = _odd_rank([values[different[0]] for values in ranks])
        raise UserError(
            f"the ranks no longer hold the same model: rank {rank} differs from the others in "
            f"{names[different[0]]}, the first of {len(different)} tensors that differ (of "
            f"{len(names)}). Check that every gradient is synchronized, that every buffer which "
            f"forward updates is (docs/recipes/running-statistics.md), and that every rank uses "
            f"the same seed"
        )


def _odd_rank(values):
    """The first rank that differs from most of those with the same shard. values: (shard, checksum)
    of each rank."""
    for rank, (shard, checksum) in enumerate(values):
        same_shard = Counter(other for number, other in values if number == shard)
        if checksum != same_shard.most_common(1)[0][0]:
            return rank


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """A list with one integer per tensor, which changes with any bit of any one of its elements; of
    a DTensor, of this rank's shard. Waits once for the device.

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


def _tensors(model, optimizer, between_steps):
    """(name, tensor) of each tensor of which several ranks hold the same part, in the model's
    order."""
    for name, tensor in _named(model, optimizer, between_steps):
        is_divided_among_all = (
            isinstance(tensor, DTensor)
            and Replicate() not in tensor.placements
            and tensor.device_mesh.size() == dist.get_world_size()
        )
        if tensor.numel() and not is_divided_among_all:
            yield name, tensor


def _shard_number(tensor):
    """Which part of a DTensor this rank holds: its place along the dimensions of the mesh that
    divide it. () for a tensor. Where the mesh is a slice of a larger one, as FSDP's in two
    dimensions, all slices hold the same."""
    if not isinstance(tensor, DTensor):
        return ()
    places = zip(tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True)
    return tuple(place for place, placement in places if placement != Replicate())


def _named(model, optimizer, between_steps):
    model = unwrap(model)
    if optimizer:
        yield from model.named_parameters()
    for prefix, module in model.named_modules():
        if not (between_steps and isinstance(module, _BatchNorm)):
            left_out = {*module._non_persistent_buffers_set}  # caches
            left_out |= {*getattr(module, "local_buffers", ())}  # which the user lets differ
            for name, buffer in module.named_buffers(prefix, recurse=False):
                if name.rpartition(".")[2] not in left_out:
                    yield name, buffer
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items() if optimizer else ():
        for key, value in state.items():
            if isinstance(value, Tensor):
                yield f"{names.get(parameter, 'a parameter')} ({key})", value
