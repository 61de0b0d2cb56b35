"""Faults that no test on a CPU can see: each has happened, and shows on the null device."""

import pytest
import torch

from lab.budgets import RUNS
from tests.null_device import SETTINGS, stop_and_resume
from tools.fit.candidates import text_of
from tools.lib.ladder import ROOT
from tools.null import report

RESNET = {"model": "resnet20"}  # has buffers: BatchNorm's statistics


def resume(device, script, folder, nproc=None, **flags):
    """stop_and_resume() as in RUNS, with these flags, too."""
    _, arguments, own = RUNS[script]
    arguments = {} if nproc else arguments
    return stop_and_resume(device, script, folder, nproc, arguments, **own | flags)


def test_sums_of_a_resumed_epoch_are_on_the_cpu_when_steps_are_skipped(null_device, tmp_path):
    resume(null_device, "train_1gpu.py", tmp_path, max_skipped_steps=3)


@pytest.mark.slow
@pytest.mark.rare
def test_offloaded_shards_and_buffers_are_on_two_devices_when_resumed(null_device, tmp_path):
    resume(null_device, "train_fsdp.py", tmp_path, fsdp_offload=True, optimizer="sgd", **RESNET)


@pytest.mark.slow
def test_gradients_of_offloaded_shards_are_on_the_cpu_when_steps_are_skipped(null_device, tmp_path):
    resume(null_device, "train_fsdp.py", tmp_path, fsdp_offload=True, max_skipped_steps=3)


@pytest.mark.slow
@pytest.mark.rare
def test_messages_of_a_pipeline_do_not_wait_for_others(null_device, tmp_path):
    """Neither for collectives, nor, unless they form a batch, for those of other pairs of ranks."""
    run = resume(null_device, "train_pp.py", tmp_path, nproc=2)
    communicators = [
        {call.partition(" ")[0] for call in calls} for calls in run.reports[0]["calls"].values()
    ]
    messages = [kinds for kinds in communicators if kinds & {"send", "receive"}]
    two = [{"send", "receive"}] * 2  # of the batches, and of the pair
    # PyTorch 2.11 sends a single message as a batch, too.
    assert messages == two or (torch.__version__ < "2.14" and messages == two[:1])
    assert {"broadcast"} in communicators


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "optimizer"),
    [
        ("train_tp.py", "adamw"),
        pytest.param("train_fsdp_tp.py", "sgd", marks=pytest.mark.rare),
    ],
)
def test_tensors_of_a_mesh_are_updated_together(script, optimizer, null_device, tmp_path):
    run = resume(null_device, script, tmp_path, optimizer=optimizer, max_skipped_steps=3)
    updates = "FusedAdam" if optimizer == "adamw" else "multi_tensor_apply_kernel"
    assert [name for name in run.step["kernel"] if updates in name]
    assert report.number(run.step, "kernel") < 400  # one by one, AdamW takes over 700


def test_batchnorms_in_float32_are_gathered_together(null_device, tmp_path):
    """Not one by one, of which each would cost a message for a few numbers."""
    flags = SETTINGS | RESNET | {"fsdp_dtype": "bfloat16", "output_dir": tmp_path / "run"}
    run = null_device.run("train_fsdp.py", arguments={"ranks": 4, "steps": 3}, **flags)
    assert run.code == 0, run.stderr
    counts = {name.partition(",")[0]: n for name, (n, _) in run.step["collective"].items()}
    blocks = 9  # and the root, and the 21 BatchNorms together
    assert counts["reduce-scatter"] == blocks + 2


def test_random_numbers_by_sample_are_drawn_for_a_dataset_on_the_gpu(null_device, tmp_path):
    """Its batches have indices that are there, too: no step waits for them."""
    script = tmp_path / "train_1gpu.py"
    text = text_of(ROOT / script.name, "tasks.diffusion", False)
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{text}")
    flags = {"dataset": "synthetic", "synthetic_samples": 40, "image_size": 8, "layers": 1}
    flags |= {"width": 16, "global_batch_size": 8, "num_workers": 0, "loader": "device"}
    run = null_device.run(script, output_dir=tmp_path / "run", arguments={"steps": 3}, **flags)
    assert run.code == 0, run.stderr
    assert len(run.reports[0]["steps"]) == 3 and "wait" not in run.step
