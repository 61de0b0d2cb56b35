"""docs/recipes/gan.md: two networks that train each other, and the mistakes that it explains."""

import importlib.util
import sys

import pytest
import torch
from torch import nn

from tests.docs.test_recipes import compile_without_inductor
from tests.forked import ROUNDING, fork_script, killed_at, largest_difference
from tests.recipes import RUN, applied, run_to_end, with_task
from tools.lib.ladder import ROOT

PAGE = ROOT / "docs" / "recipes" / "gan.md"
TASK = "tests.gan_task"
SLOW = pytest.mark.slow
FLAGS = {"optimizer": "adamw", "clip_norm": 1.0}
TO_GENERATOR = (
    "update(model.generator, mean_loss(task.generator_loss(logits), count), optimizer, cfg)"
)
THROUGH_DDP = ("model.discriminator.module(outputs", "model.discriminator(outputs")
SEPARATE = (  # in tasks/gan.py
    'both = torch.cat([batch["image"], fakes.detach()])  # for a single forward pass\n'
    '        return {"fakes": fakes, "logits": self.discriminator(both)}',
    'logits = [self.discriminator(each) for each in (batch["image"], fakes.detach())]\n'
    '        return {"fakes": fakes, "logits": torch.cat(logits)}',
)
TWO_OPTIMIZERS = [
    ("(loss_sum, count), optimizer, cfg", "(loss_sum, count), optimizer[1], cfg"),
    ("(logits), count), optimizer, cfg", "(logits), count), optimizer[0], cfg"),
    ("        scheduler.step()\n", "        [each.step() for each in scheduler]\n"),
    (
        "optimizer = build_optimizer(model, cfg)",
        "both = model.generator, model.discriminator\n"
        "    optimizer = [build_optimizer(each, cfg) for each in both]",
    ),
    (
        "scheduler = build_scheduler(optimizer, cfg, steps_per_epoch=len(train_loader))",
        "scheduler = [build_scheduler(each, cfg, len(train_loader)) for each in optimizer]",
    ),
    (
        '"optimizer": optimizer,\n        "scheduler": scheduler,',
        '"optimizer": optimizer[0],\n        "scheduler": scheduler[0],\n'
        '        "optimizer 2": optimizer[1],\n        "scheduler 2": scheduler[1],',
    ),
    ("lr=scheduler.", "lr=scheduler[0]."),
]


class Project:
    """A copy of the scripts with the page, maybe changed, that trains the task of the tests."""

    def __init__(self, folder, monkeypatch, changes=()):
        self.folder = applied(PAGE.stem, folder / "copy").parent
        for code, instead in changes:
            files = [folder / "copy" / name for name in ("train_ddp.py", "tasks/gan.py")]
            (file,) = (file for file in files if code in file.read_text())
            assert file.read_text().count(code) == 1
            file.write_text(file.read_text().replace(code, instead))
        # The script will take utils/ and tasks/ of this process, with this module in addition.
        spec = importlib.util.spec_from_file_location("tasks.gan", folder / "copy/tasks/gan.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "tasks.gan", module)
        spec.loader.exec_module(module)
        monkeypatch.delitem(sys.modules, TASK, raising=False)  # it has imported an earlier one
        self.script = with_task(folder / "copy" / "train_ddp.py", TASK)

    def train(self, nproc, name, before=None, **flags):
        """Returns the Run and its last checkpoint."""
        flags = {"output_dir": self.folder / name} | FLAGS | flags
        return run_to_end(self.script, nproc, before=before, **flags)

    def failure(self, nproc, before=None, **flags):
        """The messages of a run that fails."""
        flags = RUN | FLAGS | flags | {"output_dir": self.folder / "failed"}
        run = fork_script(self.script, nproc, before, **flags)
        assert run.code == 1
        return run.stderr


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The rows and the last checkpoint of one rank."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        project = Project(tmp_path_factory.mktemp("one"), monkeypatch)
        run, end = project.train(1, "run")
    assert run.stderr == ""
    return run.rows, end


@pytest.fixture
def project(tmp_path, monkeypatch):
    return Project(tmp_path, monkeypatch)


def numbers(rows):
    names = [f"{split}_{name}" for split in ("train", "val") for name in ("loss", "distance")]
    return [row[name] for row in rows for name in names]


def with_batch_norm():
    sys.modules[TASK].norm = nn.BatchNorm1d


@pytest.mark.parametrize("nproc", [2, 3])
def test_any_number_of_ranks(nproc, one, project):
    run, end = project.train(nproc, "run")
    assert run.stderr == ""
    assert largest_difference(end["model"], one[1]["model"]) < ROUNDING
    assert numbers(run.rows) == pytest.approx(numbers(one[0]), rel=ROUNDING)
    assert [row["val_samples"] for row in run.rows] == [31, 31]


def test_resumed_within_an_epoch(one, project):
    assert project.train(2, "run", killed_at(1, 3), save_steps=2)[0].code == -9
    run, end = project.train(3, "run", save_steps=2)
    assert largest_difference(end["model"], one[1]["model"]) < ROUNDING
    assert numbers(run.rows) == pytest.approx(numbers(one[0]), rel=ROUNDING)


def test_rank_without_samples_in_evaluation(project):
    def few():
        sys.modules[TASK].val_samples = 2

    ends = [project.train(nproc, f"{nproc}", few) for nproc in (1, 3)]
    assert numbers(ends[0][0].rows) == pytest.approx(numbers(ends[1][0].rows), rel=ROUNDING)


@SLOW
def test_compiled(one, project):
    end = project.train(2, "run", compile_without_inductor, compile="default")[1]
    assert largest_difference(end["model"], one[1]["model"]) < ROUNDING


def test_sync_batch_norm(project):
    ends = [project.train(nproc, f"{nproc}", with_batch_norm)[1]["model"] for nproc in (1, 2)]
    assert largest_difference(*ends) < ROUNDING


def test_batch_norm_of_each_rank(project):
    run, end = project.train(2, "two", with_batch_norm, sync_bn=False)
    assert run.stderr == ""
    alone = project.train(1, "one", with_batch_norm, sync_bn=False)[1]
    assert largest_difference(end["model"], alone["model"]) > 1e-3


def test_two_optimizers_are_the_same_as_one(one, tmp_path, monkeypatch):
    project = Project(tmp_path, monkeypatch, TWO_OPTIMIZERS)
    project.train(2, "run", killed_at(1, 3), save_steps=2)
    end = project.train(2, "run", save_steps=2)[1]
    assert largest_difference(end["model"], one[1]["model"]) < ROUNDING


MISTAKES = {  # whose weights differ
    "noise of the rank's own generator": [
        ("outputs = model(inputs)", 'inputs["noise"].normal_()\n        outputs = model(inputs)')
    ],
    "the same noise on all ranks": [
        (
            "outputs = model(inputs)",
            "torch.manual_seed(loader.step)\n        inputs['noise'].normal_()\n"
            "        outputs = model(inputs)",
        )
    ],
    "the sum of the ranks' means": [
        ("count = mean_over_replicas(task.count(targets))", "count = task.count(targets) / 2")
    ],
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_differ(name, one, tmp_path, monkeypatch):
    project = Project(tmp_path, monkeypatch, MISTAKES[name])
    end = project.train(2, "run")[1]
    assert largest_difference(end["model"], one[1]["model"]) > 1e-6


BACKWARD = "loss.backward(inputs=parameters)"
FROZEN = [
    ("model.discriminator.module(", "model.discriminator.requires_grad_(False).module("),
    (f"{TO_GENERATOR}\n", f"{TO_GENERATOR}\n        model.discriminator.requires_grad_(True)\n"),
    (BACKWARD, "loss.backward()"),
]
WRAP = "    model{0} = DistributedDataParallel(model{0}, gradient_as_bucket_view=True)\n"
BOTH = "for network in model.generator, model.discriminator:\n        rebuild"
ONE_DDP = [
    (WRAP.format(".generator") + WRAP.format(".discriminator"), WRAP.format("")),
    ("update(model.discriminator,", "update(model.module.discriminator,"),
    ("model.discriminator.module(", "model.module.discriminator("),
    ("update(model.generator,", "update(model.module.generator,"),
    (BOTH, "for network in [model]:\n        rebuild"),
]
NOT_SAME = "rank 1 differs"
GRADIENTS = """gradients = torch.autograd.grad(loss, parameters)
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = gradient"""
ERRORS = {
    "one DDP around both": ONE_DDP,
    "gradients of the discriminator are left": [(BACKWARD, "loss.backward()")],
    "autograd.grad": [(BACKWARD, GRADIENTS)],
}


@pytest.mark.parametrize("name", ERRORS)
def test_mistakes_raise(name, tmp_path, monkeypatch):
    stderr = Project(tmp_path, monkeypatch, ERRORS[name]).failure(2)
    assert NOT_SAME in stderr


@pytest.mark.parametrize("changes", [FROZEN, [THROUGH_DDP]], ids=["frozen", "through DDP"])
def test_different_ways_to_the_same(changes, one, tmp_path, monkeypatch):
    end = Project(tmp_path, monkeypatch, changes).train(2, "run")[1]
    assert largest_difference(end["model"], one[1]["model"]) < ROUNDING


def test_separate_forward_passes_of_batch_norm(tmp_path, monkeypatch):
    project = Project(tmp_path, monkeypatch, [SEPARATE])
    numbers = (2, 3) if torch.__version__.startswith("2.11") else (1, 2)  # the page says why
    ends = [project.train(nproc, f"{nproc}", with_batch_norm)[1]["model"] for nproc in numbers]
    assert largest_difference(*ends) < ROUNDING  # with sync_bn, which is on by default
    flags = RUN | FLAGS | {"sync_bn": False, "output_dir": tmp_path / "unsynchronized"}
    run = fork_script(project.script, 2, with_batch_norm, **flags)
    assert run.code == 0 or "inplace operation" in run.stderr  # by version of torch


def test_buffers_that_are_not_broadcast(tmp_path, monkeypatch):
    both = "(model.discriminator, gradient_as_bucket_view=True"
    changes = [(both, both.replace("gradient_as_bucket_view=True", "broadcast_buffers=False"))]
    project = Project(tmp_path, monkeypatch, changes)
    assert NOT_SAME in project.failure(2, with_batch_norm, sync_bn=False)


def test_code_of_the_page_is_that_of_the_tests():
    block = PAGE.read_text().partition("```python\n")[2].partition("```")[0]
    dataset = block.partition("class ")[2].partition("\n\n\n")[0]
    assert f"class {dataset}\n" in (ROOT / "tests" / "gan_task.py").read_text()
