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
from dataclasses import fields, replace
from pathlib import Path

import yaml

from utils.distributed import UserError
from utils.settings import Config
from utils.weights import find_weights


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
    if cfg.freeze != "none" and not cfg.weights:
        raise ConfigError("freeze=backbone would train on a random backbone: pass --weights")
    if cfg.val_fraction >= 1:
        raise ConfigError(f"val_fraction={cfg.val_fraction} leaves nothing to train on")
    try:
        own_size = find_weights(cfg.model, cfg.weights).inputs.get("image_size", 32)
    except UserError as error:
        raise ConfigError(str(error)) from None
    if cfg.val_fraction and cfg.dataset != "imagefolder":
        raise ConfigError(f"val_fraction is for dataset=imagefolder, not {cfg.dataset}")
    cfg = replace(cfg, image_size=cfg.image_size or own_size)
    if cfg.image_size < 8:
        raise ConfigError(f"image_size must be 0 or at least 8, not {cfg.image_size}")
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
