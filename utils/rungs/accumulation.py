"""The settings of train_ddp_accum.py, and what micro-batches compute differently."""

from dataclasses import dataclass
from typing import Any, Self

import torch

from utils.config import BaseSettings, ConfigError, setting
from utils.distributed import all_gather_object, is_main_process, launched_world_size
from utils.errors import say
from utils.guards import Guard


@dataclass(frozen=True)
class AccumulationSettings(BaseSettings):
    """Settings of train_ddp_accum.py."""

    micro_batches: int = setting(
        1,
        "micro-batches per step of a process; changes numerics with BatchNorm, whose statistics "
        "then come from a micro-batch (models with the suffix _gn have none)",
        low=1,
    )

    def resolved(self) -> Self:
        """See BaseSettings."""
        cfg = super().resolved()
        samples = cfg.global_batch_size // launched_world_size()
        if cfg.micro_batches > samples:
            raise ConfigError(f"{cfg.micro_batches} micro-batches of {samples} samples per process")
        if cfg.micro_batches > 1 and cfg.compile in ("reduce-overhead", "max-autotune"):
            raise ConfigError(  # a CUDA graph overwrites the gradients of the micro-batch before
                f"--compile {cfg.compile} does not accumulate gradients: pass --compile default"
            )
        return cfg


class RunningStatistics(Guard):
    """Prints, after two steps, which modules update buffers or frozen parameters in forward(), as
    BatchNorm and momentum teachers do: with micro-batches, each update is of a part of the
    batch, and depends on their number. In the first step, a teacher may equal its student."""

    def at_start(self, checkpoint: Any) -> None:
        self.steps = 0 if checkpoint.cfg.micro_batches > 1 else 2
        self.before = _sums_of_untrained(checkpoint.model)

    def after_step(self, checkpoint: Any) -> None:
        self.steps += 1
        if self.steps != 2:
            return
        now = _sums_of_untrained(checkpoint.model)
        changed = [name for name, value in self.before.items() if value != now[name]]
        ranks = all_gather_object(changed)  # several may hold the model together
        names = sorted({name.rpartition(".")[0] for rank in ranks for name in rank})
        if names and is_main_process():
            say(
                f"running statistics of each micro-batch, so that they depend on --micro-batches, "
                f"and with BatchNorm the weights, too: {', '.join(names)[:200]}"
            )


def _sums_of_untrained(model):
    """{name: the sum of a buffer or a frozen parameter that a checkpoint holds}"""
    saved = model.state_dict().keys()  # without caches
    tensors = [*model.named_buffers(), *model.named_parameters()]
    untrained = {n: t for n, t in tensors if n in saved and not t.requires_grad}
    return {name: tensor.sum(dtype=torch.complex128).item() for name, tensor in untrained.items()}
