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
    assert len((ROOT / script).read_text().splitlines()) <= 110
    assert not re.search(r"\.cuda\(|import train_|\bargs\b|\bgpu_id\b|\bnet\b", text)
    branches = re.findall(r"^ *(?:el)?if (.*):", text, re.MULTILINE)
    assert set(branches) <= {"cfg.clip_norm", "cfg.sync_bn", '__name__ == "__main__"'}


@pytest.mark.parametrize("rung", LADDER, ids=lambda r: r.script)
def test_script_loads_the_config_of_its_rung(rung):
    (argument,) = set(re.findall(r"load_config\((\w*)\)", "\n".join(code(rung.script))))
    assert argument == ("" if rung.config_class().__name__ == "Config" else argument)
    assert argument in ("", rung.config_class().__name__)


@pytest.mark.parametrize("path", UTILS, ids=lambda p: p.stem)
def test_modules_and_functions_are_small(path):
    assert size(path).lines <= (360 if path.stem == "image_folder" else 260)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno + 1 <= 50, node.name


@pytest.mark.parametrize("path", [*UTILS, *TOOLS], ids=lambda p: p.stem)
def test_public_functions_have_docstrings(path):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            is_short = isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno <= 3
            assert ast.get_docstring(node) or is_short or node.name == "main", node.name


@pytest.mark.parametrize("path", [*map(ROOT.joinpath, SCRIPTS), *UTILS], ids=lambda p: p.stem)
def test_calls_have_no_positional_booleans(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "setting") != "setting":
            values = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            assert not any(isinstance(value, bool) for value in values), ast.unparse(node)


def test_no_module_imports_a_tool_or_a_script():
    for path in [*map(ROOT.joinpath, SCRIPTS), *UTILS]:
        assert not re.search(r"^ *(from|import) (tools|tests|train_)", path.read_text(), re.M)


def test_threads_are_set_in_one_place():
    calls = {path.name for path in UTILS if "set_num_threads(" in path.read_text()}
    assert calls == {"runtime.py"}
