"""Files are whole or absent, written by rank 0 beside the training, and never silently lost."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

import utils.saving
from tests.launch import ROOT, run_ranks
from tools.runs import kill_family, start_run
from utils.distributed import PeerError, UserError
from utils.saving import finish_saving, save_on_master


@pytest.fixture(autouse=True)
def uncovered(monkeypatch):
    """Coverage has a handler of its own for SIGTERM, in this process and in those it starts."""
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def writers(folder):
    """The ranks that wrote when all called save_on_master."""

    class Marked:
        def __init__(self, rank):
            self.rank = rank

        def __getstate__(self):
            (folder / f"rank{self.rank}").touch()
            return {}

    def body(rank):
        save_on_master(Marked(rank), folder / f"file{rank}.pt")
        finish_saving()

    run_ranks(body, 3)
    return sorted(path.name for path in folder.glob("rank*"))


def test_only_the_main_process_saves(tmp_path):
    assert writers(tmp_path) == ["rank0"]


def test_planted_every_rank_saves(tmp_path, monkeypatch):
    monkeypatch.setattr(utils.saving, "is_main_process", lambda: True)
    assert writers(tmp_path) == ["rank0", "rank1", "rank2"]


def test_a_failed_save_raises_on_all_ranks_and_keeps_the_old_file(tmp_path):
    path = tmp_path / "x.pt"

    def body(rank):
        save_on_master(1, path)
        finish_saving()
        os.fsync = lambda file: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        try:
            save_on_master(2, path)
            finish_saving()
        except Exception as error:
            return type(error), str(error)

    results = run_ranks(body, 2)
    assert [kind for kind, _ in results] == [UserError, PeerError]
    assert "No space left" in results[0][1] and str(path) in results[0][1]
    assert torch.load(path) == 1
    assert os.listdir(tmp_path) == ["x.pt"]


def test_training_goes_on_while_the_file_is_written(tmp_path, monkeypatch):
    """What is saved is what was there when it was asked for."""
    go, real = threading.Event(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: go.wait(60) and real(file))
    weight, done = torch.ones(3), []
    save_on_master({"a": [weight], "b": 1}, tmp_path / "x.pt", lambda: done.append(1))
    weight.zero_()  # the next step
    assert not (tmp_path / "x.pt").exists() and not done
    go.set()
    finish_saving()
    saved = torch.load(tmp_path / "x.pt")
    assert saved["a"][0].tolist() == [1, 1, 1] and saved["b"] == 1 and done
    finish_saving()  # nothing left to wait for


SLOW = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from utils.distributed import UserError, report_errors
from utils.saving import save_on_master
real = os.fsync
@report_errors
def main():
    def fsync(file):
        print("writing", flush=True)
        time.sleep(1.0)
        {fsync}
    os.fsync = fsync
    save_on_master([1, 2], {path!r})
    {then}
main()
"""


def end_while_writing(tmp_path, fsync="real(file)", then="pass", send=None):
    path = tmp_path / "x.pt"
    code = SLOW.format(root=str(ROOT), path=str(path), fsync=fsync, then=then)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "writing\n"
    if send:
        process.send_signal(send)
    _, stderr = process.communicate(timeout=60)
    return process.returncode, stderr, torch.load(path) if path.exists() else None


def test_the_file_is_finished_whatever_ends_the_process(tmp_path):
    assert end_while_writing(tmp_path / "end") == (0, "", [1, 2])
    code, stderr, saved = end_while_writing(tmp_path / "error", then="raise UserError('stop')")
    assert (code, stderr, saved) == (1, "error: stop\n", [1, 2])
    preempted = end_while_writing(tmp_path / "term", then="time.sleep(60)", send=signal.SIGTERM)
    assert preempted == (-signal.SIGTERM, "", [1, 2])
    code, _, saved = end_while_writing(tmp_path / "kill", "pass", "time.sleep(9)", signal.SIGKILL)
    assert (code, saved) == (-signal.SIGKILL, None)  # nothing, rather than a part of it


def test_a_last_file_that_cannot_be_written_fails_the_run(tmp_path):
    code, stderr, saved = end_while_writing(tmp_path, "raise OSError(28, 'No space left')")
    assert code == 1 and saved is None and not os.listdir(tmp_path)
    assert stderr.startswith("error: cannot save ") and stderr.endswith("is still there\n")


WAITING = """
import os, sys, time
sys.path.insert(0, {root!r})
import torch.distributed as dist
from utils.distributed import get_rank, init_distributed
from utils.saving import save_on_master
init_distributed("cpu")
real = os.fsync
os.fsync = lambda file: (time.sleep({seconds}), real(file))
save_on_master([1, 2], {path!r})
if get_rank() == 0:
    print(os.getpid(), flush=True)
    time.sleep(1.0)
    dist.barrier()  # the other never comes: where Python runs no signal handlers
time.sleep(60)
"""


@pytest.mark.parametrize("seconds", [0.0, 1.5], ids=["written", "being written"])
def test_sigterm_ends_a_rank_that_waits_for_another(seconds, tmp_path):
    path, script = tmp_path / "x.pt", tmp_path / "script.py"
    script.write_text(WAITING.format(root=str(ROOT), seconds=seconds, path=str(path)))
    process = start_run(script, 2, {})
    pid = int(process.stdout.readline())
    time.sleep(1.2 if not seconds else 1.1)
    os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + 15
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
        time.sleep(0.05)
    alive = os.path.exists(f"/proc/{pid}")
    kill_family(process.run_tag)
    process.communicate()
    assert not alive and torch.load(path) == [1, 2]


def test_a_failed_save_is_told_even_where_nobody_asks(tmp_path):
    fail = "raise OSError(28, 'No space left')"
    _, stderr, saved = end_while_writing(tmp_path / "a", fail, "time.sleep(60)", signal.SIGTERM)
    assert saved is None and stderr.startswith("error: cannot save")
    code, stderr, _ = end_while_writing(tmp_path / "b", fail, "raise UserError('stop')")
    assert code == 1 and "error: stop" in stderr and "error: cannot save" in stderr


def test_only_a_writer_that_may_come_back_yields(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    limits = {0: False, 20: True}
    for limit, may in limits.items():
        monkeypatch.setattr(utils.saving.resource, "getrlimit", lambda _, n=limit: (n, n))
        assert utils.saving._may_return() == may
    monkeypatch.delattr(os, "SCHED_IDLE")
    assert not utils.saving._may_return()


def test_sigterm_is_as_before_when_all_is_written(tmp_path):
    save_on_master({}, tmp_path / "x.pt")
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    finish_saving()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
