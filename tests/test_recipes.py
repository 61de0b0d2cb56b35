"""docs/recipes: each page applies to the scripts as they are, and does what it promises."""

import re
from functools import partial

import pytest
import torch
from torch import nn

from tests import experts_task
from tests.forked import killed_at, largest_difference
from tests.launch import SMALL
from tests.recipes import EXACT, PAGES, RUN, applied, run_to_end, with_task
from tools.lessons import ROOT
from tools.runs import finish_run, start_run
from tools.verify.run import project_with_task
from utils.checkpoint import Checkpointer

EXPERTS = "tests.experts_task"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_diff_is_short_and_applies(page, tmp_path):
    """A page may be applied as it is: git ignores what is around the diffs."""
    folder = applied(page.stem, tmp_path / "copy")
    diffs = re.findall(r"```diff\n(.*?)```", page.read_text(), re.DOTALL)
    assert diffs
    for diff in diffs:
        old, new, *lines = diff.splitlines()
        assert (old[:4], new[:4]) == ("--- ", "+++ ")
        assert sum(line[0] in "+-" for line in lines) <= 40
        file = folder / new.removeprefix("+++ b/")
        assert max(map(len, file.read_text().splitlines())) <= 100
        if file.suffix == ".py":
            compile(file.read_text(), file, "exec")


def saved_at_the_end():
    """For fork_script(before=...): a save between epochs would gather and free all parameters."""
    real = Checkpointer.save

    def save(checkpoint, epoch, **options):
        if epoch == checkpoint.cfg.epochs:
            real(checkpoint, epoch, **options)

    Checkpointer.save = save


def averages(checkpoint):
    return {name: s["average"] for name, s in checkpoint["optimizer"]["state"].items()}


@pytest.mark.parametrize(
    "optimizer",
    ["sgd", *(pytest.param(o, marks=pytest.mark.slow) for o in ("adamw", "sgd without momentum"))],
)
def test_exponential_moving_average(optimizer, tmp_path):
    flags = {"optimizer": optimizer.split()[0], "lr": 0.01}
    if "without" in optimizer:
        flags["momentum"] = 0.0
    train = partial(run_to_end, **flags)
    folder = applied("ema", tmp_path / "copy")
    ddp, fsdp = folder / "train_ddp.py", folder / "train_fsdp.py"
    plain, plain_end = train("train_ddp.py", 1, tmp_path / "plain")
    one, end = train(ddp, 1, tmp_path / "one")
    assert largest_difference(end["model"], plain_end["model"]) == 0  # the training is the same
    assert max((end["model"][name] - a).abs().max() for name, a in averages(end).items()) > 1e-4
    losses = [row["val_loss"] for row in one.rows]
    assert losses[-1] != plain.rows[-1]["val_loss"]
    train(ddp, 2, tmp_path / "killed", killed_at(1, 3), save_steps=2)
    runs = [
        train(ddp, 2, tmp_path / "ddp"),
        train(fsdp, 2, tmp_path / "fsdp", saved_at_the_end),
        train(fsdp, 2, tmp_path / "killed"),
    ]
    for run, checkpoint in runs:
        assert largest_difference(checkpoint["model"], end["model"]) < EXACT
        assert largest_difference(averages(checkpoint), averages(end)) < EXACT
        assert [row["val_loss"] for row in run.rows] == pytest.approx(losses, rel=EXACT)


@pytest.mark.slow
def test_unused_parameters(tmp_path):
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    uses = experts_task.chosen(experts_task.Points(60, 0).points)[order].view(5, 6, 2).sum(1)
    assert {int((step > 0).sum()) for step in uses} == {0, 1, 2}  # ranks that use the second one
    plain = project_with_task("images", tmp_path / "plain")
    # As a user would: the level is read when torch is imported.
    environment = {"TORCH_DISTRIBUTED_DEBUG": "INFO", "PYTHONPATH": ROOT}
    flags = SMALL | RUN | {"output_dir": tmp_path / "failed"}
    failed = finish_run(
        start_run(with_task(plain / "train_ddp.py", EXPERTS), 2, flags, environment),
        tmp_path / "failed",
    )
    assert failed.code == 1 and "Expected to have finished reduction" in failed.stderr
    assert "Parameters which did not receive grad for rank" in failed.stderr
    assert "experts.1.weight" in failed.stderr
    script = with_task(applied("unused-parameters", tmp_path / "copy") / "train_ddp.py", EXPERTS)
    one = run_to_end(with_task(plain / "train_1gpu.py", EXPERTS), None, tmp_path / "one")[1]
    run_to_end(script, 2, tmp_path / "two", killed_at(1, 3), save_steps=2)
    two = run_to_end(script, 2, tmp_path / "two")[1]
    assert largest_difference(two["model"], one["model"]) < EXACT


def counting(log):
    """For fork_script(before=...): write the sizes of all tensors that autograd saves to a file."""

    def before():
        file = log.open("w", buffering=1)

        def pack(tensor):
            print(tensor.nbytes, file=file)
            return tensor

        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor).__enter__()

    return before


def saved_bytes(log):
    return sum(map(int, log.read_text().split()))


def compile_without_inductor():
    """For fork_script(before=...): all that torch.compile does, but for generating code."""
    compile_module = nn.Module.compile
    nn.Module.compile = lambda module, mode: compile_module(module, backend="aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_ddp.py", "train_fsdp.py"])
def test_activation_checkpointing(script, tmp_path):
    folder = applied("activation-checkpointing", tmp_path / "copy")
    train = partial(run_to_end, model="vit_tiny")
    logs = tmp_path / "plain.log", tmp_path / "one.log"
    plain = train("train_ddp.py", 1, tmp_path / "plain", counting(logs[0]))[1]
    one = train(folder / "train_ddp.py", 1, tmp_path / "one", counting(logs[1]))[1]
    assert largest_difference(one["model"], plain["model"]) == 0
    assert saved_bytes(logs[1]) < saved_bytes(logs[0]) / 5
    train(folder / script, 2, tmp_path / "two", killed_at(1, 3), save_steps=2)
    two = train(folder / script, 2, tmp_path / "two")[1]
    assert largest_difference(two["model"], plain["model"]) < EXACT
    compiled = compile_without_inductor
    three = train(folder / script, 2, tmp_path / "compiled", compiled, compile="default")[1]
    assert largest_difference(three["model"], plain["model"]) < EXACT
