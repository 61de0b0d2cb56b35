"""BaseSettings from defaults, a YAML file and flags. Needs only PyYAML and errors.py.

Each field is a YAML key, a flag, an attribute, and a line of --help. Every mistake ends the program
with exit code 2 and one line that names the file, the key and the closest known name.
"""

import argparse
import difflib
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from inspect import get_annotations
from pathlib import Path
from typing import Any, Self, TypeVar, get_type_hints

import yaml

from utils.errors import UserError

# What other trainers call a setting.
OTHER_NAMES = {
    "batch_size": "global_batch_size",
    "learning_rate": "lr",
    "num_epochs": "epochs",
    "max_grad_norm": "clip_norm",
    "workers": "num_workers",
    "wd": "weight_decay",
}


class ConfigError(UserError):
    """A mistake in a config file or a flag."""

    exit_code = 2


def setting(
    default: bool | float | str,
    help: str,
    choices: Sequence[str] | None = None,
    low: float | None = None,
    free: bool | None = None,
) -> Any:
    """A field of a class of settings. low: the smallest number that is allowed, 0 by default. free:
    the value may change when a run is resumed, because the weights that the run reaches do not
    depend on it. A subclass may change the default alone: `lr: float = 0.01`."""
    return field(default=default, metadata=dict(help=help, choices=choices, low=low, free=free))


def free_setting(
    default: bool | float | str,
    help: str,
    choices: Sequence[str] | None = None,
    low: float | None = None,
) -> Any:
    """A setting that may change when a run is resumed."""
    return setting(default, help, choices, low, free=True)


@dataclass(frozen=True)
class BaseSettings:
    """Base of all classes of settings. Its subclasses can be combined by multiple inheritance."""

    def resolved(self) -> Self:
        """These settings with all open values filled in. Subclasses extend this, and call it
        through super(). Raises ConfigError if values contradict each other."""
        return self

    def warnings(self, device: Any) -> list[str]:
        """Lines for whoever starts a run on the torch.device: what works, but hardly as intended.
        Subclasses extend this list."""
        return []


S = TypeVar("S", bound=BaseSettings)


def rules_of(kind: type, name: str) -> dict[str, Any]:
    """{"help", "choices", "low", "free"} of a field: see setting()."""
    rules = {"help": None, "choices": None, "low": 0, "free": False}
    for cls in reversed(kind.__mro__):
        if name in get_annotations(cls):
            own = vars(cls)["__dataclass_fields__"][name].metadata
            rules |= {key: own[key] for key in rules if own.get(key) is not None}
    return rules


def parse_settings(kind: type[S], argv: Sequence[str] | None = None) -> S:
    """An instance of `kind` from its defaults, then --config FILE, then the flags in `argv`.

    kind: a dataclass whose fields are made by setting(). argv: default: sys.argv[1:].
    Raises ConfigError.
    """
    types = get_type_hints(kind)  # field.type may be a string: from __future__ import annotations
    _check_fields(kind, types)
    parser = _build_parser(kind, types)
    flags, unknown = parser.parse_known_args(argv)
    flags = vars(flags)
    if unknown:
        raise ConfigError(f"unknown argument {unknown[0]}{_hint(unknown[0], kind, argv)}")
    config_file = flags.pop("config", None)
    texts = _read_yaml(config_file) if config_file else {}
    for name, text in flags.items():
        texts[name] = (text, _flag(name))
    known = {f.name: f for f in fields(kind)}
    values = {}
    for name, (text, where) in texts.items():
        if name not in known:
            raise ConfigError(f"{where}: unknown key {name!r}{_closest(name, known)}")
        values[name] = _convert(name, types[name], rules_of(kind, name), text, where)
    return kind(**values)


def _check_fields(kind, types):
    """Raise ConfigError for what a class of settings declares, but cannot be set."""
    for cls in kind.__mro__:
        if get_annotations(cls) and "__dataclass_params__" not in vars(cls):
            raise ConfigError(f"the class {cls.__name__} needs the line @dataclass(frozen=True)")
        for name in sorted(types.keys() & vars(cls).keys() - get_annotations(cls).keys()):
            raise ConfigError(
                f"{name} of the class {cls.__name__} needs its type, or it sets nothing: "
                f"{name}: {types[name].__name__} = {vars(cls)[name]!r}"
            )
    for f in fields(kind):
        known_type = types[f.name] in (bool, int, float, str)
        if not known_type or rules_of(kind, f.name)["help"] is None:
            where = _declaring_class(kind, f.name).__name__
            raise ConfigError(
                f"{f.name} of the class {where} must be declared as a setting of type bool, int, "
                f"float or str: {f.name}: int = setting(1, 'what it is'), for example"
            )


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ConfigError(message)

    def print_help(self, file=None):
        if os.environ.get("RANK", "0") == "0":
            super().print_help(file)


def _flag(name):
    return "--" + name.replace("_", "-")


def _build_parser(kind, types):
    usage = "%(prog)s [--config FILE] [--SETTING VALUE ...]"
    example = "Example: %(prog)s --epochs 3 --lr 0.05 --no-sync-bn"
    parser = _Parser(
        usage=usage, description=example, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    parser.add_argument("--config", metavar="FILE", help="YAML with any of the names below")
    groups = {}
    for owner in kind.__mro__:  # from the script's and the task's to the most general ones
        groups[owner] = parser.add_argument_group(_title(owner))
    for f in fields(kind):
        group, rules = groups[_declaring_class(kind, f.name)], rules_of(kind, f.name)
        default = f.default
        if types[f.name] is bool:
            default = "on" if default else "off"
        text = rules["help"] + (f" (default: {default})" if default != "" else "")
        text = text.replace("%", "%%")
        if types[f.name] is bool:
            group.add_argument(_flag(f.name), action=argparse.BooleanOptionalAction, help=text)
        else:
            choices = rules["choices"] or [types[f.name].__name__.upper()]
            metavar = "|".join(map(str, choices))
            group.add_argument(_flag(f.name), metavar=metavar, help=text)
    return parser


def _declaring_class(kind, name):
    """The class in which a field appears first; subclasses may only change its default."""
    return [cls for cls in kind.__mro__ if name in get_annotations(cls)][-1]


def _title(cls):
    """The first line of its docstring; a dataclass without one has its signature there."""
    doc = cls.__doc__ or cls.__name__
    if doc.startswith(f"{cls.__name__}("):
        doc = cls.__name__
    return doc.partition("\n")[0].rstrip(".")


def _hint(text, kind, argv):
    """What an unknown argument may have been meant to be, for the end of a message."""
    argv = sys.argv[1:] if argv is None else list(argv)
    flag = argv[argv.index(text) - 1]
    if not text.startswith("-") and flag.startswith("--"):  # such as --sync-bn False
        return f": pass {flag} or {flag.replace('--', '--no-', 1)}, without a value"
    name = text.partition("=")[0].lstrip("-").replace("-", "_")
    project = Path(__file__).parents[1]
    for path in sorted([*project.glob("tasks/**/*.py"), *project.glob("utils/rungs/*.py")]):
        if re.search(rf"\n    {name}: \w+ = \w*setting\(", path.read_text(encoding="utf-8")):
            return f": it is a setting of {path.relative_to(project)}, which is not in use here"
    known = ["config", *(f.name for f in fields(kind))]
    return _closest(_flag(OTHER_NAMES.get(name, name)), map(_flag, known))


def _closest(name, names):
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _read_yaml(path):
    """Read a YAML mapping. Returns {key: (text, "file:line")}."""
    try:
        node = yaml.compose(Path(path).read_text(encoding="utf-8"), yaml.SafeLoader)
    except FileNotFoundError:
        known = ", ".join(sorted(map(str, Path("configs").glob("*.yaml"))))
        raise ConfigError(
            f"--config {path}: there is no such file; there are {known or 'none'}"
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"cannot read --config {path} as YAML: {text}") from None
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path} must contain a mapping, lines of 'key: value'")
    texts = {}
    for key, value in node.value:
        where = f"{path}:{key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{where}: a key must be a name")
        if key.value in texts or not isinstance(value, yaml.ScalarNode):
            raise ConfigError(f"{where}: {key.value} must have one value and appear once")
        text = value.value
        if value.tag.endswith("null"):
            text = ""
        texts[key.value] = (text, where)
    return texts


def _convert(name, kind, rules, text, where):
    """Convert the text of one value to the type `kind`, and check it. rules: see rules_of().

    This reads the text because PyYAML reads `1e-3` as a string and a bare `no` as False.
    """
    if isinstance(text, bool):  # --flag or --no-flag
        return text
    low, choices = rules["low"], rules["choices"]
    try:
        if kind is bool:
            return yaml.SafeLoader.bool_values[text.lower()]
        value = kind(os.path.expanduser(text))
        if kind is float and not math.isfinite(value):
            raise ValueError
    except (KeyError, ValueError):
        expected = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise ConfigError(f"{where}: {name} must be {expected}, not {text!r}") from None
    if choices and value not in choices:
        known = ", ".join(map(str, choices))
        raise ConfigError(f"{where}: {name} must be one of {known}, not {value!r}")
    if kind is not str and not low <= value < 2**32:
        raise ConfigError(f"{where}: {name} must be at least {low} and below 2**32, not {value}")
    return value
