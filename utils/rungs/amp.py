"""The settings of train_ddp_amp.py."""

from dataclasses import dataclass
from typing import Self

import torch

from utils.config import BaseSettings, ConfigError, setting


@dataclass(frozen=True)
class AmpSettings(BaseSettings):
    """Settings of train_ddp_amp.py."""

    amp_dtype: str = setting(
        "bfloat16",
        "precision under autocast (changes numerics); float16 uses a GradScaler",
        choices=("bfloat16", "float16"),
    )

    @property
    def autocast_dtype(self) -> torch.dtype:
        """The dtype for torch.autocast."""
        return getattr(torch, self.amp_dtype)

    def resolved(self) -> Self:
        """See BaseSettings."""
        if self.max_skipped_steps >= 0 and self.amp_dtype == "float16":
            raise ConfigError(
                "with --amp-dtype float16, the GradScaler skips steps, not "
                "--max-skipped-steps: use bfloat16"
            )
        return super().resolved()
