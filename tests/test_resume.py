"""A killed and resumed run is the straight run, bit for bit, and others can continue it."""

import os
import signal
import time

import pytest
import torch

from tests.launch import run_script, start_script, wait_for_family
from tests.test_same_curve import CURVE, difference
from utils.checkpoint import read_checkpoint


def killed(script, nproc, output_dir, **flags):
    """Start a run and kill -9 what launched it, as soon as the first epoch is saved."""
    process = start_script(script, nproc, output_dir=output_dir, **flags)
    end = time.monotonic() + 120
    while not (output_dir / "last.pt").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert wait_for_family(process.run_tag) == [], "a killed launcher left ranks behind"


def same_bits(ours, theirs):
    if isinstance(theirs, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same_bits(ours[k], theirs[k]) for k in theirs)
    return ours == theirs


@pytest.mark.parametrize(("script", "nproc"), [("train_1gpu.py", None), ("train_ddp.py", 3)])
def test_killed_and_resumed_equals_straight_bit_for_bit(script, nproc, tmp_path):
    flags = {"synthetic_samples": 60, "epochs": 4}  # float32, as users run it
    straight = run_script(script, nproc, output_dir=tmp_path / "straight", **flags)
    killed(script, nproc, tmp_path / "killed", **flags)
    resumed = run_script(script, nproc, output_dir=tmp_path / "killed", **flags)
    assert (straight.code, resumed.code) == (0, 0), resumed.stderr
    assert "epochs 0 to" not in resumed.stdout, "it started anew"

    files = [read_checkpoint(run.output_dir / "last.pt") for run in (resumed, straight)]
    for name in ("model", "optimizer", "scheduler"):
        assert same_bits(files[0][name], files[1][name]), name
    timeless = [
        [{k: v for k, v in row.items() if not k.endswith("seconds")} for row in run.rows]
        for run in (resumed, straight)
    ]
    assert timeless[0] == timeless[1]


def test_another_world_size_and_another_script_finish_the_run(tmp_path):
    straight = run_script("train_1gpu.py", output_dir=tmp_path / "straight", **CURVE)
    killed("train_ddp.py", 2, tmp_path / "killed", **CURVE)
    finished = run_script("train_1gpu.py", output_dir=tmp_path / "killed", **CURVE)
    assert difference(finished, straight) < 1e-9
    assert [row["world_size"] for row in finished.rows] == [2, 1]


def test_optimizer_state_lost_on_resume_is_seen(tmp_path):
    """The planted bug: the same check, on a checkpoint whose momentum is gone."""
    straight = run_script("train_1gpu.py", output_dir=tmp_path / "straight", **CURVE)
    killed("train_1gpu.py", None, tmp_path / "killed", **CURVE)
    path = tmp_path / "killed" / "last.pt"
    checkpoint = read_checkpoint(path)
    for buffers in checkpoint["optimizer"]["state"].values():
        buffers["momentum_buffer"].zero_()
    torch.save(checkpoint, path)
    resumed = run_script("train_1gpu.py", output_dir=tmp_path / "killed", **CURVE)
    assert difference(resumed, straight) > 1e-6


def test_a_changed_config_stops_and_names_the_keys(tmp_path):
    run_script("train_1gpu.py", output_dir=tmp_path, **CURVE)
    changed = CURVE | {"lr": 0.02, "seed": 7}
    refused = run_script("train_1gpu.py", output_dir=tmp_path, **changed)
    assert refused.code != 0
    assert "lr was 0.01 and is 0.02" in refused.stderr
    assert "seed was 0 and is 7" in refused.stderr
    forced = run_script("train_1gpu.py", output_dir=tmp_path, allow_config_change=True, **changed)
    assert forced.code == 0
    assert "nothing left to do" in forced.stdout
