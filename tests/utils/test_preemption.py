"""A signal to any rank: all save at the same step, exit with code 75, and can be continued."""

import json
import os
import runpy
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import pytest

import utils.signals
from tests.forked import FIVE_STEPS, FORK, fork_script, same_bits, without_seconds
from tests.processes import is_alive, run_ranks, start_script, wait_until
from tests.utils.test_checkpoint import in_fork
from tools.lib.runs import family, finish_run, kill_family
from utils.checkpoint import read_checkpoint
from utils.guards import preemption
from utils.guards.preemption import SIGNAL, SaveOnSignal
from utils.reports import report_errors
from utils.signals import SECONDS_OF_ONE_REQUEST, SIGNALS, shield_worker

FLAGS = FIVE_STEPS | {"save_steps": 0}


def signalled(number, epoch, step, rank):
    """For fork_script(before=...): this rank receives a signal after this step of this epoch."""

    def before():
        real = SaveOnSignal.after_step

        def after_step(guard, checkpoint):
            here = checkpoint.epoch, checkpoint.state["loader"].step
            if here == (epoch, step) and os.environ["RANK"] == str(rank):
                os.kill(os.getpid(), number)
            real(guard, checkpoint)

        SaveOnSignal.after_step = after_step

    return before


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return fork_script("train_ddp.py", 2, output_dir=tmp_path_factory.mktemp("run"), **FLAGS)


@pytest.mark.parametrize(
    ("number", "rank", "at", "saved"),
    [
        (signal.SIGTERM, 0, (1, 2), (1, 3)),
        (signal.SIGINT, 1, (0, 4), (1, 0)),  # known in the last step, so saved after the epoch
        # Known in the next epoch.
        pytest.param(signal.SIGUSR1, 1, (0, 5), (1, 1), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_signal_to_one_rank_stops_all_at_one_step(number, rank, at, saved, straight, tmp_path):
    flags = FLAGS | {"output_dir": tmp_path / "run"}
    run = fork_script("train_ddp.py", 2, signalled(number, *at, rank), **flags)
    assert run.code == 75
    assert run.stderr.count("\n") == 1
    assert f"in epoch {saved[0]}, after step {saved[1]}, " in run.stderr
    contents = read_checkpoint(tmp_path / "run" / "last.pt")
    assert (contents["epoch"], contents["loader"]["step"]) == saved
    resumed = fork_script("train_ddp.py", 2, **flags)
    assert (resumed.code, resumed.stderr) == (0, "")
    ours, theirs = (read_checkpoint(r.output_dir / "last.pt") for r in (resumed, straight))
    assert same_bits(ours["model"], theirs["model"])
    assert without_seconds(resumed.rows) == without_seconds(straight.rows)


@pytest.mark.slow
@pytest.mark.rare
def test_signal_to_all_processes_of_a_job(tmp_path):
    """As from SLURM: to torchrun, which repeats it, the ranks, and their workers."""
    flags = {"output_dir": tmp_path / "run", "num_workers": 1, "save_steps": 2}
    process = start_script("train_ddp.py", 2, synthetic_samples=3000, **flags)
    try:
        wait_until((tmp_path / "run" / "last.pt").exists, seconds=600)
        for pid in family(process.run_tag):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        run = finish_run(process, tmp_path / "run")
    finally:
        kill_family(process.run_tag)
    contents = read_checkpoint(tmp_path / "run" / "last.pt")
    assert f"epoch {contents['epoch']}, after step {contents['loader']['step']}, " in run.stderr
    assert "DataLoader" not in run.stderr


# One process


def started():
    """The guard of a run that has started, and what it needs of a Checkpointer."""
    guard, requests = SaveOnSignal(), []
    checkpoint = SimpleNamespace(
        cfg=SimpleNamespace(save_minutes=7.0, epochs=3),
        state={"loader": SimpleNamespace(step=3)},
        epoch=1,
        wait=lambda: None,
        request_save=lambda: requests.append(True),
        requests=requests,
    )
    guard.at_start(checkpoint)
    return guard, checkpoint


def test_signals_within_two_seconds_are_one_request_and_a_later_one_ends():
    def body():
        guard, _ = started()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        guard.signalled_at -= SECONDS_OF_ONE_REQUEST
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

    assert in_fork(body) == 128 + signal.SIGINT


def test_forks_of_a_rank_obey_signals():
    """A multiprocessing.Pool ends its processes by SIGTERM, and waits for them."""

    def body():
        started()
        ready = FORK.Event()
        child = FORK.Process(target=lambda: (ready.set(), time.sleep(100)))
        child.start()
        ready.wait()  # Python drops signals that arrive while it forks
        child.terminate()
        child.join()
        assert child.exitcode == 128 + signal.SIGTERM

    assert in_fork(body) == 0


def test_a_thread_and_a_notebook_keep_their_handlers(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    ThreadPoolExecutor(1).submit(started).result()
    monkeypatch.setattr(sys, "ps1", "In: ", raising=False)
    started()
    assert signal.getsignal(signal.SIGTERM) is before


def test_hangup_stays_ignored_under_nohup():
    def body():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert signal.SIGHUP not in runpy.run_path(utils.signals.__file__)["SIGNALS"]
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert signal.SIGHUP in runpy.run_path(utils.signals.__file__)["SIGNALS"]

    assert in_fork(body) == 0


def test_launcher_is_told_that_the_run_has_stopped(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(preemption, "SIGNALS", [])
    guard, checkpoint = started()
    guard.agreed, checkpoint.wait = SIGNAL, (tmp_path / "saved").touch
    with pytest.raises(SystemExit) as caught:
        report_errors(guard.after_save)(checkpoint)
    assert caught.value.code == 75
    assert (tmp_path / "saved").exists()  # or its error would be lost
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["extraInfo"]["outcome"] == "stopped"
    assert "epoch 1, after step 3" in message["message"]


def test_run_that_is_over_does_not_stop(monkeypatch):
    monkeypatch.setattr(preemption, "SIGNALS", [])
    guard, checkpoint = started()
    guard.agreed, checkpoint.epoch = SIGNAL, 3
    guard.after_save(checkpoint)


# Time intervals


def test_saves_once_per_interval_of_the_clock_of_any_rank(monkeypatch):
    def body(rank):
        clock, saved = SimpleNamespace(now=0.0), []
        monkeypatch.setattr(preemption.time, "monotonic", lambda: clock.now)
        guard, checkpoint = started()
        for step in range(1, 10):
            clock.now += 240 * rank  # rank 0's clock stands still
            guard.after_step(checkpoint)
            if checkpoint.requests:
                checkpoint.requests.clear()
                saved.append(step)
                guard.after_save(checkpoint)
        return saved

    # After seven minutes, and decided one step later.
    assert run_ranks(body, 2) == [[3, 6, 9]] * 2


def test_save_of_a_different_reason_begins_a_new_interval(monkeypatch):
    monkeypatch.setattr(preemption, "SIGNALS", [])
    guard, checkpoint = started()
    guard.saved_at -= 500
    guard.after_step(checkpoint)
    guard.after_save(checkpoint)
    guard.after_step(checkpoint)
    assert not checkpoint.requests


# Worker processes of a loader


def work(file):
    shield_worker(0)
    file.write_text(str(os.getpid()))
    time.sleep(100)  # longer than the test waits


def test_worker_obeys_its_rank_alone_and_dies_with_it(tmp_path):
    files, is_checked = [tmp_path / "first", tmp_path / "second"], FORK.Event()

    def rank():
        workers = [FORK.Process(target=work, args=(file,), daemon=True) for file in files]
        for worker in workers:
            worker.start()
        is_checked.wait(60)
        workers[0].terminate()
        time.sleep(60)

    process = FORK.Process(target=rank)
    process.start()
    try:
        wait_until(lambda: all(file.exists() and file.read_text() for file in files))
        first, second = (int(file.read_text()) for file in files)
        for number in SIGNALS:
            os.kill(first, number)
            os.kill(second, number)
        time.sleep(0.3)
        assert is_alive(first) and is_alive(second)
        is_checked.set()
        wait_until(lambda: not is_alive(first))
        assert is_alive(second)
    finally:
        process.kill()
    wait_until(lambda: not is_alive(second))
