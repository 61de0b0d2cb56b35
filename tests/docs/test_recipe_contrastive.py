"""docs/recipes/contrastive-loss.md: the loss over all ranks, and the mistakes that it explains."""

import re
import sys

import pytest

from tests.forked import ROUNDING, killed_at, largest_difference
from tests.recipes import applied, import_new, run_to_end, with_task
from tools.lib.ladder import ROOT

PAIRS = "tests.pairs_task"
MISTAKES = {  # {name: (file, code, what replaces it)}
    "rows of all ranks without gradients": (
        "tasks/contrastive.py",
        "dim=-2))  #",
        "dim=-2).detach())  #",
    ),
    "gradients of the other ranks are lost": (
        "utils/gather.py",
        "dist.reduce_scatter_tensor(own, gradient.contiguous(), group=data_parallel_group())",
        "own.copy_(gradient.chunk(dp_world_size())[dp_rank()])",
    ),
    "the whole loss on each rank": (
        "tasks/contrastive.py",
        "all_images, all_texts = rows.unbind(-2)",
        "(images, texts), first = rows.unbind(-2), 0\n    all_images, all_texts = images, texts",
    ),
    "divided by the number of ranks again": (
        "tasks/contrastive.py",
        "return losses / 2",
        "return losses / 2 / torch.distributed.get_world_size()",
    ),
    "labels without the position": ("utils/gather.py", "dp_rank() * len(own)", "0"),
}


def make_script(script, folder, monkeypatch):
    """The path of a script, in a copy with the page, that trains pairs."""
    import_new("utils.gather", folder, monkeypatch)
    import_new("tasks.contrastive", folder, monkeypatch)
    monkeypatch.delitem(sys.modules, PAIRS, raising=False)  # it has imported those of another test
    return with_task(folder / script, PAIRS)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The Run and the last checkpoint of train_1gpu.py."""
    folder = tmp_path_factory.mktemp("one")
    with pytest.MonkeyPatch.context() as monkeypatch:
        copy = applied("contrastive-loss", folder / "copy")
        return run_to_end(make_script("train_1gpu.py", copy, monkeypatch), None, folder / "run")


def losses(run):
    return [row[name] for row in run.rows for name in ("train_loss", "val_loss")]


@pytest.mark.slow
def test_same_weights_on_any_number_of_ranks(one, monkeypatch, tmp_path):
    copy = applied("contrastive-loss", tmp_path / "copy")
    script = make_script("train_ddp.py", copy, monkeypatch)
    killed, _ = run_to_end(script, 2, tmp_path / "run", killed_at(1, 3), save_steps=2)
    assert killed.code == -9
    for nproc, name in ((1, "alone"), (3, "run")):  # the second continues
        run, end = run_to_end(script, nproc, tmp_path / name)
        # torch 2.14 warns of names that its own function uses.
        warning = r"\S+c10d_logger.py:\d+: FutureWarning: .*\n  return func.*\n\n?"
        assert re.sub(warning, "", run.stderr) == ""
        assert largest_difference(end["model"], one[1]["model"]) < ROUNDING
        assert losses(run) == pytest.approx(losses(one[0]), rel=ROUNDING)
        assert [row["val_samples"] for row in run.rows] == [5, 5]  # three ranks have 2, 2 and 1


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_differ(name, one, monkeypatch, tmp_path):
    copy = applied("contrastive-loss", tmp_path / "copy")
    file, code, instead = MISTAKES[name]
    text = (copy / file).read_text()
    assert text.count(code) == 1
    (copy / file).write_text(text.replace(code, instead))
    script = make_script("train_ddp.py", copy, monkeypatch)
    _, end = run_to_end(script, 2, tmp_path / "run")
    assert largest_difference(end["model"], one[1]["model"]) > 1e-6


def test_groups_of_the_page_are_those_of_the_tests():
    page = (ROOT / "docs" / "recipes" / "contrastive-loss.md").read_text()
    block = page.partition("```python\n")[2].partition("```")[0]
    assert block.strip() in (ROOT / "tests" / "pairs_task.py").read_text()
