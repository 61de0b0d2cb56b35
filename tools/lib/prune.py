"""Leave guards out of a copy: their lines in the script, their files, and the settings that only
they read.

A guard is a module of utils/guards. Two more can be left out: the check of the task, and the
options, with what their settings add.
"""

import ast
import re
from typing import NamedTuple

from tools.lib.closure import purpose
from tools.lib.ladder import ROOT, RUNGS

SETTINGS = "utils/config.py"
BASE_CLASS = "utils/guards/__init__.py"
CLASS_OF_OPTIONS = re.compile(r"@dataclass.*\nclass Watching\(.*\n(?:(?:    .*)?\n)+")


class Guard(NamedTuple):
    """What a copy can be without."""

    path: str
    purpose: str


def _guard(path):
    return Guard(path.relative_to(ROOT).as_posix(), purpose(path))


GUARDS = {path.stem: _guard(path) for path in sorted((ROOT / "utils/guards").glob("[a-z]*.py"))}
RENAMED = {"run_folder": "lock", "watchdog": "hang"}  # in records of older copies
GUARDS["contract"] = _guard(ROOT / "utils" / "contract.py")
GUARDS["options"] = _guard(ROOT / "utils" / "options" / "__init__.py")


def without(files, names):
    """A copy, {path: bytes}, without the guards of these names."""
    texts = {path: text.decode() for path, text in files.items()}
    removed = [texts.pop(GUARDS[name].path, "") for name in names]
    for script in RUNGS.keys() & texts.keys():
        texts[script] = _script_without(texts[script], names)
    if "options" in names and SETTINGS in texts:
        texts[SETTINGS] = CLASS_OF_OPTIONS.sub("", texts[SETTINGS]).replace(", Watching)", ")")
    if not any("utils.guards import" in text for text in texts.values()):
        texts.pop(BASE_CLASS, None)
    code = [text for path, text in texts.items() if path.endswith(".py")]
    for setting in _attributes(removed) - _attributes(code):
        for path in (p for p in texts if p == SETTINGS or p.endswith(".yaml")):
            texts[path] = _without_setting(texts[path], setting)
    return {path: text.encode() for path, text in texts.items()}


def _script_without(text, names):
    for name in names:
        text = re.sub(rf"^(from utils\.guards import .*?)\b{name}\b(, )?", r"\1", text, flags=re.M)
        text = re.sub(rf"^ +{name}\.\w+\(.*\),.*\n", "", text, flags=re.M)
    text = re.sub(r"^(from utils\.guards import .*), $", r"\1", text, flags=re.M)
    text = re.sub(r"^from utils\.guards import \n", "", text, flags=re.M)
    if "contract" in names:
        text = re.sub(r"^( *check_task\(|from utils\.contract ).*\n", "", text, flags=re.M)
    if "options" in names:
        text = re.sub(r"^( *\*option_guards\(|from utils\.options ).*\n", "", text, flags=re.M)
    return re.sub(r"^    guards = \[.*\n    \]\n", "    guards = []\n", text, flags=re.M)


def _attributes(texts):
    nodes = (node for text in texts for node in ast.walk(ast.parse(text)))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def _without_setting(text, name):
    """A file without a setting, as a field of a class on one line or several, or a key of YAML."""
    text = re.sub(rf"^    {name}: \w+ = .*(?<!\()\n", "", text, flags=re.M)
    text = re.sub(rf"^    {name}: \w+ = .*\(\n(?:        .*\n)+    \)\n", "", text, flags=re.M)
    return re.sub(rf"^{name}:.*\n", "", text, flags=re.M)
