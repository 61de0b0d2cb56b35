"""A script needs little code besides its own: budgets for its imports and its settings."""

from dataclasses import fields

import pytest

from tools.closure import (
    closure,
    depth,
    imports,
    lazy_imports,
    options,
    purpose,
    size,
    total,
)
from tools.lessons import LADDER, ROOT, RUNGS
from utils.config import Config, load_config

MODULES, CODE_LINES, TOKENS = 10, 1100, 9500  # of train_ddp.py with all that it imports
ROOTS = ("train_1gpu.py", "train_ddp.py")  # every other script adds its idea to one of these
LEAVES = [rung for rung in LADDER if rung.script not in ROOTS]
UTILS = sorted(path for path in (ROOT / "utils").glob("*.py") if path.name != "__init__.py")


def own_settings(rung):
    """The names of the settings that only this script's Config has."""
    base = {field.name for field in fields(Config)}
    return [field.name for field in fields(rung.config_class()) if field.name not in base]


def test_train_ddp_stays_within_budget():
    script = ROOT / "train_ddp.py"
    modules = closure(script)
    lines, tokens = total([script, *modules])
    assert len(modules) <= MODULES
    assert lines <= CODE_LINES and tokens <= TOKENS


@pytest.mark.parametrize("rung", LEAVES, ids=lambda rung: rung.script)
def test_leaf_adds_one_module_and_100_lines(rung):
    def needs(script):
        modules = closure(ROOT / script)
        return set(modules), total([ROOT / script, *modules]).lines

    (modules, lines), (parents, parent_lines) = needs(rung.script), needs(rung.parent)
    assert len(modules - parents) <= 1
    assert lines <= parent_lines + 100


@pytest.mark.parametrize("rung", LADDER, ids=lambda rung: rung.script)
def test_import_chains_are_short(rung):
    assert depth(ROOT / rung.script) <= 3


def test_base_config_is_small():
    assert len(fields(Config)) <= 36


@pytest.mark.parametrize("rung", LADDER, ids=lambda rung: rung.script)
def test_leaf_settings_are_unknown_elsewhere(rung, capfd):
    names = own_settings(rung)
    assert bool(names) == (rung.config != "utils.config:Config")
    for name in names:
        flag = f"--{name.replace('_', '-')}=1"
        for other in LADDER:
            if name not in {field.name for field in fields(other.config_class())}:
                with pytest.raises(SystemExit, match="2"):
                    load_config(other.config_class(), [flag])
                assert f"unrecognized arguments: {flag}" in capfd.readouterr().err


def test_core_modules_import_no_option_and_no_leaf():
    """Every script but the leaves needs the same modules, and only those."""
    core = set(closure(ROOT / "train_ddp.py"))
    leaves = {path for rung in LEAVES for path in closure(ROOT / rung.script)} - core
    for path in core:
        assert imports(path) <= core
        assert not lazy_imports(path) & leaves


def test_every_module_is_core_a_leaf_or_an_option():
    used = set()
    for script in (ROOT / rung.script for rung in LADDER):
        chosen = [option.path for option in options(script).values()]
        used |= {*chosen, *closure(script, *chosen)}
    assert used == set(UTILS)
    assert all(purpose(path) for path in used)


def test_options_name_their_setting():
    by_name = options(ROOT / "train_ddp.py")
    assert all(option.setting for option in by_name.values())
    assert by_name["sharded"].setting == "--save-sharded"
    assert by_name["small_models"].setting == "--model NAME"


# The counting itself, on a small project


@pytest.fixture
def project(tmp_path):
    files = {
        "train.py": '"""Trains.\n\nMore."""\n\nimport os  # comment\nfrom utils import core\n',
        "utils/__init__.py": "",
        "utils/core.py": "try:\n    import utils.base\nexcept ImportError:\n    pass\n\n\n"
        'def f():\n    """Text\n    text."""\n    with option("--extra"):\n'
        "        from utils.extra import g\n    return g(\n        1\n    )\n",
        "utils/base.py": "A = 1\n",
        "utils/extra.py": '"""Extra."""\nfrom utils.helper import B\nfrom utils.base import A\n',
        "utils/helper.py": "B = 2\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_closure_follows_module_level_imports(project):
    names = [path.name for path in closure(project / "train.py", root=project)]
    assert names == ["base.py", "core.py"]
    assert depth(project / "train.py", root=project) == 2


def test_lazy_import_is_an_option(project):
    by_name = options(project / "train.py", root=project)
    assert list(by_name) == ["extra"]
    assert by_name["extra"].setting == "--extra" and purpose(by_name["extra"].path) == "Extra."


def test_code_lines_leave_out_comments_docstrings_and_blank_lines(project):
    assert size(project / "train.py") == (2, 6)
    (project / "text.py").write_text('name = f"{a:{b}} and {f(c)!r}" f"{d}"\n')
    assert size(project / "text.py") == (1, 4)  # also where Python 3.12 splits these strings
    assert size(project / "utils" / "core.py").lines == 10
    assert total([project / "train.py", project / "utils" / "base.py"]) == (3, 9)


def test_every_script_is_a_rung():
    assert RUNGS.keys() == {path.name for path in ROOT.glob("train_*.py")}
