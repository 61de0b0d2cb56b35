"""Do all ranks run the same code on the same data, and still hold the same model, bit for bit?"""

import re
import sys
import zlib
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

from utils.distributed import all_gather_object
from utils.errors import UserError

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_setup(facts, loader):
    """Raise UserError if the ranks differ in `facts` (a dict), in the length of `loader`, in the
    version of torch, or in the code of the script or of this folder. All ranks call it together.

    Collectives of ranks that differ may silently combine numbers that do not belong together.
    """
    files = [Path(sys.argv[0]), *sorted(Path(__file__).parent.glob("*.py"))]
    code = {f"{p.parent.name}/{p.name}": zlib.crc32(p.read_bytes()) for p in files if p.is_file()}
    mine = facts | {"steps per epoch": len(loader), "torch": torch.__version__, "files": code}
    for rank, theirs in enumerate(all_gather_object(mine)):
        for name in mine | theirs:
            if mine.get(name) != theirs.get(name):
                if name == "files":
                    changed = dict(code.items() ^ theirs["files"].items())
                    raise UserError(f"rank {rank} has other code: {', '.join(sorted(changed))}")
                raise UserError(
                    f"rank {rank} has {name} {theirs.get(name)!r}, not {mine.get(name)!r}: the "
                    f"ranks must agree on that"
                )


def check_replicas(model, optimizer, between_steps=False):
    """Raise UserError, on all ranks, if their parameters, buffers or optimizer state differ in a
    single bit. All ranks call it together.

    Shards (DTensors) differ by design and are not compared. between_steps: neither are buffers (the
    statistics of an unsynchronized BatchNorm), which DistributedDataParallel broadcasts at the next
    forward pass.
    """
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    named = [] if alone else list(_checksums(model, optimizer, between_steps))
    if not named:  # one process, or nothing but shards
        return
    names, sums = zip(*named, strict=True)
    ranks = all_gather_object(torch.stack(sums).tolist())  # the only device synchronization
    different = [i for i, values in enumerate(zip(*ranks, strict=True)) if len(set(values)) > 1]
    if different:
        values = [sums[different[0]] for sums in ranks]
        usual = Counter(values).most_common(1)[0][0]
        rank = next(rank for rank, value in enumerate(values) if value != usual)
        raise UserError(
            f"the ranks no longer hold the same model: rank {rank} differs from the others in "
            f"{names[different[0]]}, the first of {len(different)} tensors that differ (of "
            f"{len(names)}). Check that every gradient and buffer is synchronized and that every "
            f"rank uses the same seed"
        )


def checksum(tensor):
    """An int64 scalar, on the tensor's device, that changes with any bit of any one element.

    The sum of all elements' bits, as integers, each times an odd number, modulo 2**64: a change of
    one element always shows, because odd numbers have an inverse.
    """
    flat, size = tensor.detach().reshape(-1).contiguous(), tensor.element_size()
    if flat.nbytes % 8 == 0 and flat.storage_offset() * size % 8 == 0:
        size = 8  # several elements at a time
    bits = flat.view(_INTEGERS[size])
    total, first = bits.new_zeros((), dtype=torch.int64), 1
    for piece in bits.split(1 << 24):  # as int64, a large tensor would take many times its memory
        odd = torch.arange(first, first + 2 * len(piece), 2, device=bits.device)
        total, first = total + (piece.long() * odd).sum(), first + 2 * len(piece)
    return total


def _checksums(model, optimizer, between_steps):
    """(name, int64 scalar) of each replicated tensor, all on one device, in the model's order."""
    device = next(model.parameters()).device
    for name, tensor in _tensors(model, optimizer, between_steps):
        if not hasattr(tensor, "full_tensor"):
            yield re.sub(r"^((module|_orig_mod)\.)+", "", name), checksum(tensor).to(device)


def _tensors(model, optimizer, between_steps):
    yield from model.named_parameters()
    yield from () if between_steps else model.named_buffers()
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                yield f"{names.get(parameter, 'a parameter')} ({key})", value
