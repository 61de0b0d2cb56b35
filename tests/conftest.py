import os
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch

from utils import distributed
from utils.distributed import cores_per_rank

# Their failed assertions show values as well.
pytest.register_assert_rewrite("tests.forked", "tests.processes", "tests.namespaces")

# Files of few tests that take minutes.
LONGEST = ("test_verify", "test_chaos", "test_nodes", "test_verify_bugs", "test_own_task")

torch.set_num_threads(1)  # a pool of OpenMP threads would not survive the forks of run_ranks()
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the ranks, so that torchrun does not warn
# The cache of torch.compile does not know ATEN_CPU_CAPABILITY: with code that has been compiled for
# a different one, torch 2.14 computes wrong numbers, or crashes.
CAPABILITY = torch.backends.cpu.get_cpu_capability()
CACHE = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}_{CAPABILITY}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(CACHE))

# With pytest-xdist, each process has cores of its own.
if "PYTEST_XDIST_WORKER" in os.environ:
    number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, cores_per_rank() // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    first = number * share % len(cores)
    os.sched_setaffinity(0, cores[first:][:share])


def pytest_configure(config):
    """Hide the GPUs from all tests but those of tests/gpu (make test-gpu)."""
    if not any("tests/gpu" in path for path in config.args):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items):
    """With `--no-loadscope-reorder`: the longest files first, then those of many tests."""
    counts = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path.stem not in LONGEST, -counts[item.path]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """For `-n auto`: one process per core, and four on two or three cores, where tests wait half of
    the time for processes that start or end."""
    count = cores_per_rank()
    return max(count, 4) if count > 1 else 0


@pytest.fixture(autouse=True)
def requested_threads(monkeypatch):
    """The numbers of threads that the code under test sets; this process keeps its one thread."""
    requested = []
    monkeypatch.setattr(torch, "set_num_threads", requested.append)
    return requested


@pytest.fixture(autouse=True)
def no_signal_handler_is_left():
    """Later tests fork this process, and their ranks would ignore what should end them."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    after = [signal.signal(*pair) for pair in zip(numbers, before, strict=True)]
    assert after == before


@pytest.fixture(autouse=True)
def no_device_is_left(monkeypatch):
    """Later tests, and their ranks, compute on the CPU until they select a device."""
    monkeypatch.setattr(distributed, "_devices", [torch.device("cpu")])


@pytest.fixture(autouse=True)
def no_step_is_left():
    """Later tests, and ranks that a fixture of theirs forks, are before their first step."""
    yield
    if sample_random := sys.modules.get("utils.sample_random"):
        sample_random._step.keys, sample_random._step.used = None, {}
