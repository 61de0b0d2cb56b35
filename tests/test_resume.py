"""A killed and resumed run matches an uninterrupted one, bit for bit, even within an epoch."""

import pytest
import torch
import torchvision

import tasks.images
from tests.forked import (
    FIVE_STEPS,
    ROUNDING,
    assert_resumes,
    fork_script,
    killed_at,
    largest_difference,
    without_seconds,
)
from tests.processes import run_script
from utils.checkpoint import read_checkpoint

ADAMW = {"optimizer": "adamw", "lr": 0.001}


def slow(*values):
    """A parameter set that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("script", "nproc", "flags"),
    [
        # A model with dropout, whose random numbers must continue as well.
        ("train_1gpu.py", None, {"model": "squeezenet1_1", "image_size": 32, "audit": True}),
        # From three ranks on, the order of DistributedDataParallel's buckets matters.
        ("train_ddp.py", 3, {"loader": "workers", "num_workers": 1, "audit": True}),
        slow("train_ddp.py", 2, {"save_sharded": True} | ADAMW),
        slow("train_ddp_mp.py", 2, {"devices": "cpu,cpu", "micro_batches": 2}),
    ],
    ids=str,
)
def test_killed_and_resumed_run_matches_an_uninterrupted_one(script, nproc, flags, tmp_path):
    assert_resumes(tmp_path, script, nproc, **flags)


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize(("script", "flags"), [("train_ddp.py", ADAMW), ("train_fsdp.py", {})])
def test_run_with_a_frozen_backbone_resumes(script, flags, tmp_path):
    torch.manual_seed(0)
    backbone = torchvision.models.resnet18().state_dict()
    weights = tmp_path / "resnet18.pt"
    torch.save(backbone, weights)
    flags = flags | {"model": "resnet18", "weights": weights, "freeze": "backbone", "epochs": 1}
    checkpoint, _ = assert_resumes(tmp_path, script, 2, **flags)
    assert set(checkpoint["optimizer"]["state"]) == {"fc.weight", "fc.bias"}
    for name in ("conv1.weight", "layer4.1.bn2.running_var"):
        assert torch.equal(checkpoint["model"][name], backbone[name])


@pytest.mark.slow
def test_run_resumes_from_the_end_of_an_epoch(tmp_path):
    """Without any save within it."""
    assert_resumes(tmp_path, "train_ddp.py", 2, (1, 1), 0, save_steps=0)


@pytest.mark.slow
def test_run_moves_between_scripts_and_world_sizes(tmp_path):
    """One run, continued by one script after the other, always from within an epoch."""
    flags = FIVE_STEPS | {"dtype": "float64", "epochs": 3}
    reference = fork_script("train_1gpu.py", output_dir=tmp_path / "straight", **flags)
    flags |= {"output_dir": tmp_path / "moved", "resume": "always"}
    legs = [
        ("train_1gpu.py", None, (0, 2), {"resume": "auto"}),
        ("train_ddp.py", 3, (0, 4), {}),
        ("train_fsdp.py", 2, (1, 2), {}),  # reads what DDP wrote
        ("train_ddp.py", 2, (1, 4), {}),  # reads what FSDP wrote
        ("train_fsdp.py", 3, (2, 1), {"save_sharded": True}),
        ("train_fsdp.py", 2, (2, 2), {"save_sharded": True}),  # on another world size
        ("train_mp.py", None, (2, 4), {}),  # reads shards
        ("train_ddp_amp.py", 2, None, {}),
    ]
    for script, nproc, end, others in legs:
        run = fork_script(script, nproc, end and killed_at(*end), **flags | others)
        assert run.code == (-9 if end else 0), run.stderr
    assert [row["world_size"] for row in run.rows] == [2, 3, 2]
    ours, theirs = (read_checkpoint(r.output_dir / "last.pt") for r in (run, reference))
    assert largest_difference(ours["model"], theirs["model"]) < ROUNDING
    for row, other in zip(without_seconds(run.rows), without_seconds(reference.rows), strict=True):
        assert row | {"world_size": 1} == pytest.approx(other, rel=ROUNDING)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run that has ended, which tests read and do not continue."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert fork_script("train_1gpu.py", output_dir=folder, **FIVE_STEPS).code == 0
    return folder


def test_other_data_are_refused(finished):
    """For example, the same settings with different images in data_dir."""

    def relabel():
        real = tasks.images.build_datasets

        def build(cfg):
            train_set, val_set = real(cfg)
            train_set.labels[0] += 1
            train_set.classes[-1] = "other"
            return train_set, val_set

        tasks.images.build_datasets = build

    run = fork_script("train_1gpu.py", before=relabel, output_dir=finished, **FIVE_STEPS)
    assert run.code == 1 and run.stderr.count("error") == 1
    assert "classes " in run.stderr and "train_labels " in run.stderr


def test_nothing_left_to_do(finished):
    before = (finished / "last.pt").read_bytes()
    run = fork_script("train_1gpu.py", output_dir=finished, **FIVE_STEPS)
    assert run.code == 0 and "nothing left to do" in run.stdout
    assert (finished / "last.pt").read_bytes() == before


@pytest.mark.slow
def test_default_run_prints_no_warning(tmp_path):
    """As a user starts it, with torchrun; resnet18 has 1x1 convolutions, in channels_last."""
    flags = {"model": "resnet18", "image_size": 32, "synthetic_samples": 24, "epochs": 1}
    run = run_script("train_ddp.py", 2, output_dir=tmp_path / "run", **flags)
    assert (run.code, run.stderr) == (0, "")
