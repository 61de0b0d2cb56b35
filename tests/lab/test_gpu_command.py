"""The command that measures everything on a GPU, in calls of limited length."""

import json
import os
import subprocess
import sys
import tarfile
import time

import pytest

import lab.gpu.__main__ as command
from lab.bench import loader
from lab.bench.rows import Row
from lab.gpu.__main__ import Results, plan, run_call
from lab.gpu.jobs import Job, Jobs, dataset_flags
from lab.gpu.report import Monitor, sections
from tools.lib.ladder import ROOT
from tools.lib.runs import TooSlow, family, wait_for_family
from utils.errors import UserError


class Clock:
    """Time that passes only in jobs."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(command, "time", clock)
    return clock


def make_job(clock, ran, name, seconds, estimate=None):
    """A Job that takes as long as these seconds, or until it is stopped."""

    def run(limit):
        ran.append(name)
        clock.now += min(seconds, limit)
        if seconds > limit:
            raise TooSlow
        return {}

    stage = "speed" if name.startswith("fast") else "other"
    return Job(stage, name, estimate or seconds, run)


def test_next_call_continues_and_starts_nothing_that_does_not_fit(clock, tmp_path):
    ran, path = [], tmp_path / "gpu.json"
    sizes = {"first": 50, "fast": 30, "last": 20}
    jobs = [make_job(clock, ran, name, seconds) for name, seconds in sizes.items()]
    assert run_call(jobs, 2, Results(path), seconds=75) == 2
    assert ran == ["first", "last"]  # 25 seconds are left after the first
    assert run_call(jobs, 2, Results(path), seconds=60) == 0
    assert ran == ["first", "last", "fast", "fast"]
    assert run_call(jobs, 2, Results(path), seconds=60) == 0
    assert len(ran) == 4


def test_job_that_fits_into_no_call_is_an_error(clock, tmp_path):
    jobs = [make_job(clock, [], "long", 90)]
    with pytest.raises(UserError, match=r"other: long .* 90 s: .*--minutes"):
        run_call(jobs, 1, Results(tmp_path / "gpu.json"), seconds=60)


def test_everything_is_measured_once_before_the_speeds_are_measured_again(clock):
    jobs = [make_job(clock, [], name, 1) for name in ("first", "fast_a", "fast_b", "last")]
    names = [(job.name, turn) for job, turn in plan(jobs, 3)]
    assert names[:4] == [("first", 0), ("fast_a", 0), ("fast_b", 0), ("last", 0)]
    assert names[4:] == [("fast_a", 1), ("fast_b", 1), ("fast_a", 2), ("fast_b", 2)]


def test_failed_job_costs_no_other_and_is_not_repeated(clock, tmp_path, capsys):
    def fail(limit):
        raise RuntimeError("Traceback\nCUDA error: out of memory")

    ran, path = [], tmp_path / "gpu.json"
    jobs = [Job("speed", "broken", 1, fail), make_job(clock, ran, "other", 1)]
    for _ in range(2):
        assert run_call(jobs, 2, Results(path), seconds=60) == 0
    assert ran == ["other"]
    assert capsys.readouterr().out.count("speed: broken: failed: CUDA error") == 1
    assert "out of memory" in dict(sections(Results(path).data))["Failed"]


def test_job_that_two_calls_had_to_stop_counts_as_failed(clock, tmp_path):
    ran, path = [], tmp_path / "gpu.json"
    jobs = [make_job(clock, ran, "slow", 100, estimate=10)]
    assert [run_call(jobs, 1, Results(path), seconds=50) for _ in range(3)] == [1, 0, 0]
    assert ran == ["slow", "slow"] and "other: slow" in Results(path).data["errors"]


def test_time_that_a_job_took_decides_whether_it_fits_again(clock, tmp_path):
    ran, results = [], Results(tmp_path / "gpu.json")
    jobs = [make_job(clock, ran, "fast", 40, estimate=10)]
    assert run_call(jobs, 2, results, seconds=70) == 1  # 30 seconds are left
    assert ran == ["fast"]


def test_settings_of_all_jobs_are_known(tmp_path):
    """A job of an unknown model, script or setting would only fail on the GPU."""
    flags = {"dataset": "imagefolder", "data_dir": tmp_path}
    jobs = list(Jobs(tmp_path, tmp_path, flags, small=False).all())
    assert len({(job.stage, job.name) for job in jobs}) == len(jobs)
    for job in jobs:
        if job.stage == "speed" and isinstance(job.run.args[1], Row):
            row = job.run.args[1]
            row.load_config(row.flags)
    assert sum(job.seconds for job in jobs) < 66 * 60
    assert max(job.seconds for job in jobs) < 9 * 60


def test_archive_is_extracted_once(tmp_path):
    (tmp_path / "images" / "train" / "cat").mkdir(parents=True)
    archive, out = tmp_path / "cifar10.tar.xz", tmp_path / "out"
    with tarfile.open(archive, "w:xz") as file:
        file.add(tmp_path / "images", "images")  # a single folder
    folder = out / "cifar10.tar.xz.extracted" / "images"
    expected = {"dataset": "imagefolder", "data_dir": folder, "image_size": 32}
    assert dataset_flags(archive, out) == expected
    archive.write_bytes(b"")
    assert dataset_flags(archive, out) == expected


def test_data_are_a_folder_of_either_kind_or_synthetic(tmp_path):
    assert dataset_flags(None, tmp_path) == {"dataset": "synthetic"}
    with pytest.raises(UserError, match="has neither cifar-10-batches-py nor train"):
        dataset_flags(tmp_path, tmp_path)
    (tmp_path / "train").mkdir()
    assert dataset_flags(tmp_path, tmp_path)["dataset"] == "imagefolder"
    (tmp_path / "cifar-10-batches-py").mkdir()
    assert dataset_flags(tmp_path, tmp_path)["dataset"] == "cifar10"


def test_results_of_another_setup_are_not_mixed(tmp_path):
    first = Results(tmp_path / "gpu.json", {"small": True})
    first.save()
    Results(tmp_path / "gpu.json", {"small": True})
    with pytest.raises(UserError, match="pass another --output"):
        Results(tmp_path / "gpu.json", {"small": False})


@pytest.mark.slow
def test_sigterm_ends_the_job_and_writes_the_report(tmp_path):
    arguments = [sys.executable, "-m", "lab.gpu", "--small", "--output", tmp_path / "out"]
    process = subprocess.Popen(
        arguments, cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path), "RUN_TAG": "gpu-command"}
    )
    end = time.monotonic() + 60
    while not (list(tmp_path.glob("gpu-*")) and len(family("gpu-command")) > 1):  # a job
        assert time.monotonic() < end
        time.sleep(0.01)
    process.terminate()
    assert process.wait(30) == 1
    assert wait_for_family("gpu-command") == []  # none that has to be killed
    assert not list(tmp_path.glob("gpu-*"))
    assert (tmp_path / "out" / "gpu.md").exists()


def test_clock_and_power_of_the_busy_gpu_are_recorded(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    lines = "345, 71.2\n1980, 512.3\n1755, 498.0\n"
    program.write_text(f"#!/bin/sh\nprintf '{lines}'\nexec sleep 100\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with Monitor() as monitor:
        time.sleep(0.3)
    assert monitor.readings() == {"clock": 1980.0, "power": 512.3}


def test_images_are_decoded_and_cropped_on_a_device(tmp_path):
    root = loader.make_photographs(tmp_path, 70, size=(60, 50))
    batches = list(loader.DecodedOnDevice(root, "cpu"))
    assert [batch.shape for batch in batches] == [(64, 3, 224, 224)]


@pytest.mark.slow
@pytest.mark.rare
def test_small_command_measures_every_stage(tmp_path):
    root = loader.make_photographs(tmp_path / "images", 32, size=(32, 32))
    arguments = ["--small", "--data", root, "--output", tmp_path / "out", "--minutes", "20"]
    command = [sys.executable, "-m", "lab.gpu", *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "0 failed, 0 left" in run.stdout
    data = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert len(list(sections(data))) == 7
    for name in ("gpu.md", "verify.md", "loader.md", "checkpoint.md"):
        assert (tmp_path / "out" / name).stat().st_size
