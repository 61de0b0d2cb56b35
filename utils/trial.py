"""Forward passes that leave no trace in a model. Needs only torch."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@contextmanager
def trial(model: nn.Module) -> Iterator[None]:
    """A context in which `model` is in evaluation mode. Afterwards, it is as it was before, though
    its forward() may count, or initialize a layer from the first batch."""
    states = [(vars(m), vars(m).copy(), dict(m._buffers)) for m in model.modules()]
    saved = [(tensor, tensor.to("cpu", copy=True)) for tensor in changeable_tensors(model)]
    model.eval()
    try:
        yield
    finally:
        for state, attributes, buffers in states:
            state.clear()
            state.update(attributes)
            state["_buffers"].clear()
            state["_buffers"].update(buffers)
        for tensor, value in saved:
            value = value.to(tensor.device)
            if tensor.layout is not torch.strided or not tensor.equal(value):  # sparse: no equal()
                tensor.copy_(value)


def changeable_tensors(model: nn.Module) -> list[Tensor]:
    """The tensors that forward() can change: what it writes into a gathered DTensor is lost."""
    tensors = [*model.parameters(), *model.buffers()]
    return [tensor for tensor in tensors if not isinstance(tensor, DTensor)]
