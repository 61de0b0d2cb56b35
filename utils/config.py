"""One flat, frozen Config: each field is a YAML key, a flag, an attribute and a --help line.

Order of precedence: the defaults below, then the YAML file (`--config FILE`), then the flags.
Every mistake ends the program with exit code 2 and one line that names the file, the key and the
nearest name, before any data is read or a process group is joined, once a node and not once a rank.
"""

import argparse
import difflib
import math
import os
import sys
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import yaml


def _field(default, help, choices=None, low=None, free=False):
    """A Config field. `free`: may change on resume, because it cannot change the trajectory."""
    return field(default=default, metadata=dict(help=help, choices=choices, low=low, free=free))


@dataclass(frozen=True)
class Config:
    """What to train and how. Facts of the running process (rank, device index) are not in here."""

    dataset: str = _field(
        "auto",
        "auto is cifar10 where data_dir holds it and synthetic elsewhere; cifar10 is downloaded "
        "if need be; imagefolder reads data_dir/{train,val,test} or {trainset,valset,testset}",
        choices=("auto", "cifar10", "imagefolder", "synthetic"),
    )
    data_dir: str = _field("data", "where the images are, or are downloaded to", free=True)
    synthetic_samples: int = _field(8192, "training images of the synthetic set", low=1)
    image_size: int = _field(32, "height and width in pixels that the model sees", low=8)
    augment: str = _field(
        "crop_flip",
        "crop_flip pads by an eighth, crops and mirrors; resized_crop is ImageNet's "
        "RandomResizedCrop and mirrors (loader=workers only)",
        choices=("none", "crop_flip", "resized_crop"),
    )
    loader: str = _field(
        "auto",
        "workers: a DataLoader; device: the whole set as uint8 on the training device, augmented "
        "there by the batch; auto: device where the set fits. All give the same batches",
        choices=("auto", "workers", "device"),
        free=True,
    )
    num_workers: int = _field(-1, "worker processes a rank; -1: by the cores", low=-1, free=True)
    on_bad_sample: str = _field(
        "error",
        "an image that cannot be decoded: stop and name it, or check every file before the first "
        "epoch and leave the bad ones out on all ranks alike",
        choices=("error", "skip"),
    )
    cache_dir: str = _field(
        "", "where decoded image folders are kept; empty: data_dir/.cache", free=True
    )

    model: str = _field("resnet18", "any torchvision classification model, by name; or resnet20")
    stem: str = _field(
        "imagenet",
        "cifar: a 3x3 first convolution of stride 1 and no max-pooling, for small images (ResNets)",
        choices=("imagenet", "cifar"),
    )
    norm: str = _field(
        "batch",
        "group puts GroupNorm in place of BatchNorm, so that no sample depends on the others of "
        "its batch",
        choices=("batch", "group"),
    )
    sync_bn: bool = _field(True, "BatchNorm statistics over all ranks; off: of each rank alone")
    dtype: str = _field(
        "float32",
        "of weights and activations; float64 is for proofs",
        choices=("float32", "float64"),
    )
    amp_dtype: str = _field(
        "bfloat16",
        "train_ddp_amp.py only: autocast's precision (changes numerics); float16 adds a GradScaler",
        choices=("bfloat16", "float16"),
    )

    micro_batches: int = _field(
        1,
        "parts that a process computes its batch in: train_ddp_accum.py one after another to save "
        "memory, train_mp.py and train_ddp_mp.py to keep all devices busy. Changes numerics where "
        "the model has BatchNorm, whose statistics are a part's (--norm group has none)",
        low=1,
    )
    devices: str = _field(
        "auto",
        "train_mp.py and train_ddp_mp.py: where a process has the stages of its model, such as "
        "cuda:0,cuda:1 or cpu,cpu; cuda,cuda: the next two of this node, process by process; "
        "auto: an equal share of the visible GPUs, or cpu,cpu",
        free=True,
    )
    split: str = _field(
        "",
        "train_mp.py and train_ddp_mp.py: layers a stage, such as 6,4; empty: about as many "
        "parameters in each",
        free=True,
    )
    nproc: int = _field(
        0, "train_ddp_spawn.py: processes to start; 0: one a visible GPU", low=0, free=True
    )
    fsdp_dtype: str = _field(
        "none",
        "train_fsdp.py: gather parameters and compute in bfloat16 (changes numerics); gradients "
        "are summed in float32, weights stay as they are",
        choices=("none", "bfloat16"),
    )
    fsdp_offload: bool = _field(
        False, "train_fsdp.py: keep the shards in the CPU's memory", free=True
    )

    epochs: int = _field(10, "passes over the training set", low=1)
    global_batch_size: int = _field(256, "samples an optimizer step, over all ranks", low=1)
    per_process_batch_size: int = _field(
        0,
        "0: off. Otherwise the tutorials' convention instead of global_batch_size: each process "
        "takes this many, so the updates change with the number of processes",
        low=0,
    )
    lr_scaling: str = _field(
        "linear",
        "with per_process_batch_size, linear multiplies lr by the number of processes "
        "(Goyal et al. 2017, arXiv 1706.02677)",
        choices=("linear", "none"),
    )
    lr: float = _field(0.1, "peak learning rate of SGD", low=0.0)
    momentum: float = _field(0.9, "of SGD", low=0.0)
    nesterov: bool = _field(False, "Nesterov's momentum")
    weight_decay: float = _field(5e-4, "of SGD, on all parameters", low=0.0)
    warmup_epochs: float = _field(1.0, "epochs of linear warm-up from 0 to lr", low=0.0)
    lr_schedule: str = _field(
        "cosine", "after the warm-up, step by step", choices=("cosine", "linear", "constant")
    )
    clip_norm: float = _field(0.0, "largest global L2 norm of the gradient; 0: no clipping", low=0)

    output_dir: str = _field(
        "", "checkpoints and metrics; empty: runs/<name of the script>", free=True
    )
    seed: int = _field(0, "of the weights, the order of the samples and the augmentation", low=0)
    device: str = _field("auto", "auto, cpu, cuda, or one device such as cuda:0", free=True)
    timeout: float = _field(
        300.0, "seconds that a collective waits for the other ranks", low=1, free=True
    )
    resume: str = _field(
        "auto",
        "auto: continue the run in output_dir if there is one; always: it is an error if there is "
        "none; never: start anew, the old files move to output_dir/previous-N",
        choices=("auto", "always", "never"),
        free=True,
    )
    allow_config_change: bool = _field(
        False, "resume although a setting differs that changes the trajectory", free=True
    )
    save_steps: int = _field(
        0, "save also within an epoch, after every so many steps; 0: off", low=0, free=True
    )
    save_minutes: float = _field(
        10.0, "save also within an epoch, every so many minutes; 0: off", low=0.0, free=True
    )
    save_sharded: bool = _field(
        False,
        "each rank writes its own part, through torch.distributed.checkpoint: for models too large "
        "for one process. Every script reads both kinds",
        free=True,
    )
    check_replicas_every: int = _field(
        0,
        "steps between two checks that all ranks hold the same parameters, buffers and optimizer "
        "state; 0: at every epoch's end only",
        low=0,
        free=True,
    )
    audit: bool = _field(
        False, "state at every epoch's end which samples were trained, and how often", free=True
    )
    keep_last: int = _field(
        2, "epoch checkpoints kept beside last.pt and best.pt", low=1, free=True
    )

    def global_batch(self, world_size):
        """Samples an optimizer step, over all `world_size` ranks."""
        return self.per_process_batch_size * world_size or self.global_batch_size

    def peak_lr(self, world_size):
        """The learning rate after the warm-up, by the linear scaling rule where it is in force."""
        linear = self.per_process_batch_size and self.lr_scaling == "linear"
        return self.lr * world_size if linear else self.lr

    def must_match(self):
        """The settings that decide which weights a run reaches: these bind a resumed run."""
        if self.allow_config_change:
            return {}
        return {f.name: getattr(self, f.name) for f in fields(self) if not f.metadata["free"]}

    def dump(self):
        """The resolved config as YAML text."""
        return yaml.safe_dump(vars(self), sort_keys=False)


class ConfigError(Exception):
    """A mistake in a file or a flag."""


def load_config(argv=None):
    """Defaults, then `--config FILE`, then flags -> Config. Exits with code 2 on a mistake."""
    try:
        flags = vars(_parser().parse_args(argv))
        path = flags.pop("config", None)
        values = _read_yaml(path) if path else {}
        values |= {key: _cast(key, text, _flag(key)) for key, text in flags.items()}
        return _resolve(Config(**values))
    except ConfigError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # every rank sees the same mistake
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _resolve(cfg):
    """Settings that contradict each other are refused, the open ones are filled in."""
    if cfg.augment == "resized_crop" and cfg.loader == "device":
        raise ConfigError("augment=resized_crop needs loader=workers: it crops the original images")
    if cfg.dataset == "auto":
        found = (Path(cfg.data_dir) / "cifar-10-batches-py").is_dir()
        cfg = replace(cfg, dataset="cifar10" if found else "synthetic")
    if not cfg.output_dir:
        cfg = replace(cfg, output_dir=str(Path("runs") / (Path(sys.argv[0]).stem or "python")))
    return cfg


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        unknown = next((w for w in message.split() if w.startswith("--")), "").split("=")[0]
        raise ConfigError(f"{message}{_nearest(unknown, self._option_string_actions)}")


def _flag(key):
    return "--" + key.replace("_", "-")


def _parser():
    parser = _Parser(allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE", help="YAML with any of the names below")
    for f in fields(Config):
        default = f"default: {f.default!r}".replace("'", "")
        text = f"{f.metadata['help']} ({default})".replace("%", "%%")
        if f.type is bool:
            parser.add_argument(_flag(f.name), action=argparse.BooleanOptionalAction, help=text)
        else:
            choices = f.metadata["choices"]
            metavar = "|".join(choices) if choices else f.type.__name__.upper()
            parser.add_argument(_flag(f.name), metavar=metavar, help=text)
    return parser


def _nearest(name, names):
    close = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {close[0]!r}?)" if close and name not in names else ""


def _read_yaml(path):
    """A YAML mapping -> {key: value}, each key known, given once and of the right type."""
    try:
        node = yaml.compose(Path(path).read_text(encoding="utf-8"), yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read --config {path}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path} must hold a mapping, lines of 'key: value'")
    values, names = {}, [f.name for f in fields(Config)]
    for key_node, value_node in node.value:
        key, where = key_node.value, f"{path}:{key_node.start_mark.line + 1}"
        if key not in names:
            raise ConfigError(f"{where}: unknown key {key!r}{_nearest(str(key), names)}")
        if key in values:
            raise ConfigError(f"{where}: {key!r} is given twice")
        if not isinstance(value_node, yaml.ScalarNode):
            raise ConfigError(f"{where}: {key} takes one value, not a list or a mapping")
        values[key] = _cast(key, value_node.value, where)
    return values


def _cast(key, text, where):
    """The text of one value -> the type of its field, checked.

    From the text, because PyYAML reads `1e-3` as a string and a bare `no` as False.
    """
    f = next(f for f in fields(Config) if f.name == key)
    low, choices = f.metadata["low"], f.metadata["choices"]
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    try:
        if f.type is bool:
            return text if isinstance(text, bool) else words[text.lower()]
        value = f.type(text)
        if f.type is float and not math.isfinite(value):
            raise ValueError
    except (KeyError, ValueError):
        kind = {bool: "true or false", int: "a whole number", float: "a number"}[f.type]
        raise ConfigError(f"{where}: {key} takes {kind}, not {text!r}") from None
    if choices and value not in choices:
        near = _nearest(value, choices)
        raise ConfigError(f"{where}: {key} is one of {', '.join(choices)}, not {value!r}{near}")
    if low is not None and value < low:
        raise ConfigError(f"{where}: {key} must be at least {low}, not {value}")
    return value
