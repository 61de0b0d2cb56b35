"""The benches beside tools.bench: peers, loaders, checkpoints, and what is prepared for a GPU."""

import json
from types import SimpleNamespace

import pytest
import torch

from tools import bench_checkpoint, bench_loader, bench_peers, on_gpu
from tools.bench_peers import contestants, ratio, table
from tools.runs import ROOT, family
from utils.config import load_config


def run_main(module, *flags):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [module.__name__, *flags])
        patch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
        module.main()


def measured(**speeds):
    """What bench_peers would have found, at these images/s of each row of two processes or one."""
    result = {"contestants": {}}
    for contestant in contestants([1, 2], [0, 4]):
        facts = contestant.facts()
        speed = speeds.get(facts["kind"], 100)
        facts["samples"] = [{"images_per_second": speed} for _ in range(3)]
        result["contestants"][contestant.key()] = facts
    return result


def test_ratios_are_to_the_fastest_peer_of_as_many_processes():
    result = measured(ours=200, bare=210)
    fast = result["contestants"]["fabric x1 float32 4"]["samples"]
    fast[:] = [{"images_per_second": 1e4} for _ in range(3)]
    ours = result["contestants"]["ours, 1 device float32"]
    assert ratio(result, ours).startswith("0.02 (") and ratio(result, ours).endswith("of float32")
    two = result["contestants"]["ours, DDP x2, own statistics bfloat16"]
    assert "of bfloat16; 2.0" in ratio(result, two) and ratio(result, two).startswith("2.0")
    assert "0.95" in ratio(result, result["contestants"]["bare loop, our loader float32"])
    assert ratio(result, result["contestants"]["fabric x1 float32 0"]) == ""
    assert len(table(result).splitlines()) == 2 + len(result["contestants"])


def test_a_bare_loop_and_the_tutorial_are_timed(tmp_path):
    flags = ["--processes=1", "--repeats=1", "--steps=2", "--workers=0", f"--output={tmp_path}"]
    flags += ["--set=global_batch_size=8", "--set=device=cpu"]
    for only, count in (("bare", 1), ("tutorial x1", 1), ("ours", 2)):
        run_main(bench_peers, f"--only={only}", *flags)
        found = json.loads((tmp_path / "peers.json").read_text())["contestants"]
        assert len(found) == count
        for contestant in found.values():
            (sample,) = contestant["samples"]
            assert sample["images_per_second"] > 0 and 0 <= sample["train_accuracy"] <= 1


def test_peers_that_fail_or_come_too_late_cost_no_other(tmp_path, monkeypatch):
    seen = []

    def sample(bench, contestant):
        seen.append(contestant.key())
        if len(seen) == 2:
            raise RuntimeError("it failed")
        if len(seen) == 4:
            raise KeyboardInterrupt
        return {"images_per_second": 10.0, "train_accuracy": 0.1}

    monkeypatch.setattr(bench_peers, "sample", sample)
    with pytest.raises(SystemExit, match="could be measured: ours, 1 device float32"):
        run_main(bench_peers, "--processes=1", "--repeats=2", f"--output={tmp_path}")
    found = json.loads((tmp_path / "peers.json").read_text())["contestants"]
    assert list(found) == [seen[0], seen[2]]
    assert "1 runs of each row" in (tmp_path / "peers.md").read_text()


def test_workers_that_start_anew_are_timed_over_a_real_epoch():
    asked = {}

    def peer(row, arguments):
        asked[arguments[1]] = row.flags
        return [{"samples": 1, "seconds": 1.0, "accuracy": 0.0}]

    for contestant in contestants([1], [0, 4]):
        if contestant.peer == "tutorial":
            bench_peers.sample(SimpleNamespace(flags={}, peer=peer), contestant)
    assert set(asked) == {"10!", "0", "4"}
    assert asked["10!"]["synthetic_samples"] == 50_000
    assert not any("synthetic_samples" in asked[workers] for workers in ("0", "4"))


STAGE = """
import os, subprocess, sys, time
print(os.environ["RUN_TAG"], flush=True)
env = os.environ | {"RUN_TAG": os.environ["RUN_TAG"] + "run"}  # as start_run() does
sleeper = [sys.executable, "-c", "import time; print('asleep', flush=True); time.sleep(600)"]
subprocess.Popen(sleeper, env=env, start_new_session=True)
time.sleep(600)
"""


def test_a_stage_that_takes_too_long_leaves_nothing_behind(tmp_path):
    with open(tmp_path / "log", "w+") as log:
        assert on_gpu.run(["-c", "raise SystemExit(3)"], log, 60) == 3
        assert on_gpu.run(["-c", STAGE], log, 5) == on_gpu.STOPPED
        log.seek(0)
        tag, *said = log.read().splitlines()
    assert "asleep" in said and "KeyboardInterrupt" in said
    assert len(tag) == 32 and family(tag) == []


def test_a_checkpoints_costs_are_timed(tmp_path):
    flags = ["--models=resnet18", "--steps=3", "--repeats=1", f"--output={tmp_path}"]
    run_main(bench_checkpoint, *flags, "--set=global_batch_size=4", "--set=device=cpu")
    (name, found), *_ = json.loads((tmp_path / "checkpoint.json").read_text())["models"].items()
    assert name == "resnet18" and found["load"] > 0
    assert all(len(found["runs"][way]) == 1 for way in bench_checkpoint.WAYS)
    assert not list(tmp_path.glob("checkpoint-*"))


def test_loaders_take_turns(tmp_path):
    root = bench_loader.make_photographs(tmp_path, 16, size=(60, 50))
    flags = ["--dataset=imagefolder", f"--data-dir={root}", "--augment=resized_crop"]
    flags += ["--image-size=32", "--global-batch-size=4", "--loader=workers"]
    pair = [bench_loader.ours(flags, 0, True), bench_loader.reference(flags, 0)]
    assert [images for _, images in pair] == [16, 16]
    batches = [next(iter(loader))[0] for loader, _ in pair]
    assert all(b.shape == (4, 3, 32, 32) and b.dtype == torch.float32 for b in batches)
    ours, theirs = bench_loader.in_turns(pair, repeats=2)
    assert len(ours) == len(theirs) == 2 and min(ours + theirs) > 0
    uint8, _ = bench_loader.ours(flags, 0, False)
    assert next(iter(uint8))[0].dtype == torch.uint8


def test_what_is_prepared_for_a_gpu_can_be_started(tmp_path, monkeypatch, capsys):
    for commands in on_gpu.stages(tmp_path, data_dir="data/jpg").values():
        for command in commands:
            if command[0] == "-m" and command[1].startswith("tools."):
                assert (ROOT / f"{command[1].replace('.', '/')}.py").exists()
            if "train_ddp_amp.py" in command:
                flags = command[command.index("train_ddp_amp.py") + 1 :]
                cfg = load_config([f.replace("configs/", f"{ROOT}/configs/") for f in flags])
                expected = ("resnet9", "imagefolder")
                if "tools.profiler" in command:
                    expected = ("resnet50", "synthetic")
                assert (cfg.model, cfg.dataset) == expected
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["on_gpu", str(tmp_path)])
    with pytest.raises(SystemExit):
        on_gpu.main()
    assert "no CUDA device is visible" in capsys.readouterr().err
