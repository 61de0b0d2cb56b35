"""One trajectory: every script, on any number of ranks, trains the same weights (in float64)."""

import pytest
from torch import nn
from torchvision.models.resnet import BasicBlock

import tasks.images
from tests.forked import ROUNDING, fork_script, largest_difference, without_seconds
from utils.checkpoint import read_checkpoint

# 54 samples make four global batches of 12 and leave 6; 13 validation samples divide unevenly.
# About half of the steps are clipped: if all were, a loss that is divided twice would not show.
SETTINGS = {"dtype": "float64", "synthetic_samples": 54, "clip_norm": 5.8}
# Micro-batches change a BatchNorm's statistics.
GROUPNORM = {"model": "resnet20_gn", "lr": 0.05, "clip_norm": 4.5}
VIT = {"model": "vit_tiny", "lr": 0.1, "clip_norm": 2.4}


def slow(*values):
    """A parameter set that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def train(folder, script, nproc=None, before=None, **flags):
    run = fork_script(script, nproc, before, output_dir=folder / "run", **SETTINGS | flags)
    assert (run.code, run.stderr) == (0, "")
    return run.rows, read_checkpoint(run.output_dir / "last.pt")


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """What train_1gpu.py reaches, with BatchNorm and with GroupNorm."""
    return [
        train(tmp_path_factory.mktemp("reference"), "train_1gpu.py", **flags)
        for flags in ({}, GROUPNORM)
    ]


def assert_same_curve(ours, theirs, tolerance=ROUNDING):
    (rows, saved), (other_rows, other_saved) = ours, theirs
    for row, other in zip(without_seconds(rows), without_seconds(other_rows), strict=True):
        assert row.pop("world_size") >= other.pop("world_size")
        assert row == pytest.approx(other, rel=ROUNDING)
    assert largest_difference(saved["model"], other_saved["model"]) < tolerance
    momentum, other_momentum = (
        {name: state["momentum_buffer"] for name, state in s["optimizer"]["state"].items()}
        for s in (saved, other_saved)
    )
    assert largest_difference(momentum, other_momentum) < tolerance


@pytest.mark.parametrize(
    ("script", "nproc", "flags"),
    [
        ("train_dp.py", None, {}),
        ("train_1gpu_graph.py", None, {}),
        ("train_mp.py", None, {"devices": "cpu,cpu,cpu"}),
        ("train_ddp.py", 1, {}),
        ("train_ddp.py", 2, {}),
        ("train_ddp.py", 3, {"loader": "workers", "num_workers": 1}),
        slow("train_ddp_spawn.py", 2, {}),
        slow("train_ddp_amp.py", 2, {}),  # autocast leaves float64 as it is
        slow("train_ddp_mp.py", 2, {}),
        ("train_fsdp.py", 2, {}),
        slow("train_fsdp.py", 3, {"save_sharded": True}),
        slow("train_fsdp.py", 4, {"fsdp_size": 2}),
    ],
    ids=lambda value: str(value).removeprefix("train_"),
)
def test_script_trains_the_same_weights(script, nproc, flags, references, tmp_path):
    assert_same_curve(train(tmp_path, script, nproc, **flags), references[0])


@pytest.mark.parametrize(
    ("script", "nproc", "count"),
    [
        ("train_ddp_accum.py", 2, 4),  # of 2, 2, 1 and 1 samples
        ("train_mp.py", None, 3),
        slow("train_pp.py", 2, 3),
    ],
)
def test_micro_batches_train_the_same_weights(script, nproc, count, references, tmp_path):
    flags = GROUPNORM | {"micro_batches": count}
    assert_same_curve(train(tmp_path, script, nproc, **flags), references[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "nproc", "flags"),
    [
        ("train_tp.py", 2, {}),
        ("train_pp.py", 2, {}),
        ("train_pp.py", 3, {"schedule": "InterleavedZeroBubble", "micro_batches": 6}),
    ],
    ids=lambda value: str(value).removeprefix("train_"),
)
def test_transformer_trains_the_same_weights(script, nproc, flags, tmp_path):
    reference = train(tmp_path / "1gpu", "train_1gpu.py", **VIT)
    assert_same_curve(train(tmp_path, script, nproc, **VIT | flags), reference)


def build_small_model():
    """For fork_script(before=...): a model with BatchNorm that takes little time to compile."""

    def build_model(cfg, train_set):
        block = BasicBlock(4, 4)
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10)]
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), block, *head)

    tasks.images.build_model = build_model


@pytest.mark.slow
def test_compiled_model_trains_the_same_weights(tmp_path):
    """What torch.compile captures, without the time that its default backend takes: SyncBatchNorm
    in DistributedDataParallel, evaluation, and its last batch, which is smaller."""

    def compile_small_model():
        build_small_model()
        compile_module = nn.Module.compile

        def compile(module, mode):
            assert mode == "default"
            compile_module(module, backend="eager")

        nn.Module.compile = compile

    reference = train(tmp_path / "1gpu", "train_1gpu.py", None, build_small_model)
    ours = train(tmp_path / "ddp", "train_ddp.py", 2, compile_small_model, compile="default")
    assert_same_curve(ours, reference)


def test_another_setting_is_another_curve(references, tmp_path):
    """The comparison above notices a difference that it should notice."""
    ours = train(tmp_path, "train_ddp.py", 2, sync_bn=False)
    with pytest.raises(AssertionError):
        assert_same_curve(ours, references[0])
