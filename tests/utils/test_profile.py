"""--profile: traces of some steps, and the summary of them."""

import gzip
import json
from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from tests.forked import fork_script
from utils.config import ConfigError
from utils.options.profile import Profile, kernels_of, shares_of_kernels
from utils.options.timing import Timing

# Eight steps per epoch.
FLAGS = {"image_size": 8, "save_minutes": 0}


def trace(folder, rank):
    with gzip.open(folder / "profile" / f"rank{rank}.json.gz") as file:
        return [event.get("name", "") for event in json.load(file)["traceEvents"]]


@pytest.mark.slow
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
    assert "aten::convolution_backward" in text and "c10d::allreduce_" in text


def test_run_that_ends_before_the_last_of_these_steps(tmp_path):
    run = fork_script("train_1gpu.py", None, output_dir=tmp_path, profile="15:99", **FLAGS)
    assert run.code == 0 and "steps 15 to 16: " in run.stdout
    assert trace(tmp_path, 0).count("Optimizer.step#SGD.step") == 2


@pytest.mark.parametrize("steps", ["10", "1:5", "9:8"])
def test_wrong_steps_are_an_error(steps):
    with pytest.raises(ConfigError, match=f"--profile {steps}"):
        Profile(steps)


def test_not_with_timing():
    with pytest.raises(ConfigError, match="--profile"):
        Timing().at_start(SimpleNamespace(cfg=SimpleNamespace(profile="2:3")))


# What ran on a GPU


def test_communication_counts_where_nothing_else_runs():
    kernels = [
        ("gemm", 8, 10),
        ("gemm", 0, 4),
        ("softmax", 1, 2),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 3, 6),
    ]
    expected = {"computing": 0.6, "communicating": 0.2, "idle": 0.2}
    assert shares_of_kernels(kernels) == pytest.approx(expected)
    assert shares_of_kernels([]) is None


def test_kernels_are_what_runs_on_a_gpu():
    def event(name, kind, is_annotation=False):
        times = SimpleNamespace(start=1, end=2)
        return SimpleNamespace(
            name=name, device_type=kind, is_user_annotation=is_annotation, time_range=times
        )

    events = [
        event("gemm", DeviceType.CUDA),
        event("aten::mm", DeviceType.CPU),
        event("step", DeviceType.CUDA, is_annotation=True),
    ]
    assert kernels_of(events) == [("gemm", 1, 2)]
