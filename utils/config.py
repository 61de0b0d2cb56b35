"""How to train: settings from the defaults below, then --config FILE, then the flags.

Each is a YAML key, a flag, an attribute and a line of --help. A task adds its own in a subclass of
Config, and a script in a subclass of BaseSettings.
"""

import argparse
import difflib
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from inspect import get_annotations
from pathlib import Path
from typing import Any, Self, get_type_hints

import torch
import yaml

from utils.errors import UserError
from utils.reports import report_errors

ON = ("true", "yes", "on")  # in YAML
OFF = ("false", "no", "off")


class ConfigError(UserError):
    """A mistake in a config file or a flag."""

    exit_code = 2


def setting(
    default: bool | float | str,
    help: str,
    choices: Sequence[str] | None = None,
    low: float = 0,
    free: bool = False,
) -> Any:
    """A field of a class of settings. low: the smallest number that is allowed. free: may change
    when a run is resumed, because the weights do not depend on it. A subclass may change the
    default alone: `lr: float = 0.01`."""
    return field(default=default, metadata=dict(help=help, choices=choices, low=low, free=free))


free_setting = partial(setting, free=True)


def facts_of(kind: type, name: str) -> Any:
    """What setting() was told about a field: "help", "choices", "low" and "free". A field may have
    a plain default instead."""
    told = {f.name: f.metadata for f in fields(owner_of(kind, name))}[name]
    return told or setting(0, "", low=-math.inf).metadata


def owner_of(kind: type, name: str) -> Any:
    """The class in which a field appears first; subclasses may only change its default."""
    return [cls for cls in kind.__mro__ if name in get_annotations(cls)][-1]


@dataclass(frozen=True)
class BaseSettings:
    """Base of all classes of settings, which can be combined by multiple inheritance."""

    def resolved(self) -> Self:
        """These settings with all open values filled in. Subclasses extend this, and call it
        through super(). Raises ConfigError if values contradict each other."""
        return self

    def fixed_on_resume(self) -> dict[str, Any]:
        """{name: value} of the settings that decide which weights a run reaches."""
        names = [f.name for f in fields(self) if not facts_of(type(self), f.name)["free"]]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Watching(BaseSettings):
    """Watching the run: utils/options."""

    log_steps: int = free_setting(0, "a row of steps.jsonl after every N steps; 0: none")
    logger: str = free_setting("", "tensorboard, wandb, trackio, mlflow or MODULE:CLASS")
    timing: bool = free_setting(False, "report what the time of each rank is spent on")
    profile: str = free_setting("", "FIRST:LAST, steps of this process: trace them, on each rank")
    audit: bool = free_setting(False, "report which samples each epoch trained on")
    max_skipped_steps: int = free_setting(-1, "skip N steps with inf or NaN; -1: none", low=-1)


@dataclass(frozen=True)
class Saving(BaseSettings):
    """Saving and resuming."""

    output_dir: str = free_setting("", "checkpoints and metrics; empty: runs/<script>")
    resume: str = free_setting(
        "auto", "always, never: fail without, with a run", choices=("auto", "always", "never")
    )
    allow_config_change: bool = free_setting(False, "resume with changed settings")
    save_epochs: int = free_setting(1, "save after every N epochs, the best and the last", low=1)
    save_steps: int = free_setting(0, "also save every N steps; 0: never")
    save_minutes: float = free_setting(10.0, "also save every N minutes; 0: never")
    keep_last: int = free_setting(2, "number of epoch checkpoints to keep", low=1)
    save_sharded: bool = free_setting(False, "each rank saves its own part of the tensors")


@dataclass(frozen=True)
class Machine(BaseSettings):
    """The machine, and how it computes."""

    device: str = free_setting("auto", "auto, cpu, cuda or xpu, or one for all, such as cuda:0")
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
    deterministic: bool = setting(False, "on CUDA: the same bits in every run; slower")
    num_workers: int = free_setting(-1, "loader processes per rank; -1: automatic", low=-1)
    num_threads: int = free_setting(0, "CPU threads (changes rounding); 0: automatic")
    timeout: float = free_setting(300.0, "seconds before a wait for ranks or loaders fails", low=1)


@dataclass(frozen=True)
class Config(Machine, Saving, Watching):
    """How to train."""

    epochs: int = setting(10, "passes over the training set", low=1)
    global_batch_size: int = setting(256, "samples per step, over all ranks", low=1)
    optimizer: str = setting(
        "sgd", "adam, adamw: lower --lr to 1e-3", choices=("sgd", "sgd_nesterov", "adam", "adamw")
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
    def torch_dtype(self) -> torch.dtype:
        """The dtype of weights, and of floating-point inputs and targets."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    def resolved(self) -> Self:
        """See BaseSettings."""
        cfg = super().resolved()
        if "://" in cfg.output_dir:
            raise ConfigError(f"output_dir {cfg.output_dir}: mount it, and pass the folder")
        folder = cfg.output_dir or str(Path("runs") / (Path(sys.argv[0]).stem or "python"))
        return replace(cfg, output_dir=folder)


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ConfigError(message)

    def print_help(self, file=None):
        if os.environ.get("RANK", "0") == "0":
            super().print_help(file)


@report_errors
def load_config(
    task_settings: type[Config] = Config,
    script_settings: type[BaseSettings] | None = None,
    argv: Sequence[str] | None = None,
) -> Any:
    """The checked and resolved settings of a run, in one frozen object.

    task_settings: the task's subclass of Config. script_settings: a script's subclass of
    BaseSettings. argv: default: sys.argv[1:]. A mistake ends the program with exit code 2 and one
    line, which names the closest known settings.
    """
    kind: Any = task_settings
    if script_settings:
        kind = dataclass(frozen=True)(type("RunConfig", (script_settings, task_settings), {}))
    parser = _build_parser(kind)
    flags = _parse(parser, argv)
    files = flags.pop("config", [])
    if len(files) > 1 or "" in files:
        raise ConfigError(f"pass one file by --config, not {files}")
    try:
        values = _parse(parser, [flag for path in files for flag in _flags_of(path)]) | flags
    except ConfigError as error:
        raise ConfigError(f"{files[0]}: {error}") from None
    for name, value in values.items():
        low = facts_of(kind, name)["low"]
        if isinstance(value, int | float) and not low <= value < math.inf:
            raise ConfigError(f"{name} must be a number of at least {low}, not {value}")
    return kind(**values).resolved()


def _build_parser(kind):
    parser = _Parser(
        usage="%(prog)s [--config FILE] [--SETTING VALUE ...]",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    text = "YAML with any of the names below"
    parser.add_argument("--config", metavar="FILE", action="append", help=text)
    types = get_type_hints(kind)
    owners = {}  # {class that declares settings: its group}; the script's and the task's first
    for f in sorted(fields(kind), key=lambda f: kind.__mro__.index(owner_of(kind, f.name))):
        # A subclass that says `lr = 0.01`, without a type, which a dataclass ignores:
        if getattr(kind, f.name, None) != f.default:
            raise ConfigError(f"{f.name}: set it with its type, in a @dataclass(frozen=True)")
        owner, facts = owner_of(kind, f.name), facts_of(kind, f.name)
        if owner not in owners:
            title = (owner.__doc__ or owner.__name__).partition("\n")[0].rstrip(".")
            owners[owner] = parser.add_argument_group(title)
        kind_of_value, choices, default = types[f.name], facts["choices"], f.default
        options: dict[str, Any] = {}
        if kind_of_value is bool:
            options["action"], default = argparse.BooleanOptionalAction, _flag(f.name, default)
        else:
            options["type"] = os.path.expanduser if kind_of_value is str else kind_of_value
            options["choices"] = choices
            options["metavar"] = "|".join(choices or [kind_of_value.__name__.upper()])
        text = facts["help"] + (f" (default: {default})" if default != "" else "")
        owners[owner].add_argument(_flag(f.name), help=text.replace("%", "%%"), **options)
    return parser


def _flag(name, is_on=True):
    return ("--" if is_on else "--no-") + name.replace("_", "-")


def _parse(parser, argv):
    values, unknown = parser.parse_known_args(argv)
    if unknown:
        known = re.findall(r"--[\w-]+", parser.format_help())
        name = unknown[0].partition("=")[0]
        close = difflib.get_close_matches(name, known)
        hint = f"did you mean {' or '.join(close)}?" if close else "see --help"
        raise ConfigError(f"unknown argument {name!r}: {hint}")
    return vars(values)


def _flags_of(path):
    """The keys of a YAML file, as flags: argparse converts and checks both in the same way."""
    try:
        contents = yaml.load(Path(path).read_text(encoding="utf-8"), yaml.BaseLoader)  # as text
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(contents, dict):
        raise ConfigError("must contain lines of 'key: value'")
    for key, value in contents.items():
        if not isinstance(value, str) or key in ("config", "help"):
            raise ConfigError(f"{key} must be a setting with one value")
        if value.lower() in (*ON, *OFF):
            yield _flag(key, value.lower() in ON)
        else:
            yield f"{_flag(key)}={'' if value in ('~', 'null') else value}"
