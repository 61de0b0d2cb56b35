"""Random numbers that belong to samples: dropout, stochastic depth, and noise of one's own.

A number is a function of (seed, epoch, index of the sample, name of the draw, place in it). So a
sample has the same on any rank, in any micro-batch, pipeline stage or rank of tensor parallelism,
and after a resume; PyTorch's generators would give it others for each number of ranks. The Loader
tells which samples a step holds.

The generator is Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3",
doi 10.1145/2063384.2063405): a key per sample, and a range of counters per name. On PyTorch 2.14
and later, torch.func._random computes it in one kernel; before that, the same bits take about 100.
"""

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from utils import seeds
from utils.batches import tensors_of
from utils.data import inner_dataset
from utils.errors import UserError

_LOW = 0xFFFFFFFF  # the lower half of 64 bits
micro_batches: list[tuple[int, int]] = []  # (number, count) of what runs: utils/rungs/pipeline.py


class _Step:
    """The samples of the current step, and how many of them each draw has used.

    A forward pass may see the samples in parts, in their order: micro-batches, each of which draws
    under the same names. `used` says where the next part begins.
    """

    def __init__(self) -> None:
        self.keys: Any = None  # int64 (n,); None before the first step
        # One for each n, which stays where it is: a CUDA graph of the training steps reads it.
        self.on_device: dict[tuple[torch.device, int], Tensor] = {}
        self.used: dict[str, int] = {}
        self.prefix, self.thread = "", 0

    def start(self, seed: int, epoch: int, indices: Tensor | None) -> None:
        """A step with the samples `indices` begins; None: the run. Does not wait for a device.
        Raises UserError if a draw of the step before was not for all of its samples."""
        used, self.used = self.used, {}
        if indices is None:
            self.keys = None
            return
        for name, count in used.items():
            if count < len(self.keys):
                raise UserError(
                    f"the draw {name!r} took {count} samples in a step of {len(self.keys)}: draw "
                    f"for all samples of the batch, in their order, and choose some afterwards"
                )
        # On the device of the indices, which is the dataset's if it lies on one.
        self.keys = indices + seeds.derive_seed(seed, epoch)
        self.thread = threading.get_ident()
        for (device, count), held in self.on_device.items():
            if count == len(self.keys):
                held.copy_(_pinned(self.keys, device), non_blocking=True)

    def take(self, name: str, count: int, device: torch.device) -> Tensor:
        """Keys, int64 (count,), of the next `count` samples for a draw. Raises UserError."""
        if self.keys is None:
            return self._before_the_first_step(name, count, device)
        if _is_other_thread(self.thread):
            raise UserError(
                "nn.DataParallel runs forward passes in threads, which share the samples of a "
                "step: use DistributedDataParallel"
            )
        total = len(self.keys)
        if (device, total) not in self.on_device:
            copied = _pinned(self.keys, device).to(device, non_blocking=True, copy=True)
            self.on_device[device, total] = copied
        keys = self.on_device[device, total]
        if micro_batches:
            number, parts = micro_batches[-1]
            start, end = number * count, number * count + count
            if parts > 1 and parts * count != total and torch.is_grad_enabled():
                raise _wrong_size(name, parts * count, total)
            # In evaluation, a pipeline repeats samples that do not fill a batch.
            return keys[torch.arange(start, end, device=device) % total]
        start = self.used.get(name, 0)
        if _is_backward():  # which recomputes the last part, for activation checkpointing
            start -= count
        end = start + count
        if end > total:
            raise _wrong_size(name, end, total)
        self.used[name] = end
        return keys[start:end]

    def _before_the_first_step(self, name, count, device):
        """The same for all samples: of two together, a task has the sum of both, as it must."""
        if torch.is_grad_enabled():
            raise UserError(
                f"the draw {name!r} needs to know its samples: iterate over a Loader of "
                f"utils/data.py, or call start_batch(seed, epoch, indices), of utils/seeds.py, "
                f"before each batch"
            )
        return torch.zeros(count, dtype=torch.int64, device=device)


def _wrong_size(name, count, total):
    return UserError(
        f"the draw {name!r} takes {count} samples in a step of {total}: the first dimension must "
        f"be the batch's, and a module or name that is used several times in a step needs a "
        f"name for each: `with draws_named('second'):`"
    )


def _is_other_thread(thread):
    is_other = not torch.compiler.is_compiling() and threading.get_ident() != thread
    return is_other and not _is_backward()  # which has its own threads


def _is_backward():
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() >= 0


def _pinned(tensor, device):
    is_moved = device.type != "cpu" and tensor.is_cpu
    return tensor.pin_memory() if is_moved else tensor


_step = _Step()
seeds.on_batch.append(_step.start)


def require_order(loader: Any) -> None:
    """Raise UserError if the dataset's collate_fn() sorts its samples, as for a packed sequence: a
    step could not tell which row of a batch is which sample."""
    if not hasattr(inner_dataset(loader.dataset), "collate_fn"):
        return
    last = len(loader.dataset) - 1
    for other in {1, last // 2, last} - {0}:
        batches = loader.examples([0], [other], [0, other], [other, 0])
        one, two, both, reverse = (tensors_of(loader.prepare(batch)) for batch in batches)
        if _are_equal(both, reverse) and not _are_equal(one, two):
            raise UserError(
                "collate_fn() sorts its samples, so that random numbers by sample would belong to "
                "others: leave them in their order, and sort in forward() what has been drawn for"
            )


def _are_equal(one, other):
    return all(map(torch.equal, one, other))


seeds.on_check.append(require_order)


@contextmanager
def draws_named(prefix: str) -> Iterator[None]:
    """A context that changes the names of all draws: for a second forward pass of the same
    modules in one step."""
    before, _step.prefix = _step.prefix, f"{_step.prefix}{prefix}/"
    try:
        yield
    finally:
        _step.prefix = before


def uniform(name: str, shape: Sequence[int], device: torch.device) -> Tensor:
    """Numbers in [0, 1), float32 of this shape. shape[0]: the number of samples, all of the step or
    the next of its micro-batches. name: a different one for each draw of a step.

    Before the first step, as where the task is checked, all samples have the same. Raises UserError
    if the name has been used for these samples, or if a step trains and none has started.
    """
    name = _step.prefix + name
    keys = _step.take(name, shape[0], device)
    keys = torch.stack([keys, torch.full_like(keys, _first_counter(name))], -1)
    return _philox(keys, shape)


def normal(name: str, shape: Sequence[int], device: torch.device) -> Tensor:
    """Numbers with mean 0 and standard deviation 1, float32. See uniform()."""
    centered = uniform(name, shape, device) + 2.0**-25  # not 0
    return torch.special.ndtri(centered.clamp(max=1 - 2.0**-24))


@torch.compiler.assume_constant_result
def _first_counter(name):
    """The names divide the 2**64 counters of a key into ranges of 2**30, each of 2**32 numbers."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 31 << 30


def _philox(keys, shape):
    """Uniform numbers of this shape; keys: int64 (shape[0], 2), a key and its first counter."""
    if hasattr(torch.ops.aten, "_philox_uniform_"):
        batched = keys.view(torch.uint64).view(shape[0], *[1] * (len(shape) - 1), 2)
        result = torch.empty(shape, device=keys.device)
        return torch.ops.aten._philox_uniform_(result, batched, 0.0, 1.0)
    return _philox_of_int64(keys, shape)


def _philox_of_int64(keys, shape):
    """The same in int64 arithmetic, whose products wrap around like products of uint64."""
    numbers = torch.Size(shape[1:]).numel()
    blocks = torch.arange(-(-numbers // 4), device=keys.device)
    key, counter = keys[:, :1], keys[:, 1:] + blocks
    words = [counter & _LOW, counter >> 32 & _LOW, *[torch.zeros_like(counter)] * 2]
    low, high = key & _LOW, key >> 32 & _LOW
    for _ in range(10):
        first, second = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [
            second >> 32 & _LOW ^ words[1] ^ low,
            second & _LOW,
            first >> 32 & _LOW ^ words[3] ^ high,
            first & _LOW,
        ]
        low, high = low + 0x9E3779B9 & _LOW, high + 0xBB67AE85 & _LOW
    bits = torch.stack(words, -1).flatten(1)[:, :numbers] & 0xFFFFFF
    return (bits.float() / 2**24).view(shape)


class Dropout(nn.Module):
    """nn.Dropout, by sample: sets values to 0 with probability p, and divides the rest by 1 - p.

    kept_dims: the mask has one number for each place in so many leading dimensions, all by default;
    1 drops whole samples (StochasticDepth), 2 whole channels.
    name: of the draw; convert_dropout() takes the module's.
    """

    def __init__(self, p: float = 0.5, name: str = "", kept_dims: int | None = None) -> None:
        super().__init__()
        self.p, self.name, self.kept_dims = p, name, kept_dims

    def extra_repr(self) -> str:
        return f"p={self.p}, name={self.name!r}, kept_dims={self.kept_dims}"

    def forward(self, values: Tensor) -> Tensor:
        """values: (n, ...), a row per sample -> the same shape. Raises UserError."""
        if not self.training or self.p == 0:
            return values
        dims = values.ndim if self.kept_dims is None else self.kept_dims
        shape = [*values.shape[:dims], *[1] * (values.ndim - dims)]
        scale = 0.0 if self.p == 1 else 1 / (1 - self.p)
        kept = uniform(self.name, shape, values.device) >= self.p
        return values * kept.to(values.dtype).mul(scale)


class StochasticDepth(Dropout):
    """torchvision.ops.StochasticDepth(p, "row"), by sample: sets all values of a sample to 0 with
    probability p, and divides the others by 1 - p (Huang et al. 2016, arXiv 1603.09382).

    For the end of a residual branch, which a sample then skips. name: of the draw; each branch
    needs its own.
    """

    def __init__(self, p: float = 0.5, name: str = "") -> None:
        super().__init__(p, name, kept_dims=1)


# {class: the dimensions of its mask}
_CHANNELS = {nn.Dropout: None, nn.Dropout1d: 2, nn.Dropout2d: 2, nn.Dropout3d: 2}
_OTHERS = (nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU, nn.FractionalMaxPool2d)


def convert_dropout(model: nn.Module) -> nn.Module:
    """The model with a Dropout of this module in place of each nn.Dropout (1d to 3d, too), and with
    a StochasticDepth in place of torchvision's. The names of parameters stay the same.

    Raises UserError for layers whose random numbers cannot be given by sample: dropout inside of
    nn.MultiheadAttention or nn.LSTM, for example. Compute softmax(scores), Dropout and the product
    with the values yourself there. Calls of torch.nn.functional.dropout() are not seen. Raises
    UserError, too, for what has been compiled, whose dropout is part of it.
    """
    replaced: dict[nn.Module, nn.Module] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module not in replaced:
            replaced[module] = _converted(name, module)
        if replaced[module] is not module:
            if not name:
                return replaced[module]
            model.set_submodule(name, replaced[module])
    return model


def _converted(name, module):
    if _has_its_dropout_compiled(module):
        raise UserError(
            f"{name or 'the model'}, a {type(module).__name__}, has been compiled with its "
            f"dropout: call convert_dropout() first, and compile afterwards"
        )
    if type(module) in _CHANNELS:
        return Dropout(module.p, name, _CHANNELS[type(module)]).train(module.training)
    if type(module).__name__ == "StochasticDepth" and module.mode == "row":
        return StochasticDepth(module.p, name).train(module.training)
    hidden: Any = isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout
    if hidden or isinstance(module, _OTHERS) or type(module).__name__ == "StochasticDepth":
        raise UserError(
            f"{name or 'the model'}, a {type(module).__name__}, draws random numbers that cannot "
            f"belong to samples: set its dropout to 0, or use a layer without"
        )
    return module


def _has_its_dropout_compiled(module):
    """Whether torch.compile(), which renames modules, TorchScript, or torch.export compiled it."""
    if isinstance(module, torch.jit.ScriptModule):
        return "dropout" in str(module.inlined_graph)
    if isinstance(module, torch.fx.GraphModule):
        calls = [node.target for node in module.graph.nodes if node.op == "call_function"]
        return any("dropout" in str(target) for target in calls)
    return hasattr(module, "_orig_mod")
