"""--per-process-batch-size: the tutorials' convention, where updates depend on the world size."""

import os
from dataclasses import dataclass, replace

from utils.config import setting


@dataclass(frozen=True)
class Settings:
    """What --per-process-batch-size adds to the Config."""

    per_process_batch_size: int = setting(
        0, "samples per optimizer step and process; determines global_batch_size", low=1
    )
    lr_scaling: str = setting(
        "linear",
        "linear: lr is multiplied by the number of processes (Goyal et al. 2017, arXiv 1706.02677)",
        choices=("linear", "none"),
    )

    @property
    def peak_lr(self):
        """The learning rate after the warmup, under the linear scaling rule if it applies."""
        return self.lr * _world_size() if self.lr_scaling == "linear" else self.lr

    def resolved(self):
        """The config with the global batch size of this number of processes."""
        batch = self.per_process_batch_size * _world_size()
        return super(Settings, replace(self, global_batch_size=batch)).resolved()

    def fixed_on_resume(self):
        """As Config's, without what depends on the number of processes."""
        fixed = super().fixed_on_resume()
        del fixed["global_batch_size"]
        return fixed


def _world_size():
    return int(os.environ.get("WORLD_SIZE") or "1")
