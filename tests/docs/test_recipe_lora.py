"""docs/recipes/lora.md: adapters beside frozen layers, on any number of ranks."""

import pytest
import torch

from tests.forked import ROUNDING, killed_at, largest_difference
from tests.recipes import TEXT, applied, import_new, run_text_to_end, with_task
from tools.lib.edits import changed
from tools.lib.ladder import ROOT
from utils.checkpoint import read_checkpoint

SIZES = [TEXT[name] for name in ("context", "layers", "heads", "width")]


class Project:
    """A copy with the page, and its modules, that trains the text task."""

    def __init__(self, folder, monkeypatch):
        self.folder = applied("lora", folder)
        self.lora = import_new("utils.lora", folder, monkeypatch)
        self.text = import_new("tasks.text", folder, monkeypatch)

    def train(self, script, nproc, output_dir, before=None, **flags):
        script = with_task(self.folder / script, "tasks.text")
        return run_text_to_end(script, nproc, output_dir, before, **flags)

    def model(self, rank=0):
        model = self.text.GPT(*SIZES)
        if rank:
            self.lora.add_lora(model, ("query", "value"), rank)
        return model.double()


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Project(tmp_path_factory.mktemp("project") / "copy", monkeypatch)


@pytest.fixture(scope="module")
def base(project, tmp_path_factory):
    """The checkpoint of a pretrained model."""
    folder = tmp_path_factory.mktemp("base") / "run"
    project.train("train_1gpu.py", None, folder, lr=0.03)
    return folder / "last.pt"


@pytest.fixture(scope="module")
def one(project, base, tmp_path_factory):
    """The last checkpoint of train_1gpu.py with adapters."""
    folder = tmp_path_factory.mktemp("one") / "run"
    return project.train("train_1gpu.py", None, folder, base=base)[1]


def test_only_adapters_are_trained(project, base, one):
    frozen, adapters = read_checkpoint(base)["model"], set()
    for name, value in one["model"].items():
        if name in frozen:
            assert torch.equal(value, frozen[name].float().double()), name  # of build_model()
        else:
            adapters.add(name)
            assert value.abs().max() > 1e-3, name
    assert len(adapters) == 8 and one["optimizer"]["state"].keys() == adapters


def test_adapters_change_nothing_at_first(project):
    inputs = torch.randint(256, (3, 20))
    model, adapted = project.model(), project.model(4)
    adapted.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(model(inputs), adapted(inputs))
    assert adapted.blocks[0].attention.key.bias is None


def test_merged_model(project, base, one, tmp_path):
    page = (ROOT / "docs" / "recipes" / "lora.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    changes = [
        ("runs/train_ddp/best.pt", str(tmp_path / "best.pt")),
        ('"merged.pt"', repr(str(tmp_path / "merged.pt"))),
    ]
    torch.save(one, tmp_path / "best.pt")
    exec(changed(code, changes, "lora.md"), {})
    plain, adapted = project.model(), project.model(8)
    plain.load_state_dict(read_checkpoint(tmp_path / "merged.pt")["model"])
    adapted.load_state_dict(one["model"])
    inputs = torch.randint(256, (3, 20))
    assert (plain(inputs) - adapted(inputs)).abs().max() < ROUNDING
    assert largest_difference(plain.state_dict(), read_checkpoint(base)["model"]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "nproc", "flags"),
    [
        ("train_ddp.py", 3, {}),
        ("train_fsdp.py", 3, {}),
        ("train_ddp_accum.py", 2, {"micro_batches": 3}),
    ],
)
def test_killed_and_resumed(script, nproc, flags, project, base, one, tmp_path):
    flags = flags | {"base": base, "save_steps": 2}
    killed, _ = project.train(script, 2, tmp_path / "run", killed_at(1, 3), **flags)
    run, end = project.train(script, nproc, tmp_path / "run", **flags)
    assert killed.stderr == run.stderr == ""
    assert largest_difference(end["model"], one["model"]) < ROUNDING
