"""The loop as people edit it: the same weights on any number of ranks, interrupted and resumed.

The edits are those of docs/editing.md.
"""

import shutil

import pytest

from lab.edits import EDITS, REFUSED, SCRIPTS, Edit, edited
from tests.forked import ROUNDING, fork_script, killed_at, largest_difference
from utils.checkpoint import read_checkpoint

# Of five steps per epoch.
SETTINGS = {
    "epochs": 3,
    "global_batch_size": 12,
    "dtype": "float64",
    "lr": 0.05,
    "save_steps": 1,
    "keep_last": 3,
    "device": "cpu",
}
NAMES = {edit.name: edit for edit in EDITS}
NONE = Edit("none", "", "", [])
SLOW = ("limit", "skip", "peek", "training set", "second loader, now and then", "dtypes", "hooks")
SLOW += ("noise on gradients",)  # others do almost the same
ALSO = "second loader"  # by itself, in .ci/run
RANKS = {"train_1gpu.py": None}  # and two, of the other scripts


class Edited:
    """Runs of the scripts with an edit."""

    def __init__(self, folder, edit):
        self.folder, self.edit = folder, edit
        folder.mkdir(exist_ok=True)

    def run(self, script, output_dir, nproc=2, before=None, **flags):
        """The Run of a script with the edit."""
        path = self.folder / script
        path.write_text(edited(script, self.edit, "tests.edits_task"))
        nproc = RANKS.get(script, nproc)
        folder = self.folder / output_dir
        settings = SETTINGS | flags
        return fork_script(path, nproc, before, settings=settings, output_dir=folder)

    def finish(self, *arguments, **flags):
        """The last checkpoint of a run that ends well."""
        run = self.run(*arguments, **flags)
        assert run.code == 0, run.stderr
        return read_checkpoint(run.output_dir / "last.pt")

    def kill(self, script, output_dir, nproc=2):
        """Kill a run within its second epoch, after it has saved."""
        step = 2 if self.edit.name == "accumulate" else 3
        run = self.run(script, output_dir, nproc, killed_at(1, step))
        assert run.code == -9, run.stderr
        checkpoint = read_checkpoint(run.output_dir / "last.pt")
        assert (checkpoint["epoch"], checkpoint["loader"]["step"]) == (1, step)

    def end_epoch(self, source, output_dir):
        """A folder with the state of a run at the end of its first epoch."""
        folder = self.folder / output_dir
        folder.mkdir()
        shutil.copyfile(self.folder / source / "epoch-0001.pt", folder / "last.pt")


def assert_same(ours, theirs):
    """The weights, and what the edits have in `state`, are the same."""
    assert largest_difference(ours["model"], theirs["model"]) < ROUNDING
    assert ours.get("warmth") == theirs.get("warmth")


@pytest.fixture(scope="module")
def unedited(tmp_path_factory):
    """Runs of train_1gpu.py without an edit, one of which has ended."""
    runs = Edited(tmp_path_factory.mktemp("unedited"), NONE)
    runs.finish("train_1gpu.py", "straight")
    return runs


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in NAMES]
)
def test_edited_loop_keeps_the_promise(name, tmp_path, unedited):
    """Straight on one process; and from the end of an epoch on two ranks, killed within the next
    one, and continued by FSDP."""
    runs = Edited(tmp_path, NAMES[name])
    straight = runs.finish("train_1gpu.py", "straight")
    runs.end_epoch("straight", "resumed")
    runs.kill("train_ddp.py", "resumed")
    last = "train_fsdp.py" if "train_fsdp.py" in NAMES[name].scripts else "train_ddp.py"
    assert_same(runs.finish(last, "resumed"), straight)
    original = read_checkpoint(unedited.folder / "straight" / "last.pt")
    difference = largest_difference(straight["model"], original["model"])
    assert (difference == 0) if NAMES[name].keeps else (difference > 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.rare] * (name != ALSO)) for name in NAMES],
)
@pytest.mark.parametrize("script", SCRIPTS)
def test_each_script_with_an_edit_resumes(script, name, tmp_path):
    """By itself, on as many ranks and on three."""
    if script not in NAMES[name].scripts:
        return
    runs = Edited(tmp_path, NAMES[name])
    straight = runs.finish(script, "straight")
    runs.end_epoch("straight", "whole")
    assert_same(runs.finish(script, "whole", nproc=3), straight)
    runs.kill(script, "killed")
    shutil.copytree(runs.folder / "killed", runs.folder / "moved")
    assert_same(runs.finish(script, "killed"), straight)
    assert_same(runs.finish(script, "moved", nproc=3), straight)


@pytest.mark.parametrize("edit", REFUSED, ids=lambda edit: edit.name)
def test_edit_that_would_break_the_promise_is_refused(edit, tmp_path, unedited):
    runs = Edited(tmp_path, edit)
    folder = runs.folder / "run"
    if edit.name in ("from the start", "renamed"):  # of a run that is resumed
        shutil.copytree(unedited.folder / "straight", folder)
    run = runs.run("train_1gpu.py", "run")
    assert run.code == 1 and run.stderr.count("error") == 1, run.stderr
    for word in edit.error:
        assert word in run.stderr
