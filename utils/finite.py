"""Refuses to save a model that is no longer finite, and so keeps the last one that is."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from utils.batches import tensors_of
from utils.distributed import fail_together
from utils.errors import UserError
from utils.hooks import Checkpoint, Hook


class RefuseNonFinite(Hook):
    """Raises UserError before a save, on all ranks, if a parameter, buffer or optimizer state holds
    inf or NaN. What is not trained, and held them at the start, is left out: a causal mask, for
    example, has -inf."""

    def __init__(self, cfg: Any = None, state: Mapping[str, Any] | None = None) -> None:
        self.never_finite = set()  # names of tensors

    def after_load(self, checkpoint: Checkpoint) -> None:
        model = checkpoint.model
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        self.never_finite = set(_not_finite(_named_tensors(model))).difference(trained)

    def before_save(self, checkpoint: Checkpoint, between_steps: bool) -> None:
        named = _named_tensors(checkpoint.model, checkpoint.optimizer)
        for name in self.never_finite:
            named.pop(name, None)
        with fail_together():
            if names := _not_finite(named):
                raise UserError(
                    f"the model is no longer finite: {names[0]} is the first of {len(names)} "
                    f"tensors that hold inf or NaN. Try a smaller --lr, or --clip-norm 1"
                )


def _named_tensors(model, optimizer=None):
    """{name: tensors} of what a checkpoint holds; of a DTensor, this rank's shard."""
    values = dict(model.state_dict())  # get_extra_state() may have returned a dict, for example
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items() if optimizer else ():
        for key, value in state.items():
            values[f"{names.get(parameter, 'a parameter')} ({key})"] = value
    return {
        name: [t.to_local() if isinstance(t, DTensor) else t for t in tensors_of(value)]
        for name, value in values.items()
    }


def _not_finite(named):
    """The names of those among `named`, {name: tensors}, that hold inf or NaN."""
    if _all_finite([tensor for tensors in named.values() for tensor in tensors]):
        return []
    return [name for name, tensors in named.items() if not _all_finite(tensors)]


def _all_finite(tensors):
    """Whether no tensor holds inf or NaN. Waits once per device."""
    real = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]
    values = [t for t in real if t.is_floating_point() and t.numel()]
    return nn.utils.get_total_norm(values, torch.inf).isfinite()
