"""docs/recipes/gan.md: two networks, the same on any number of ranks."""

import sys

import pytest
import torch
from torch import nn

from tests.docs.test_recipes import compile_without_inductor
from tests.forked import ROUNDING, killed_at, largest_difference
from tests.recipes import applied, import_new, run_to_end, with_task
from tools.lib.edits import changed
from tools.lib.ladder import ROOT

TASK = "tests.gan_task"
FLAGS = {"optimizer": "adamw", "clip_norm": 1.0}
# In tasks/gan.py:
BOTH_AT_ONCE = (
    'both = torch.cat([batch["image"], fakes.detach()])  # for a single forward pass\n'
    '        return {"fakes": fakes, "logits": self.discriminator(both)}'
)
ONE_BY_ONE = (
    'logits = [self.discriminator(each) for each in (batch["image"], fakes.detach())]\n'
    '        return {"fakes": fakes, "logits": torch.cat(logits)}'
)


def make_script(folder, monkeypatch, *changes):
    """The path of train_ddp.py, in a copy with the page, that trains TASK. changes: of gan.py."""
    folder = applied("gan", folder)
    file = folder / "tasks" / "gan.py"
    file.write_text(changed(file.read_text(), changes, file))
    import_new("tasks.gan", folder, monkeypatch)
    monkeypatch.delitem(sys.modules, TASK, raising=False)  # it has imported an earlier one
    return with_task(folder / "train_ddp.py", TASK)


def train(script, nproc, output_dir, before=None, **flags):
    return run_to_end(script, nproc, output_dir, before, **FLAGS | flags)


def numbers(run):
    names = "train_loss", "train_distance", "val_loss", "val_distance"
    return [row[name] for row in run.rows for name in names]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The Run and the last checkpoint of one rank."""
    folder = tmp_path_factory.mktemp("one")
    with pytest.MonkeyPatch.context() as monkeypatch:
        return train(make_script(folder / "copy", monkeypatch), 1, folder / "run")


def with_batch_norm():
    sys.modules[TASK].norm = nn.BatchNorm1d


@pytest.mark.slow
def test_killed_on_two_ranks_and_resumed_on_three(one, tmp_path, monkeypatch):
    script = make_script(tmp_path / "copy", monkeypatch)
    killed, _ = train(script, 2, tmp_path / "run", killed_at(1, 3), save_steps=2)
    run, end = train(script, 3, tmp_path / "run", save_steps=2)
    assert (killed.code, killed.stderr, run.stderr) == (-9, "", "")
    assert largest_difference(end["model"], one[1]["model"]) < ROUNDING
    assert numbers(run) == pytest.approx(numbers(one[0]), rel=ROUNDING)
    assert [row["val_samples"] for row in run.rows] == [31, 31]


@pytest.mark.slow
def test_batch_norm_needs_sync_bn(tmp_path, monkeypatch):
    script = make_script(tmp_path / "copy", monkeypatch)
    _, alone = train(script, 1, tmp_path / "one", with_batch_norm)
    _, synchronized = train(script, 2, tmp_path / "two", with_batch_norm)
    run, by_rank = train(script, 2, tmp_path / "by rank", with_batch_norm, sync_bn=False)
    assert run.stderr == ""
    assert largest_difference(synchronized["model"], alone["model"]) < ROUNDING
    assert largest_difference(by_rank["model"], alone["model"]) > 1e-3


@pytest.mark.slow
@pytest.mark.rare
def test_compiled(one, tmp_path, monkeypatch):
    script = make_script(tmp_path / "copy", monkeypatch)
    flags = {"compile": "default", "timeout": 600}
    _, end = train(script, 2, tmp_path / "run", compile_without_inductor, **flags)
    assert largest_difference(end["model"], one[1]["model"]) < ROUNDING


@pytest.mark.slow
@pytest.mark.rare
def test_separate_forward_passes_of_batch_norm(tmp_path, monkeypatch):
    script = make_script(tmp_path / "copy", monkeypatch, (BOTH_AT_ONCE, ONE_BY_ONE))
    few, more = (2, 3) if torch.__version__.startswith("2.11") else (1, 2)  # the page says why
    _, end = train(script, few, tmp_path / "few", with_batch_norm)
    _, other = train(script, more, tmp_path / "more", with_batch_norm)
    assert largest_difference(end["model"], other["model"]) < ROUNDING


def test_code_of_the_page_is_that_of_the_tests():
    page = (ROOT / "docs" / "recipes" / "gan.md").read_text()
    block = page.partition("```python\n")[2].partition("```")[0]
    dataset = block.partition("class ")[2].partition("\n\n\n")[0]
    assert f"class {dataset}\n" in (ROOT / "tests" / "gan_task.py").read_text()
