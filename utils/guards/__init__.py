"""What watches a run: one class per file, and one visible list of them in a script's main(). To
leave a guard out, delete its line there, its import and its file."""

from typing import Any


class Guard:
    """Base class. A Checkpointer calls these methods on all ranks together, so that they may
    communicate. By default, each does nothing; each may raise UserError.

    A guard with state_dict() and load_state_dict() is part of the checkpoint, under the name of its
    class; it need not have been in the run that is resumed.
    """

    def at_start(self, checkpoint: Any) -> None:
        """The state is loaded, and training is about to begin. checkpoint: the Checkpointer."""

    def after_step(self, checkpoint: Any) -> None:
        """Called after each optimizer step. May call checkpoint.request_save()."""

    def before_save(self, checkpoint: Any, between_steps: bool) -> None:
        """Called before the state is copied. between_steps: within an epoch."""

    def after_save(self, checkpoint: Any) -> None:
        """The state is copied, and is being written."""
