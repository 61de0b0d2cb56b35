"""docs/recipes/contrastive-loss.md: the loss over all ranks, and the mistakes that it explains."""

import importlib.util
import re
import sys

import pytest

from tests.forked import ROUNDING, killed_at, largest_difference
from tests.recipes import applied, run_to_end, with_task
from tools.lib.ladder import ROOT

PAGE = ROOT / "docs" / "recipes" / "contrastive-loss.md"
PAIRS = "tests.pairs_task"
NEW_MODULES = {"utils.gather": "utils/gather.py", "tasks.contrastive": "tasks/contrastive.py"}
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


def script_for_pairs(script, folder, monkeypatch, mistake=None):
    """The path of a script, in a new copy with the page and maybe a mistake, that trains pairs."""
    folder = applied(PAGE.stem, folder)
    if mistake:
        file, code, instead = mistake
        text = (folder / file).read_text()
        assert text.count(code) == 1
        (folder / file).write_text(text.replace(code, instead))
    # The script will take utils/ and tasks/ of this process, with these modules in addition.
    for name, file in NEW_MODULES.items():
        spec = importlib.util.spec_from_file_location(name, folder / file)
        monkeypatch.setitem(sys.modules, name, importlib.util.module_from_spec(spec))
        spec.loader.exec_module(sys.modules[name])
    monkeypatch.delitem(sys.modules, PAIRS, raising=False)  # it has imported those of another test
    return with_task(folder / script, PAIRS)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """The metrics and the weights of train_1gpu.py."""
    folder = tmp_path_factory.mktemp("one_process")
    with pytest.MonkeyPatch.context() as monkeypatch:
        script = script_for_pairs("train_1gpu.py", folder / "copy", monkeypatch)
        run, end = run_to_end(script, None, folder / "run")
    return run.rows, end["model"]


def losses(rows):
    return [row[name] for row in rows for name in ("train_loss", "val_loss")]


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_any_number_of_ranks(nproc, one_process, monkeypatch, tmp_path):
    rows, weights = one_process
    script = script_for_pairs("train_ddp.py", tmp_path / "copy", monkeypatch)
    run, end = run_to_end(script, nproc, tmp_path / "run")
    # torch 2.14 warns of names that its own function uses.
    warning = r"\S+c10d_logger.py:\d+: FutureWarning: .*\n  return func.*\n\n?"
    assert re.sub(warning, "", run.stderr) == ""
    assert largest_difference(end["model"], weights) < ROUNDING
    assert losses(run.rows) == pytest.approx(losses(rows), rel=ROUNDING)
    assert [row["val_samples"] for row in run.rows] == [5, 5]  # the ranks have 3 and 2, or 2, 2, 1


def test_resumed_within_an_epoch(one_process, monkeypatch, tmp_path):
    rows, weights = one_process
    script = script_for_pairs("train_ddp.py", tmp_path / "copy", monkeypatch)
    killed, _ = run_to_end(script, 2, tmp_path / "run", killed_at(1, 3), save_steps=2)
    assert killed.code == -9
    run, end = run_to_end(script, 2, tmp_path / "run")
    assert largest_difference(end["model"], weights) < ROUNDING
    assert losses(run.rows) == pytest.approx(losses(rows), rel=ROUNDING)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_differ(name, one_process, monkeypatch, tmp_path):
    script = script_for_pairs("train_ddp.py", tmp_path / "copy", monkeypatch, MISTAKES[name])
    _, end = run_to_end(script, 2, tmp_path / "run")
    assert largest_difference(end["model"], one_process[1]) > 1e-6


def test_groups_of_the_page_are_those_of_the_tests():
    block = PAGE.read_text().partition("```python\n")[2].partition("```")[0]
    assert block.strip() in (ROOT / "tests" / "pairs_task.py").read_text()
