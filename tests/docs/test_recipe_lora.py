"""docs/recipes/lora.md: adapters beside frozen layers, on any number of ranks."""

import pytest
import torch

from tests.forked import ROUNDING, killed_at, largest_difference
from tests.recipes import TEXT, applied, import_new, run_text_to_end, with_task
from tools.lib.ladder import ROOT
from utils.checkpoint import read_checkpoint

PAGE = ROOT / "docs" / "recipes" / "lora.md"
SIZES = [TEXT[name] for name in ("context", "layers", "heads", "width")]


class Project:
    """Scripts that train the text task with adapters; base: the checkpoint of a pretrained model;
    lora, text: the modules."""

    def __init__(self, folder, monkeypatch):
        self.folder = applied(PAGE.stem, folder / "copy")
        self.lora = import_new("utils.lora", self.folder, monkeypatch)
        self.text = import_new("tasks.text", self.folder, monkeypatch)
        run_text_to_end(self.script("train_1gpu.py"), None, folder / "base", lr=0.03)
        self.base = folder / "base" / "last.pt"

    def script(self, name):
        return with_task(self.folder / name, "tasks.text")

    def train(self, script, nproc, output_dir, before=None, **flags):
        flags = {"base": self.base} | flags
        return run_text_to_end(self.script(script), nproc, output_dir, before, **flags)

    def model(self, *adapters):
        model = self.text.GPT(*SIZES).double()
        if adapters:
            self.lora.add_lora(model, ("query", "value"), *adapters)
        return model


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Project(tmp_path_factory.mktemp("project"), monkeypatch)


@pytest.fixture(scope="module")
def one_process(project, tmp_path_factory):
    """The last checkpoint of train_1gpu.py."""
    return project.train("train_1gpu.py", None, tmp_path_factory.mktemp("one_process") / "run")[1]


@pytest.mark.parametrize(
    "script, nproc, flags",
    [
        *(("train_ddp.py", nproc, {}) for nproc in (1, 2, 3)),
        *(("train_fsdp.py", nproc, {}) for nproc in (1, 2, 3)),
        ("train_ddp_accum.py", 2, {"micro_batches": 3}),
    ],
)
def test_any_number_of_ranks(script, nproc, flags, project, one_process, tmp_path):
    run, end = project.train(script, nproc, tmp_path / "run", **flags)
    assert run.stderr == ""
    assert largest_difference(end["model"], one_process["model"]) < ROUNDING


@pytest.mark.parametrize("script", ["train_ddp.py", "train_fsdp.py"])
def test_resumed_within_an_epoch(script, project, one_process, tmp_path):
    killed, _ = project.train(script, 2, tmp_path / "run", killed_at(1, 3), save_steps=2)
    assert killed.code == -9
    _, end = project.train(script, 2, tmp_path / "run")
    assert largest_difference(end["model"], one_process["model"]) < ROUNDING


def test_only_adapters_are_trained(project, one_process):
    base, adapters = read_checkpoint(project.base)["model"], set()
    for name, value in one_process["model"].items():
        if name in base:
            assert torch.equal(value, base[name].float().double()), name  # build_model: float32
        else:
            adapters.add(name)
            assert value.abs().max() > 1e-3, name
    assert len(adapters) == 8 and one_process["optimizer"]["state"].keys() == adapters


def test_adapters_change_nothing_at_first(project):
    inputs = torch.randint(256, (3, 20))
    model, adapted = project.model(), project.model(4).double()
    adapted.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(model(inputs), adapted(inputs))
    assert adapted.blocks[0].attention.key.bias is None


def test_adapters_of_zeros_never_train(project, tmp_path):
    def before():
        project.lora.nn.init.kaiming_uniform_ = lambda tensor, a: torch.nn.init.zeros_(tensor)

    _, end = project.train("train_1gpu.py", None, tmp_path / "run", before)
    assert not any(value.any() for name, value in end["model"].items() if ".lora_" in name)


def test_freezing_after_the_wrap_fails(project, tmp_path):
    """As the page explains."""
    script = project.script("train_ddp.py")
    text, line = script.read_text(), "    # Optimization\n"
    assert text.count(line) == 1
    freeze = (
        "    for name, p in model.named_parameters():\n        p.requires_grad_('.lora_' in name)\n"
    )
    wrong = script.with_name("train_wrong.py")
    wrong.write_text(text.replace(line, freeze + line))

    def before():
        def add_lora(model, *args, add=project.text.add_lora):
            add(model, *args)
            model.requires_grad_(True)

        project.text.add_lora = add_lora

    with pytest.raises(AssertionError, match="finished reduction"):
        run_text_to_end(wrong, 2, tmp_path / "run", before, base=project.base)


def test_merged_model(project, one_process, tmp_path):
    code = PAGE.read_text().partition("```python\n")[2].partition("```")[0]
    files = {"runs/train_ddp/best.pt": tmp_path / "best.pt", "merged.pt": tmp_path / "merged.pt"}
    torch.save(one_process, tmp_path / "best.pt")
    for name, path in files.items():
        assert code.count(f'"{name}"') == 1
        code = code.replace(f'"{name}"', repr(str(path)))
    exec(code, {})
    plain, adapted = project.model(), project.model(8).double()
    plain.load_state_dict(read_checkpoint(tmp_path / "merged.pt")["model"])
    adapted.load_state_dict(one_process["model"])
    inputs = torch.randint(256, (3, 20))
    assert (plain(inputs) - adapted(inputs)).abs().max() < ROUNDING
    base = read_checkpoint(project.base)["model"]
    assert largest_difference(plain.state_dict(), base) > 1e-3
    project.train("train_1gpu.py", None, tmp_path / "next", base=tmp_path / "merged.pt")


def test_memory_of_the_page(project):
    def megabytes(parameters):
        return sum(parameter.nbytes for parameter in parameters) / 1e6

    with torch.device("meta"):
        model = project.text.GPT(128, 12, 12, 768)
        whole = megabytes(model.parameters())
        project.lora.add_lora(model, ("query", "value"), 8)
    with_adapters = megabytes(model.parameters())
    trained = megabytes(p for p in model.parameters() if p.requires_grad)
    for row in (
        f"| weights | {whole:.0f} MB | {with_adapters:.0f} MB |",
        f"| gradients | {whole:.0f} MB | {trained:.1f} MB |",
        f"| AdamW's state | {2 * whole:.0f} MB | {2 * trained:.1f} MB |",
    ):
        assert row in PAGE.read_text()


def test_bytes_of_the_optimizer(project, one_process):
    def state_bytes(checkpoint):
        states = checkpoint["optimizer"]["state"].values()
        return sum(s[name].nbytes for s in states for name in ("exp_avg", "exp_avg_sq"))

    trained = sum(v.nbytes for n, v in one_process["model"].items() if ".lora_" in n)
    assert state_bytes(one_process) == 2 * trained
    assert state_bytes(read_checkpoint(project.base)) > 20 * trained
