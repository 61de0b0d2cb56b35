"""The settings of train_ddp_amp.py."""

from dataclasses import dataclass

import torch

from utils.config import Config, setting


@dataclass(frozen=True)
class AmpConfig(Config):
    """Config of train_ddp_amp.py."""

    amp_dtype: str = setting(
        "bfloat16",
        "precision under autocast (changes numerics); float16 uses a GradScaler",
        choices=("bfloat16", "float16"),
    )

    @property
    def precision(self):
        """The precision of the computation, for people."""
        return f"{self.amp_dtype} autocast, {super().precision}"

    @property
    def autocast_dtype(self):
        """The torch.dtype for torch.autocast."""
        return getattr(torch, self.amp_dtype)
