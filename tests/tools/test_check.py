"""check/ in this repository: its pages, its old name, and this project's own scripts."""

import subprocess
import sys

import pytest
import yaml

from check.advice import ADVICE
from check.tests.corpus.__main__ import check
from lab import check_own as own
from tools.lib.ladder import ROOT
from tools.verify.plants import PLANTS


def blocks_of_the_page():
    """The hook and the workflow that docs/check.md tells users to copy."""
    text = (ROOT / "docs" / "check.md").read_text()
    blocks = [block.split("```")[0] for block in text.split("```yaml\n")[1:]]
    return {block.split()[1]: yaml.safe_load(block) for block in blocks}


def test_documented_hook_is_installed_for_its_stage():
    """`pre-commit install` installs hooks of other types than pre-commit only if they are named."""
    config = blocks_of_the_page()[".pre-commit-config.yaml"]
    (repository,) = config["repos"]
    (named,) = repository["hooks"]
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert named["id"] == hook["id"] and (ROOT / hook["entry"]).is_file()
    assert set(hook["stages"]) <= set(config["default_install_hook_types"])


def test_documented_workflow_may_check_out_and_upload():
    """Rights that a workflow does not name are taken away; a fork's pull request gets none."""
    job = blocks_of_the_page()[".github/workflows/check.yml"]["jobs"]["check"]
    needed = {"contents": "read", "actions": "read", "security-events": "write"}
    assert job["permissions"] == needed
    checkout, *_, upload = job["steps"]
    assert checkout["with"]["persist-credentials"] is False
    for condition in ("always()", "head.repo.full_name == github.repository", "hashFiles"):
        assert condition in upload["if"]


@pytest.mark.slow
@pytest.mark.rare
def test_old_name_of_the_command_is_kept(tmp_path):
    """Hooks and workflows of users have it."""
    (tmp_path / "train.py").write_text("raise KeyError('mine')\n")
    command = [sys.executable, ROOT / "tools" / "check", "--", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "KeyError: 'mine'" in done.stderr


OWN = {each.name: each for each in own.own_checks()}


def test_own_bugs_are_all_planted_once(tmp_path):
    planted = [bug.name for each in OWN.values() for bug in each.bugs]
    assert sorted(planted) == sorted(bug.name for bug in PLANTS)
    assert set(own.FINDS) | set(own.UNSEEN) <= set(planted)
    assert set(own.FINDS.values()) <= set(ADVICE)
    for number, each in enumerate(OWN.values()):
        if len(each.bugs) > 1:  # each must find its line, which no other one has changed
            own.options_of(each, tmp_path / str(number))


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("name", ["ddp x2", "accum x2", "fsdp x2", "one_file ddp x2"])
def test_own_script_yields_no_alarm_and_is_checked(name):
    """SyncBatchNorm, seeds in each step, lists of micro-batches, keys of (epoch, index), next()."""
    row = own.row_of(OWN[f"images: {name}"], check)
    left = [item for item in row["not_checked"] if not item.startswith("metrics of one rank")]
    assert row["verdicts"] == {f"images: {name}": "ok"} and not left, row


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("names", [own.TOGETHER[0], own.TOGETHER[3]], ids=lambda names: names[0])
def test_finds_bugs_in_own_scripts(names):
    row = own.row_of(OWN[", ".join(names)], check)
    assert {own.FINDS[name] for name in names if name in own.FINDS} <= set(row["rules"]), row
