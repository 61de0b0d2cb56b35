"""Options: what a setting switches on, in one table.

Each module of this folder is imported only where a setting selects it. A copy without the module
ends with an error that names the setting and the file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from utils.distributed import launched_world_size
from utils.errors import required_by
from utils.hooks import Hook
from utils.preemption import Interrupts
from utils.progress import Progress
from utils.settings import ConfigError, Settings, free_setting, setting


@dataclass(frozen=True)
class Options(Settings):
    """Options, which are off by default."""

    per_process_batch_size: int = setting(
        0,
        "samples per optimizer step and process, from which global_batch_size follows: the weights "
        "then depend on the number of processes; 0: off",
    )
    lr_scaling: str = setting(
        "linear",
        "with per_process_batch_size; linear: lr is multiplied by the number of processes (Goyal "
        "et al. 2017, arXiv 1706.02677)",
        choices=("linear", "none"),
    )
    log_steps: int = free_setting(
        0, "write a row to steps.jsonl after every N steps: loss, speed and more; 0: off"
    )
    logger: str = free_setting(
        "",
        "tensorboard, wandb, trackio, mlflow or MODULE:CLASS, or several with commas; empty: none",
    )
    timing: bool = free_setting(
        False, "report what the time of each rank is spent on, and what limits the run"
    )
    profile: str = free_setting(
        "",
        "FIRST:LAST, steps of this process: write a trace of them for each rank, and show what "
        "takes longest; empty: none",
    )
    audit: bool = free_setting(False, "report which samples each epoch trained on")
    save_sharded: bool = free_setting(False, "each rank saves its own part of the tensors")
    max_skipped_steps: int = free_setting(
        -1,
        "skip up to N steps, from a start to the next, whose gradients are not finite on any rank, "
        "then fail; -1: do not look",
        low=-1,
    )
    save_errors: str = free_setting(
        "stop",
        "warn: continue if a checkpoint cannot be written, and try again at the next one",
        choices=("stop", "warn"),
    )
    verify_saves: bool = free_setting(
        False, "read each checkpoint back before it replaces the last one"
    )

    @property
    def peak_lr(self) -> float:
        """The learning rate after the warmup."""
        if self.per_process_batch_size and self.lr_scaling == "linear":
            return self.lr * launched_world_size()
        return self.lr

    def resolved(self) -> Self:
        """See Settings. Raises ConfigError where an option cannot have an effect."""
        if self.save_sharded and (self.save_errors == "warn" or self.verify_saves):
            raise ConfigError(
                "--save-errors warn and --verify-saves need a checkpoint that rank 0 writes alone: "
                "not --save-sharded, nor train_pp.py"
            )
        if self.timing and self.profile:
            raise ConfigError("--timing would measure the profiler: pass --profile or --timing")
        cfg = self
        if self.per_process_batch_size:
            batch = self.per_process_batch_size * launched_world_size()
            cfg = replace(self, global_batch_size=batch)
        return super(Options, cfg).resolved()


def build_hooks(cfg: Any, state: Mapping[str, Any]) -> list[Hook]:
    """The Hooks (utils/hooks.py) that the settings select. state: see Checkpointer."""
    hooks: list[Hook] = []
    if cfg.save_minutes:
        hooks.append(Interrupts(cfg.save_minutes))
    if cfg.audit:
        with required_by("--audit"):
            from utils.options.audit import Audit
        hooks.append(Audit(cfg, state))
    if cfg.max_skipped_steps >= 0:
        with required_by("--max-skipped-steps"):
            from utils.options.skipped_steps import SkippedSteps
        hooks.append(SkippedSteps(cfg.max_skipped_steps, state))
    if cfg.log_steps:
        with required_by("--log-steps"):
            from utils.options.step_log import StepLog
        hooks.append(StepLog(cfg, state))
    if cfg.timing:
        with required_by("--timing"):
            from utils.options.timing import Timing
        hooks.append(Timing(cfg, state))
    if cfg.profile:
        with required_by("--profile"):
            from utils.options.profile import Profile
        hooks.append(Profile(cfg, state))
    if cfg.logger:
        with required_by("--logger"):
            from utils.options.loggers import Loggers
        hooks.append(Loggers(cfg, state))
    if cfg.save_errors == "warn":
        with required_by("--save-errors warn"):
            from utils.options.save_errors import WarnOfSaveErrors
        hooks.append(WarnOfSaveErrors())
    if cfg.save_sharded:
        with required_by("--save-sharded"):
            from utils.options.sharded import ShardedFiles
        hooks.append(ShardedFiles())
    elif cfg.verify_saves:
        with required_by("--verify-saves"):
            from utils.options.verified_saves import VerifiedFiles
        hooks.append(VerifiedFiles())
    return [*hooks, Progress(cfg, state)]  # after those that change the sums
