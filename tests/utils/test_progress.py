"""How far a run is: the bar or the lines, and what they cost."""

import os
import pty
import sys
import termios
from types import SimpleNamespace

import pytest
import torch

import utils.progress
from tests.forked import FIVE_STEPS, fork_script
from utils.errors import UserError
from utils.hooks import AsyncCopy
from utils.metrics import MetricLogger
from utils.progress import Progress


class Meter:
    """Of a task whose loss is the mean over its targets."""

    def __init__(self):
        self.sums = torch.zeros(2, dtype=torch.float64)

    def update(self, loss_sum, count):
        self.sums = self.sums + torch.tensor([loss_sum, count])

    def snapshot(self):
        return self.sums

    def summarize(self, snapshot):
        return {"loss": (snapshot[0] / snapshot[1]).item()}


class Loader:
    """Of 100 steps, with what Progress needs."""

    epoch, step, batch_size, global_batch = 0, 0, 4, 8

    def __len__(self):
        return 100


@pytest.fixture
def watched(monkeypatch):
    """A function that takes a step, which lasts one second, and its Progress."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(utils.progress.time, "monotonic", lambda: clock.now)
    loader, meter = Loader(), Meter()
    progress = Progress(SimpleNamespace(epochs=3), {"loader": loader, "meter": meter})

    def step(loss=1.0):
        clock.now += 1.0
        loader.step += 1
        meter.update(4 * loss, 4)
        progress.after_step(None)

    return SimpleNamespace(step=step, loader=loader, meter=meter, progress=progress, clock=clock)


def test_lines_show_what_happened_since_the_last_one(watched, capsys):
    for _ in range(15):
        watched.step(loss=3.0)
    assert capsys.readouterr().err == ""  # it is early
    for _ in range(16):
        watched.step(loss=5.0)
    first, second = capsys.readouterr().err.splitlines()
    for part in (
        "epoch 0: step 16 of 100",
        "04:44 left",
        "01:24 in the epoch",
        "loss 3.1250 (rank 0)",
        "8 samples/s",
    ):
        assert part in first
    for part in (
        "epoch 0: step 31 of 100",
        "04:29 left",
        "01:09 in the epoch",
        "loss 5.0000 (rank 0)",
    ):
        assert part in second


def test_time_left_in_the_run_includes_what_lies_between_epochs(watched, capsys):
    for _ in range(100):
        watched.step()
    watched.loader.epoch, watched.loader.step = 1, 0
    watched.meter.sums = torch.zeros(2, dtype=torch.float64)
    watched.clock.now += 49.0  # evaluation
    capsys.readouterr()
    for _ in range(20):
        watched.step(loss=2.0)
    # 84 steps of this epoch, 100 of the last one, and once the 50 seconds from step to step.
    (line,) = capsys.readouterr().err.splitlines()
    for part in (
        "epoch 1: step 16 of 100",
        "03:54 left",
        "01:24 in the epoch",
        "loss 2.0000 (rank 0)",
        "8 samples/s",
    ):
        assert part in line


def test_loss_of_one_process_needs_no_label(watched, capsys):
    watched.loader.batch_size = 8
    for _ in range(16):
        watched.step()
    assert "loss 1.0000, 8 samples/s" in capsys.readouterr().err


def test_other_ranks_show_nothing(watched, capsys):
    watched.progress.is_main = False
    for _ in range(40):
        watched.step()
    assert capsys.readouterr().err == ""


def test_loss_is_shown_once_it_has_arrived(watched, monkeypatch, capsys):
    """The host never waits: is_done() is asked, and wait() is not called."""
    done = iter([False, False, True])
    monkeypatch.setattr(AsyncCopy, "is_done", lambda readout: next(done))
    monkeypatch.setattr(AsyncCopy, "wait", lambda readout: pytest.fail("it waited"))
    for step in range(20):
        watched.step(loss=step)
    (line,) = capsys.readouterr().err.splitlines()
    # Of the steps up to the sixteenth, although two more have been taken.
    assert line.startswith("epoch 0: step 18 of 100, ") and ", loss 7.5000 " in line


def run_on_terminal(columns=100, **flags):
    """Run train_1gpu.py on a terminal. Returns what it has written there, and its exit code."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))

    def before():
        os.dup2(theirs, 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        utils.progress.SECONDS_BETWEEN_BARS = 0.0
        if "before" in flags:
            flags["before"]()

    settings = {name: value for name, value in flags.items() if name != "before"}
    run = fork_script("train_1gpu.py", None, before, **FIVE_STEPS, **settings)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 65536):
            shown += part
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    return shown.decode(), run


def test_bar_on_a_terminal(tmp_path):
    shown, run = run_on_terminal(output_dir=tmp_path / "run")
    assert run.code == 0
    last = [part for part in shown.split("\r") if "5/5, " in part]
    assert last and last[0].startswith("epoch 0 ")
    assert "in the run, " in last[-1] and "loss " in last[-1]
    assert shown.split("\r")[-1].strip() == ""  # the bar is gone
    assert "step 3 of 5" not in shown


@pytest.mark.parametrize(("columns", "is_narrow"), [(80, True), (100, True), (120, False)])
def test_time_left_fits_beside_the_bar(columns, is_narrow, watched, capsys, monkeypatch):
    """Whatever does not fit is cut off at the end."""
    tqdm = pytest.importorskip("tqdm").tqdm
    monkeypatch.setattr(utils.progress, "_columns", lambda: columns)
    watched.progress.new_bar = lambda **options: tqdm(
        **options | {"dynamic_ncols": False}, ncols=columns
    )
    watched.loader.epoch, watched.loader.global_batch = 12, 9310
    watched.progress.epochs = 15
    for _ in range(16):
        watched.step()
    watched.progress.bar.disable = True  # or its next bar would leave space for it
    bar = capsys.readouterr().err.split("\r")[-1]
    assert bar.index("04:44 left") < bar.index("loss 1.0000") and "9,310 sampl" in bar
    assert ("(rank 0)" not in bar) == ("in the epoch" not in bar) == is_narrow
    assert len(bar.rstrip()) <= columns


def test_terminal_that_goes_away_ends_no_run(tmp_path):
    def before():
        ours, theirs = pty.openpty()
        terminals = [ours]
        termios.tcsetwinsize(theirs, (24, 100))
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(theirs, number)
            setattr(sys, name, os.fdopen(number, "w", closefd=False))
        utils.progress.SECONDS_BETWEEN_BARS = 0.0
        real = MetricLogger.log

        def close_and_log(*args, **kwargs):
            while terminals:  # once: the number may be that of a different file later
                os.close(terminals.pop())
            real(*args, **kwargs)

        MetricLogger.log = close_and_log

    run = fork_script("train_1gpu.py", None, before, output_dir=tmp_path / "run", **FIVE_STEPS)
    assert run.code == 0 and len(run.rows) == 2
    assert (tmp_path / "run" / "epoch-0002.pt").exists()


def test_error_stands_on_a_line_of_its_own(tmp_path):
    def before():
        def fail(meter, *args):
            raise UserError("what, where, what to do")

        utils.progress.Progress.before_save = fail

    shown, run = run_on_terminal(output_dir=tmp_path / "run", before=before)
    assert run.code == 1
    line = shown.replace("\n", "").split("\r")
    assert "error: what, where, what to do" in line


def test_lines_without_tqdm(tmp_path):
    def before():
        sys.modules["tqdm"] = None
        utils.progress.SECONDS_BETWEEN_LINES = -1

    shown, run = run_on_terminal(output_dir=tmp_path / "run", before=before)
    assert run.code == 0
    assert [line.split(",")[0] for line in shown.splitlines()[:2]] == [
        "epoch 0: step 1 of 5",
        "epoch 0: step 2 of 5",
    ]
