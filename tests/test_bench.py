"""The instrument: where a step's time goes, limits, ratios with intervals, the scaling model."""

import json
import math
import random
import subprocess
import sys

import pytest
import torch

from tools import bench, bench_report, scaling
from tools.probe import PARTS, Probe
from tools.profiler import busy
from tools.runs import ROOT, flag_list
from utils.config import load_config


def test_the_parts_of_a_step_add_up():
    probe = Probe()
    probe.device = "cpu"
    marks = [("ask", 0.0), ("batch", 1.0), ("backward", 3.0), ("backward done", 6.0)]
    marks += [("backward", 7.0), ("backward done", 9.0)]  # a second micro-batch
    marks += [("step", 10.0), ("step done", 14.0), ("ask", 14.5), ("batch", 15.0)]
    first, second = probe.steps(marks)
    assert first == [1.0, 3.0, 5.0, 5.0, 0.5] and len(first) == len(PARTS)
    assert second == [0.5, 0, 0, 0, 0] and sum(map(sum, (first, second))) == 15.0


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """bench.json of a small run of the whole, and what it printed."""
    folder = tmp_path_factory.mktemp("bench")
    flags = ["--processes=1,2", "--repeats=1", "--steps=3", f"--output={folder}"]
    settings = {"model": "resnet20", "image_size": 16, "global_batch_size": 8, "device": "cpu"}
    flags += [f"--set={name}={value}" for name, value in settings.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["bench", "--only=DDP x", *flags])
        patch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
        bench.main()
    return folder, json.loads((folder / "bench.json").read_text())


def test_a_bench_has_samples_limits_and_reports(result):
    folder, found = result
    names = ["DDP x1", "DDP x2", "DDP x2, 8 each", "DDP x2, 2 stages"]
    assert list(found["rows"]) == names and all(len(s) == 1 for s in found["rows"].values())
    for name, samples in found["rows"].items():
        for sample in samples:
            assert sample["updates"] == 3 and len(sample["steps"]) == 3
            assert sample["step_seconds"] > 0 and sample["start_up"] > 0
            assert sum(sample["parts"]) >= 0.5 * sample["step_seconds"]
            assert sample["samples"] == 3 * sample["global_batch_size"]
            assert sample["global_batch_size"] == (16 if "8 each" in name else 8)
    assert {key: set(runs[0]) for key, runs in found["limits"].items()} == {
        "1  ": {"data", "compute"},
        "2  ": {"data", "compute", "communication"},
        "2  16": {"data", "compute", "communication"},
    }
    table = (folder / "bench.md").read_text()
    weak = next(line for line in table.splitlines() if line.startswith("| DDP x2, 8 each"))
    assert "not comparable" in weak and "not comparable" not in table.split("| DDP x2 |")[1][:99]
    page = (folder / "bench.html").read_text()
    assert "data:image/png;base64," in page and "<td>DDP x1</td>" in page


class Stopped:
    """Stands for Bench; its run number `last` ends with `error`."""

    def __init__(self, last, error):
        self.runs, self.last, self.error = [], last, error

    def run(self, what, row):
        self.runs.append(f"{what} {row.name}")
        if len(self.runs) == self.last:
            raise self.error
        return {"images_per_second": 1.0}

    def row(self, row):
        return self.run("row", row)

    def limits(self, row):
        return self.run("limits", row)


def lengths(found):
    return {name: len(samples) for name, samples in found["rows"].items()}


def test_an_interrupted_bench_reports_what_it_has():
    rows = bench.rows_for([1, 2], 0, 256, quick=True)
    stopped = Stopped(5, KeyboardInterrupt())
    found = bench.measure(stopped, rows, 3)
    # One process has the same limits as one device, and two were not measured any more.
    assert stopped.runs == [
        "row 1 device",
        "limits 1 device",
        "row DDP x1",
        "row DDP x2",
        "limits DDP x2",
    ]
    assert lengths(found) == {"1 device": 1, "DDP x1": 1}
    assert list(found["absent"]) == ["DDP x2", "DDP + AMP x1", "DDP + AMP x2"]


def test_a_row_that_fails_costs_no_other(tmp_path, monkeypatch):
    rows = bench.rows_for([1, 2], 0, 256, quick=True)
    stopped = Stopped(4, RuntimeError("DDP x2 failed with exit code 1:\nout of memory | gone\n"))
    found = bench.measure(stopped, rows, 2)
    assert lengths(found) == {"1 device": 2, "DDP x1": 2, "DDP + AMP x1": 2, "DDP + AMP x2": 2}
    assert found["absent"] == {"DDP x2": "failed: out of memory / gone"}
    assert stopped.runs.count("row DDP x2") == 1 and "limits DDP x2" not in stopped.runs

    monkeypatch.setattr(bench, "measure", lambda *_: {"rows": {}, "limits": {}, "absent": {}})
    monkeypatch.setattr("sys.argv", ["bench", f"--output={tmp_path}"])
    with pytest.raises(SystemExit, match="nothing was measured"):
        bench.main()


def test_busy_is_what_kernels_cover():
    assert busy([(0, 1), (1, 2)]) == 1
    assert busy([(3, 4), (0, 1), (0.5, 2)]) == 0.75
    assert busy([(0, 10), (2, 3)]) == 1


def test_a_profile_names_the_operations(tmp_path):
    flags = ["--synthetic-samples=240", f"--output-dir={tmp_path / 'run'}", "--device=cpu"]
    flags += ["--dataset=synthetic", "--model=resnet20", "--image-size=16", "--epochs=2"]
    flags += ["--global-batch-size=20"]
    command = [sys.executable, "-m", "tools.profiler", str(tmp_path), "train_1gpu.py", *flags]
    subprocess.run(command, cwd=ROOT, check=True, timeout=180)
    text = (tmp_path / "profile.md").read_text()
    assert "4 steps" in text and "convolution_backward" in text
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert again.returncode == 1 and "nothing was profiled" in again.stderr  # it was resumed
    assert not (tmp_path / "profile.md").exists()


def test_settings_for_all_rows():
    assert bench.setting("sync_bn=false") == ("sync_bn", False)
    assert bench.setting("config=a=b") == ("config", "a=b")


def test_verdicts_name_the_bottleneck():
    limits = {"data": 500.0, "compute": 100.0}
    assert bench_report.verdict([6, 30, 60, 4, 0], limits, 0.9).startswith("input-bound")
    assert bench_report.verdict([1, 30, 60, 9, 0], limits, 0.9) == "compute-bound"
    assert bench_report.verdict([1, 30, 60, 9, 0], limits, 0.5).startswith("overhead")
    limits |= {"communication": 50.0}
    assert bench_report.verdict([1, 30, 60, 9, 0], limits, 0.5).startswith("held up by the other")


def test_an_interval_holds_the_true_ratio_nearly_always():
    draw = random.Random(1)
    inside = 0
    for _ in range(60):
        before = [draw.gauss(100, 5) for _ in range(9)]
        after = [draw.gauss(110, 5) for _ in range(9)]
        middle, low, high = bench_report.interval(before, after, draws=300)
        assert low <= middle <= high
        inside += low <= 1.1 <= high
    assert inside >= 50


def test_rows_that_the_machine_cannot_run_say_why():
    rows = {row.name: row for row in bench.rows_for([1, 2], 0, 256, quick=False)}
    assert rows["DataParallel"].absent == "DataParallel needs 2 GPUs, and 0 are visible"
    assert not rows["DDP x2, 2 stages"].absent


def test_a_gpu_has_a_row_for_each_precision_and_compiler():
    rows = [row for row in bench.rows_for([1], 1, 256, quick=False) if ", " in row.name]
    assert len(rows) == len({row.name for row in rows}) == 12
    assert len({bench.limit_key(row) for row in rows}) == 12
    for row in rows:
        load_config(flag_list(row.flags))  # settings that there are
    rows = {row.name: row for row in bench.rows_for([1, 2], 2, 256, quick=False)}
    assert not rows["DataParallel"].absent and "needs 4 GPUs" in rows["DDP x2, 2 stages"].absent


# The scaling model


def test_all_reduce_takes_the_shorter_way():
    link = scaling.Link(1e9, 1e-3)
    assert scaling.all_reduce_seconds(1e9, 1, link) == 0
    assert scaling.all_reduce_seconds(1e9, 4, link) == pytest.approx(2 * 3e-3 + 1.5)  # ring
    assert scaling.all_reduce_seconds(8, 1024, link) == pytest.approx(2 * 10e-3)  # tree
    both = scaling.cluster_seconds(1e9, 2, 4, link, scaling.Link(1e8, 0))
    assert both == pytest.approx(2 * 3e-3 + 1.5 + 2.5e8 / 1e8)


def test_buckets_come_from_the_last_layer_and_hold_25_mebibytes():
    sizes = scaling.buckets([2**20] * 60)
    assert sizes == [2**20, 25 * 2**20, 25 * 2**20, 9 * 2**20] and sum(sizes) == 60 * 2**20


def test_communication_hides_behind_the_backward_pass_but_for_the_last_bucket():
    step = scaling.Step(1.0, 4.0, 0.5, [2**20, 25 * 2**20, 25 * 2**20, 2**20])
    assert len(scaling.buckets(step.gradients)) == 4
    assert scaling.step_seconds(step, lambda size: 0.0) == 5.5
    assert scaling.step_seconds(step, lambda size: 0.5) == 6.0
    assert scaling.step_seconds(step, lambda size: 2.0) == 1 + (1 + 4 * 2.0) + 0.5


def test_units_are_read():
    assert scaling.parse_rate("400Gb/s") == 50e9 and scaling.parse_rate("1.5 GB/s") == 1.5e9
    assert math.isclose(scaling.parse_time("5us"), 5e-6)
    for bad in ("400", "400Gb", "fast"):
        with pytest.raises(ValueError, match="is no bandwidth"):
            scaling.parse_rate(bad)
    with pytest.raises(ValueError, match="is no time"):
        scaling.parse_time("5")


def test_the_published_table_is_not_explained_by_communication():
    """The tutorial's epochs at 2 and 4 GPUs take longer than its own step and an NVLink allow."""
    found = {gpus: (predicted, seconds) for gpus, predicted, seconds in scaling.published()}
    assert found[1][0] == pytest.approx(13.2, rel=0.01)
    assert all(found[gpus][0] < 0.75 * found[gpus][1] for gpus in (2, 4))
    assert torch.tensor([found[n][0] for n in (1, 2, 4)]).diff().max() < 0
