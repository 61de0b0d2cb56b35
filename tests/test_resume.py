"""A killed and resumed run matches an uninterrupted one, bit for bit, even within an epoch."""

import os
import signal
import subprocess
import sys

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
from tools.lib.runs import ROOT
from utils.checkpoint import read_checkpoint

ADAMW = {"optimizer": "adamw", "lr": 0.001}


def slow(*values):
    """A parameter set that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A file with the weights of a resnet18."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "resnet18.pt"
    torch.save(torchvision.models.resnet18().state_dict(), path)
    return path


@pytest.mark.parametrize(
    ("script", "nproc", "flags"),
    [
        # A model with dropout, whose random numbers must continue as well.
        ("train_1gpu.py", None, {"model": "squeezenet1_1", "image_size": 32, "audit": True}),
        # From three ranks on, the order of DistributedDataParallel's buckets matters.
        ("train_ddp.py", 3, {"loader": "workers", "num_workers": 1, "audit": True}),
        slow("train_ddp.py", 2, {"save_sharded": True} | ADAMW),
        slow("train_ddp.py", 1, {"save_sharded": True, "sync_bn": False}),
        ("train_1gpu.py", None, {"optimizer": "sgd_nesterov", "lr_schedule": "step"}),
        ("train_1gpu.py", None, {"momentum": 0, "save_sharded": True}),
        slow("train_ddp_mp.py", 2, {"devices": "cpu,cpu", "micro_batches": 2}),
        slow("train_ddp_accum.py", 2, {"micro_batches": 2}),
    ],
    ids=str,
)
def test_killed_and_resumed_run_matches_an_uninterrupted_one(script, nproc, flags, tmp_path):
    assert_resumes(tmp_path, script, nproc, **flags)


@pytest.mark.parametrize(
    ("script", "nproc", "flags"),
    [("train_ddp.py", 2, {}), ("train_1gpu.py", None, ADAMW), slow("train_fsdp.py", 2, {})],
    ids=str,
)
def test_run_with_a_frozen_backbone_resumes(script, nproc, flags, weights, tmp_path):
    flags = flags | {"model": "resnet18", "weights": weights, "freeze": "backbone", "epochs": 1}
    checkpoint, _ = assert_resumes(tmp_path, script, nproc, **flags)
    assert set(checkpoint["optimizer"]["state"]) == {"fc.weight", "fc.bias"}
    backbone = torch.load(weights)
    for name in ("conv1.weight", "layer4.1.bn2.running_var"):
        assert torch.equal(checkpoint["model"][name], backbone[name])


@pytest.mark.parametrize("killed", [(1, 1), (1, 2)], ids=["after an epoch", "by the clock"])
def test_run_resumes_from_other_saves(killed, tmp_path):
    """From the end of an epoch, without any save within it; and from a save by --save-minutes."""
    if killed == (1, 1):
        assert_resumes(tmp_path, "train_ddp.py", 2, killed, 0, save_steps=0)
    else:  # due after the first step, saved after the second
        flags = {"save_steps": 0, "save_minutes": 1e-9, "epochs": 1}
        assert_resumes(tmp_path, "train_ddp.py", 2, (0, 3), 2, **flags)


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


def test_crash_in_cpp_is_named_and_its_test_runs_once_more(tmp_path):
    def crash():
        os.kill(os.getpid(), signal.SIGSEGV)

    with pytest.raises(AssertionError, match=r"rank 0 .* died of SIGSEGV:\n(.|\n)*Fatal Python"):
        fork_script("train_1gpu.py", None, crash, output_dir=tmp_path / "run")

    (tmp_path / "test_of_tests.py").write_text(
        """
calls = []

def test_crash():
    calls.append(1)
    assert len(calls) > 1, "rank 1 of train_ddp.py died of SIGSEGV"

def test_error():
    assert False
"""
    )
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "-p", "no:xdist"]
    process = subprocess.run([*command, tmp_path], capture_output=True, text=True)
    assert "1 failed, 1 passed, 1 rerun" in process.stdout, process.stdout + process.stderr


def test_batches_are_kept_within_an_epoch(tmp_path):
    """Also where changes are allowed: no sample would be used once."""
    flags = FIVE_STEPS | {"output_dir": tmp_path / "run", "allow_config_change": True}
    fork_script("train_ddp.py", 2, killed_at(0, 2), **flags)
    for script, nproc, changed, name in (
        ("train_ddp.py", 2, {"global_batch_size": 20}, "global batch"),
        ("train_1gpu.py", None, {"synthetic_samples": 48}, "train_samples"),
    ):
        run = fork_script(script, nproc, **flags | changed)
        assert run.code == 1 and run.stderr.count("error") == 1
        assert name in run.stderr and "finish" in run.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run that has ended, which tests read and do not continue."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert fork_script("train_1gpu.py", output_dir=folder, **FIVE_STEPS).code == 0
    return folder


def test_changed_settings_are_named(finished):
    changed = {"lr": 0.02, "weight_decay": 0.1, "num_threads": 1}
    refused = fork_script("train_1gpu.py", output_dir=finished, **FIVE_STEPS | changed)
    assert refused.code == 1 and refused.stderr.count("error") == 1
    for part in (" lr ", "0.02", "weight_decay ", "--output-dir", "--allow-config-change"):
        assert part in refused.stderr
    assert "num_threads" not in refused.stderr and "Traceback" not in refused.stderr


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
    assert run.code == 1 and "classes " in run.stderr and "train_labels " in run.stderr


def test_nothing_left_to_do(finished):
    before = (finished / "last.pt").read_bytes()
    run = fork_script("train_1gpu.py", output_dir=finished, **FIVE_STEPS)
    assert run.code == 0 and "nothing left to do" in run.stdout
    assert (finished / "last.pt").read_bytes() == before


def test_resume_never_and_always(finished, tmp_path):
    run = fork_script("train_1gpu.py", output_dir=finished, resume="never", **FIVE_STEPS)
    assert run.code == 1 and f"{finished} " in run.stderr and "--output-dir" in run.stderr
    run = fork_script("train_1gpu.py", output_dir=tmp_path / "new", resume="always", **FIVE_STEPS)
    assert run.code == 1 and str(tmp_path / "new") in run.stderr


@pytest.mark.parametrize(
    ("script", "nproc", "changed"),
    [
        ("train_1gpu.py", None, {"lr": 0.005, "epochs": 4}),
        ("train_1gpu.py", None, ADAMW),  # its state is new
        slow("train_fsdp.py", 2, ADAMW),
        ("train_1gpu.py", None, {"momentum": 0}),
    ],
    ids=str,
)
def test_changed_settings_take_effect_when_allowed(script, nproc, changed, tmp_path):
    flags = FIVE_STEPS | {"epochs": 3, "lr_schedule": "constant", "output_dir": tmp_path / "run"}
    fork_script(script, nproc, killed_at(1, 3), **flags)
    run = fork_script(script, nproc, **flags | changed | {"allow_config_change": True})
    assert run.code == 0, run.stderr
    assert "from epoch 1, step 2" in run.stdout
    assert [row["lr"] for row in run.rows[1:]] == [changed.get("lr", 0.01)] * (
        changed.get("epochs", 3) - 1
    )
    (group,) = read_checkpoint(tmp_path / "run" / "last.pt")["optimizer"]["param_groups"]
    for name in ("lr", "momentum", "weight_decay"):
        if name in changed:
            assert group[name] == changed[name]


def test_schedule_continues_when_the_number_of_steps_per_epoch_changes(tmp_path):
    """A batch size per process, on one process and then on two: half as many steps per epoch."""
    flags = FIVE_STEPS | {"output_dir": tmp_path / "run", "epochs": 4, "allow_config_change": True}
    flags |= {"lr_schedule": "linear", "warmup_epochs": 0, "save_steps": 0}
    fork_script("train_ddp.py", 1, killed_at(2, 1), global_batch_size=6, **flags)
    run = fork_script("train_ddp.py", 2, global_batch_size=12, **flags)
    assert run.code == 0, run.stderr
    peak = run.rows[0]["lr"] / 0.75
    assert [row["lr"] / peak for row in run.rows] == pytest.approx([0.75, 0.5, 0.25, 0.0])


@pytest.fixture(scope="module")
def one_epoch(tmp_path_factory):
    """{model: the folder of its run of one epoch}; tests read them."""
    folders = {name: tmp_path_factory.mktemp(name) / "run" for name in ("resnet20_gn", "vit_tiny")}
    for model, folder in folders.items():
        fork_script("train_1gpu.py", output_dir=folder, model=model, epochs=1, **FIVE_STEPS)
    return folders


@pytest.mark.parametrize(("script", "nproc"), [("train_1gpu.py", None), ("train_fsdp.py", 2)])
@pytest.mark.parametrize(
    ("model", "changed", "tensor"),
    [
        ("resnet20_gn", {"model": "resnet20"}, "bn1.num_batches_tracked"),
        ("vit_tiny", {"image_size": 16}, "encoder.pos_embedding"),
    ],
    ids=["more tensors", "another shape"],
)
def test_another_model_is_refused_even_when_changes_are_allowed(
    script, nproc, model, changed, tensor, one_epoch
):
    """FSDP's loading would leave tensors that the file does not have as they are."""
    flags = FIVE_STEPS | {"model": model, "output_dir": one_epoch[model]}
    run = fork_script(script, nproc, **flags | changed, allow_config_change=True)
    assert run.code == 1 and run.stderr.count("error") == 1, run.stderr
    assert "different model" in run.stderr and tensor in run.stderr


def test_default_run_prints_no_warning(tmp_path):
    """As a user starts it, with torchrun; resnet18 has 1x1 convolutions, in channels_last."""
    flags = {"model": "resnet18", "image_size": 32, "synthetic_samples": 24, "epochs": 1}
    run = run_script("train_ddp.py", 2, output_dir=tmp_path / "run", **flags)
    assert (run.code, run.stderr) == (0, "")
