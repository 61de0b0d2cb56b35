"""Ranks launched from Python: the first failure, or a signal, ends all of them."""

import os
import runpy
import signal
import socket
import sys
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch.multiprocessing as mp

from tests.accelerators import visible_accelerators
from tests.forked import FORK
from tests.processes import ROOT, is_alive, run_script, wait_until
from tests.utils.test_checkpoint import in_fork
from utils.config import Config, ConfigError, load_config
from utils.distributed import init_distributed
from utils.reports import report_errors
from utils.rungs.spawn import (
    SpawnSettings,
    host_store,
    number_of_ranks,
    set_environment,
    wait_for_ranks,
)


class Launcher:
    """A process that launches ranks as train_ddp_spawn.py does, but by fork, which is quicker."""

    def __init__(self, folder, body, patience=30.0):
        self.folder, self.error = folder, folder / "stderr"
        self.process = FORK.Process(target=self._launch, args=(body, patience))
        self.process.start()

    def _launch(self, body, patience):
        os.setsid()  # as in a terminal, where Ctrl-C reaches the whole group
        os.dup2(os.open(self.error, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        store, all_started = host_store(), FORK.Event()
        arguments = body, store.port, all_started
        ranks = mp.start_processes(self._rank, arguments, 3, join=False, start_method="fork")
        (self.folder / "launched").write_text(" ".join(map(str, ranks.pids())))
        all_started.set()
        wait_for_ranks(ranks, patience)

    def _rank(self, rank, body, port, all_started):
        set_environment(rank, 3, port)
        all_started.wait()  # set() would wait forever for a rank that is killed in here
        (self.folder / f"rank-{rank}").write_text(str(os.getpid()))
        body(rank)

    def end(self):
        """Exit code and stderr, without torch's log, when the launcher and all ranks have ended."""
        self.process.join(30)
        launched = [int(pid) for pid in (self.folder / "launched").read_text().split()]
        wait_until(lambda: not any(is_alive(pid) for pid in launched), seconds=10)
        lines = self.error.read_text().splitlines(keepends=True)
        return self.process.exitcode, "".join(line for line in lines if "via signal" not in line)


def test_one_rank_per_gpu_but_only_where_gpus_train(monkeypatch):
    visible_accelerators(monkeypatch, 4)
    counts = [
        number_of_ranks(load_config(Config, SpawnSettings, flags))
        for flags in ([], ["--device=cpu"], ["--spawn-processes=3"])
    ]
    assert counts == [4, 1, 3]
    visible_accelerators(monkeypatch, 0)
    assert number_of_ranks(load_config(Config, SpawnSettings, [])) == 1


def test_store_listens_on_one_address():
    store = host_store()
    socket.create_connection(("127.0.0.1", store.port)).close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", store.port))


def test_exception_of_one_rank_is_shown_once(tmp_path):
    def body(rank):
        time.sleep(0 if rank == 1 else 60)
        raise ZeroDivisionError("in rank 1")

    code, text = Launcher(tmp_path, body).end()
    assert code == 1 and text.count("Traceback") == 1
    assert text.endswith("ZeroDivisionError: in rank 1\n")


def test_error_that_a_rank_has_reported_is_not_repeated(tmp_path):
    @report_errors
    def body(rank):
        time.sleep(0 if rank == 0 else 60)
        raise ConfigError("what to do")  # its exit code is 2

    assert Launcher(tmp_path, body).end() == (2, "error (rank 0): what to do\n")


def test_run_that_is_saved_may_abort_in_its_teardown():
    """As a rank does now and then whose group still exists when Python shuts down."""
    aborted = mp.ProcessExitedException("", 0, 1, -signal.SIGABRT, "SIGABRT")
    ranks = SimpleNamespace(join=Mock(side_effect=aborted))
    ranks.processes = [SimpleNamespace(exitcode=code) for code in (-signal.SIGABRT, 75)]
    assert in_fork(lambda: wait_for_ranks(ranks)) == 75


def test_killed_rank_ends_the_others(tmp_path):
    launcher = Launcher(tmp_path, lambda rank: time.sleep(60))
    file = tmp_path / "rank-1"
    wait_until(lambda: file.exists() and file.read_text())
    os.kill(int(file.read_text()), signal.SIGKILL)
    code, text = launcher.end()
    assert code == 1 and text.count("\n") == 1
    assert "rank 1 " in text and "SIGKILL" in text


def test_killed_launcher_ends_the_ranks(tmp_path):
    def body(rank):
        init_distributed("cpu", timeout=30)
        (tmp_path / f"joined-{rank}").touch()
        time.sleep(60)

    launcher = Launcher(tmp_path, body)
    wait_until(lambda: len(list(tmp_path.glob("joined-*"))) == 3)
    os.kill(launcher.process.pid, signal.SIGKILL)
    assert launcher.end() == (-signal.SIGKILL, "")


def start_and_signal(tmp_path, number, handler, patience=30.0):
    """Exit code and stderr of a Launcher whose ranks handle the signal that it receives."""

    @report_errors
    def body(rank):
        init_distributed("cpu", timeout=30)
        signal.signal(number, handler)
        (tmp_path / f"ready-{rank}").touch()
        time.sleep(60)

    launcher = Launcher(tmp_path, body, patience=patience)
    wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 3)
    kill = os.killpg if number == signal.SIGINT else os.kill  # Ctrl-C reaches the whole group
    kill(launcher.process.pid, number)
    return launcher.end()


@pytest.mark.parametrize("obeys", [True, False])
def test_ctrl_c_ends_all_ranks(obeys, tmp_path):
    """A rank that does not react is killed when its time is up."""
    # As report_errors does: torch.multiprocessing takes a KeyboardInterrupt for a regular end.
    handler, patience = (lambda *_: sys.exit(1), 30) if obeys else (signal.SIG_IGN, 0.2)
    code, text = start_and_signal(tmp_path, signal.SIGINT, handler, patience)
    assert code == 130 and "Traceback" not in text
    assert text.count("interrupted") <= 1


def test_signal_is_passed_on_and_waited_for(tmp_path):
    """The ranks complete what they are writing, and their exit code is the launcher's."""

    def save_and_exit(*_):
        time.sleep(0.5)
        assert os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"] == "3"
        (tmp_path / f"saved-{os.environ['RANK']}").touch()
        sys.exit(75)

    assert start_and_signal(tmp_path, signal.SIGTERM, save_and_exit) == (75, "")
    assert len(list(tmp_path.glob("saved-*"))) == 3


@pytest.mark.slow
def test_script_starts_its_ranks_and_ends_well(tmp_path):
    """The script itself, as a user starts it."""
    flags = {"spawn_processes": 2, "epochs": 1, "synthetic_samples": 24}
    run = run_script("train_ddp_spawn.py", output_dir=tmp_path / "run", **flags)
    assert (run.code, run.stderr) == (0, "")
    assert run.rows[0]["world_size"] == 2


def test_mistake_in_a_flag_is_reported_before_any_rank_starts(monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["train_ddp_spawn.py", "--epochs=0"])
    monkeypatch.setattr(mp, "spawn", None)
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(ROOT / "train_ddp_spawn.py"), run_name="__main__")
    assert caught.value.code == 2
    assert "epochs" in capfd.readouterr().err
