"""Does a task keep its part of the contract with the scripts? See docs/own-task.md."""

import math
import zlib
from collections.abc import Mapping
from contextlib import suppress
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import Dataset

from utils.batches import collate, describe, map_tensors, on_device_of, tensors_of
from utils.data import BatchDataset, Loader, fetch_samples
from utils.distributed import all_gather_object, is_main_process
from utils.errors import UserError, warn
from utils.hooks import Checkpoint, Hook
from utils.trial import changeable_tensors, trial

NAMES = ("loss", "count", "measure", "summarize", "describe", "BEST")


@torch.no_grad()
def check_task(task: Any, model: nn.Module, loader: Any, val_loader: Any = None) -> None:
    """Try a task on a few samples, before the first epoch does. `model` is not divided or wrapped
    yet, and stays as it is, except for the shapes of lazy modules. All ranks call it together.

    loader, val_loader: utils.data.Loader, of the training and of the validation.
    Raises UserError if the task lacks a name that every script uses, if what loss() or measure()
    returns is not a sum, if a function does not return what it must, or if ranks have different
    validation samples. Warns if the loss of a sample depends on the others in its batch, unless the
    function says so: loss.compares_samples = True.
    """
    if missing := [name for name in NAMES if not hasattr(task, name)]:
        raise UserError(f"the task {_name(task)} does not define {', '.join(missing)}")
    if not _names_a_metric(task.BEST):
        raise UserError(
            f"BEST of the task {_name(task)} is {task.BEST}, but must be the name of a metric "
            f"and the function max or min, such as ('accuracy', max)"
        )
    if next(model.parameters(), None) is None:
        raise UserError(f"build_model() of {_name(task)} returns a model without parameters")
    if any(is_lazy(tensor) for tensor in changeable_tensors(model)):
        for inputs, _ in loader.examples([0, 0]):
            model.eval()(_moved(model, inputs))  # the first pass, for which PyTorch asks
        model.train()
    with trial(model):
        _check_summary(task, _try(task, model, loader))
        for batch in val_loader.examples([0, 0]) if val_loader else ():
            _sums(task, model, batch)
    if val_loader:  # a hook compares the training samples, because it knows the checkpoint
        compare_samples(val_loader)


class CompareSamples(Hook):
    """Compares the ranks' training samples at the start, and a resumed run's with the samples
    before. contents: what has been compared."""

    def __init__(self, cfg: Any, state: Mapping[str, Any]) -> None:
        self.loader, self.may_change = state["loader"], cfg.allow_config_change
        self.contents: list[list[Any]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"contents": self.contents}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.contents = state["contents"]

    def after_load(self, checkpoint: Checkpoint) -> None:
        """Raises UserError, on all ranks, if a rank or the checkpoint has different samples."""
        if not isinstance(self.loader, Loader):  # a user's own, of which nothing is known
            return
        saved, self.contents = self.contents, compare_samples(self.loader)
        within_epoch = self.loader.start > 0
        if within_epoch or not self.may_change:
            remedy = "" if within_epoch else ", or pass --allow-config-change"
            _refuse_different(self.loader, self.contents, "the checkpoint has", saved, remedy)


def compare_samples(loader: Any) -> list[list[Any]]:
    """Raise UserError, on all ranks, if a rank has different samples under the same indices.
    Returns what was compared: of the first, the middle and the last sample.

    All ranks call it together. Samples of a stream are not compared: see sources.streams.
    """
    source = loader.source
    if isinstance(source, BatchDataset) and source.in_order:
        return []
    keys = [torch.tensor([index], device=loader.source_device) for index in _compared(loader)]
    contents = list(loader.read_apart(_Contents(source), keys))
    for rank, theirs in enumerate(all_gather_object(contents)):
        _refuse_different(loader, contents, f"rank {rank} has", theirs)
    return contents


def _compared(loader):
    last = len(loader.dataset) - 1
    return [0, last // 2, last]


def _refuse_different(loader, contents, who, others, remedy=""):
    for index, mine, theirs in zip(_compared(loader), contents, others, strict=False):
        for one, other in zip(mine, theirs, strict=False):
            if not _are_alike(one, other):
                kind = "training" if loader.train else "validation"
                raise UserError(
                    f"{who} different {kind} samples: {theirs}, not {mine}, in number {index}. "
                    f"Sort what set(), os.listdir() or glob() return, whose order may differ "
                    f"in each process{remedy}"
                )


class _Contents(Dataset[list[Any]]):
    """What tells a sample from others: a summary of each tensor, and None for one that differs when
    it is read again, such as an image whose transform draws its own random numbers."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __getitem__(self, index):
        try:
            first, again = (tensors_of(self._read(index)) for _ in range(2))
            pairs = zip(first, again, strict=True)
            return [_summary_of(one) if one.equal(other) else None for one, other in pairs]
        except Exception:  # it cannot be combined, or read, of which the epoch will tell
            return []

    def _read(self, index):
        if isinstance(self.dataset, BatchDataset):
            return self.dataset.get_batch(index, 0, 0)
        return fetch_samples(self.dataset, index, 0, 0, collate)


def _summary_of(tensor):
    """The mean size of pixels and floating-point numbers, an integer, or a checksum of several."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.uint8:
        return tensor.abs().double().mean().item()
    if tensor.numel() == 1:
        return int(tensor.item())
    return f"{zlib.crc32(tensor.cpu().contiguous().numpy().data):08x}"


def _are_alike(one, other):
    """Whether two summaries may be of one tensor: a different machine may round differently."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=0.05) or one != one
    return one == other or None in (one, other)


def _try(task, model, loader):
    """The sums of a sample, or of two, if the model needs them."""
    first, second = [0], [min(1, len(loader.dataset) - 1)]
    try:
        return _try_samples(task, model, loader, first, second)
    except ValueError:  # of statistics of a batch: "Expected more than 1 value per channel"
        with suppress(ValueError):
            return _try_samples(task, model, loader, first * 2, second * 2)
        raise


def _try_samples(task, model, loader, first, second):
    examples = loader.examples(first, first * 2, second, first + second)
    one, two = next(examples), next(examples)  # the same transforms, too
    if (one[0] is one[1]) != (two[0] is two[1]):
        raise UserError(
            "collate_fn() of the dataset returns a list with an entry per sample, which for two "
            "samples is taken for (inputs, targets): return a tuple of two, or a dict"
        )
    once, again, twice = (_sums(task, model, batch) for batch in (one, one, two))
    if not all(torch.allclose(again[name], once[name], rtol=0.01) for name in once):
        return once  # the model draws random numbers: its sums cannot be compared
    if not getattr(task.loss, "compares_samples", False):
        with suppress(Exception):  # samples that cannot be combined, if each batch has one
            _warn_if_coupled(task, model, once, *examples)
    if twice["count"].item() == 2 * once["count"].item():
        _refuse_means(task, once, twice)
        if _is_multiple(4, once, twice):  # also a loss of pairs whose logits are all equal, as yet
            for tensor in changeable_tensors(model):
                if tensor.is_floating_point():
                    tensor.add_(0.1)
            once, twice = (_sums(task, model, batch) for batch in (one, two))
        _refuse_unless_sum(task, once, twice)
    return once


def _warn_if_coupled(task, model, once, other, both):
    """once: the sums of a batch; other: one of different samples; both: one of all of them."""
    alone, together = _sums(task, model, other), _sums(task, model, both)
    first, second, whole = (sums["loss"].item() for sums in (once, alone, together))
    is_coupled = abs(whole - first - second) > 0.01 * max(abs(first), abs(second), abs(whole))
    is_additive = together["count"].item() == once["count"].item() + alone["count"].item()
    if is_coupled and is_additive and is_main_process():
        warn(
            f"the loss of a sample depends on the others in its batch, and so on the "
            f"number of processes: it is {whole:.4g} for two batches together, but {first:.4g} and "
            f"{second:.4g} for each. If loss() compares samples, see docs/recipes/contrastive-loss"
            f".md; otherwise, look for padding and for statistics of a batch in the model"
        )


def _refuse_unless_sum(task, once, twice):
    """once, twice: the sums of a sample, and of the same sample twice."""
    if _is_multiple(1, once, twice):
        mistake, remedy = "a mean", "pass reduction='sum', for example"
    elif _is_multiple(4, once, twice):
        mistake = "over all pairs of an output and a target"
        remedy = "shapes such as (n, 1) and (n,) broadcast to (n, n); make them the same"
    else:
        return
    raise UserError(
        f"loss() of the task {_name(task)} must return a sum over the targets, not {mistake}: it "
        f"is {once['loss']:.4g} for a sample, and {twice['loss']:.4g} for twice this sample, of "
        f"which count() says that it has twice as many targets: {remedy}"
    )


def _is_multiple(factor, once, twice):
    first, second = once["loss"].item(), twice["loss"].item()
    return first != 0 and math.isclose(second, factor * first, rel_tol=0.01)


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
    inputs, targets = _moved(model, batch)
    try:
        outputs = model(inputs)
    except RuntimeError as error:
        error.add_note(f"The model got inputs as of one sample: {describe(inputs)}.")
        raise
    targets = on_device_of(outputs, targets)
    loss, count = task.loss(outputs, targets), task.count(targets)
    measured = task.measure(outputs, targets)
    is_scalar = isinstance(loss, Tensor) and loss.dim() == 0
    _expect(is_scalar, task, "loss", "a tensor with one number, the sum over the targets", loss)
    _expect(_is_number(count), task, "count", "one number", count)
    is_dict = isinstance(measured, dict)
    _expect(is_dict, task, "measure", "a dict, {} if there is nothing to measure", measured)
    is_apart = not measured.keys() & {"loss", "count"}  # the sums of these functions
    _expect(is_apart, task, "measure", "names other than loss and count", measured)
    sums = {"loss": loss, "count": count, **measured}
    try:
        return {n: torch.as_tensor(value, dtype=torch.float64).cpu() for n, value in sums.items()}
    except (TypeError, ValueError):
        _expect(False, task, "measure", "numbers or tensors", measured)


def _expect(condition, task, function, expected, value):
    """Raise UserError unless a condition on the value that a function returns is true."""
    if not condition:
        raise UserError(
            f"{function}() of the task {_name(task)} must return {expected}, not {describe(value)}"
        ) from None


def _moved(model, batch):
    device = next(model.parameters()).device
    return map_tensors(lambda tensor: tensor.to(device), batch)


def _check_summary(task, sums):
    result = task.summarize(sums)
    are_numbers = isinstance(result, dict) and all(map(_is_number, result.values()))
    _expect(are_numbers, task, "summarize", "{name: number}", result)
    best = task.BEST[0]
    _expect("loss" in result, task, "summarize", "'loss', which every task needs", result)
    _expect(best in result, task, "summarize", f"{best!r}, which BEST names", result)


def _is_number(value):
    return isinstance(value, Number) or (isinstance(value, Tensor) and value.numel() == 1)


def _names_a_metric(best):
    is_pair = isinstance(best, tuple | list) and len(best) == 2
    return is_pair and isinstance(best[0], str) and best[1] in (max, min)


def _name(task):
    return getattr(task, "__name__", type(task).__name__)
