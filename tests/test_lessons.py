"""The text of the scripts keeps the design: small steps, small modules, no branch on the world."""

import ast
import re

import pytest

from tools.lessons import LADDER, ROOT, changed, code
from tools.readme import BLOCKS, PAGES, generate

SCRIPTS = sorted(path.name for path in ROOT.glob("train_*.py"))
UTILS = sorted(path for path in (ROOT / "utils").glob("*.py") if path.name != "__init__.py")
# utils that a team lifts out alone: these may need only torch and the ones named.
LIFTABLE = {
    "distributed": set(),
    "augment": set(),
    "sync_batchnorm": set(),
    "conv": set(),
    "checkpoint": {"distributed", "saving", "sharded"},
    "saving": {"distributed"},
    "sharded": {"distributed"},
    "replicas": {"distributed"},
    "spawn": set(),
    "metrics": {"distributed"},
    "runtime": {"distributed"},
    "threads": {"distributed"},
    "weights": {"checkpoint", "distributed"},
}


def test_every_script_is_a_rung():
    assert {rung.script for rung in LADDER} == set(SCRIPTS)


@pytest.mark.parametrize("rung", [r for r in LADDER if r.parent], ids=lambda r: r.script)
def test_a_rung_stays_inside_its_budget(rung):
    assert 0 < changed(rung) <= rung.budget


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_reads_from_top_to_bottom(script):
    text = "\n".join(code(script))
    assert len((ROOT / script).read_text().splitlines()) <= 110
    assert not re.search(r"\.cuda\(|import train_|\bargs\b|\bgpu_id\b|\bnet\b", text)
    branches = re.findall(r"^ *(?:el)?if (.*):", text, re.MULTILINE)
    assert set(branches) <= {"cfg.clip_norm", "cfg.sync_bn", '__name__ == "__main__"'}


@pytest.mark.parametrize("path", UTILS, ids=lambda p: p.stem)
def test_a_module_is_small_and_its_functions_smaller(path):
    tree = ast.parse(path.read_text())
    assert _code_lines(tree, path) <= (260 if path.stem == "settings" else 200)  # that is a table
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno + 1 <= 50, node.name


def _code_lines(tree, path):
    """Lines that are neither blank nor comment nor docstring nor import."""
    lines = set()
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.strip() and not line.strip().startswith("#"):
            lines.add(number)
    for node in ast.walk(tree):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if docstring or isinstance(node, ast.Import | ast.ImportFrom):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


@pytest.mark.parametrize("path", UTILS, ids=lambda p: p.stem)
def test_imports_form_a_star(path):
    needs = {
        node.module.split(".")[1]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module.startswith("utils.")
    }
    assert "config" not in needs
    if path.stem in LIFTABLE:
        assert needs == LIFTABLE[path.stem]
        assert "cfg" not in path.read_text()


@pytest.mark.parametrize("path", UTILS, ids=lambda p: p.stem)
def test_every_public_function_says_what_it_does(path):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            short = isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno <= 3
            assert ast.get_docstring(node) or short, node.name


def test_the_generated_blocks_are_current():
    texts = [page.read_text() for page in PAGES]
    assert texts == [generate(text) for text in texts], "run: make readme"
    assert all(sum(f"<!-- {name} -->" in text for text in texts) == 1 for name in BLOCKS)
