"""Trains the batches of several ranks in one process, to compare gradients.

In the run "exact-two" each rank writes its first batches; in "exact-one" a single process gets the
batches of all ranks, concatenated. Dropout, clipping, loss scaling and BatchNorm's batch statistics
are off in both, so that the gradients of the first step are the same except for rounding. (The
statistics are on if the script itself joins all ranks' statistics.)
"""

import os
import random
import sys
from collections.abc import Mapping
from pathlib import Path

from check_inside.record import PLAN, checksum, record, write_numbers
from check_inside.state import STATE

ELEMENTS = 200_000  # of all gradients; of more, every k-th one is compared
BATCHES = 64
IS_EXACT = PLAN["run"].startswith("exact")
_state = None


def install(name, torch):
    """Take out what differs between one process and two for good reasons."""
    if not IS_EXACT:
        return
    functional = torch.nn.functional
    random.seed(1)
    torch.manual_seed(1)

    def no_dropout(original):
        def dropout(input, *args, **kwargs):
            return input

        return dropout

    for function in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"):
        _replace(functional, function, no_dropout)

    def make_attention(original):
        def attention(*args, dropout_p=0.0, **kwargs):
            return (
                original(*args, **kwargs) if len(args) < 5 else original(*args[:4], 0.0, *args[5:])
            )

        return attention

    _replace(functional, "scaled_dot_product_attention", make_attention)

    def make_batch_norm(original):
        def batch_norm(input, running_mean, running_var, weight=None, bias=None, *args, **kwargs):
            channels = [1, -1] + [1] * (input.dim() - 2)
            if running_mean is not None:
                input = (input - running_mean.reshape(channels)) / (
                    running_var.reshape(channels) + 1e-5
                ).sqrt()
            if weight is not None:
                input = input * weight.reshape(channels) + bias.reshape(channels)
            return input

        return batch_norm

    if not PLAN["joins_statistics"]:
        _replace(functional, "batch_norm", make_batch_norm)
    scaler_init = torch.amp.GradScaler.__init__

    def __init__(self, *args, **kwargs):
        scaler_init(self, *args, **kwargs)
        self._enabled = False

    torch.amp.GradScaler.__init__ = __init__


def _replace(module, name, make):
    setattr(module, name, make(getattr(module, name)))


def clip(original, *args, **kwargs):
    """Clip the gradients, except in exact runs, where clipping would hide their scale."""
    if not IS_EXACT:
        return original(*args, **kwargs)
    import torch

    return torch.tensor(1.0)


_written = {}


def batch_of(loader, batch, size):
    """The batch that the script gets in place of this one of so many samples."""
    global _state
    if not IS_EXACT or STATE.steps > 0:
        return batch
    import torch

    number = _written[loader] = _written.get(loader, -1) + 1
    folder = Path(PLAN["exact"])
    if number < BATCHES and PLAN["run"] == "exact-two":
        rank = os.environ.get("RANK", "0")
        if torch.distributed.is_initialized():
            rank = torch.distributed.get_rank()
        torch.save((size, batch), folder / f"batch-{loader}-{number}-rank{rank}.pt")
    elif PLAN["run"] == "exact-one":
        batch = _joined(folder, loader, number, batch)
    _state = checksum(torch.random.get_rng_state())
    return batch


def _has_drawn(torch):
    """Whether numbers were drawn since the last batch. A generator that was only seeded since then
    is as a new one with that seed."""
    seeded = torch.Generator().manual_seed(torch.initial_seed())
    state = checksum(torch.random.get_rng_state())
    return state not in (_state, checksum(seeded.get_state()))


def _joined(folder, loader, number, batch):
    """The batches of all ranks as one; or in turns, if the script accumulates as many more."""
    import torch

    ranks, turns = PLAN["ranks"], PLAN["turns"]
    if turns:
        paths = [folder / f"batch-{loader}-{number // ranks}-rank{number % ranks}.pt"]
    else:
        paths = [folder / f"batch-{loader}-{number}-rank{rank}.pt" for rank in range(ranks)]
    if not all(path.exists() for path in paths):
        record("not_exact", why="the two ranks read fewer batches before their first step")
        return batch
    parts = [torch.load(path, weights_only=False) for path in paths]
    if len(parts) == 1:
        return parts[0][1]
    try:
        return _join([size for size, _ in parts], [batch for _, batch in parts])
    except (ValueError, RuntimeError, TypeError, KeyError) as error:
        record("not_exact", why=f"the batches of two ranks cannot be concatenated ({error})"[:200])
        return batch


def _join(sizes, parts):
    """Parts of these numbers of samples as one: tensors and arrays are concatenated, and so are
    lists that hold an entry per sample."""
    import torch

    first = parts[0]
    if isinstance(first, torch.Tensor) and first.dim():
        return torch.cat(parts)
    if _is_array(first):
        return sys.modules["numpy"].concatenate(parts) if first.ndim else first
    if isinstance(first, list | tuple):
        is_alike = len({type(entry) for entry in first}) == 1
        is_long = [len(part) for part in parts] == sizes
        if is_long and is_alike and not _holds_batches(sizes[0], first):
            joined = [sample for part in parts for sample in part]
        else:
            joined = [_join(sizes, fields) for fields in zip(*parts, strict=True)]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    if isinstance(first, Mapping):
        return type(first)({key: _join(sizes, [part[key] for part in parts]) for key in first})
    if isinstance(first, torch.Tensor | int | float | str | bytes | bool | None):
        return first
    raise TypeError(f"a batch with a {type(first).__name__}")


def _holds_batches(size, fields):
    """Whether the entries of a list are tensors or arrays of a whole batch, not of one sample."""
    import torch

    return all(
        (isinstance(x, torch.Tensor) or _is_array(x)) and x.ndim and len(x) == size for x in fields
    )


def _is_array(value):
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def gradients_of(optimizer, parameters):
    """Write the gradients of the first step of each optimizer."""
    import torch

    if not IS_EXACT or STATE.steps > 3 or (optimizer, "done") in _written:
        return
    _written[optimizer, "done"] = True
    if _state is None:
        record("not_exact", why="the script reads no DataLoader before its first step")
        return
    if _has_drawn(torch):
        record("not_exact", why="the step draws random numbers, of a different number on one rank")
        return
    total = sum(p.numel() for p in parameters)
    every = 1 + total // ELEMENTS
    parts = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros(parameter.shape)
        parts.append(_whole(gradient).detach().cpu().double().reshape(-1)[::every])
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    file = f"gradients-{optimizer}-rank{rank}"
    write_numbers(file, torch.cat(parts))
    initial = [checksum(_whole(parameter)) for parameter in parameters]
    sizes = [len(part) for part in parts]
    record("gradients", optimizer=optimizer, file=file, sizes=sizes, initial=initial)


def _whole(tensor):
    if hasattr(tensor, "full_tensor"):
        return tensor.full_tensor()
    return tensor.to_dense() if tensor.is_sparse else tensor
