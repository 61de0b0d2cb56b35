"""The scripts keep their design: short lessons, no branch on rank, task or technique."""

import re

import pytest

from tools.lib.ladder import LADDER, ROOT, changed, code

SCRIPTS = sorted(path.name for path in ROOT.glob("train_*.py"))


def test_ladder_has_every_script():
    assert {rung.script for rung in LADDER} == set(SCRIPTS)


@pytest.mark.parametrize("rung", [r for r in LADDER if r.parent], ids=lambda r: r.script)
def test_lesson_stays_within_budget(rung):
    assert 0 < changed(rung) <= rung.budget


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_reads_from_top_to_bottom(script):
    text = "\n".join(code(script))
    assert 80 <= len((ROOT / script).read_text().splitlines()) <= 130
    assert not re.search(r"\.cuda\(|import train_|\bargs\b|\bgpu_id\b|\bnet\b", text)
    assert "inputs.to(" not in text and "targets.to(" not in text  # the loader has done it
    branches = re.findall(r"^ *(?:el)?if (.*):", text, re.MULTILINE)
    known = {"cfg.clip_norm", "cfg.sync_bn", 'cfg.compile != "none"', '__name__ == "__main__"'}
    assert set(branches) <= known


@pytest.mark.parametrize("rung", LADDER, ids=lambda r: r.script)
def test_script_names_its_task_in_one_line_and_loads_its_settings(rung):
    text = "\n".join(code(rung.script))
    line = f"import tasks.{rung.task} as task  # to train something else, change this line"
    assert text.count("tasks.") == 1 and text.count(line) == 1
    for arguments in re.findall(r"load_config\((.*)\)", text):
        task, *own = arguments.split(", ")
        assert task == "task.Settings"
        names = [argument.rpartition(".")[2] for argument in own]
        settings = rung.settings_class()
        assert names == ([settings.__name__] if settings else [])
