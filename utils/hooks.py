"""Base classes of hooks: called after steps and around saves, or to change the form of files.

Needs no other module.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class AsyncCopy:
    """Copies a tensor to the CPU without blocking the host.

    values: the copy, which is complete once is_done() is true, or wait() has returned.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.values = tensor.to("cpu", non_blocking=True)
        self.event = None
        if not tensor.is_cpu:
            self.event = torch.Event(tensor.device)
            self.event.record(torch.accelerator.current_stream(tensor.device))

    def is_done(self) -> bool:
        """Whether the copy is complete. Does not wait."""
        return self.event is None or self.event.query()

    def wait(self) -> Tensor:
        """The values, once they are complete."""
        if self.event is not None:
            self.event.synchronize()
        return self.values


class Checkpoint(Protocol):
    """What a hook may use of the Checkpointer (utils/checkpoint.py)."""

    cfg: Any  # the settings of the run
    state: Mapping[str, Any]
    hooks: list["Hook"]
    folder: Path
    model: nn.Module  # without wrappers
    optimizer: Optimizer
    epoch: int  # epochs done
    ends_run: bool  # the run ends after the next save, or the current one

    def is_due(self) -> bool: ...
    def note_hooks_called(self) -> None: ...
    def request_save(self, ends_run: bool) -> None: ...
    def wait(self) -> None: ...


class Hook:
    """Base class of hooks. These methods are called on all ranks together, so they may
    communicate. `checkpoint` is the Checkpointer. By default, each does nothing."""

    def __init__(self, cfg: Any = None, state: Mapping[str, Any] | None = None) -> None:
        """cfg: the settings of the run. state: as for the Checkpointer. Open files in after_load():
        the output folder may not exist yet, or belong to another run."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, for the checkpoint; plain values and tensors on the CPU."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what state_dict() has returned. Not called if the hook is new."""

    def after_load(self, checkpoint: Checkpoint) -> None:
        """The run is about to start or to continue. May raise UserError."""

    def after_step(self, checkpoint: Checkpoint) -> None:
        """Called after each optimizer step. May request a save by checkpoint.request_save(), before
        hooks that ask checkpoint.is_due(). Unless it is due, a hook may read values on the device
        in its next call, to avoid blocking the host."""

    def before_row(self, row: dict[str, Any]) -> None:
        """An epoch has ended: add to its row, {name: value}, before it is written."""

    def after_row(self, row: dict[str, Any]) -> None:
        """A row, {name: value}, is in metrics.jsonl, or in steps.jsonl if it has a "step". Only the
        main process has those, so do not communicate."""

    def before_save(self, checkpoint: Checkpoint, between_steps: bool) -> None:
        """Called before the state is copied. between_steps: within an epoch. May raise."""

    def after_save(self, checkpoint: Checkpoint) -> None:
        """The state is copied, and is being written. May raise SilentExit to end the run."""


class Hooks(list[Hook]):
    """The hooks of a run, which a Checkpointer and a MetricLogger call, too."""

    def after_step(self, checkpoint: Checkpoint) -> None:
        """Call after each optimizer step, before checkpoint.step(), which saves."""
        for hook in self:
            hook.after_step(checkpoint)
        checkpoint.note_hooks_called()


class FileForm(Hook):
    """Base class of what changes the form of a file. By default, each method changes nothing."""

    def context(self, checkpoint: Checkpoint) -> AbstractContextManager[None]:
        """A context in which model and optimizer have the form that they have in files."""
        return nullcontext()

    def from_file(
        self, checkpoint: Checkpoint, path: Path, contents: dict[str, Any]
    ) -> dict[str, Any]:
        """contents: of the checkpoint in the file `path`. Returns what this rank loads of it."""
        return contents

    def to_file(self, checkpoint: Checkpoint, contents: dict[str, Any]) -> dict[str, Any]:
        """contents: of a checkpoint, about to be written. Returns what goes into the file."""
        return contents
