"""docs/recipes/hugging-face.md: a model of transformers, trained on any number of ranks."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.forked import ROUNDING, killed_at, largest_difference
from tests.recipes import TEXT, applied, import_new, run_text_to_end, with_task
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


def assert_same(ours, theirs):
    (run, end), (expected_run, expected) = ours, theirs
    # torch 2.14 gives up to compile a function of transformers, which then runs as it is.
    assert [line for line in run.stderr.splitlines() if "torch/_dynamo/" not in line] == []
    assert largest_difference(end["model"], expected["model"]) < ROUNDING
    assert losses(run) == pytest.approx(losses(expected_run), rel=ROUNDING)
    assert [row["val_samples"] for row in run.rows] == [7, 7]


def checkpointed(task):
    """For fork_script(before=...): activation checkpointing, and torch.compile without Inductor."""

    def before():
        build_model, compile_module = task.build_model, nn.Module.compile

        def build(*args):
            model = build_model(*args)
            model.module.activation_checkpointing_enable()
            return model

        task.build_model = build
        nn.Module.compile = lambda module, mode: compile_module(module, backend="aot_eager")

    return before


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_ddp.py", "train_fsdp.py"])
def test_killed_on_two_ranks_and_resumed_on_three(script, project, one_process, tmp_path):
    """Those with activation checkpointing."""
    killed, _ = train(project, script, 2, tmp_path / "run", killed_at(1, 3), save_steps=2)
    assert killed.code == -9
    assert_same(train(project, script, 3, tmp_path / "run", checkpointed(project[1])), one_process)


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("script", ["train_ddp.py", "train_fsdp.py"])
def test_compiled(script, project, one_process, tmp_path):
    before = checkpointed(project[1])
    run = train(project, script, 2, tmp_path / "run", before, compile="default")
    assert_same(run, one_process)


def test_a_folder_of_json_lines(project, tmp_path):
    """Whose pieces are read by an index (docs/streams.md)."""
    _, task = project
    for split in ("train", "val"):
        lines = [json.dumps({"text": f"document {i} " * 3}) + "\n" for i in range(10)]
        (tmp_path / f"{split}-0.jsonl").write_text("".join(lines))
    cfg = task.Settings(**TEXT | {"text_file": str(tmp_path)})
    train_set, _ = task.build_datasets(cfg)
    inputs, targets = train_set.collate_fn([train_set[0], train_set[1]])
    assert bytes(inputs["input_ids"][0].tolist()).startswith(b"document 0 ")
    assert inputs["attention_mask"].shape == targets.shape


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
    for text, instead in (
        ("runs/train_ddp/best.pt", str(tmp_path / "best.pt")),
        ('"exported")  #', f"{str(tmp_path / 'exported')!r})  #"),
        ("None).module", "None).module.double()"),
    ):
        assert code.count(text) == 1
        code = code.replace(text, instead)
    exec(code, {})
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert largest_difference(model.state_dict(), checkpoint["model"]) == 0
