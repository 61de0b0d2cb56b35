"""The settings of train_ddp_accum.py, and what micro-batches compute differently."""

from dataclasses import dataclass
from typing import Any, Self

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
    """Prints, after the first step, which modules update buffers in forward(), as BatchNorm does:
    with micro-batches, each update is of a part of the batch, and depends on their number."""

    def at_start(self, checkpoint: Any) -> None:
        self.is_due, model = checkpoint.cfg.micro_batches > 1, checkpoint.model
        saved = model.state_dict().keys() if self.is_due else ()  # without caches
        self.before = {name: b.clone() for name, b in model.named_buffers() if name in saved}

    def after_step(self, checkpoint: Any) -> None:
        if not self.is_due:
            return
        now = dict(checkpoint.model.named_buffers())
        changed = [name for name, buffer in self.before.items() if not buffer.equal(now[name])]
        self.is_due, self.before = False, {}
        ranks = all_gather_object(changed)  # several may hold the model together
        names = sorted({name.rpartition(".")[0] for rank in ranks for name in rank})
        if names and is_main_process():
            say(
                f"running statistics of each micro-batch, so that they depend on --micro-batches, "
                f"and with BatchNorm the weights, too: {', '.join(names)[:200]}"
            )
