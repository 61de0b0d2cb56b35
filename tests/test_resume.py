"""A killed and resumed run is the straight run, bit for bit, also from the middle of an epoch."""

import pytest
import torch

from tests.launch import run_script, start_script
from tools.runs import kill_after_first_save
from utils.checkpoint import read_checkpoint


def same_bits(ours, theirs):
    if isinstance(theirs, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same_bits(ours[k], theirs[k]) for k in theirs)
    return ours == theirs


@pytest.mark.parametrize(
    ("script", "nproc", "flags"),
    [
        # a model with dropout, whose random numbers must go on as well
        ("train_1gpu.py", None, {"save_steps": 2, "model": "squeezenet1_1", "image_size": 32}),
        ("train_ddp.py", 3, {"save_steps": 2, "loader": "workers", "num_workers": 1}),
        ("train_fsdp.py", 2, {"save_steps": 2, "save_sharded": True}),
        ("train_ddp.py", 2, {}),  # at the end of an epoch
    ],
)
def test_killed_and_resumed_equals_straight_bit_for_bit(script, nproc, flags, tmp_path):
    flags = {"synthetic_samples": 60, "epochs": 3, "audit": True} | flags  # float32, as usual
    straight = run_script(script, nproc, output_dir=tmp_path / "straight", **flags)
    process = start_script(script, nproc, output_dir=tmp_path / "killed", **flags)
    kill_after_first_save(process, tmp_path / "killed")
    step = read_checkpoint(tmp_path / "killed" / "last.pt")["loader"]["step"]
    resumed = run_script(script, nproc, output_dir=tmp_path / "killed", **flags)
    assert (straight.code, resumed.code) == (0, 0), resumed.stderr
    assert "epochs 0 to" not in resumed.stdout, "it started anew"
    assert ("(from step 2)" if "save_steps" in flags else "epochs 1 to") in resumed.stdout
    assert step == flags.get("save_steps", 0)

    files = [read_checkpoint(run.output_dir / "last.pt") for run in (resumed, straight)]
    for name in ("model", "optimizer", "scheduler"):
        assert same_bits(files[0][name], files[1][name]), name
    timeless = [
        [{k: v for k, v in row.items() if not k.endswith("seconds")} for row in run.rows]
        for run in (resumed, straight)
    ]
    assert timeless[0] == timeless[1]


def test_a_changed_config_stops_and_names_the_keys(tmp_path):
    run_script("train_1gpu.py", output_dir=tmp_path)
    changed = {"lr": 0.02, "seed": 7}
    refused = run_script("train_1gpu.py", output_dir=tmp_path, **changed)
    assert refused.code != 0
    assert "lr was 0.01 and is 0.02" in refused.stderr
    assert "seed was 0 and is 7" in refused.stderr
    forced = run_script("train_1gpu.py", output_dir=tmp_path, allow_config_change=True, **changed)
    assert forced.code == 0
    assert "nothing left to do" in forced.stdout
