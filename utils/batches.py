"""Batches of any shape: tensors in nested dicts, tuples, lists and dataclasses."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from utils.errors import UserError


def collate(samples: Sequence[Any]) -> Any:
    """A list of samples -> a batch: torch.utils.data.default_collate, which also knows dataclasses.

    Raises UserError if samples cannot be combined; the message shows the first one.
    """
    try:
        return _collate(samples)
    except (TypeError, RuntimeError, ValueError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"samples such as {describe(samples[0])} cannot be combined into a batch ({reason}): "
            f"give the dataset a method collate_fn(samples)"
        ) from None


def _collate(samples):
    first = samples[0]
    if is_dataclass(first) and not isinstance(first, type):
        columns = {name: [getattr(s, name) for s in samples] for name in _fields(first)}
        return _with(first, {name: _collate(column) for name, column in columns.items()})
    if isinstance(first, Mapping):
        return {name: _collate([sample[name] for sample in samples]) for name in first}
    if isinstance(first, tuple | list):
        columns = [_collate(list(column)) for column in zip(*samples, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    return default_collate(samples)


def map_tensors(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """The batch with function(tensor) in place of each tensor; other values stay as they are."""
    if isinstance(batch, Tensor):
        return function(batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        return _with(batch, {n: map_tensors(function, v) for n, v in _fields(batch).items()})
    if isinstance(batch, Mapping):
        return {name: map_tensors(function, value) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        values = [map_tensors(function, value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def _fields(value):
    """{name: value} of a dataclass. A field of which __init__() knows nothing may not be set."""
    names = [field.name for field in fields(value)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _with(value, changes):
    """A copy of a dataclass with these values of fields. Its __post_init__() has run for each
    sample, and would scale images, for example, a second time."""
    if isinstance(value, Mapping):  # its __post_init__() fills the dict that it is
        return type(value)(**_fields(value) | changes)
    changed = copy.copy(value)
    for name, change in changes.items():
        object.__setattr__(changed, name, change)  # also if it is frozen
    return changed


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors in a batch, as a list."""
    tensors = []

    def collect(tensor):
        tensors.append(tensor)
        return tensor  # a dataclass may look at its fields

    map_tensors(collect, batch)
    return tensors


def same_values(a: Any, b: Any) -> bool:
    """Whether two values are equal. The values in tensors are compared one by one."""
    return map_tensors(lambda t: t.tolist(), a) == map_tensors(lambda t: t.tolist(), b)


def dtype_for(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a tensor in a run in `dtype`: other kinds than floating-point numbers keep
    theirs, but complex numbers have the precision of `dtype`."""
    if tensor.is_complex():
        return dtype.to_complex()
    return dtype if tensor.is_floating_point() else tensor.dtype


def on_device_of(outputs: Any, targets: Any) -> Any:
    """Move the targets to the device of the outputs, which differs from the inputs' if the model
    spans several devices. Does nothing if they are there already, or if the outputs hold no
    tensors, such as a torch.distributions.Normal."""
    found = tensors_of(outputs)
    if not found:
        return targets
    return map_tensors(lambda tensor: tensor.to(found[0].device, non_blocking=True), targets)


def as_pair(batch: Any) -> tuple[Any, Any]:
    """(inputs, targets). A batch that is not a tuple or list of two, such as a dict, is both."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return tuple(batch)
    return batch, batch


def describe(value: Any) -> str:
    """The structure of a sample or a batch as a short text, such as (float32 (3, 32, 32), int)."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}".removeprefix("torch.")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r}: {describe(v)}" for name, v in value.items()) + "}"
    if isinstance(value, tuple | list):
        shown = [describe(v) for v in value[:4]] + ["..."] * (len(value) > 4)
        return ("[{}]" if isinstance(value, list) else "({})").format(", ".join(shown))
    return type(value).__name__
