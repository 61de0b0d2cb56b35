"""Steps in which some rank has a gradient that is inf or NaN, which a run may outlive."""

import itertools
import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.forked import FIVE_STEPS, ROUNDING, fork_script, largest_difference, without_seconds
from utils.checkpoint import Checkpointer, read_checkpoint
from utils.config import load_config
from utils.data import Loader
from utils.distributed import dp_rank
from utils.options.skipped_steps import SkippedSteps
from utils.rungs.amp import AmpSettings

SKIP = FIVE_STEPS | {"dtype": "float64", "max_skipped_steps": 2}
VIT = {"model": "vit_tiny", "image_size": 16}
ADAMW = VIT | {"optimizer": "adamw"}


def poisoned(*places, rank=None, value=float("nan")):
    """For fork_script(before=...): the inputs of (epoch, step) are `value` on data-parallel rank
    `rank`, or on all."""

    def before():
        batches = Loader.__iter__

        def poisoned_batches(loader):
            for batch in batches(loader):
                here = loader.train and rank in (None, dp_rank())
                if here and (loader.epoch, loader.read) in places:
                    parts = batch if isinstance(batch, list) else [batch]  # micro-batches
                    for inputs, _ in parts:
                        inputs.mul_(value)
                yield batch

        Loader.__iter__ = poisoned_batches

    return before


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """train_1gpu.py skips a whole global batch within an epoch, and one at its end."""
    folder = tmp_path_factory.mktemp("one")
    runs = {}
    for name, flags in (("resnet", {}), ("vit", VIT), ("adamw", ADAMW)):
        places = poisoned((0, 2), (1, 5))
        flags = SKIP | flags
        runs[name] = fork_script("train_1gpu.py", None, places, output_dir=folder / name, **flags)
        assert runs[name].code == 0, runs[name].stderr
    return runs


def test_skipped_step_changes_nothing(one_process):
    run = one_process["resnet"]
    assert [row["train_samples"] for row in run.rows] == [48, 48]  # of 60
    assert [row["skipped_steps"] for row in run.rows] == [[2], [5]]
    first, second = run.stderr.splitlines()
    assert "step 2 of epoch 0" in first and "loss on rank 0" in first and "samples [" in first
    assert "step 5 of epoch 1" in second
    checkpoint = read_checkpoint(run.output_dir / "last.pt")
    assert all(tensor.isfinite().all() for tensor in checkpoint["model"].values())
    assert checkpoint["model"]["bn1.num_batches_tracked"] == 8  # of 10
    assert all(0.0 < row["train_loss"] < 10.0 for row in run.rows)


@pytest.mark.parametrize(
    ("script", "nproc", "reference", "flags"),
    [
        ("train_1gpu_graph.py", None, "resnet", {}),
        ("train_mp.py", None, "resnet", {"devices": "cpu,cpu"}),
        ("train_ddp.py", 2, "resnet", {}),
        ("train_ddp_accum.py", 2, "vit", VIT | {"micro_batches": 2}),
        ("train_fsdp.py", 2, "resnet", {}),  # SGD is not fused for its shards, AdamW is
        ("train_fsdp.py", 2, "adamw", ADAMW),
        ("train_tp.py", 2, "vit", VIT),
        ("train_pp.py", 2, "vit", VIT | {"micro_batches": 2}),
    ],
    ids=str,
)
def test_all_scripts_skip_the_same_steps(script, nproc, reference, flags, tmp_path, one_process):
    """One rank's samples are enough; here, the last data-parallel rank's."""
    replicas = nproc if script in ("train_ddp.py", "train_ddp_accum.py", "train_fsdp.py") else 1
    places = poisoned((0, 2), (1, 5), rank=replicas - 1)
    run = fork_script(script, nproc, places, output_dir=tmp_path / "run", **SKIP | flags)
    assert run.code == 0, run.stderr
    assert run.stderr.count(" skipped") == 2
    named = replicas if reference == "resnet" else 1  # synchronized BatchNorm spreads it to all
    assert run.stderr.count("loss on rank ") == run.stderr.count("samples [") == 2 * named
    theirs = one_process[reference]
    paths = run.output_dir / "last.pt", theirs.output_dir / "last.pt"
    ours, expected = (read_checkpoint(path)["model"] for path in paths)
    assert largest_difference(ours, expected) < ROUNDING
    for row, other in zip(run.rows, theirs.rows, strict=True):
        for name in ("train_loss", "train_accuracy", "train_samples", "val_loss"):
            assert row[name] == pytest.approx(other[name], abs=ROUNDING), name


def test_too_many_skipped_steps_end_the_run(tmp_path):
    flags = SKIP | {"max_skipped_steps": 1, "sync_bn": False}  # which would spread NaN to rank 0
    places = poisoned((0, 4), (1, 3), rank=1)
    run = fork_script("train_ddp.py", 2, places, output_dir=tmp_path / "run", **flags)
    assert run.code == 1
    error, warning = sorted(run.stderr.splitlines())
    assert "step 4 of epoch 0" in warning and "step 3 of epoch 1" in error
    assert "loss on rank 1" in error and "samples [" in error and "--max-skipped-steps" in error
    assert read_checkpoint(tmp_path / "run" / "last.pt")["epoch"] == 1
    again = fork_script("train_ddp.py", 2, places, output_dir=tmp_path / "run", **flags)
    assert again.code == 0, again.stderr  # each start counts from zero


def test_gradient_without_a_loss_that_is_not_finite(tmp_path):
    def before():
        real = torch.Tensor.backward

        def backward(tensor, *args, **kwargs):
            real(tensor * float("inf"), *args, **kwargs)

        torch.Tensor.backward = backward

    flags = SKIP | {"max_skipped_steps": 0}
    run = fork_script("train_1gpu.py", None, before, output_dir=tmp_path / "run", **flags)
    assert run.code == 1
    assert "step 1 of epoch 0" in run.stderr and "a gradient" in run.stderr


def test_all_ranks_skip_if_one_shard_is_not_finite(tmp_path):
    def before():
        check = SkippedSteps._before_step

        def poison_and_check(self, optimizer, args, kwargs):
            if dist.get_rank() == 1 and next(steps) == 3:
                *_, weight, _ = optimizer.param_groups[0]["params"]
                weight.grad.to_local().fill_(float("inf"))
            check(self, optimizer, args, kwargs)

        steps = itertools.count(1)
        SkippedSteps._before_step = poison_and_check

    run = fork_script("train_fsdp.py", 2, before, output_dir=tmp_path / "run", **SKIP | VIT)
    assert run.code == 0, run.stderr
    (warning,) = run.stderr.splitlines()
    assert "step 3 of epoch 0" in warning and "a gradient" in warning and "loss" not in warning
    assert [row["train_samples"] for row in run.rows] == [48, 60]


class Averaging(nn.Module):
    """Assigns its buffer, instead of writing into it; a second one appears in the first step."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("last", None)

    def forward(self, inputs):
        self.mean = 0.5 * self.mean + inputs.mean(0)
        self.last = inputs[-1]
        return inputs * self.weight


def test_buffers_that_forward_assigns_are_restored():
    model = Averaging()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = SimpleNamespace(device=torch.device("cpu"), indices=torch.arange(3), epoch=0, step=1)
    meter = SimpleNamespace(vector=torch.zeros(1), shapes={}, count=0)
    state = {"loader": loader, "meter": meter, "metrics": SimpleNamespace(columns=[])}
    cfg = SimpleNamespace(max_skipped_steps=3)
    run = SimpleNamespace(cfg=cfg, model=model, optimizer=optimizer, state=state, epoch=0)
    guard = SkippedSteps()
    guard.at_start(run)
    seen = []
    for value in (1.0, float("nan"), 2.0):
        optimizer.zero_grad()
        model(torch.full((3, 2), value)).sum().backward()
        optimizer.step()
        guard.after_step(run)
        seen.append([model.mean[0].item(), model.last[0].item()])
    assert seen == [[1.0, 1.0], [1.0, 1.0], [2.5, 2.0]]


def test_first_step_of_an_epoch_may_be_skipped(tmp_path):
    """Its Meter starts again from nothing, not from the sums of the epoch before."""
    run = fork_script("train_1gpu.py", None, poisoned((1, 1)), output_dir=tmp_path, **SKIP)
    assert run.code == 0, run.stderr
    assert [row["train_samples"] for row in run.rows] == [60, 48]
    assert run.rows[1]["train_loss"] < 3.0


def test_gradscaler_has_the_decision(capfd):
    """The first scale of float16 is meant to overflow; such steps would count."""
    flags = ["--max-skipped-steps", "3"]
    with pytest.raises(SystemExit):
        load_config(script_settings=AmpSettings, argv=[*flags, "--amp-dtype", "float16"])
    assert "--max-skipped-steps" in capfd.readouterr().err
    assert load_config(script_settings=AmpSettings, argv=flags).max_skipped_steps == 3


@pytest.mark.parametrize("skipped", [2, 3])
def test_resumed_run_skips_and_counts_as_an_uninterrupted_one(skipped, tmp_path):
    """Saved right after a skipped step: the Meter's sums in the file are without it. Or the first
    step after the resume is skipped."""
    flags = SKIP | {"epochs": 1}
    places = poisoned((0, skipped))
    straight = fork_script("train_1gpu.py", None, places, output_dir=tmp_path / "a", **flags)

    def stop():
        places()
        real = Checkpointer.step

        def step(checkpoint):
            real(checkpoint)
            if checkpoint.state["loader"].step == 3:
                checkpoint.wait()
                os._exit(7)

        Checkpointer.step = step

    folder = tmp_path / "b"
    assert fork_script("train_1gpu.py", None, stop, output_dir=folder, **flags).code == 7
    assert read_checkpoint(folder / "last.pt")["loader"]["step"] == 2
    resumed = fork_script("train_1gpu.py", None, places, output_dir=folder, **flags)
    assert resumed.code == 0 and resumed.stderr.count("was skipped") == (skipped == 3)
    assert without_seconds(resumed.rows) == without_seconds(straight.rows)
