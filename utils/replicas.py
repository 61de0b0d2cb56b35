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
    named = [] if alone else list(_tensors(model, optimizer, between_steps))
    if not named:  # one process, or nothing but shards
        return
    names, tensors = zip(*named, strict=True)
    ranks = all_gather_object(checksums(tensors))
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


def checksums(tensors):
    """A list with one integer per tensor, which changes with any bit of any one of its elements.

    It is the sum of all elements' bits, as integers, each times an odd number, modulo 2**64: a
    change of one element always shows, because odd numbers have an inverse. The odd numbers are
    given by the position among all tensors of the same kind, and the sums are the differences of a
    running sum: a few kernels for all tensors together. None of them may be empty.
    """
    groups, sums = {}, [0] * len(tensors)
    for i, tensor in enumerate(tensors):
        size = tensor.element_size()
        if tensor.nbytes % 8 == 0 and tensor.storage_offset() * size % 8 == 0:
            size = 8  # several elements at a time
        groups.setdefault((tensor.device, _INTEGERS[size]), []).append(i)
    for (device, dtype), indices in groups.items():
        values, total, first = [], 0, 1
        length = 1 << (16 if device.type == "cpu" else 22)  # small enough for a CPU's cache
        for bits, ends in _buffers([tensors[i] for i in indices], dtype, length):
            odd = torch.arange(first, first + 2 * len(bits), 2, device=device)
            running = bits.long().mul_(odd).cumsum_(0).add_(total)
            values.append(running[torch.tensor(ends, dtype=torch.long).to(device)])
            total, first = running[-1], first + 2 * len(bits)
        values = torch.cat(values)
        for i, value in zip(indices, values.diff(prepend=0 * values[:1]).tolist(), strict=True):
            sums[i] = value
    return sums


def _buffers(tensors, dtype, length):
    """(copies of the tensors' elements one after another, as `dtype`; the positions of the last
    elements of tensors), in parts of at most `length`: a copy of all would take too much memory."""
    pieces, ends, used = [], [], 0
    for tensor in tensors:
        for piece in tensor.detach().reshape(-1).contiguous().view(dtype).split(length):
            if used + len(piece) > length:
                yield torch.cat(pieces), ends
                pieces, ends, used = [], [], 0
            pieces.append(piece)
            used += len(piece)
        ends.append(used - 1)
    yield torch.cat(pieces), ends


def _tensors(model, optimizer, between_steps):
    """(name, tensor) of each replicated tensor, in the model's order."""
    for name, tensor in _named(model, optimizer, between_steps):
        if tensor.numel() and not hasattr(tensor, "full_tensor"):
            yield re.sub(r"^((module|_orig_mod)\.)+", "", name), tensor


def _named(model, optimizer, between_steps):
    yield from model.named_parameters()
    yield from () if between_steps else model.named_buffers()
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                yield f"{names.get(parameter, 'a parameter')} ({key})", value
