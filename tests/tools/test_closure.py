"""tools.lib.closure: what a script imports, and how much code it is."""

import json

import pytest

from tools.lib.closure import closure, loaded, options, purpose, size, total
from tools.lib.ladder import LADDER, RESULTS, ROOT

FILES = {
    "train.py": '"""Trains.\n\nMore.\n"""\n\nimport os  # comment\nfrom utils import core\n',
    "utils/__init__.py": "",
    "utils/core.py": (
        "import utils.base\nfrom utils.guards import lock\n\n\ndef run(on):\n"
        "    from utils.plain import f\n\n    if on:\n"
        '        with required_by("--extra"):\n            from utils import extra\n'
    ),
    "utils/base.py": "x = 1\n",
    "utils/guards/__init__.py": "y = 1\n",
    "utils/guards/lock.py": "z = 1\n",
    "utils/plain.py": "f = 1\n",
    "utils/extra.py": '"""Extra."""\n\nfrom utils.more import y\n',
    "utils/more.py": "y = 1\n",
}


@pytest.fixture
def project(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_closure_follows_imports_but_not_options(project):
    paths = closure(project / "train.py", root=project)
    names = [path.relative_to(project / "utils").as_posix() for path in paths]
    assert names == ["base.py", "core.py", "guards/__init__.py", "guards/lock.py", "plain.py"]


def test_import_required_by_a_setting_is_an_option(project):
    by_name = options(project / "train.py", root=project)
    assert list(by_name) == ["extra"]
    assert by_name["extra"].setting == "--extra"
    assert purpose(by_name["extra"].path) == "Extra."


def test_code_lines_leave_out_comments_docstrings_and_blank_lines(project):
    assert size(project / "train.py") == (2, 6)
    (project / "text.py").write_text('name = f"{a:{b}} and {f(c)!r}" f"{d}"\n')
    assert size(project / "text.py") == (1, 4)  # also where Python 3.12 splits these strings
    assert total([project / "train.py", project / "utils" / "base.py"]) == (3, 9)


# The others import nothing that it does not import, but for their own modules.
OFTEN = ("train_fsdp.py",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(rung.script, marks=[pytest.mark.rare] * (rung.script not in OFTEN))
        for rung in LADDER
    ],
)
def test_published_files_are_those_of_a_default_run(script):
    """lab/results/loaded.json, from which the README's table is made."""
    published = json.loads((RESULTS / "loaded.json").read_text())[script]
    files = loaded(ROOT / script)
    assert published == [str(path.relative_to(ROOT)) for path in files]
    script = ROOT / script
    assert {*files} <= {script, *closure(script)}
    assert not {*files} & {option.path for option in options(script).values()}
