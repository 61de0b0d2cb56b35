"""What tools.fit says that a rank holds: as by the formulas, and as ranks on the CPU hold."""

import json

import pytest

from lab.fit.__main__ import LLAMA, PUBLISHED
from lab.memory import BYTES, share
from tests.lab.test_memory import run_measured
from tools.fit.candidates import text_of
from tools.fit.run import FITS, Job, Machine, run
from tools.lib.ladder import ROOT
from tools.verify.run import write_text

BASE = {"epochs": 1, "global_batch_size": 12, "optimizer": "adamw", "lr": 0.001}
TASKS = {
    "tasks.images": {"model": "vit_tiny", "dataset": "synthetic", "image_size": 16}
    | {"synthetic_samples": 48},
    "tasks.text": {"layers": 4, "heads": 4, "width": 32, "context": 24},
    "tasks.segmentation": {"image_size": 16, "width": 8, "synthetic_samples": 48},
}
RUNS = {  # script: (task, ranks of the null device, flags)
    "train_1gpu_graph.py": ("tasks.images", None, {}),
    "train_ddp_amp.py": ("tasks.segmentation", 2, {"amp_dtype": "bfloat16"}),
    "train_ddp_accum.py": ("tasks.text", 2, {"micro_batches": 2}),
    "train_fsdp.py": ("tasks.segmentation", 2, {}),
    "train_fsdp_tp.py": ("tasks.text", 4, {"fsdp_size": 2}),
    "train_tp.py": ("tasks.images", 2, {}),
}


def copy_of(script, task, folder):
    """A copy of a script that trains a task of the project."""
    path = folder / script
    text = text_of(ROOT / script, task, False)
    path.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{text}")
    return path


def settings_of(task, folder, samples=48):
    """The settings of a short run."""
    settings = BASE | TASKS[task]
    if task == "tasks.text":
        settings["text_file"] = write_text(folder / "text.txt", train=samples, val=4)
    return settings


def held_on_null_device(device, script, ranks, folder, settings):
    """What tools.fit says of the same run."""
    arguments = {"ranks": ranks or 0, "steps": 2, "gpus": 8 if ranks else 1}
    flags = settings | {"output_dir": folder / "null"}
    run = device.run(script, arguments=arguments, variables={"NULL_FIT": "1"}, **flags)
    assert run.code == 0, run.stderr
    return run.reports[0]["memory"]["held"]


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("script", RUNS)
def test_ranks_on_cpus_hold_as_much(script, null_device, tmp_path):
    task, ranks, flags = RUNS[script]
    settings = settings_of(task, tmp_path) | flags
    copy = copy_of(script, task, tmp_path)
    run_measured(copy, ranks, tmp_path, settings | {"device": "cpu"})
    real = json.loads((tmp_path / "rank0.json").read_text())["held"]
    told = held_on_null_device(null_device, copy, ranks, tmp_path, settings)
    for kind in ("parameters", "gradients"):
        assert told[kind] == pytest.approx(real[kind], rel=0.01), kind
    assert told["optimizer"] == pytest.approx(real["optimizer state"], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("fsdp_size", [8, pytest.param(64, marks=pytest.mark.rare)])
def test_formulas_hold_for_ranks_that_no_machine_has(fsdp_size, null_device, tmp_path):
    settings = settings_of("tasks.text", tmp_path, samples=4 * 64)
    settings |= {"width": 512, "context": 64, "global_batch_size": 64, "fsdp_size": fsdp_size}
    copy = copy_of("train_fsdp.py", "tasks.text", tmp_path)
    held = held_on_null_device(null_device, copy, 64, tmp_path, settings)
    embeddings, block = (256 + 64) * 512, 12 * 512**2 + 12 * 512
    parameters = 4 * block + embeddings + 2 * 512
    part = share("train_fsdp.py", 64, fsdp_size)
    assert sum(held.values()) == pytest.approx(part * parameters * BYTES["adamw"], rel=0.01)


@pytest.mark.slow
@pytest.mark.rare
def test_peak_is_the_one_that_others_have_measured(null_device):
    """Llama 3.1 8B on 8 H100s, as in lab/results/fit.md: within 10 %."""
    gpus, _, measured = PUBLISHED[0]
    job = Job(ROOT / LLAMA, (), gpus, Machine(gpus, 8, 95.0))
    result = run(job, null_device.library, 500)
    assert result.outcome == FITS, result.reason
    assert result.step["reserved"] / 2**30 == pytest.approx(measured, rel=0.1)
