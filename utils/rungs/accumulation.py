"""The settings of train_ddp_accum.py, and what micro-batches compute differently."""

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from utils.distributed import all_gather_object, is_main_process, launched_world_size
from utils.errors import say
from utils.hooks import Checkpoint, Hook
from utils.settings import BaseSettings, ConfigError, setting


@dataclass(frozen=True)
class AccumulationSettings(BaseSettings):
    """BaseSettings of train_ddp_accum.py."""

    micro_batches: int = setting(
        1,
        "micro-batches per step of a process; changes numerics with BatchNorm, whose statistics "
        "then come from a micro-batch (models with the suffix _gn have none), and with "
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


class RunningStatistics(Hook):
    """Prints, after the first step, which modules update buffers in forward(), as BatchNorm does:
    with micro-batches, each update is of a part of the batch, and depends on their number."""

    def __init__(self, cfg: Any, state: Mapping[str, Any]) -> None:
        self.micro_batches = cfg.micro_batches
        self.before: dict[str, Tensor] = {}

    def after_load(self, checkpoint: Checkpoint) -> None:
        if self.micro_batches > 1:
            self.before = {name: b.clone() for name, b in checkpoint.model.named_buffers()}

    def after_step(self, checkpoint: Checkpoint) -> None:
        if not self.before:
            return
        before, self.before = self.before, {}
        saved = checkpoint.model.state_dict().keys()  # the other buffers are caches
        changed = [
            name.rpartition(".")[0]
            for name, buffer in checkpoint.model.named_buffers()
            if name in saved and not (name in before and buffer.equal(before[name]))
        ]
        ranks = all_gather_object(list(dict.fromkeys(changed)))  # several may hold the model
        names = dict.fromkeys(name or "the model" for rank in ranks for name in rank)
        if names and is_main_process():
            text = textwrap.shorten(", ".join(names), 200)
            say(
                f"each micro-batch updates running statistics by itself, so that these depend on "
                f"--micro-batches, and with BatchNorm the weights, too: {text}"
            )
