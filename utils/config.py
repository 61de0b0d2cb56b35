"""One frozen Config: each field is a YAML key, a flag, an attribute, and a line of --help.

Order of precedence: the defaults below, then the YAML file (--config FILE), then the flags. A
script with settings of its own passes a subclass to load_config(). Every mistake ends the program
with exit code 2 and one line that names the file, the key and the closest known name.
"""

import argparse
import difflib
import math
import os
import sys
from dataclasses import dataclass, field, fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
import yaml

from utils.errors import UserError, option, report_errors

TOLERANCE = {"max_skipped_steps", "save_errors", "verify_saves"}
MORE = """These add settings: --dataset imagefolder, --weights NAME, --per-process-batch-size N,
--max-skipped-steps N, --save-errors warn, --verify-saves. Append --help to see them."""


class ConfigError(UserError):
    """A mistake in a config file or a flag."""

    exit_code = 2


def setting(default, help, choices=None, low=0, free=False):
    """A Config field. low: its smallest allowed value. free: it may change when a run is resumed,
    because it does not affect the weights that the run reaches."""
    return field(default=default, metadata=dict(help=help, choices=choices, low=low, free=free))


free_setting = partial(setting, free=True)


@dataclass(frozen=True)
class Config:
    """What to train and how. Facts about the running process, such as its rank, are not in it."""

    dataset: str = setting(
        "auto",
        "auto: cifar10 if data_dir holds it, else synthetic; imagefolder adds settings of its own",
        choices=("auto", "cifar10", "imagefolder", "synthetic", "fake"),
    )
    data_dir: str = free_setting("data", "where the images are, or are downloaded to")
    synthetic_samples: int = setting(8192, "training images in dataset=synthetic", low=1)
    image_size: int = setting(0, "pixels per side of the input; 0: as --weights expect, or 32")
    augment: str = setting(
        "crop_flip",
        "crop_flip: pad, crop, flip; resized_crop: ImageNet's (for dataset=imagefolder)",
        choices=("none", "crop_flip", "resized_crop"),
    )
    loader: str = free_setting(
        "auto",
        "device: keep the dataset on the training device; auto: if it fits (same batches)",
        choices=("auto", "workers", "device"),
    )
    num_workers: int = free_setting(-1, "loader processes per rank; -1: automatic", low=-1)
    num_threads: int = free_setting(0, "CPU threads (changes rounding); 0: automatic")
    model: str = setting(
        "resnet18", "torchvision's, resnet20, resnet9, vit_tiny; or with _cifar, _gn"
    )
    weights: str = setting("", "pretrained: torchvision's name (DEFAULT), or a file; adds --freeze")
    sync_bn: bool = setting(True, "BatchNorm statistics over all ranks; off: per rank")
    dtype: str = setting(
        "float32",
        "of the model (changes numerics). On CUDA, float32: convolutions in TF32, as is PyTorch's "
        "default; tf32: matrix products, too; ieee: neither",
        choices=("float32", "tf32", "ieee", "float64"),
    )
    cudnn_benchmark: bool = setting(
        False, "cuDNN times its algorithms and takes the fastest: not the same bits in each run"
    )
    compile: str = setting(
        "none",
        "mode of torch.compile (changes rounding)",
        choices=("none", "default", "reduce-overhead", "max-autotune"),
    )
    epochs: int = setting(10, "passes over the training set", low=1)
    global_batch_size: int = setting(
        256, "samples per step, over all ranks (or --per-process-batch-size)", low=1
    )
    optimizer: str = setting(
        "sgd", "adam, adamw: set lr <= 1e-3", choices=("sgd", "sgd_nesterov", "adam", "adamw")
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
    output_dir: str = free_setting("", "checkpoints and metrics; empty: runs/<script>")
    seed: int = setting(0, "seed of weights, sample order and augmentation")
    device: str = free_setting("auto", "auto, cpu, cuda, or one device such as cuda:0")
    timeout: float = free_setting(300.0, "seconds before a waiting collective fails", low=1)
    resume: str = free_setting(
        "auto",
        "always: fail if there is no checkpoint; never: move old files to output_dir/previous-TIME",
        choices=("auto", "always", "never"),
    )
    allow_config_change: bool = free_setting(False, "resume with changed settings")
    save_steps: int = free_setting(0, "also save every N steps; 0: never")
    save_minutes: float = free_setting(
        -1, "also save every N minutes and on SIGTERM; 0: neither; -1: automatic", low=-1
    )
    save_sharded: bool = free_setting(False, "each rank saves its own part of the tensors")
    save_epochs: int = free_setting(
        1, "save after every N epochs, the last one, and each that is the best so far", low=1
    )
    keep_last: int = free_setting(2, "number of epoch checkpoints to keep", low=1)
    check_replicas_every: int = free_setting(
        0, "steps between comparisons of ranks; 0: only at saves; -1: never", low=-1
    )
    audit: bool = free_setting(False, "report which samples each epoch trained on")

    @property
    def peak_lr(self):
        """The learning rate after the warmup."""
        return self.lr

    @property
    def precision(self):
        """The precision of the computation, for people."""
        return f"{self.dtype}{' (on CUDA: TF32 convolutions)' * (self.dtype == 'float32')}"

    @property
    def torch_dtype(self):
        """The torch.dtype of weights and activations."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    def resolved(self):
        """This config with all open values filled in. Raises ConfigError if values contradict."""
        auto = "synthetic" if find_spec("utils.array_data") else "fake"
        if (Path(self.data_dir) / "cifar-10-batches-py").is_dir():
            auto = "cifar10"
        minutes = 10.0 if find_spec("utils.preemption") else 0.0
        return replace(
            self,
            dataset=auto if self.dataset == "auto" else self.dataset,
            image_size=self.image_size or 32,
            save_minutes=minutes if self.save_minutes < 0 else self.save_minutes,
            output_dir=self.output_dir or str(Path("runs") / (Path(sys.argv[0]).stem or "python")),
        )

    def fixed_on_resume(self):
        """{name: value} of the settings that decide which weights a run reaches."""
        return {f.name: getattr(self, f.name) for f in fields(self) if not f.metadata["free"]}

    def dump(self):
        """The resolved config as YAML text."""
        return yaml.safe_dump(vars(self), sort_keys=False)


@report_errors
def load_config(kind=Config, argv=None):
    """A checked and resolved `kind`, from its defaults, then --config FILE, then the flags."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("config", "dataset", "weights", "per_process_batch_size", *TOLERANCE):
        early.add_argument(_flag(name), nargs="?", const=name in TOLERANCE)
    early_texts = {k: text for k, text in vars(early.parse_known_args(argv)[0]).items() if text}
    texts = _read_yaml(early_texts["config"]) if "config" in early_texts else {}
    kind = _with_options(kind, {name: text for name, (text, _) in texts.items()} | early_texts)
    flags = vars(_parser(kind).parse_args(argv)).items()
    texts |= {name: (text, _flag(name)) for name, text in flags if name != "config"}
    known = {f.name: f for f in fields(kind)}
    for name, (_, where) in texts.items():
        if name not in known:
            raise ConfigError(f"{where}: unknown key {name!r}{_closest(name, known)}")
    values = {name: _cast(known[name], text, where) for name, (text, where) in texts.items()}
    return kind(**values).resolved()


def _with_options(kind, texts):
    """`kind` with the settings of the optional modules that these values select."""
    options = []
    if texts.get("dataset") == "imagefolder":
        with option("--dataset imagefolder"):
            from utils.image_folder import Settings
        options.append(Settings)
    if texts.get("weights"):
        with option("--weights"):
            from utils.weights import Settings
        options.append(Settings)
    if "per_process_batch_size" in texts:
        with option("--per-process-batch-size"):
            from utils.per_process import Settings
        options.append(Settings)
    if texts.keys() & TOLERANCE:
        with option("--max-skipped-steps, --save-errors and --verify-saves"):
            from utils.tolerance import Settings
        options.append(Settings)
    return dataclass(frozen=True)(type("Config", (*options, kind), {})) if options else kind


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        unknown = next((w for w in message.split() if w.startswith("--")), "").split("=")[0]
        raise ConfigError(f"{message}{_closest(unknown, self._option_string_actions)}")


def _flag(name):
    return "--" + name.replace("_", "-")


def _parser(kind):
    parser = _Parser(allow_abbrev=False, argument_default=argparse.SUPPRESS, epilog=MORE)
    parser.add_argument("--config", metavar="FILE", help="YAML with any of the names below")
    for f in fields(kind):
        text = f"{f.metadata['help']} (default: {f.default})".replace("%", "%%")
        if f.type is bool:
            parser.add_argument(_flag(f.name), action=argparse.BooleanOptionalAction, help=text)
        else:
            metavar = "|".join(f.metadata["choices"] or [f.type.__name__.upper()])
            parser.add_argument(_flag(f.name), metavar=metavar, help=text)
    return parser


def _closest(name, names):
    close = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {close[0]!r}?)" if close and name not in names else ""


def _read_yaml(path):
    """Read a YAML mapping. Returns {key: (text, "file:line")}."""
    try:
        node = yaml.compose(Path(path).read_text(encoding="utf-8"), yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"cannot read --config {path} as YAML: {text}") from None
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path} must contain a mapping, lines of 'key: value'")
    texts = {}
    for key, value in node.value:
        where = f"{path}:{key.start_mark.line + 1}"
        if key.value in texts or not isinstance(value, yaml.ScalarNode):
            raise ConfigError(f"{where}: {key.value} must have one value and appear once")
        texts[key.value] = "" if value.tag.endswith("null") else value.value, where
    return texts


def _cast(f, text, where):
    """Convert the text of one value to the type of field `f`, and check it.

    This reads the text because PyYAML reads `1e-3` as a string and a bare `no` as False.
    """
    low, choices = f.metadata["low"], f.metadata["choices"]
    try:
        if f.type is bool:
            return text if isinstance(text, bool) else yaml.SafeLoader.bool_values[text.lower()]
        value = f.type(os.path.expanduser(text))
        if f.type is float and not math.isfinite(value):
            raise ValueError
    except (KeyError, ValueError):
        kind = {bool: "true or false", int: "a whole number", float: "a number"}[f.type]
        raise ConfigError(f"{where}: {f.name} must be {kind}, not {text!r}") from None
    if choices and value not in choices:
        raise ConfigError(f"{where}: {f.name} must be one of {', '.join(choices)}, not {value!r}")
    if f.type is not str and not low <= value < 2**32:
        raise ConfigError(f"{where}: {f.name} must be at least {low} and below 2**32, not {value}")
    return value
