"""Does a task keep its part of the contract with the scripts? See docs/own-task.md."""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from utils.batches import map_tensors, on_device_of, tensors_of
from utils.data import BatchDataset
from utils.distributed import all_gather_object, is_main_process, launched_world_size
from utils.errors import UserError, warn
from utils.seeds import on_check

NAMES = ("loss", "count", "measure", "summarize", "describe", "BEST")


@torch.no_grad()
def check_task(task: Any, model: nn.Module, loader: Any) -> None:
    """Try a task on two samples, apart and together, before the first epoch does, with a copy of
    the model, in evaluation and in training. All ranks call it together.

    Raises UserError if the task lacks a name, if what loss() or measure() returns is not a sum, if
    forward() changes a buffer that no checkpoint holds, or if a rank has different samples under
    the same indices. Warns of hooks on gradients.
    """
    if missing := [name for name in NAMES if not hasattr(task, name)]:
        raise UserError(f"the task does not define {', '.join(missing)}")
    if any(parameter.is_meta for parameter in model.parameters()):
        return  # its weights are read later, as in docs/recipes/large-models.md
    hooked = [name for name, parameter in model.named_parameters() if parameter._backward_hooks]
    if hooked and launched_world_size() > 1 and is_main_process():
        warn(f"the hook of {hooked[0]} sees one rank's gradient: clip after loss.backward()")
    model, second = copy.deepcopy(model), min(1, len(loader.dataset) - 1)
    device = next((p.device for p in model.parameters()), loader.device)  # not yet on the loader's?
    examples = list(loader.examples([0], [second], [0, second]))
    batches = [map_tensors(lambda tensor: tensor.to(device), loader.prepare(e)) for e in examples]
    _warn_of_rounding(examples[-1], loader.dtype)
    for is_training in (False, True):
        for module in model.modules():  # no dropout, and no statistics of a batch
            is_tried = any(module.children()) or module._non_persistent_buffers_set
            module.training = is_training and bool(is_tried)
        state = _random_state(device)
        one, before = _sums(task, model, *batches[0]), _caches(model)
        two, both = (_sums(task, model, *batch) for batch in batches[1:])
        after = _caches(model)
        for key in before.keys() & after:
            if not after[key].equal(before[key]):
                raise UserError(f"forward() changes {key[0]}: register it with persistent=True")
        if one["loss"].shape != both["loss"].shape:
            raise UserError("loss() must return as many terms for each batch")
        summary = task.summarize(one)
        for name in ("loss", task.BEST[0]):
            if name not in summary:
                raise UserError(f"summarize() must return {name!r}: the loss, and what BEST names")
        is_random = not torch.equal(state, _random_state(device))
        if not is_random and both["count"].equal(one["count"] + two["count"]):
            _refuse_unless_sums(task, one, two, both)
    if not (isinstance(loader.dataset, BatchDataset) and loader.dataset.in_order):
        _compare_samples(loader)
        for function in on_check:
            function(loader)


def _caches(model):
    """{(name, shape): a copy} of the buffers that no checkpoint holds; a cache may grow."""
    saved = model.state_dict().keys()
    named = [(name, buffer) for name, buffer in model.named_buffers() if name not in saved]
    return {(name, buffer.shape): buffer.clone() for name, buffer in named}


def _warn_of_rounding(batch, dtype):
    for tensor in tensors_of(batch):
        if tensor.dtype == torch.float64 and is_main_process():
            changed = tensor[(tensor.to(dtype) != tensor) & (tensor.abs() > 2**24)]
            if len(changed):
                value, rounded = changed[0].item(), changed[0].to(dtype).item()
                warn(f"a sample holds {value}, in {dtype} {rounded}: make identifiers int64")


def _random_state(device):
    module = torch if device.type == "cpu" else torch.get_device_module(device)
    return module.get_rng_state()


def _sums(task, model, inputs, targets):
    """What a Meter would add up for these samples."""
    outputs = model(inputs)
    targets = on_device_of(outputs, targets)
    loss, measured = task.loss(outputs, targets), task.measure(outputs, targets)
    count = torch.as_tensor(task.count(targets))
    if not isinstance(loss, Tensor) or loss.shape != count.shape or loss.dim() > 1:
        raise UserError("loss() must return a sum over the targets, a tensor shaped as count()")
    if not isinstance(measured, dict) or measured.keys() & {"loss", "count"}:
        raise UserError("measure() must return {name: sum}, with names other than loss and count")
    sums = {"loss": loss, "count": count, **measured}
    return {name: torch.as_tensor(value, dtype=torch.float64) for name, value in sums.items()}


def _refuse_unless_sums(task, one, two, both):
    """one, two: what was measured of a sample each; both: of a batch of these two."""
    may_differ = {"loss"} if getattr(task.loss, "compares_samples", False) else set()
    for name in one.keys() - may_differ:
        first, second, together = (sums[name].sum().item() for sums in (one, two, both))
        limit = 0.01 * max(abs(first), abs(second), abs(together))
        if abs(together - first - second) > limit:
            raise UserError(
                f"{name} of the task must be a sum over the targets: it is {first:.4g} for one "
                f"sample and {second:.4g} for a second one, but {together:.4g} for a batch of both "
                f"(terms with counts of their own, or that compare samples: docs/own-task.md)"
            )


def _compare_samples(loader):
    """The first, the middle and the last; a different machine may round differently. Tensors may be
    empty, of any dtype, and hold NaN."""
    last = len(loader.dataset) - 1
    batches = map(loader.prepare, loader.examples([0], [last // 2], [last]))
    mine = [sum(map(_mean_size, tensors_of(batch))) for batch in batches]
    for rank, theirs in enumerate(all_gather_object(mine)):
        for one, other in zip(mine, theirs, strict=True):
            if not math.isclose(one, other, rel_tol=0.05):
                raise UserError(
                    f"rank {rank} has different samples. Sort what set(), os.listdir() or glob() "
                    f"return, whose order may differ in each process"
                )


def _mean_size(tensor):
    return tensor.to(torch.complex128).abs().mean().nan_to_num().item()
