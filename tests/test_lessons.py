"""The scripts and modules keep their design: short lessons, small modules, no rank branches."""

import ast
import re

import pytest

from tools.closure import size
from tools.lessons import LADDER, ROOT, changed, code

SCRIPTS = sorted(path.name for path in ROOT.glob("train_*.py"))
UTILS = sorted(path for path in (ROOT / "utils").glob("*.py") if path.name != "__init__.py")
TOOLS = sorted(path for path in (ROOT / "tools").rglob("*.py") if path.name != "__init__.py")


def test_ladder_has_every_script():
    assert {rung.script for rung in LADDER} == set(SCRIPTS)


@pytest.mark.parametrize("rung", [r for r in LADDER if r.parent], ids=lambda r: r.script)
def test_lesson_stays_within_budget(rung):
    assert 0 < changed(rung) <= rung.budget


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_reads_from_top_to_bottom(script):
    text = "\n".join(code(script))
    assert 80 <= len((ROOT / script).read_text().splitlines()) <= 110
    assert not re.search(r"\.cuda\(|import train_|\bargs\b|\bgpu_id\b|\bnet\b", text)
    assert "images.to(" not in text and "labels.to(device" not in text  # the loader has done it
    branches = re.findall(r"^ *(?:el)?if (.*):", text, re.MULTILINE)
    assert set(branches) <= {"cfg.clip_norm", "cfg.sync_bn", '__name__ == "__main__"'}


@pytest.mark.parametrize("rung", LADDER, ids=lambda r: r.script)
def test_script_loads_the_config_of_its_rung(rung):
    (argument,) = set(re.findall(r"load_config\((?:\w+\.)?(\w*)\)", "\n".join(code(rung.script))))
    assert argument == ("" if rung.config_class().__name__ == "Config" else argument)
    assert argument in ("", rung.config_class().__name__)


@pytest.mark.parametrize("path", UTILS, ids=lambda p: p.stem)
def test_modules_and_functions_are_small(path):
    assert size(path).lines <= (360 if path.stem == "image_folder" else 260)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno + 1 <= 45, node.name


@pytest.mark.parametrize("path", [*UTILS, *TOOLS], ids=lambda p: p.stem)
def test_public_functions_have_docstrings(path):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            is_short = isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno <= 3
            assert ast.get_docstring(node) or is_short or node.name == "main", node.name


@pytest.mark.parametrize("path", [*map(ROOT.joinpath, SCRIPTS), *UTILS], ids=lambda p: p.stem)
def test_calls_have_no_positional_booleans(path):
    """In a script, none at all; in a module, PyTorch's methods may take them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            of_torch = isinstance(node.func, ast.Attribute) and path.parent.name == "utils"
            values = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            has_boolean = any(isinstance(value, bool) for value in values)
            is_setting = getattr(node.func, "id", "") in ("setting", "free_setting")
            assert not has_boolean or is_setting or of_torch, ast.unparse(node)


def test_no_module_imports_a_tool_or_a_script():
    for path in [*map(ROOT.joinpath, SCRIPTS), *UTILS]:
        assert not re.search(r"^ *(from|import) (tools|tests|train_)", path.read_text(), re.M)


def test_threads_are_set_in_one_place():
    calls = {path.name for path in UTILS if "set_num_threads(" in path.read_text()}
    assert calls == {"runtime.py"}


PAGES = [path for path in ROOT.rglob("*.md") if not path.relative_to(ROOT).parts[0].startswith(".")]
CODE = [path for folder in ("utils", "tools", "tests") for path in (ROOT / folder).rglob("*.py")]
TEXTS = [*PAGES, *CODE, *ROOT.glob("*.py"), *ROOT.glob("configs/*.yaml"), ROOT / "Makefile"]

# What a native reader stumbles over, written so that this file does not contain it.
UNUSUAL = [
    r"\b(one|an?) (row|case|process|rank|number|file|line|step|epoch|node|folder|image) an? \w+",
    r"\b[m]end(s|ed|ing)?\b",
    r"\b[a]new\b",
    r"\b[t]old\b",
    r"\b[s]aid\b",
    r"made-[u]p",
    r"beside the [t]raining",
    r"the ranks [r]est\b",
    r"equals [s]traight",
]


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_english_is_plain(path):
    text = " ".join(path.read_text().split())
    for pattern in UNUSUAL:
        match = re.search(pattern, text, re.IGNORECASE)
        assert not match, text[max(0, match.start() - 40) : match.end() + 40]


@pytest.mark.parametrize(
    "path", [*map(ROOT.joinpath, SCRIPTS), *UTILS, *TOOLS], ids=lambda p: p.stem
)
def test_variables_are_named_after_their_values(path):
    vague = {"how", "found", "own", "wanted", "given", "gpu_id", "net", "ddp_rank"}
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.id] if isinstance(node, ast.Name) else []
        names += [node.arg] if isinstance(node, ast.arg) else []
        assert not vague & set(names), f"line {node.lineno}: {names}"
