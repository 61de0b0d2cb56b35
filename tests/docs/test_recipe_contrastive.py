"""docs/recipes/contrastive-loss.md: the loss over all ranks, on any number of them."""

import re
import sys

import pytest

from tests.forked import ROUNDING, killed_at, largest_difference
from tests.recipes import applied, import_new, run_to_end, with_task
from tools.lib.ladder import ROOT

PAIRS = "tests.pairs_task"


def losses(run):
    return [row[name] for row in run.rows for name in ("train_loss", "val_loss")]


@pytest.mark.slow
def test_same_weights_on_any_number_of_ranks(monkeypatch, tmp_path):
    copy = applied("contrastive-loss", tmp_path / "copy")
    import_new("utils.gather", copy, monkeypatch)
    import_new("tasks.contrastive", copy, monkeypatch)
    monkeypatch.delitem(sys.modules, PAIRS, raising=False)  # it may have those of another test
    one, expected = run_to_end(with_task(copy / "train_1gpu.py", PAIRS), None, tmp_path / "one")
    script = with_task(copy / "train_ddp.py", PAIRS)
    killed, _ = run_to_end(script, 2, tmp_path / "run", killed_at(1, 3), save_steps=2)
    assert killed.code == -9
    for nproc, name in ((1, "alone"), (3, "run")):  # the second continues
        run, end = run_to_end(script, nproc, tmp_path / name)
        # torch 2.14 warns of names that its own function uses.
        warning = r"\S+c10d_logger.py:\d+: FutureWarning: .*\n  return func.*\n\n?"
        assert re.sub(warning, "", run.stderr) == ""
        assert largest_difference(end["model"], expected["model"]) < ROUNDING
        assert losses(run) == pytest.approx(losses(one), rel=ROUNDING)
        assert [row["val_samples"] for row in run.rows] == [5, 5]  # three ranks have 2, 2 and 1


def test_groups_of_the_page_are_those_of_the_tests():
    page = (ROOT / "docs" / "recipes" / "contrastive-loss.md").read_text()
    block = page.partition("```python\n")[2].partition("```")[0]
    assert block.strip() in (ROOT / "tests" / "pairs_task.py").read_text()
