"""Batches of any shape: tensors in nested dicts, tuples, lists and dataclasses."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

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
        names = [f.name for f in fields(first)]
        return replace(first, **{n: _collate([getattr(s, n) for s in samples]) for n in names})
    if isinstance(first, Mapping):
        return {name: _collate([sample[name] for sample in samples]) for name in first}
    if isinstance(first, tuple | list):
        columns = [_collate(list(column)) for column in zip(*samples, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    return default_collate(samples)


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """The batch with function(tensor) in place of each tensor; other values stay as they are."""
    if isinstance(batch, Tensor):
        return function(batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        values = {f.name: map_tensors(function, getattr(batch, f.name)) for f in fields(batch)}
        return replace(batch, **values)
    if isinstance(batch, Mapping):
        return {name: map_tensors(function, value) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        values = [map_tensors(function, value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors in a batch, as a list."""
    tensors = []

    def collect(tensor):
        tensors.append(tensor)
        return tensor  # a dataclass may look at its fields

    map_tensors(collect, batch)
    return tensors


def on_device_of(outputs: Any, targets: Any) -> Any:
    """The targets on the device of the outputs: that of a model which is spread over several
    devices is not the device of its inputs. The same tensors if they are there already."""
    device = tensors_of(outputs)[0].device
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), targets)


def as_pair(batch: Any) -> tuple[Any, Any]:
    """(inputs, targets). A batch that is no tuple or list of two, such as a dict, is both."""
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
