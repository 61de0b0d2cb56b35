"""What is wrong outside ends every rank soon, with one message, and leaves no process behind."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from PIL import Image

from tests.launch import planted, run_script, start_script
from tools.runs import ROOT, family, finish_run, start_run, wait_for_family
from utils.checkpoint import read_checkpoint


def image_folder(root, classes=("cat", "dog"), count=12):
    for split in ("train", "val"):
        for label, name in enumerate(classes):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                image = Image.new("RGB", (20, 16), (100 * label, 20 * i, 50))
                image.save(folder / f"{i}.jpg")
    return root


def spoken(run):
    """Lines of the ranks' own messages, and how many tracebacks are theirs."""
    errors = [line for line in run.stderr.splitlines() if line.startswith("error")]
    own = run.stderr.count("Traceback (most recent call last)")
    launcher = run.stderr.count("torch.distributed.elastic.multiprocessing.errors.ChildFailedError")
    return errors, own - launcher


def assert_one_message(run, *parts):
    errors, tracebacks = spoken(run)
    assert run.code != 0
    assert len(errors) == 1, run.stderr
    assert tracebacks == 0, run.stderr
    for part in parts:
        assert part in errors[0]


def test_unknown_key(tmp_path):
    config = tmp_path / "mine.yaml"
    config.write_text("epochs: 1\nlrr: 0.1\n")
    run = run_script("train_ddp.py", 2, config=config, output_dir=tmp_path / "run")
    assert_one_message(run, f"{config}:2", "'lrr'", "did you mean 'lr'")


def test_truncated_image_in_the_middle_of_a_set(tmp_path):
    data = image_folder(tmp_path / "data")
    bad = data / "train" / "dog" / "7.jpg"
    bad.write_bytes(bad.read_bytes()[:300])
    flags = {"dataset": "imagefolder", "data_dir": data, "global_batch_size": 4, "epochs": 1}
    flags |= {"loader": "workers", "num_workers": 1}
    run = run_script("train_ddp.py", 2, output_dir=tmp_path / "error", **flags)
    assert_one_message(run, str(bad), "--on-bad-sample skip")

    flags["on_bad_sample"] = "skip"
    run = run_script("train_ddp.py", 2, output_dir=tmp_path / "skip", **flags)
    assert run.code == 0, run.stderr
    assert "23 + 24 images" in run.stdout
    assert "left out: 1 of 48 files" in run.stdout
    assert run.rows[0]["train_samples"] == 20  # 23, less the 3 that fill no global batch


def test_full_disk_keeps_the_previous_checkpoint(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:  # one checkpoint of this model takes 5.8 MB
        run = run_script("train_ddp.py", 2, output_dir=folder, model="squeezenet1_1", image_size=32)
        assert_one_message(run, "epoch-0002.pt", "No space left")
        assert read_checkpoint(folder / "last.pt")["epoch"] == 1
        assert not list(folder.glob("*.tmp"))
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_an_exception_on_one_rank_is_the_one_that_is_shown(tmp_path):
    raising = "        optimizer.step()\n        1 / (torch.distributed.get_rank() - 1)"
    copy = planted(tmp_path, "train_ddp.py", "        optimizer.step()", raising)
    run = run_script(copy, 2, output_dir=tmp_path / "run")
    errors, tracebacks = spoken(run)
    assert run.code != 0
    assert errors == []
    assert tracebacks == 1, run.stderr
    assert "ZeroDivisionError" in run.stderr
    root_cause = run.stderr.split("Root Cause")[1]
    assert "rank      : 1" in root_cause


EARLY = """
import os, sys, time
sys.path.insert(0, {root!r})
from utils.distributed import UserError, init_distributed, report_errors

@report_errors
def main():
    if os.environ["LOCAL_RANK"] == "0":
        {first}
    raise UserError("the second device is gone")

main()
"""


@pytest.mark.parametrize("first", ["time.sleep(2)", "init_distributed('cpu')"])
def test_an_error_before_the_ranks_have_met_is_told_once(first, tmp_path):
    """All ranks see it, local rank 0 two seconds late; or only local rank 1 does."""
    script = tmp_path / "script.py"
    script.write_text(EARLY.format(root=str(ROOT), first=first))
    run = finish_run(start_run(script, 2, {}), tmp_path)
    assert run.code == 1 and run.stderr.count("error: the second device is gone") == 1, run.stderr
    assert run.seconds < 60


def test_a_killed_rank_ends_the_run(tmp_path):
    process = start_script(
        "train_ddp.py", 2, output_dir=tmp_path, epochs=1000, loader="workers", num_workers=1
    )
    end = time.monotonic() + 120
    while not (tmp_path / "last.pt").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)
    ranks = [
        pid
        for pid in family(process.run_tag)
        if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    ]
    os.kill(min(ranks), signal.SIGKILL)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "SIGKILL" in stderr
    assert wait_for_family(process.run_tag) == []


@pytest.mark.parametrize("script", ["train_ddp.py", "train_ddp_amp.py"])
def test_started_without_torchrun(script, tmp_path):
    run = run_script(script, output_dir=tmp_path)
    assert_one_message(run, f"torchrun --standalone --nproc_per_node=N {script}")


def test_one_process_script_under_torchrun(tmp_path):
    assert_one_message(run_script("train_1gpu.py", 2, output_dir=tmp_path), "python train_1gpu.py")
