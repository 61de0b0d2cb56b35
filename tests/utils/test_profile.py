"""--profile: traces of some steps, and the summary of them."""

import gzip
import json
from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from tests.forked import fork_script
from utils.config import ConfigError
from utils.options.profile import Profile, covered, kernels_of, shares_of_kernels

# Eight steps per epoch.
FLAGS = {"image_size": 8, "save_minutes": 0}


def trace(folder, rank):
    with gzip.open(folder / "profile" / f"rank{rank}.json.gz") as file:
        return [event.get("name", "") for event in json.load(file)["traceEvents"]]


def test_every_rank_writes_a_trace_of_these_steps(tmp_path):
    """Steps 7 to 9, of which the last is in the second epoch."""
    run = fork_script("train_ddp.py", 2, output_dir=tmp_path, profile="7:9", **FLAGS)
    assert run.code == 0, run.stderr
    for rank in range(2):
        names = trace(tmp_path, rank)
        assert names.count("DistributedDataParallel.forward") >= 3
        assert names.count("Optimizer.step#SGD.step") == 3
    text = (tmp_path / "profile" / "summary.txt").read_text()
    assert text in run.stdout and text.startswith("steps 7 to 9: ")
    lines = text.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 90
    assert "aten::convolution_backward" in text and "c10d::allreduce_" in text
    shares = [float(line.split()[1].strip("%")) for line in lines[3:]]
    assert shares == sorted(shares, reverse=True) and 50 < sum(shares) <= 100.1


@pytest.mark.slow
def test_run_that_ends_before_the_last_of_these_steps(tmp_path):
    run = fork_script("train_1gpu.py", None, output_dir=tmp_path, profile="15:99", **FLAGS)
    assert run.code == 0 and "steps 15 to 16: " in run.stdout
    assert trace(tmp_path, 0).count("Optimizer.step#SGD.step") == 2
    out = tmp_path / "short"
    run = fork_script("train_1gpu.py", None, output_dir=out, profile="17:18", **FLAGS)
    assert run.code == 0 and "the run had 16 steps" in run.stdout
    assert not (out / "profile").exists()


@pytest.mark.parametrize("steps", ["10", "1:5", "9:8", "a:b", "2:", "-1:5"])
def test_wrong_steps_are_an_error(steps):
    with pytest.raises(ConfigError, match=f"--profile {steps}"):
        Profile(steps)


def test_not_with_timing(tmp_path):
    run = fork_script("train_1gpu.py", output_dir=tmp_path, profile="2:3", timing=True, **FLAGS)
    assert run.code == 2 and "--timing" in run.stderr and "--profile" in run.stderr


# What ran on a GPU


def test_covered():
    assert covered([]) == 0
    assert covered([(0, 1), (1, 2)]) == 2
    assert covered([(3, 4), (0, 1), (0.5, 2)]) == 3
    assert covered([(0, 10), (2, 3)]) == 10


def test_communication_counts_where_nothing_else_runs():
    kernels = [("gemm", 0, 4), ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 3, 6), ("gemm", 8, 10)]
    expected = {"computing": 0.6, "communicating": 0.2, "idle": 0.2}
    assert shares_of_kernels(kernels) == pytest.approx(expected)
    assert shares_of_kernels([]) is None


def test_kernels_are_what_runs_on_a_gpu():
    def event(name, device_type, is_user_annotation=False):
        time_range = SimpleNamespace(start=1, end=2)
        return SimpleNamespace(
            name=name,
            device_type=device_type,
            is_user_annotation=is_user_annotation,
            time_range=time_range,
        )

    events = [event("gemm", DeviceType.CUDA), event("aten::mm", DeviceType.CPU)]
    events.append(event("step", DeviceType.CUDA, is_user_annotation=True))
    assert kernels_of(events) == [("gemm", 1, 2)]
