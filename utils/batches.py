"""Batches of any shape: tensors in nested dicts, tuples and lists."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from utils.errors import UserError


def collate(samples: Sequence[Any]) -> Any:
    """default_collate, whose errors name the remedy."""
    try:
        batch = default_collate(list(samples))
    except (TypeError, RuntimeError, ValueError, KeyError) as error:
        raise UserError(
            f"samples cannot be combined into a batch ({str(error).splitlines()[0]}): give the "
            f"dataset a method collate_fn(samples)"
        ) from None
    return tuple(batch) if isinstance(batch, list) else batch


def map_tensors(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """The batch with function(tensor) in place of each tensor."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {name: map_tensors(function, value) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        values = [map_tensors(function, value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors in a batch, as a list."""
    tensors = []
    map_tensors(tensors.append, batch)
    return tensors


def dtype_for(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a tensor in a run in `dtype`: integers keep theirs, complex numbers theirs in
    its precision."""
    if tensor.is_complex():
        return dtype.to_complex()
    return dtype if tensor.is_floating_point() else tensor.dtype


def on_device_of(outputs: Any, targets: Any) -> Any:
    """Move the targets to the device of the outputs, if the model spans several."""
    found = tensors_of(outputs)
    if not found:  # a torch.distributions.Normal, for example
        return targets
    return map_tensors(lambda tensor: tensor.to(found[0].device, non_blocking=True), targets)


def as_pair(batch: Any) -> tuple[Any, Any]:
    """(inputs, targets). A batch that is not a pair, such as a dict, is both."""
    is_pair = isinstance(batch, tuple | list) and len(batch) == 2
    return tuple(batch) if is_pair else (batch, batch)
