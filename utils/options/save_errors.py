"""--save-errors warn: a run that outlives checkpoints which cannot be written."""

from contextlib import suppress

from utils.errors import UserError, warn
from utils.hooks import Checkpoint, Hook
from utils.run_folder import claim, write_text


class WarnOfSaveErrors(Hook):
    """Turns errors of saves into warnings, except for the save that ends a run."""

    is_ending = False

    def before_save(self, checkpoint: Checkpoint, between_steps: bool) -> None:
        is_signaled = any(hook.ends_run(checkpoint) for hook in checkpoint.hooks)
        self.is_ending = is_signaled or checkpoint.epoch == checkpoint.cfg.epochs

    def save_failed(self, checkpoint: Checkpoint, message: str) -> bool:
        if self.is_ending:
            return False
        warn(f"{message}; the run continues")
        folder = checkpoint.folder
        if not folder.exists():  # it was deleted
            with suppress(UserError):
                claim(folder, "auto")
                write_text(folder / "config.yaml", checkpoint.cfg.dump())
        return True
