"""What a script or an option can add to a Checkpointer. Needs no other module."""

from contextlib import nullcontext

import torch


class Readout:
    """A copy of a tensor on the CPU, begun now, for which the host does not wait.

    values: the copy, which is complete once is_done() is true, or wait() has returned.
    """

    def __init__(self, tensor):
        self.values = tensor.to("cpu", non_blocking=True)
        self.event = None
        if not tensor.is_cpu:
            self.event = torch.Event(tensor.device)
            self.event.record(torch.accelerator.current_stream(tensor.device))

    def is_done(self):
        """Whether the copy is complete. Does not wait."""
        return self.event is None or self.event.query()

    def wait(self):
        """The values, once they are complete."""
        if self.event is not None:
            self.event.synchronize()
        return self.values


class Hook:
    """Base class of hooks. A Checkpointer calls these methods on all ranks together, so they may
    communicate. `checkpoint` is the Checkpointer. By default, each does nothing."""

    def state_dict(self):
        """What a resumed run needs, for the checkpoint; plain values and tensors on the CPU."""
        return {}

    def load_state_dict(self, state):
        """Continue from what state_dict() has returned. Not called if the hook is new."""

    def after_load(self, checkpoint):
        """The run is about to start or to continue. May raise UserError."""

    def is_due(self, checkpoint):
        """After each step: whether to save now. The answer must be the same on all ranks."""
        return False

    def after_step(self, checkpoint, wait):
        """After each step. wait: a save or the end of the epoch follows; otherwise, a look at
        values on the device may be left to the next call, so that the host does not wait."""

    def before_row(self, row):
        """An epoch has ended: add to its row, {name: value}, before it is written."""

    def after_row(self, row):
        """A row, {name: value}, is in metrics.jsonl, or in steps.jsonl if it has a "step"; only the
        main process has those."""

    def before_save(self, checkpoint, between_steps):
        """Before the state is copied. between_steps: the save is within an epoch. May raise."""

    def after_save(self, checkpoint):
        """The state is copied, and is being written. May raise SilentExit to end the run."""

    def ends_run(self, checkpoint):
        """Whether after_save() will end the run."""
        return False

    def file_form(self, checkpoint):
        """A context in which model and optimizer have the form that they have in files."""
        return nullcontext()

    def select(self, checkpoint, path, contents):
        """contents: of the checkpoint in the file `path`. Returns what this rank loads of it."""
        return contents

    def convert(self, checkpoint, contents):
        """contents: of a checkpoint, about to be written. Returns what goes into the file."""
        return contents

    def write(self, checkpoint, contents, path):
        """Write a file. Returns whether it did; if no hook does, save_atomically() is called. Only
        rank 0 calls this and the next method, in a thread. May raise OSError."""
        return False

    def save_failed(self, checkpoint, message):
        """A file could not be written. Returns whether the run continues in spite of that."""
        return False
