"""--timing finds what was planted to slow a run down, and nothing in ordinary runs."""

import os
import time
from types import SimpleNamespace

import numpy
import pytest
import torch

import utils.checkpoint
import utils.data
from tests.forked import fork_script
from utils.options import timing
from utils.options.timing import NAMES, Timing, diagnose, find_limits

# An epoch of 16 steps, and no save that a test does not ask for.
FLAGS = {"synthetic_samples": 192, "epochs": 1, "timing": True, "save_minutes": 0}
PLACES = ["rank 0 on a", "rank 1 on a", "rank 2 on b", "rank 3 on b"]


class Loader:
    """Of 40 steps on a GPU, which never wait for data."""

    device, source_device, step = torch.device("cuda"), torch.device("cuda"), 0
    waited = computed = 0.0

    def __len__(self):
        return 40


def started(loader):
    """Timing, and the function that adds its columns to a row."""
    guard, metrics = Timing(), SimpleNamespace(columns=[])
    state, cfg = {"loader": loader, "metrics": metrics}, SimpleNamespace(profile=False)
    guard.at_start(SimpleNamespace(state=state, cfg=cfg))
    return guard, metrics.columns[0]


def times(**lists):
    """ "time" of a row of 100 seconds on four ranks, which compute for the rest."""
    row = {"total": 100.0} | {name: lists.get(name, [0.0] * 4) for name in NAMES}
    row["computing"] = [
        100.0 - sum(row[name][rank] for name in NAMES if name != "computing") for rank in range(4)
    ]
    return row


@pytest.mark.parametrize(
    ("lists", "name", "seconds", "place"),
    [
        ({"data": [37.0] * 4}, "data", 37.0, ""),
        (
            {"data": [1.0, 1.0, 40.0, 2.0], "communicating": [39.0, 39.0, 0.0, 38.0]},
            "data",
            39.0,
            "rank 2 on b ",
        ),
        ({"communicating": [30.0, 31.0, 29.0, 2.0]}, "rank", 28.0, "rank 3 on b "),
        ({"communicating": [62.0, 61.0, 63.0, 64.0]}, "communicating", 61.0, ""),
        ({"saving": [22.0] * 4}, "saving", 22.0, ""),
        ({"host": [45.0] * 4}, "host", 45.0, ""),
        (
            {"cores": [5.0, 50.0, 5.0, 5.0], "communicating": [45.0, 0.0, 45.0, 45.0]},
            "cores",
            50.0,
            "rank 1 on a ",
        ),
    ],
)
def test_what_limits_a_run_is_found(lists, name, seconds, place):
    found = find_limits(times(**lists), PLACES, 2)
    assert found.keys() == {name}
    cost, text = found[name]
    assert cost == pytest.approx(seconds)
    assert place in text
    assert diagnose(times(**lists), PLACES, 2) == text


def test_nothing_is_found_in_ordinary_times():
    # While a rank waits for cores, the others wait for it: that is not communication.
    crowded = times(cores=[19.0] * 4, communicating=[45.0] * 4)
    usual = times(communicating=[33.0] * 4, data=[9.0] * 4)
    for row in (times(), crowded, usual):
        assert find_limits(row, PLACES, 2) == {}
    no_steps = times() | {"computing": [0.0] * 4, "validation": [100.0] * 4}
    assert "too few" in diagnose(no_steps, PLACES, 0)


def test_workers_that_a_run_needs_are_named(monkeypatch):
    """What two workers make in 100 seconds is needed in 63, for example."""
    monkeypatch.setattr("utils.options.timing.cores_per_rank", lambda: 8)
    for waited, workers, needed in ((37.0, 2, 4), (60.0, 0, 2), (20.0, 0, 1)):
        text = diagnose(times(data=[waited] * 4), PLACES, workers)
        assert f"--num-workers {needed} (now {workers})" in text
        assert "cores" not in text
    assert "8 cores" in diagnose(times(data=[80.0] * 4), PLACES, 3)
    assert "--num-workers" not in diagnose(times(data=[20.0] * 4), PLACES, None)


def test_division_on_a_gpu():
    """Of ten seconds, two saving; of the other eight, 50 % computing and 30 % idle."""
    guard, _ = started(Loader())
    passed, saving = numpy.array([10.0, 9.0, 0.0]), numpy.array([2.0, 2.0, 0.0])
    guard.shares = {"computing": 0.5, "communicating": 0.2, "idle": 0.3}
    divided = guard._divide(passed, saving, numpy.array([1.0, 0.0, 0.0]))
    expected = {"saving": 2.0, "computing": 4.0, "communicating": 1.6, "data": 1.0, "host": 1.4}
    assert {k: v for k, v in divided.items() if v} == pytest.approx(expected)
    divided = guard._divide(passed, saving, numpy.array([7.0, 0.0, 0.0]))
    assert (divided["data"], divided["host"]) == pytest.approx((2.4, 0.0))  # the GPU had work
    guard.shares = None  # resumed after the middle of the epoch
    unknown = guard._divide(passed, saving, numpy.array([1.0, 0.0, 0.0]))
    assert {k: v for k, v in unknown.items() if v} == {"saving": 2.0, "other": 8.0}


def test_kernels_are_recorded_in_the_middle_of_an_epoch(monkeypatch):
    """On a GPU; here, the clocks, the profiler and the steps are made up."""
    calls, clock = [], SimpleNamespace(now=0.0)
    kernels = [("gemm", 0, 6), ("ncclDevKernel_AllReduce", 6, 8), ("gemm", 9, 10)]

    def work(name):
        calls.append((name, loader.step))
        clock.now += 100.0  # which is no part of the training

    profiler = SimpleNamespace(start=lambda: work("start"), stop=lambda: work("stop"), events=list)
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: profiler)
    monkeypatch.setattr(timing, "kernels_of", lambda events: kernels)
    monkeypatch.setattr(timing, "read_clocks", lambda: numpy.array([clock.now, 0.0, 0.0]))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    loader = Loader()
    guard, add_columns = started(loader)
    for loader.step in range(1, 41):
        clock.now += 1.0
        guard.after_step(SimpleNamespace(is_due=lambda: loader.step == 40))
    assert calls == [("start", 20), ("stop", 28)]
    row = {}
    add_columns(row)
    assert row["time"]["total"] == pytest.approx(39.0)
    seconds = {name: row["time"][name][0] for name in NAMES}
    expected = {"computing": 0.7 * 39, "communicating": 0.2 * 39, "host": 0.1 * 39}
    assert seconds == pytest.approx(dict.fromkeys(NAMES, 0.0) | expected)


# Planted causes


def slow(function, seconds):
    """`function`, which then also waits."""

    def slowed(*args, **kwargs):
        time.sleep(seconds)
        return function(*args, **kwargs)

    return slowed


def plant_slow_data():
    utils.data._Batches._make = slow(utils.data._Batches._make, 0.4)  # also on a busy machine


def plant_shared_core():
    os.sched_setaffinity(0, {min(os.sched_getaffinity(os.getppid()))})


def plant_slow_disk():
    utils.checkpoint.save_atomically = slow(utils.checkpoint.save_atomically, 1.5)


def limits_of(run):
    """find_limits() of the last epoch."""
    assert (run.code, run.stderr) == (0, "")
    row = run.rows[-1]
    total, ranks = row["time"]["total"], range(row["world_size"])
    sums = [sum(row["time"][name][rank] for name in NAMES) for rank in ranks]
    assert sums == pytest.approx([total] * len(ranks), rel=0.2)
    assert all(seconds >= 0 for name in NAMES for seconds in row["time"][name])
    assert row["limited_by"] in run.stdout
    return find_limits(row["time"], [f"rank {rank}" for rank in ranks], 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "name", "text", "flags"),
    [
        (plant_slow_data, "data", "% waiting for data", {}),
        (plant_shared_core, "cores", " waits for cores ", {}),
        (plant_slow_disk, "saving", "% saving", {"save_steps": 2}),
    ],
)
def test_planted_cause_is_named(plant, name, text, flags, tmp_path):
    flags = FLAGS | {"num_workers": 0, "output_dir": tmp_path} | flags
    run = fork_script("train_ddp.py", 2, plant, **flags)
    limits = limits_of(run)
    if name != "cores" and max(run.rows[-1]["time"]["cores"]) > run.rows[-1]["time"]["total"] / 2:
        pytest.skip("other processes have the cores for most of the time")
    assert text in limits[name][1], run.rows[-1]["time"]
    # Other tests may use the same cores.
    assert [other for other in limits if other not in (name, "cores")] == []


@pytest.mark.parametrize(
    ("script", "nproc", "flags"),
    [
        ("train_1gpu.py", None, {"num_workers": 1}),
        pytest.param("train_ddp.py", 2, {}, marks=pytest.mark.slow),
    ],
)
def test_nothing_stands_out_in_ordinary_runs(script, nproc, flags, tmp_path):
    flags = FLAGS | {"image_size": 32, "output_dir": tmp_path} | flags
    run = fork_script(script, nproc, **flags)
    # Other tests may use the same cores.
    assert set(limits_of(run)) <= {"cores"}, run.rows[-1]["time"]


def test_epoch_may_end_by_a_break():
    """When the evaluation began is not known then."""
    loader = SimpleNamespace(waited=0.0, computed=0.0, step=0, source_device=torch.device("cpu"))
    loader.device, loader.reader = loader.source_device, SimpleNamespace(num_workers=0)
    guard, add_columns = started(loader)
    row = {}
    for _ in range(2):
        guard.after_step(SimpleNamespace(is_due=lambda: False))
        add_columns(row)
        assert row["time"]["validation"] == [0.0]
