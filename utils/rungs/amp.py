"""The settings of train_ddp_amp.py."""

from dataclasses import dataclass
from typing import Self

import torch

from utils.rungs.half_precision import warnings_of
from utils.settings import BaseSettings, ConfigError, setting


@dataclass(frozen=True)
class AmpSettings(BaseSettings):
    """BaseSettings of train_ddp_amp.py."""

    amp_dtype: str = setting(
        "bfloat16",
        "precision under autocast (changes numerics); float16 uses a GradScaler",
        choices=("bfloat16", "float16"),
    )

    @property
    def precision(self) -> str:
        """A readable description of the precision."""
        return f"{self.amp_dtype} autocast, {super().precision}"

    @property
    def autocast_dtype(self) -> torch.dtype:
        """The dtype for torch.autocast."""
        return getattr(torch, self.amp_dtype)

    def warnings(self, device: torch.device) -> list[str]:
        """See utils.settings."""
        own = warnings_of(self.amp_dtype, device, "train_ddp.py trains in float32")
        return [*super().warnings(device), *own]

    def resolved(self) -> Self:
        """See utils.settings. Raises ConfigError if values contradict each other."""
        if self.max_skipped_steps >= 0 and self.amp_dtype == "float16":
            raise ConfigError(
                "--max-skipped-steps does not work with --amp-dtype float16, where the GradScaler "
                "skips steps: use bfloat16"
            )
        return super().resolved()
