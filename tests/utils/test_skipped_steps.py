"""Steps in which some rank has a gradient that is inf or NaN, which a run may outlive."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.forked import (
    FIVE_STEPS,
    ROUNDING,
    fork_script,
    killed_at,
    largest_difference,
    without_seconds,
)
from tests.processes import run_ranks
from utils.checkpoint import read_checkpoint
from utils.data import Loader
from utils.distributed import dp_rank
from utils.options.skipped_steps import SkippedSteps

CPU = torch.device("cpu")
SKIP = FIVE_STEPS | {"dtype": "float64", "max_skipped_steps": 3}
VIT = {"model": "vit_tiny", "image_size": 16}


def poisoned(*places, rank=None):
    """For fork_script(before=...): the inputs of these (epoch, step) are NaN on data-parallel rank
    `rank`, or on all."""

    def before():
        batches = Loader.__iter__

        def poisoned_batches(loader):
            for batch in batches(loader):
                here = loader.train and rank in (None, dp_rank())
                if here and (loader.epoch, loader.read) in places:
                    parts = batch if isinstance(batch, list) else [batch]  # micro-batches
                    for inputs, _ in parts:
                        inputs.mul_(float("nan"))
                yield batch

        Loader.__iter__ = poisoned_batches

    return before


def skipping(folder, script="train_1gpu.py", nproc=None, rank=None, **flags):
    """A run that skips a step within the first epoch, and the first and the last of the second."""
    places = poisoned((0, 2), (1, 1), (1, 5), rank=rank)
    run = fork_script(script, nproc, places, output_dir=folder / script, **SKIP | flags)
    assert run.code == 0, run.stderr
    assert run.stderr.count(" skipped") == 3
    return run


def assert_same(run, other):
    """Assert that two runs have reached the same weights and metrics."""
    paths = run.output_dir / "last.pt", other.output_dir / "last.pt"
    ours, theirs = (read_checkpoint(path)["model"] for path in paths)
    assert largest_difference(ours, theirs) < ROUNDING
    for row, other_row in zip(run.rows, other.rows, strict=True):
        for name in ("train_loss", "train_accuracy", "train_samples", "val_loss"):
            assert row[name] == pytest.approx(other_row[name], abs=ROUNDING), name


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    return skipping(tmp_path_factory.mktemp("one"))


def test_skipped_step_changes_nothing(one_process):
    run = one_process
    assert [row["train_samples"] for row in run.rows] == [48, 36]  # of 60
    assert [row["skipped_steps"] for row in run.rows] == [[2], [1, 5]]
    first, *_, last = run.stderr.splitlines()
    assert "step 2 of epoch 0" in first and "loss on rank 0" in first and "samples [" in first
    assert "step 5 of epoch 1" in last
    checkpoint = read_checkpoint(run.output_dir / "last.pt")
    assert all(tensor.isfinite().all() for tensor in checkpoint["model"].values())
    assert checkpoint["model"]["bn1.num_batches_tracked"] == 7  # of 10
    assert all(0.0 < row["train_loss"] < 3.0 for row in run.rows)


@pytest.mark.parametrize(
    "script", ["train_ddp.py", pytest.param("train_fsdp.py", marks=pytest.mark.slow)]
)
def test_scripts_skip_the_same_steps(script, tmp_path, one_process):
    """One rank's samples are enough. SGD is not fused for the shards of FSDP."""
    run = skipping(tmp_path, script, 2, rank=1)
    assert run.stderr.count("loss on rank ") == 6  # synchronized BatchNorm spreads it to both
    assert_same(run, one_process)


@pytest.mark.slow
@pytest.mark.rare
def test_scripts_skip_the_same_steps_of_a_transformer(tmp_path):
    one = skipping(tmp_path, **VIT)
    accumulating = skipping(tmp_path, "train_ddp_accum.py", 2, rank=1, **VIT, micro_batches=2)
    assert accumulating.stderr.count("loss on rank 1") == 3
    assert_same(accumulating, one)
    assert_same(skipping(tmp_path, "train_tp.py", 2, **VIT), one)
    assert_same(skipping(tmp_path, "train_pp.py", 2, **VIT, micro_batches=2), one)


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


def test_one_gradient_of_one_rank_skips_the_step_of_all():
    """As of a shard. The buffers that forward() has assigned are restored."""

    def body(rank):
        model = Averaging()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = SimpleNamespace(device=CPU, indices=torch.arange(3), epoch=0, step=1)
        meter = SimpleNamespace(vector=torch.zeros(1), shapes={}, count=0)
        state = {"loader": loader, "meter": meter, "metrics": SimpleNamespace(columns=[])}
        cfg = SimpleNamespace(max_skipped_steps=3)
        run = SimpleNamespace(cfg=cfg, model=model, optimizer=optimizer, state=state, epoch=0)
        guard = SkippedSteps()
        guard.at_start(run)
        seen = []
        for value in (1.0, (5.0, float("inf"))[rank], 2.0):
            optimizer.zero_grad()
            model(torch.full((3, 2), value)).sum().backward()
            optimizer.step()
            guard.after_step(run)
            seen.append([model.mean[0].item(), model.last[0].item(), model.weight[0].item()])
        return seen

    for first, second, third in run_ranks(body, 2):
        assert first == second == [1.0, 1.0, pytest.approx(0.7)]
        assert third == [2.5, 2.0, pytest.approx(0.1)]


def test_resumed_run_skips_and_counts_as_an_uninterrupted_one(tmp_path):
    """Saved right after a skipped step: the Meter's sums in the file are without it. The first step
    after the resume is skipped, too."""
    flags = SKIP | {"epochs": 1}
    places = poisoned((0, 2), (0, 3))
    straight = fork_script("train_1gpu.py", None, places, output_dir=tmp_path / "a", **flags)

    def stop():
        places()
        killed_at(0, 3)()

    folder = tmp_path / "b"
    assert fork_script("train_1gpu.py", None, stop, output_dir=folder, **flags).code == -9
    assert read_checkpoint(folder / "last.pt")["loader"]["step"] == 2
    resumed = fork_script("train_1gpu.py", None, places, output_dir=folder, **flags)
    assert resumed.code == 0 and resumed.stderr.count("was skipped") == 1
    assert without_seconds(resumed.rows) == without_seconds(straight.rows)
