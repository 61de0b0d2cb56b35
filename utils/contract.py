"""Does a task keep its part of the contract with the scripts? See docs/own-task.md."""

import math
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn

from utils.batches import describe, map_tensors, on_device_of
from utils.errors import UserError

NAMES = ("loss", "count", "measure", "summarize", "describe", "BEST")


@torch.no_grad()
def check_task(task: Any, model: nn.Module, loader: Any) -> None:
    """Try a task on one sample, before the first epoch does. `model` is not divided or wrapped yet,
    and stays as it is. loader: a utils.data.Loader.

    Raises UserError if the task lacks a name that every script uses, if what loss() or measure()
    returns is not a sum, or if a function does not return what it must.
    """
    if missing := [name for name in NAMES if not hasattr(task, name)]:
        raise UserError(f"the task {_name(task)} does not define {', '.join(missing)}")
    if not _names_a_metric(task.BEST):
        raise UserError(
            f"BEST of the task {_name(task)} is {task.BEST}, but must be the name of a metric "
            f"and the function max or min, such as ('accuracy', max)"
        )
    model.eval()
    once = _sums(task, model, loader.example([0]))
    twice = _sums(task, model, loader.example([0, 0]))  # the same sample, and the same transforms
    model.train()
    if twice["count"].item() == 2 * once["count"].item():
        _refuse_unless_sum(task, once["loss"].item(), twice["loss"].item())
        _refuse_means(task, once, twice)
    result, best = task.summarize(once), task.BEST[0]
    if not isinstance(result, dict) or not all(map(_is_number, result.values())):
        raise UserError(
            f"summarize() of the task {_name(task)} must return {{name: number}}, not "
            f"{describe(result)}"
        )
    for name in ("loss", best):
        if name not in result:
            raise UserError(
                f"summarize() of the task {_name(task)} returns {', '.join(result)}, but not "
                f"{name!r}, which {'BEST names' if name == best else 'every task needs'}"
            )


def _refuse_unless_sum(task, once, twice):
    """once, twice: the losses of a sample, and of the same sample twice."""
    if once and math.isclose(twice, once, rel_tol=0.01):
        mistake, remedy = "a mean", "pass reduction='sum', for example"
    elif once and math.isclose(twice, 4 * once, rel_tol=0.01):
        mistake = "over all pairs of an output and a target"
        remedy = "shapes such as (n, 1) and (n,) broadcast to (n, n); make them the same"
    else:
        return
    raise UserError(
        f"loss() of the task {_name(task)} must return a sum over the targets, not {mistake}: it "
        f"is {once:.4g} for a sample, and {twice:.4g} for twice this sample, of which count() says "
        f"that it has twice as many targets: {remedy}"
    )


def _refuse_means(task, once, twice):
    """once, twice: the sums of a sample, and of the same sample twice."""
    for name, value in once.items():
        is_measured = name not in ("loss", "count")
        if is_measured and value.any() and torch.allclose(value, twice[name], rtol=0.01, atol=0):
            raise UserError(
                f"measure() of the task {_name(task)} must return sums, but {name!r} is the same "
                f"for a sample and for twice this sample, as a mean is: return the sum, and divide "
                f"in summarize()"
            )


def _sums(task, model, batch):
    """What a Meter would add up for this batch."""
    device = next(model.parameters()).device
    inputs, targets = map_tensors(lambda tensor: tensor.to(device), batch)
    try:
        outputs = model(inputs)
    except RuntimeError as error:
        error.add_note(f"The model got inputs as of one sample: {describe(inputs)}.")
        raise
    targets = on_device_of(outputs, targets)
    loss = task.loss(outputs, targets)
    if not isinstance(loss, Tensor) or loss.dim() > 0:
        raise UserError(
            f"loss() of the task {_name(task)} must return a tensor with one number, the sum over "
            f"the targets, not {describe(loss)}"
        )
    count, measured = task.count(targets), task.measure(outputs, targets)
    if not _is_number(count):
        raise UserError(
            f"count() of the task {_name(task)} must return one number, not {describe(count)}"
        )
    if not isinstance(measured, dict):
        raise UserError(
            f"measure() of the task {_name(task)} must return a dict, {{}} if there is nothing to "
            f"measure, not {describe(measured)}"
        )
    if taken := measured.keys() & {"loss", "count"}:
        raise UserError(
            f"measure() of the task {_name(task)} returns {', '.join(sorted(taken))}, which are "
            f"the sums of loss() and count(): use different names"
        )
    sums = {"loss": loss, "count": count, **measured}
    return {n: torch.as_tensor(value, dtype=torch.float64).cpu() for n, value in sums.items()}


def _is_number(value):
    return isinstance(value, Number) or (isinstance(value, Tensor) and value.numel() == 1)


def _names_a_metric(best):
    is_pair = isinstance(best, tuple | list) and len(best) == 2
    return is_pair and isinstance(best[0], str) and best[1] in (max, min)


def _name(task):
    return getattr(task, "__name__", type(task).__name__)
