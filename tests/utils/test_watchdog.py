"""A rank that stalls is named, and ends the job, before the others' collectives time out."""

import os
import re
import signal
import socket
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.forked import FORK
from utils import watchdog
from utils.distributed import all_gather_object, init_distributed
from utils.reports import report_errors
from utils.rungs.spawn import host_store, set_environment

TIMEOUT = 8.0


def job(tmp_path, body, world_size=2, limit=120, before=lambda rank: None):
    """Exit codes and stderr of ranks that run before(rank), join, and run body(rank)."""
    store, all_started = host_store(), FORK.Event()

    def run(rank):
        os.dup2(os.open(tmp_path / f"stderr-{rank}", os.O_CREAT | os.O_WRONLY), 2)
        set_environment(rank, world_size, store.port)
        all_started.wait()
        before(rank)

        @report_errors
        def main():
            init_distributed("cpu", timeout=TIMEOUT)
            dist.all_reduce(torch.ones(1))
            body(rank)
            dist.all_reduce(torch.ones(1))
            dist.destroy_process_group()

        main()

    ranks = [FORK.Process(target=run, args=(rank,)) for rank in range(world_size)]
    for rank in ranks:
        rank.start()
    all_started.set()
    for rank in ranks:
        rank.join(limit)
        rank.kill()
    text = "".join((tmp_path / f"stderr-{rank}").read_text() for rank in range(world_size))
    return [rank.exitcode for rank in ranks], text


def stop_this_process():
    time.sleep(1)  # so that it is seen here
    os.kill(os.getpid(), signal.SIGSTOP)


def wait_for_something():
    time.sleep(1000)


@pytest.mark.parametrize(
    ("stall", "silent"), [(stop_this_process, True), (wait_for_something, False)]
)
def test_stalled_rank_is_named(stall, silent, tmp_path):
    codes, text = job(tmp_path, lambda rank: rank == 1 and stall())
    assert codes[0] == 1 and text.count("): rank 1 (process ") == 1
    assert f"in {stall.__name__}" in text
    assert "Traceback" not in text
    if silent:
        assert ") does not respond" in text
        assert codes[1] == -signal.SIGKILL  # the launcher need not wait for it
    else:
        assert ") is behind: " in text
        assert " 1 collectives, " in text and ", 2. " in text


@pytest.mark.parametrize("leave", [lambda: os._exit(0), lambda: sys.exit(0)], ids=["_exit", "exit"])
def test_rank_that_exits_too_early_is_named(leave, tmp_path):
    """With code 0: a launcher would not report it."""
    codes, text = job(tmp_path, lambda rank: rank == 1 and leave())
    assert codes == [1, 0] and text.count("Traceback") == 1
    last = text.strip().splitlines()[-1]
    assert re.fullmatch(r"rank 1 \(process \d+\) .*exited.*", last), text


def on_own_host(rank):
    socket.gethostname = lambda: f"node{rank}"


def test_lost_host_is_named(tmp_path):
    """On a different host, a rank that has died can only be seen to be silent."""

    def body(rank):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    codes, text = job(tmp_path, body, before=on_own_host)
    assert codes == [1, -signal.SIGKILL]
    assert text.startswith("error (rank 0): lost node1 (rank 1): ")
    assert "The same command" in text and text.count("\n") == 1


def test_error_on_one_of_two_hosts_keeps_its_traceback(tmp_path):
    def body(rank):
        if rank == 1:
            raise RuntimeError("of rank 1")

    codes, text = job(tmp_path, body, before=on_own_host)
    assert codes == [1, 1] and text.endswith("RuntimeError: of rank 1\n")


def test_error_that_has_nothing_to_do_with_an_exit_has_no_note(tmp_path):
    def body(rank):
        if rank == 1:
            raise RuntimeError("of rank 1")

    codes, text = job(tmp_path, body)
    assert codes == [1, 1] and text.endswith("RuntimeError: of rank 1\n")


def status(seconds=0, **counts):
    return counts, seconds, "", os.getpid(), "host"


def test_rank_that_waits_itself_is_not_blamed(monkeypatch):
    """Rank 0 waits for rank 1 in one group, and that for rank 3 in another."""
    monkeypatch.setattr("utils.reports._failure_store", dist.HashStore())
    reports, codes = [], []
    monkeypatch.setattr(watchdog, "report", lambda error: reports.append(str(error)))
    monkeypatch.setattr(os, "_exit", codes.append)
    first = [status(x=5), status(x=4, y=3), status(y=3), status(y=2)]
    last = [status(1, x=5), status(1, x=4, y=3), status(1, y=3), status(1, y=2)]
    watchdog._end_if_stalled(first, last)
    assert codes == [1] and reports[0].startswith("rank 3 ")
    watchdog._end_if_stalled([*first[:3], status(y=1)], last)  # it progresses
    assert len(codes) == 1


def test_short_stall_is_tolerated(tmp_path):
    codes, text = job(tmp_path, lambda rank: time.sleep(TIMEOUT / 4 * rank))
    assert (codes, text) == ([0, 0], "")


@pytest.mark.slow
def test_work_of_one_process_may_take_longer(tmp_path):
    """As a download does, for which the others wait in the group with the long timeout."""

    def body(rank):
        time.sleep(1.5 * TIMEOUT * rank)
        all_gather_object(rank)

    codes, text = job(tmp_path, body)
    assert (codes, text) == ([0, 0], "")
