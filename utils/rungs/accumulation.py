"""The settings of train_ddp_accum.py."""

from dataclasses import dataclass
from typing import Self

from utils.distributed import launched_world_size
from utils.settings import BaseSettings, ConfigError, setting


@dataclass(frozen=True)
class AccumulationSettings(BaseSettings):
    """BaseSettings of train_ddp_accum.py."""

    micro_batches: int = setting(
        1,
        "micro-batches per step of a process; changes numerics with BatchNorm, whose statistics "
        "are then those of a micro-batch (models with the suffix _gn have none), and with "
        "whatever else forward updates in each call",
        low=1,
    )

    def resolved(self) -> Self:
        """See utils.settings. Raises ConfigError if values contradict each other."""
        cfg = super().resolved()
        samples = cfg.global_batch_size // launched_world_size()
        if cfg.micro_batches > samples:
            raise ConfigError(
                f"a process has {samples} samples per step, too few for {cfg.micro_batches} "
                f"micro-batches: pass a smaller --micro-batches"
            )
        if cfg.micro_batches > 1 and cfg.compile in ("reduce-overhead", "max-autotune"):
            raise ConfigError(
                f"with compile {cfg.compile}, a CUDA graph would overwrite the gradients of the "
                f"micro-batch before: pass --compile default, or --micro-batches 1"
            )
        return cfg
