"""docs/recipes/hugging-face.md: a model of transformers, trained on any number of ranks."""

from types import SimpleNamespace

import pytest
import torch

from tests.forked import ROUNDING, killed_at, largest_difference
from tests.recipes import TEXT, applied, import_new, run_text_to_end, with_task
from tools.lib.edits import changed
from tools.lib.ladder import ROOT

transformers = pytest.importorskip("transformers")
PAGE = ROOT / "docs" / "recipes" / "hugging-face.md"
TASK = "tasks.hugging_face"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with the scripts, which train the task of the page, and the task."""
    folder = applied(PAGE.stem, tmp_path_factory.mktemp("project") / "copy")
    with pytest.MonkeyPatch.context() as monkeypatch:
        task = import_new(TASK, folder, monkeypatch)
        new_model(task)  # imports what would otherwise be imported in each fork
        yield folder, task


@pytest.fixture(scope="module")
def one_process(project, tmp_path_factory):
    """The Run and the checkpoint of train_1gpu.py."""
    return train(project, "train_1gpu.py", None, tmp_path_factory.mktemp("one_process") / "run")


def train(project, script, nproc, output_dir, before=None, **flags):
    script = with_task(project[0] / script, TASK)
    return run_text_to_end(script, nproc, output_dir, before, **flags)


def new_model(task):
    return task.build_model(SimpleNamespace(**TEXT), None)


def losses(run):
    return [row[name] for row in run.rows for name in ("train_loss", "val_loss")]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_ddp.py", "train_fsdp.py"])
def test_killed_on_two_ranks_and_resumed_on_three(script, project, one_process, tmp_path):
    """Those with activation checkpointing."""
    _, task = project
    build_model = task.build_model

    def build(*args):
        model = build_model(*args)
        model.module.activation_checkpointing_enable()
        return model

    def before():
        task.build_model = build  # in the ranks alone

    killed, _ = train(project, script, 2, tmp_path / "run", killed_at(1, 3), save_steps=2)
    assert killed.code == -9
    run, end = train(project, script, 3, tmp_path / "run", before)
    expected_run, expected = one_process
    assert run.stderr == ""
    assert largest_difference(end["model"], expected["model"]) < ROUNDING
    assert losses(run) == pytest.approx(losses(expected_run), rel=ROUNDING)
    assert [row["val_samples"] for row in run.rows] == [7, 7]


def test_the_loss_of_the_model_is_a_mean(project):
    """Of one rank's batch. The page shifts labels, as transformers does within its loss."""
    _, task = project
    code = PAGE.read_text().partition("`targets = ")[2].partition("`")[0]
    labels = torch.tensor([[5, 6, 7, 8], [-100, 6, -100, -100], [-100, -100, 9, 1]])
    targets = eval(code, {"torch": torch, "labels": labels})
    assert targets.tolist()[2] == [-100, 9, 1, -100]
    model = new_model(task)
    inputs = {"input_ids": labels.clamp(min=0), "attention_mask": torch.ones_like(labels)}
    mean = task.loss(model(inputs), targets) / task.count(targets)
    own = model.module(**inputs, labels=labels).loss
    assert task.count(targets) == 6 and own.item() == pytest.approx(mean.item(), rel=1e-5)


def test_export(project, one_process, tmp_path, monkeypatch):
    _, checkpoint = one_process
    torch.save(checkpoint, tmp_path / "best.pt")
    code = PAGE.read_text().partition("```python\n")[2].partition("```")[0]
    changes = [
        ("runs/train_ddp/best.pt", str(tmp_path / "best.pt")),
        ('"exported")  #', f"{str(tmp_path / 'exported')!r})  #"),
        ("None).module", "None).module.double()"),
    ]
    exec(changed(code, changes, PAGE), {})
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert largest_difference(model.state_dict(), checkpoint["model"]) == 0
