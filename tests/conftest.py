import os

import pytest
import torch

from utils.distributed import available_cores

torch.set_num_threads(1)  # a pool of OpenMP threads would not survive the forks of run_ranks
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the ranks, and torchrun need not warn
threads = []  # what the tests of this process asked for instead
torch.set_num_threads = threads.append

# Where the test files are shared out to several processes (pytest -n), each has cores of its own.
if "PYTEST_XDIST_WORKER" in os.environ:
    number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, available_cores() // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    os.sched_setaffinity(0, cores[number * share :][:share] or cores)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Of `-n auto`: two cores each, for most tests start two processes; 0: no sharing out."""
    count = available_cores() // 2
    return count if count > 1 else 0
