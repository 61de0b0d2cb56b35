"""docs/recipes/large-models.md: no rank holds the whole model, and the weights are the same."""

import ctypes
import os
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from tests import forked
from tests.forked import ROUNDING, fork_script, killed_at, largest_difference
from tests.recipes import TEXT, applied, import_new, run_text_to_end, with_task
from tools.lib.ladder import ROOT
from tools.verify.run import write_text
from utils.distributed import control_group

transformers = pytest.importorskip("transformers")
PAGE = ROOT / "docs" / "recipes" / "large-models.md"
TASK = "tasks.hugging_face"
ARCHITECTURES = ("gpt2", "llama")  # with tied weights; with buffers that are in no file


def llama(task, cfg):
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=cfg.width,
        intermediate_size=4 * cfg.width,
        num_hidden_layers=cfg.layers,
        num_attention_heads=cfg.heads,
    )
    return task.FromDict(transformers.AutoModelForCausalLM.from_config(config))


class Project:
    """Scripts that fine-tune a model. `plain` is without the page."""

    def __init__(self, folder, monkeypatch):
        plain = applied("hugging-face", folder / "plain")
        self.folder = applied(PAGE.stem, folder / "copy")
        self.plain = with_task(plain / "train_fsdp.py", TASK)
        self.large = with_task(self.folder / "train_fsdp.py", TASK)
        self.task = import_new(TASK, plain, monkeypatch)
        self.module = import_new("utils.large", self.folder, monkeypatch)
        self.build_gpt2, self.blocks_of_gpt2 = self.task.build_model, self.task.blocks
        for name in ARCHITECTURES:
            self.choose(name)
            model = self.task.build_model(SimpleNamespace(**TEXT), None).module
            model.save_pretrained(folder / name, max_shard_size="5KB")
            assert len(list((folder / name).glob("*.safetensors"))) > 5
        self.pretrained = folder

    def choose(self, architecture):
        """What the task trains."""
        if architecture == "llama":
            self.task.build_model = lambda cfg, train_set: llama(self.task, cfg)
            self.task.blocks = lambda model: list(model.module.model.layers)
        else:
            self.task.build_model, self.task.blocks = self.build_gpt2, self.blocks_of_gpt2

    def load_all(self, folder):
        """For fork_script(before=...): without the page, build_model() loads the weights."""

        def build_model(cfg, train_set):
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            return self.task.FromDict(model)

        def before():
            self.task.build_model = build_model

        return before


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Project(tmp_path_factory.mktemp("project"), monkeypatch)


def waits_for_disks():
    """For fork_script(before=...): the group in which weights are read must not be that of steps,
    whose timeout may be shorter."""
    module = sys.modules["utils.large"]
    load = module.load

    def checked_load(*args, process_group=None, **kwargs):
        assert process_group is control_group(True) is not None
        load(*args, process_group=process_group, **kwargs)

    module.load = checked_load


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_same_weights_as_without_the_page(architecture, project, tmp_path):
    """On one rank; and on two, killed within an epoch, and continued by three."""
    project.choose(architecture)
    folder = project.pretrained / architecture
    before = project.load_all(folder)
    plain_run, plain = run_text_to_end(project.plain, 2, tmp_path / "plain", before)
    flags = {"pretrained": folder, "save_sharded": True}
    one = run_text_to_end(project.large, 1, tmp_path / "one", waits_for_disks, **flags)
    killed, _ = run_text_to_end(
        project.large, 2, tmp_path / "run", killed_at(1, 3), save_steps=2, **flags
    )
    assert killed.code == -9
    resumed = run_text_to_end(project.large, 3, tmp_path / "run", waits_for_disks, **flags)
    for run, end in (one, resumed):
        assert run.stderr == ""
        assert largest_difference(end["model"], plain["model"]) < ROUNDING
        for name in ("train_loss", "val_loss"):
            losses = [row[name] for row in plain_run.rows]
            assert [row[name] for row in run.rows] == pytest.approx(losses, rel=ROUNDING)


@pytest.mark.slow
def test_a_weight_that_is_missing_is_an_error(project, tmp_path):
    project.choose("llama")
    with pytest.raises(AssertionError, match=r"Missing key .*lm_head\.weight"):
        run_text_to_end(project.large, 1, tmp_path / "run", pretrained=project.pretrained / "gpt2")


M_MMAP_THRESHOLD = -3  # of malloc.h


def anonymous():
    """The memory of this process that is not of files, in MB."""
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith("RssAnon")]
    return int(line.split()[1]) / 1e3


def peak_until_the_optimizer(script, file, before=lambda: None):
    """For fork_script(before=...): write the peak of anonymous() to a file per rank, and end."""

    def measure():
        before()
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)  # else, malloc keeps what is freed
        start, peak = anonymous(), [0]

        def sample():
            while True:
                peak[0] = max(peak[0], anonymous() - start)

        def build_optimizer(*args):
            peak[0] = max(peak[0], anonymous() - start)
            file.with_suffix(f".{os.environ['RANK']}").write_text(str(peak[0]))
            os._exit(0)

        threading.Thread(target=sample, daemon=True).start()
        forked._scripts[script].build_optimizer = build_optimizer

    return measure


@pytest.mark.slow
@pytest.mark.rare
def test_memory(project, tmp_path):
    """For the figures on the page: pytest -s -m slow -k test_memory."""
    project.choose("gpt2")
    sizes = {"layers": 12, "heads": 12, "width": 768, "context": 128}
    model = project.task.build_model(SimpleNamespace(**sizes), None).module
    megabytes = sum(parameter.nbytes for parameter in model.parameters()) / 1e6
    model.bfloat16().save_pretrained(tmp_path / "pretrained")  # as most are; trained in float32
    del model
    peaks = {}
    for name, script, before, flags in (
        ("plain", project.plain, project.load_all(tmp_path / "pretrained"), {}),
        ("large", project.large, lambda: None, {"pretrained": tmp_path / "pretrained"}),
    ):
        for nproc in (2, 4):
            file = tmp_path / f"{name}{nproc}"
            settings = TEXT | sizes | flags | {"dtype": "float32", "output_dir": tmp_path / "run"}
            settings["text_file"] = write_text(tmp_path / "text.txt", train=65, val=7)
            measure = peak_until_the_optimizer(script, file, before)
            run = fork_script(script, nproc, measure, settings=settings)
            assert run.code == 0, run.stderr
            ranks = [float(path.read_text()) for path in tmp_path.glob(f"{file.name}.*")]
            peaks[name, nproc] = max(ranks)
    print(f"weights: {megabytes:.0f} MB; peaks: {peaks}")
    assert peaks["plain", 2] > 0.9 * megabytes
    assert peaks["large", 2] < 0.85 * megabytes and peaks["large", 4] < 0.65 * megabytes
