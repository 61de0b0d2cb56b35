"""--timing finds what was planted to slow a run down, and nothing in ordinary runs."""

import os
import time
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch.autograd import DeviceType

import tasks.images
import utils.checkpoint
import utils.data
from tests.forked import fork_script
from tests.namespaces import c10d, finish, hosts, needs_namespaces
from utils.checkpoint import Checkpointer
from utils.options import timing
from utils.options.timing import NAMES, Timing, diagnose, find_limits

# An epoch of 16 steps, and no save that a test does not ask for.
FLAGS = {"synthetic_samples": 192, "epochs": 1, "timing": True, "save_minutes": 0}
PLACES = ["rank 0 on a", "rank 1 on a", "rank 2 on b", "rank 3 on b"]


CUDA_EVENT = {"device_type": DeviceType.CUDA, "is_user_annotation": False}


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
    ("lists", "workers", "parts"),
    [
        ({}, 2, ["nothing stands out"]),
        # 37 of 100 seconds: what two workers make in 100 seconds is needed in 63.
        ({"data": [37.0] * 4}, 2, ["37% ", "data: --num-workers 4 (now 2)"]),
        ({"data": [60.0] * 4}, 0, ["60% ", "data: --num-workers 2 (now 0)"]),
        ({"data": [20.0] * 4}, 0, ["20% ", "data: --num-workers 1 (now 0)"]),
        ({"data": [20.0] * 4}, None, ["20% ", "data: cheaper transforms"]),
        (
            {"data": [1.0, 1.0, 40.0, 2.0], "communicating": [39.0, 39.0, 0.0, 38.0]},
            2,
            ["rank 2 on b ", "for data ", " 40% ", " 1%: ", "disk"],
        ),
        (
            {"communicating": [30.0, 31.0, 29.0, 2.0]},
            2,
            ["rank 3 on b ", "computes 1.4 times"],
        ),
        (
            {"communicating": [62.0, 61.0, 63.0, 64.0]},
            2,
            ["61% communicating: ", "--global-batch-size", "train_ddp_accum.py", "choosing.md"],
        ),
        (
            {"saving": [22.0] * 4},
            2,
            ["22% saving: ", "--save-epochs", "--save-steps", "--save-minutes", "disk"],
        ),
        (
            {"host": [45.0] * 4},
            2,
            ["the GPUs wait ", " 45% ", "--compile default", "train_1gpu_graph.py"],
        ),
        (
            {"cores": [5.0, 50.0, 5.0, 5.0], "communicating": [45.0, 0.0, 45.0, 45.0]},
            2,
            ["rank 1 on a ", "for cores ", " 50% ", "fewer --num-threads or --num-workers"],
        ),
        # While a rank waits for cores, the others wait for it: that is not communication.
        ({"cores": [19.0] * 4, "communicating": [45.0] * 4}, 2, ["nothing stands out"]),
        ({"communicating": [33.0] * 4, "data": [9.0] * 4}, 2, ["nothing stands out"]),
    ],
)
def test_diagnoses(monkeypatch, lists, workers, parts):
    """Each begins with where the time goes."""
    monkeypatch.setattr("utils.options.timing.cores_per_rank", lambda: 8)
    text = diagnose(times(**lists), PLACES, workers)
    assert text.startswith(parts[0])
    for part in parts:
        assert part in text


def test_nothing_is_said_of_an_epoch_without_steps():
    row = times() | {"computing": [0.0] * 4, "validation": [100.0] * 4}
    assert diagnose(row, PLACES, 0).startswith("too few steps")


def test_workers_are_as_many_as_there_are_cores(monkeypatch):
    monkeypatch.setattr("utils.options.timing.cores_per_rank", lambda: 4)
    text = diagnose(times(data=[80.0] * 4), PLACES, 3)
    assert text.startswith("80% ")
    assert "--num-workers 15 (now 3), of 4 cores per rank" in text
    assert "cores" not in diagnose(times(data=[20.0] * 4), PLACES, 1)


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
    events = [
        SimpleNamespace(name=name, time_range=SimpleNamespace(start=a, end=b), **CUDA_EVENT)
        for name, a, b in [("gemm", 0, 6), ("ncclDevKernel_AllReduce", 6, 8), ("gemm", 9, 10)]
    ]

    def work(name):
        calls.append((name, loader.step))
        clock.now += 100.0  # which is no part of the training

    profiler = SimpleNamespace(
        start=lambda: work("start"), stop=lambda: work("stop"), events=lambda: events
    )
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: profiler)
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


def slow(function, seconds, rank=None):
    """`function`, which then also waits, on one rank or on all."""

    def slowed(*args, **kwargs):
        if rank is None or os.environ.get("RANK") == str(rank):
            time.sleep(seconds)
        return function(*args, **kwargs)

    return slowed


def busy(function, seconds, rank):
    """`function`, which also computes for that long on one rank."""

    def slowed(*args):
        end = time.thread_time() + seconds
        while os.environ["RANK"] == str(rank) and time.thread_time() < end:
            torch.ones(1000).sum()
        return function(*args)

    return slowed


def plant_slow_data():
    utils.data._Batches._make = slow(utils.data._Batches._make, 0.4)  # also on a busy machine


def plant_slow_data_on_rank_1():
    utils.data._Batches._make = slow(utils.data._Batches._make, 0.6, rank=1)


def plant_slow_rank():
    tasks.images.loss = busy(tasks.images.loss, 0.6, rank=1)  # also on a busy machine


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


SLOW_PLANTS = [
    (plant_slow_data_on_rank_1, "data", "rank 1 waits for data", {}),
    (plant_slow_rank, "rank", "rank 1 computes", {}),
    (plant_slow_disk, "saving", "% saving: ", {"save_steps": 2}),
]


@pytest.mark.parametrize(
    ("plant", "name", "text", "flags"),
    [
        (plant_slow_data, "data", "% waiting for data: --num-workers", {}),
        (plant_shared_core, "cores", " waits for cores ", {}),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_PLANTS),
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


@needs_namespaces
@pytest.mark.slow
def test_slow_link(tmp_path):
    """8 Mbit/s, for 1.1 MB of gradients in each of seven steps."""
    with hosts(2) as machines:
        for machine in machines:
            machine.limit("8mbit")
        flags = FLAGS | {"synthetic_samples": 96, "output_dir": tmp_path}
        command = c10d("train_ddp.py", machines[0], **flags)
        runs = finish([host.start(command) for host in machines], tmp_path)
    assert [run.code for run in runs] == [0, 0], runs
    row = runs[0].rows[-1]
    assert "% communicating: " in row["limited_by"], row["time"]


# The first three show what `make test` takes along; all of them were run on a quiet machine.
ORDINARY = [
    ("train_1gpu.py", None, {}),
    ("train_ddp.py", 2, {}),
    ("train_fsdp.py", 2, {"model": "vit_tiny"}),
    ("train_1gpu.py", None, {"num_workers": 1}),
    ("train_ddp_accum.py", 2, {"micro_batches": 2}),
    ("train_fsdp.py", 2, {}),
    ("train_tp.py", 2, {"model": "vit_tiny"}),
    ("train_pp.py", 2, {}),
    ("train_mp.py", None, {}),
]
RARE = (pytest.mark.slow, pytest.mark.rare)  # scripts that differ in nothing that is timed
MARKS = [()] * 3 + [pytest.mark.slow, *[RARE] * 3, pytest.mark.slow, RARE]


@pytest.mark.parametrize(
    ("script", "nproc", "flags"),
    [pytest.param(*case, marks=m) for case, m in zip(ORDINARY, MARKS, strict=True)],
)
def test_nothing_stands_out_in_ordinary_runs(script, nproc, flags, tmp_path):
    flags = FLAGS | {"image_size": 32, "output_dir": tmp_path} | flags
    run = fork_script(script, nproc, **flags)
    # Other tests may use the same cores.
    assert set(limits_of(run)) <= {"cores"}, run.rows[-1]["time"]


def test_first_step_is_left_out(tmp_path):
    """It would look like a rank that computes long."""

    def before():
        step = Checkpointer.step

        def slow_once(checkpoint):
            time.sleep(1.0)
            Checkpointer.step = step
            step(checkpoint)

        Checkpointer.step = slow_once

    run = fork_script("train_1gpu.py", None, before, output_dir=tmp_path, **FLAGS)
    (row,) = run.rows
    assert row["train_seconds"] > 1.0
    assert row["time"]["total"] < row["train_seconds"] + row["val_seconds"] - 0.9


def test_epoch_may_end_by_a_break():
    """When the evaluation began is not known then."""
    loader = SimpleNamespace(waited=0.0, computed=0.0, step=0, source_device=torch.device("cpu"))
    loader.device, loader.reader = loader.source_device, SimpleNamespace(num_workers=0)
    state = {"loader": loader, "metrics": SimpleNamespace(columns=[])}
    cfg = SimpleNamespace(profile=False)
    checkpoint = SimpleNamespace(state=state, is_due=lambda: False, cfg=cfg)
    guard, row = Timing(), {}
    guard.at_start(checkpoint)
    for _ in range(2):
        guard.after_step(checkpoint)
        state["metrics"].columns[0](row)
        assert row["time"]["validation"] == [0.0]
