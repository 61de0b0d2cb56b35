"""A signal at any moment: all ranks save at the same step, exit with code 75, and can continue."""

import itertools
import json
import multiprocessing
import os
import runpy
import signal
import threading
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import utils.preemption
import utils.signals
from tests.forked import FIVE_STEPS, FORK, fork_script, same_bits, without_seconds
from tests.processes import run_ranks, start_script
from tests.utils.test_spawn import is_alive
from tools.lib.runs import family, finish_run, kill_family
from utils.checkpoint import Checkpointer
from utils.checkpoint_file import read_checkpoint
from utils.config import Config
from utils.errors import UserError
from utils.hooks import Hooks
from utils.preemption import Interrupts, Preempted
from utils.reports import report_errors, set_failure_store
from utils.signals import SECONDS_OF_ONE_REQUEST, SIGNALS, shield_worker

FLAGS = FIVE_STEPS | {"save_steps": 0}


def signalled(number, epoch, step, rank=0, again=False):
    """For fork_script(before=...): this rank receives a signal after this step of this epoch."""

    def before():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
        utils.signals.SIGNALS[:] = {*SIGNALS, signal.SIGHUP}
        real = Hooks.after_step

        def signal_after_step(hooks, checkpoint):
            here = (checkpoint.epoch, checkpoint.state["loader"].step)
            if here == (epoch, step) and os.environ.get("RANK", "0") == str(rank):
                (interrupts,) = [h for h in hooks if isinstance(h, Interrupts)]
                os.kill(os.getpid(), number)
                wait_until(lambda: interrupts.signal)
            real(hooks, checkpoint)

        Hooks.after_step = signal_after_step

    return before


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return fork_script("train_ddp.py", 2, output_dir=tmp_path_factory.mktemp("run"), **FLAGS)


@pytest.mark.parametrize(
    ("number", "rank", "at", "saved"),
    [
        (signal.SIGTERM, 0, (1, 2), (1, 3)),
        (signal.SIGHUP, 1, (0, 1), (0, 2)),
        (signal.SIGINT, 1, (0, 4), (1, 0)),  # known in the last step, so saved after the epoch
        (signal.SIGTERM, 0, (0, 5), (1, 1)),  # known in the next epoch
    ],
    ids=str,
)
def test_signal_to_one_rank_stops_all_at_one_step(number, rank, at, saved, straight, tmp_path):
    flags = FLAGS | {"output_dir": tmp_path / "run", "num_workers": 1, "loader": "workers"}
    run = fork_script("train_ddp.py", 2, signalled(number, *at, rank), **flags)
    assert run.code == 75
    epoch, step = saved
    assert run.stderr.count("\n") == 1
    for part in (
        f" {number.name} ",
        f"epoch {epoch}, step {step},",
        f"saved in {run.output_dir}",
        "the same command",
    ):
        assert part in run.stderr
    checkpoint = read_checkpoint(run.output_dir / "last.pt")
    assert (checkpoint["epoch"], checkpoint["loader"]["step"]) == saved
    resumed = fork_script("train_ddp.py", 2, **flags)
    assert (resumed.code, resumed.stderr) == (0, "")
    ours, theirs = (read_checkpoint(r.output_dir / "last.pt") for r in (resumed, straight))
    assert same_bits(ours["model"], theirs["model"])
    assert without_seconds(resumed.rows) == without_seconds(straight.rows)


def test_stop_of_a_run_that_started_over_says_how_to_continue(tmp_path):
    flags = FLAGS | {"output_dir": tmp_path / "run", "resume": "never"}
    run = fork_script("train_1gpu.py", None, signalled(signal.SIGTERM, 0, 1, 0), **flags)
    assert run.code == 75
    assert "same command, without --resume never" in run.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "nproc", "number"),
    [
        ("train_ddp.py", 2, signal.SIGTERM),
        ("train_ddp_spawn.py", None, signal.SIGUSR1),
    ],
)
def test_signal_to_all_processes_of_a_job(script, nproc, number, tmp_path):
    """As from SLURM: to the launcher, the ranks, and the workers; the launcher then repeats it."""
    flags = FIVE_STEPS | {"output_dir": tmp_path / "run", "num_workers": 1, "loader": "workers"}
    flags["synthetic_samples"] = 3000  # the signal arrives before the epoch ends
    flags |= {} if nproc else {"spawn_processes": 1}
    process = start_script(script, nproc, **flags)
    try:
        wait_until((tmp_path / "run" / "last.pt").exists, seconds=600)
        for pid in family(process.run_tag):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        run = finish_run(process, flags["output_dir"])
    finally:
        kill_family(process.run_tag)
    assert f"stopped by {number.name} after epoch" in run.stderr
    for text in ("DataLoader", "killed", "resource_tracker"):
        assert text not in run.stderr, run.stderr
    assert run.stderr.count("stopped by") == 1
    checkpoint = read_checkpoint(tmp_path / "run" / "last.pt")
    place = f"after epoch {checkpoint['epoch']}, step {checkpoint['loader']['step']}, and saved"
    assert place in run.stderr


@pytest.fixture
def fake_checkpoint(tmp_path):
    """What Interrupts needs of a Checkpointer."""
    loader = SimpleNamespace(step=3)
    cfg = SimpleNamespace(resume="auto", epochs=2)
    checkpoint = Namespace()  # a class with weak references
    checkpoint.__dict__ |= dict(cfg=cfg, state={"loader": loader}, epoch=1, folder=tmp_path)
    checkpoint.pending = None
    return checkpoint


def started(checkpoint, minutes=1000.0):
    """Interrupts that handle signals."""
    interrupts = Interrupts(Config(save_minutes=minutes), {})
    interrupts.after_load(checkpoint)
    return interrupts


def exit_code(body, limit=30):
    """The exit code of a fork of this process that runs body() and then sleeps."""
    process = FORK.Process(target=lambda: (body(), time.sleep(60)))
    process.start()
    process.join(limit)
    process.kill()
    return process.exitcode


def test_signals_are_handled_from_the_start_of_the_run_on(fake_checkpoint):
    """While the data are prepared, for example, there is nothing to save."""

    def body():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        Interrupts(Config(), {})
        os.kill(os.getpid(), signal.SIGTERM)

    assert exit_code(body) == -signal.SIGTERM


def test_hangup_stays_ignored_under_nohup():
    def body():
        for handler in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(signal.SIGHUP, handler)
            module = runpy.run_path(utils.signals.__file__)
            is_ignored = handler == signal.SIG_IGN
            assert (signal.SIGHUP in module["SIGNALS"]) != is_ignored
        os._exit(7)

    assert exit_code(body) == 7


def test_run_stops_with_its_exit_code_although_nobody_can_read_why(fake_checkpoint):
    """Ctrl-C has ended the tee of  2>&1 | tee log, too."""

    def body():
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
        interrupts = Interrupts(Config(), {})
        interrupts.agreed = signal.SIGINT
        fake_checkpoint.wait = lambda: None
        report_errors(interrupts.after_save)(fake_checkpoint)

    assert exit_code(body) == 75


@pytest.mark.parametrize("is_waited_for", [False, True])
def test_second_signal_ends_the_process_once_the_file_is_complete(
    is_waited_for, fake_checkpoint, tmp_path
):
    """is_waited_for: by the main thread, as when the run stops, or saves again."""

    def body():
        interrupts = started(fake_checkpoint)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # the same request
        wait_until(lambda: interrupts.signal)
        interrupts.received -= SECONDS_OF_ONE_REQUEST
        writer = ThreadPoolExecutor(1)
        fake_checkpoint.pending = writer.submit(
            lambda: (time.sleep(0.5), (tmp_path / "complete").touch())
        )
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        if is_waited_for:
            Checkpointer.wait(fake_checkpoint)

    assert exit_code(body) == 128 + signal.SIGINT
    assert (tmp_path / "complete").exists()


def test_signal_after_a_failure_of_another_rank_ends_the_process(fake_checkpoint):
    """Launchers send SIGTERM to the other ranks: these need not save."""

    def body():
        store = dist.HashStore()
        store.add("failures", 1)
        set_failure_store(store)
        started(fake_checkpoint)
        os.kill(os.getpid(), signal.SIGTERM)

    assert exit_code(body) == 128 + signal.SIGTERM


def test_signals_act_as_before_once_the_run_is_over(fake_checkpoint):
    def body():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        interrupts = started(fake_checkpoint)
        fake_checkpoint.epoch = 2
        interrupts.after_save(fake_checkpoint)
        os.kill(os.getpid(), signal.SIGTERM)

    assert exit_code(body) == -signal.SIGTERM


def test_signals_act_as_before_after_an_error_in_a_notebook(fake_checkpoint):
    @report_errors
    def main():
        started(fake_checkpoint)
        raise UserError("the disk is full")

    def body():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with suppress(SystemExit):
            main()
        os.kill(os.getpid(), signal.SIGTERM)

    assert exit_code(body) == -signal.SIGTERM


def test_signals_act_as_before_if_nothing_is_left_to_do(fake_checkpoint):
    def body():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        fake_checkpoint.epoch = 2
        started(fake_checkpoint)
        os.kill(os.getpid(), signal.SIGTERM)

    assert exit_code(body) == -signal.SIGTERM


def test_signals_act_as_before_in_child_processes(fake_checkpoint):
    def body():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        interrupts = started(fake_checkpoint)
        running = FORK.Event()
        child = FORK.Process(target=lambda: (running.set(), time.sleep(60)))
        child.start()
        running.wait()
        child.terminate()
        child.join()
        time.sleep(0.1)  # for a byte in the pipe
        os._exit(child.exitcode == -signal.SIGTERM and interrupts.signal == 0)

    assert exit_code(body) == 1


def work(pid_file):
    shield_worker(0)
    pid_file.write_text(str(os.getpid()))
    time.sleep(60)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_worker_obeys_its_rank_alone_and_dies_with_it(method, tmp_path):
    """Not with the thread of its rank that has started it, nor with the signals of a scheduler."""
    files, ready = [tmp_path / "first", tmp_path / "second"], FORK.Event()

    def rank():
        context = multiprocessing.get_context(method)
        workers = [context.Process(target=work, args=(file,), daemon=True) for file in files]
        thread = threading.Thread(target=lambda: [worker.start() for worker in workers])
        thread.start()
        thread.join()
        ready.wait(60)
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
        ready.set()
        wait_until(lambda: not is_alive(first))
        assert is_alive(second)
    finally:
        process.kill()
    wait_until(lambda: not is_alive(second))


def test_launcher_learns_that_the_run_is_saved(fake_checkpoint, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    fake_checkpoint.wait = lambda: (tmp_path / "saved").touch()
    interrupts = Interrupts(Config(), {})
    interrupts.agreed = signal.SIGUSR1
    handler = signal.signal(signal.SIGHUP, utils.preemption._ignore)
    monkeypatch.setitem(utils.preemption._handlers, signal.SIGHUP, handler)
    with monkeypatch.context() as patch, pytest.raises(Preempted):
        patch.setenv("RANK", "0")
        interrupts.after_save(fake_checkpoint)
    assert signal.getsignal(signal.SIGHUP) is utils.preemption._ignore  # until the process ends
    with pytest.raises(Preempted):  # a notebook, in which it does not end
        interrupts.after_save(fake_checkpoint)
    assert signal.getsignal(signal.SIGHUP) == handler
    assert (tmp_path / "saved").exists()
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["extraInfo"]["outcome"] == "stopped"
    for part in ("SIGUSR1", "epoch 1, step 3", f"saved in {tmp_path}", "the same command"):
        assert part in message["message"]
    assert capfd.readouterr().err == 2 * (message["message"] + "\n")


def test_saves_when_minutes_are_over_on_the_clock_of_any_rank(fake_checkpoint, monkeypatch):
    def body(rank):
        minutes = itertools.count(0, 4 if rank else 0)  # rank 0's clock stands still
        clock = SimpleNamespace(monotonic=lambda: 60 * next(minutes))
        monkeypatch.setattr(utils.preemption, "time", clock)
        interrupts, saved, requests = Interrupts(Config(save_minutes=7.0), {}), [], []
        checkpoint = SimpleNamespace(request_save=lambda ends_run: requests.append(ends_run))
        for step in range(12):
            interrupts.after_step(checkpoint)
            if requests:
                assert requests.pop() is False
                saved.append(step)
                interrupts.after_save(fake_checkpoint)
        return saved

    # Rank 1 counts 4 minutes per step. It decides after 8 minutes, and saves one step later.
    assert run_ranks(body, 2) == [[2, 5, 8, 11]] * 2
