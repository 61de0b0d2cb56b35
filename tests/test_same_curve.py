"""One trajectory: every script, on any number of ranks, trains the same weights (in float64)."""

from functools import cache

import pytest
from torch import nn
from torchvision.models.resnet import BasicBlock

import tasks.images
from tests.forked import ROUNDING, fork_script, largest_difference, without_seconds
from utils.checkpoint import read_checkpoint

# 54 samples make four global batches of 12 and leave 6; 13 validation samples divide unevenly.
# About half of the steps are clipped: if all were, a loss that is divided twice would not show.
SETTINGS = {"dtype": "float64", "synthetic_samples": 54, "clip_norm": 5.8}
MODELS = {
    "resnet20": {},
    "resnet20_gn": {"lr": 0.05, "clip_norm": 4.5},  # micro-batches change BatchNorm's statistics
    "vit_tiny": {"lr": 0.1, "clip_norm": 2.4},
}
ZERO_BUBBLE = {"schedule": "InterleavedZeroBubble", "micro_batches": 6}


def slow(*values):
    """A parameter set that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def train(folder, script, nproc=None, before=None, **flags):
    run = fork_script(script, nproc, before, output_dir=folder / "run", **SETTINGS | flags)
    assert (run.code, run.stderr) == (0, "")
    return run.rows, read_checkpoint(run.output_dir / "last.pt")


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory):
    """A function: what train_1gpu.py reaches with one of MODELS."""

    @cache
    def reference_of(model):
        folder = tmp_path_factory.mktemp(model)
        return train(folder, "train_1gpu.py", model=model, **MODELS[model])

    return reference_of


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
    ("script", "nproc", "model", "flags"),
    [
        ("train_dp.py", None, "resnet20", {}),
        ("train_1gpu_graph.py", None, "resnet20", {}),
        ("train_mp.py", None, "resnet20", {"devices": "cpu,cpu,cpu"}),
        ("train_mp.py", None, "resnet20_gn", {"micro_batches": 3}),
        ("train_ddp.py", 1, "resnet20", {}),
        ("train_ddp.py", 2, "resnet20", {}),
        ("train_ddp.py", 3, "resnet20", {"loader": "workers", "num_workers": 1}),
        slow("train_ddp_spawn.py", 2, "resnet20", {}),
        slow("train_ddp_amp.py", 2, "resnet20", {}),  # autocast leaves float64 as it is
        ("train_ddp_accum.py", 2, "resnet20_gn", {"micro_batches": 4}),  # of 2, 2, 1, 1 samples
        slow("train_ddp_mp.py", 2, "resnet20", {}),
        ("train_fsdp.py", 2, "resnet20", {}),
        slow("train_fsdp.py", 3, "resnet20", {"save_sharded": True}),
        slow("train_fsdp.py", 4, "resnet20", {"fsdp_size": 2}),
        slow("train_tp.py", 2, "vit_tiny", {}),
        slow("train_pp.py", 2, "vit_tiny", {}),
        slow("train_pp.py", 2, "resnet20_gn", {"micro_batches": 3}),
        slow("train_pp.py", 3, "vit_tiny", ZERO_BUBBLE),
    ],
    ids=lambda value: str(value).removeprefix("train_"),
)
def test_script_trains_the_same_weights(script, nproc, model, flags, reference_of, tmp_path):
    ours = train(tmp_path, script, nproc, model=model, **MODELS[model] | flags)
    assert_same_curve(ours, reference_of(model))


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


def test_another_setting_is_another_curve(reference_of, tmp_path):
    """The comparison above notices a difference that it should notice."""
    ours = train(tmp_path, "train_ddp.py", 2, sync_bn=False)
    with pytest.raises(AssertionError):
        assert_same_curve(ours, reference_of("resnet20"))
