"""How to train: the settings that every script and every task has. Needs no torch.distributed.

Order of precedence: the defaults below, then the YAML file (--config FILE), then the flags. A task
adds its settings in a subclass of Config, and a script in a subclass of BaseSettings.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import torch
import yaml

from utils.reports import report_errors
from utils.settings import (
    BaseSettings,
    ConfigError,
    free_setting,
    parse_settings,
    rules_of,
    setting,
)

__all__ = ["BaseSettings", "Config", "ConfigError", "free_setting", "load_config", "setting"]


@dataclass(frozen=True)
class Watching(BaseSettings):
    """Watching the run."""

    check_replicas_every: int = free_setting(
        0,
        "steps between comparisons of ranks; 0: only at saves and at the end of epochs; -1: never",
        low=-1,
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
    max_skipped_steps: int = free_setting(
        -1,
        "skip up to N steps, from a start to the next, in which some rank has a gradient that is "
        "inf or NaN, then fail; -1: do not look",
        low=-1,
    )


@dataclass(frozen=True)
class Saving(Watching):
    """Saving and resuming."""

    output_dir: str = free_setting("", "checkpoints and metrics; empty: runs/<script>")
    resume: str = free_setting(
        "auto",
        "always: fail if there is no checkpoint; never: move old files to output_dir/previous-TIME",
        choices=("auto", "always", "never"),
    )
    allow_config_change: bool = free_setting(False, "resume with changed settings")
    save_epochs: int = free_setting(
        1, "save after every N epochs, the last one, and each that is the best so far", low=1
    )
    save_steps: int = free_setting(0, "also save every N steps; 0: never")
    save_minutes: float = free_setting(
        10.0, "also save every N minutes, and on SIGTERM before the run stops; 0: neither"
    )
    keep_last: int = free_setting(2, "number of epoch checkpoints to keep", low=1)
    save_sharded: bool = free_setting(False, "each rank saves its own part of the tensors")
    save_errors: str = free_setting(
        "stop",
        "warn: continue if a checkpoint cannot be written, and try again at the next one",
        choices=("stop", "warn"),
    )


@dataclass(frozen=True)
class Machine(Saving):
    """The machine, and how it computes."""

    device: str = free_setting(
        "auto", "auto, cpu, cuda or another accelerator, or one device such as cuda:0"
    )
    dtype: str = setting(
        "float32",
        "of the model (changes numerics). On CUDA, float32: convolutions in TF32, as is PyTorch's "
        "default; tf32: matrix products, too; ieee: neither",
        choices=("float32", "tf32", "ieee", "float64"),
    )
    sync_bn: bool = setting(True, "BatchNorm statistics over all ranks; off: per rank")
    compile: str = setting(
        "none",
        "mode of torch.compile (changes rounding, and which elements nn.Dropout drops)",
        choices=("none", "default", "reduce-overhead", "max-autotune"),
    )
    cudnn_benchmark: bool = setting(
        False,
        "cuDNN times its algorithms and takes the fastest; results may differ between runs",
    )
    deterministic: bool = setting(
        False,
        "on CUDA: the same bits in every run, where PyTorch has such algorithms, which are slower; "
        "it warns where it has none",
    )
    loader: str = free_setting(
        "auto",
        "device: keep the dataset on the training device; auto: if it fits (same batches)",
        choices=("auto", "workers", "device"),
    )
    num_workers: int = free_setting(-1, "loader processes per rank; -1: automatic", low=-1)
    num_threads: int = free_setting(0, "CPU threads (changes rounding); 0: automatic")
    timeout: float = free_setting(300.0, "seconds before a wait for ranks or loaders fails", low=1)


@dataclass(frozen=True)
class Config(Machine):
    """How to train."""

    epochs: int = setting(10, "passes over the training set", low=1)
    global_batch_size: int = setting(256, "samples per step, over all ranks", low=1)
    optimizer: str = setting(
        "sgd",
        "adam and adamw need a smaller lr, such as 1e-3",
        choices=("sgd", "sgd_nesterov", "adam", "adamw"),
    )
    lr: float = setting(0.1, "peak learning rate")
    momentum: float = setting(0.9, "momentum of SGD")
    weight_decay: float = setting(5e-4, "weight decay of all trainable parameters")
    warmup_epochs: float = setting(1.0, "epochs of linear warmup")
    lr_schedule: str = setting(
        "cosine",
        "after the warmup; step divides lr by 10 after 1/3 and 2/3 of the epochs",
        choices=("cosine", "linear", "step", "constant"),
    )
    clip_norm: float = setting(0.0, "maximum L2 norm of the gradients; 0: no clipping")
    seed: int = setting(0, "seed of weights, sample order and augmentation")

    @property
    def precision(self) -> str:
        """A readable description of the precision."""
        return "float32 (on CUDA: TF32 convolutions)" if self.dtype == "float32" else self.dtype

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of weights, and of floating-point inputs and targets."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    def resolved(self) -> Self:
        """See BaseSettings. Raises ConfigError if values contradict each other."""
        if self.deterministic and self.cudnn_benchmark:
            raise ConfigError("--cudnn-benchmark picks what is fastest, not --deterministic")
        if self.save_sharded and self.save_errors == "warn":
            raise ConfigError(
                "--save-errors warn needs a checkpoint that rank 0 writes alone: not "
                "--save-sharded, nor train_pp.py"
            )
        if self.timing and self.profile:
            raise ConfigError("--timing would measure the profiler: pass --profile or --timing")
        folder = self.output_dir or str(Path("runs") / (Path(sys.argv[0]).stem or "python"))
        return super(Config, replace(self, output_dir=folder)).resolved()

    def fixed_on_resume(self) -> dict[str, Any]:
        """{name: value} of the settings that decide which weights a run reaches."""
        names = [f.name for f in fields(self) if not rules_of(type(self), f.name)["free"]]
        return {name: getattr(self, name) for name in names}

    def dump(self) -> str:
        """The resolved config as YAML text."""
        return yaml.safe_dump(vars(self), sort_keys=False)


@report_errors
def load_config(
    task_settings: type[Config] = Config,
    script_settings: type[BaseSettings] | None = None,
    argv: Sequence[str] | None = None,
) -> Config:
    """The checked and resolved settings of a run, in one frozen object.

    task_settings: the task's subclass of Config. script_settings: a script's subclass of
    BaseSettings. argv: default: sys.argv[1:].
    """
    kind = task_settings
    if script_settings:
        bases = (script_settings, task_settings)
        kind = dataclass(frozen=True)(type("RunConfig", bases, {}))
    return parse_settings(kind, argv).resolved()
