"""The small guards: the lock of the folder, no NaN in a file, stacks of a hang, progress lines."""

import fcntl
import math
import os
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.forked import FORK
from tests.processes import run_ranks
from tests.utils.test_checkpoint import Steps, checkpointer, in_fork, make_state, outcome
from utils.checkpoint import read_checkpoint
from utils.errors import UserError
from utils.guards import progress
from utils.guards.finite import RefuseNonFinite
from utils.guards.hang import ShowHang
from utils.guards.lock import LockFolder
from utils.metrics import Meter

# One run at a time


def lock(folder):
    guard = LockFolder()
    guard.at_start(SimpleNamespace(folder=folder))
    return guard


def test_run_that_was_killed_holds_no_lock(tmp_path):
    locked = FORK.Event()
    process = FORK.Process(target=lambda: (lock(tmp_path), locked.set(), time.sleep(60)))
    process.start()
    assert locked.wait(60)
    assert outcome(lambda: lock(tmp_path))[0] is UserError
    process.kill()
    process.join()
    lock(tmp_path)


def test_file_system_without_locks_is_no_error(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", fail)
    lock(tmp_path)


def test_second_run_in_a_folder_is_refused(tmp_path):
    guard = lock(tmp_path)
    with pytest.raises(UserError, match=str(tmp_path)):
        lock(tmp_path)
    kinds = [kind for kind, _ in run_ranks(lambda rank: outcome(lambda: lock(tmp_path)), 2)]
    assert None not in kinds
    del guard
    lock(tmp_path)


# Finite weights


def with_meter(state, *losses):
    """The state with a Meter that has added up these losses."""
    task = SimpleNamespace(
        count=len, measure=lambda outputs, targets: {"psnr": torch.tensor(math.inf)}
    )
    meter = Meter(task, SimpleNamespace(started=0.0, counts=True))
    for loss in losses:
        meter.update(torch.tensor(loss), [], [0])
    return state | {"meter": meter}


def test_weights_that_are_not_finite_are_never_saved(tmp_path):
    def body(rank):
        state = with_meter(make_state(), 1.0)
        writer = checkpointer(tmp_path, state, [RefuseNonFinite()])
        writer.save(1)
        if rank == 1:
            state["model"][0].weight.data[-1, -1] = math.inf
        with pytest.raises(UserError, match="--lr"):
            writer.save(2)

    assert run_ranks(body, 2) == [None, None]
    assert read_checkpoint(tmp_path / "last.pt")["epoch"] == 1


def test_epoch_whose_loss_is_not_finite_is_never_saved(tmp_path):
    """A run that resumes there could not finish it."""
    state = with_meter(make_state(), 1.0, math.nan)
    with pytest.raises(UserError):
        checkpointer(tmp_path, state, [RefuseNonFinite()]).save(1)
    assert not list(tmp_path.iterdir())


def test_what_is_not_trained_may_be_infinite():
    """Such as a causal mask. And a sum of float16 may exceed its range."""
    model = nn.Linear(300, 300).half()
    model.weight.data.fill_(1.0)
    model.register_buffer("mask", torch.full((3, 3), float("-inf")))
    model.frozen = nn.Parameter(torch.tensor(float("nan")), requires_grad=False)
    checkpoint = SimpleNamespace(model=model, state=with_meter({}, 1.0))
    RefuseNonFinite().before_save(checkpoint, between_steps=False)
    model.weight.data[0, 0] = torch.inf
    with pytest.raises(UserError, match="model"):
        RefuseNonFinite().before_save(checkpoint, between_steps=False)


# Hangs


def test_hang_shows_where_it_is(tmp_path):
    def wait_for_something():
        time.sleep(1.5)

    def run(hang):
        os.dup2(os.open(tmp_path / hang, os.O_CREAT | os.O_WRONLY), 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        checkpoint = SimpleNamespace(cfg=SimpleNamespace(timeout=1.0, epochs=3), epoch=0)
        guard = ShowHang()
        guard.at_start(checkpoint)
        if hang != "first step":
            guard.after_step(checkpoint)
        if hang == "after the run":
            checkpoint.epoch = 3
            guard.after_save(checkpoint)
        wait_for_something()

    for hang, times in (("first step", 1), ("later step", 1), ("after the run", 0)):
        assert in_fork(lambda hang=hang: run(hang)) == 0  # it goes on
        assert (tmp_path / hang).read_text().count("in wait_for_something") == times


# Progress


def test_a_line_tells_how_far_the_run_is(monkeypatch, capsys):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    loader = Steps()
    loader.epoch, loader.global_batch = 3, 8
    meter = SimpleNamespace(summarize=lambda: {"loss": 2.5})
    checkpoint = SimpleNamespace(state={"loader": loader, "meter": meter})
    guard = progress.Progress()
    guard.at_start(checkpoint)
    for loader.step in range(1, 5):
        clock.now += 10.0
        guard.after_step(checkpoint)
    first, second = capsys.readouterr().err.splitlines()
    for part in ("epoch 3", "step 2 of 5", "loss 2.5000", "1 samples/s", "30 s left"):
        assert part in first
    assert "step 4 of 5" in second
    monkeypatch.setattr(progress, "is_main_process", lambda: False)
    clock.now += 20.0
    guard.after_step(checkpoint)
    assert capsys.readouterr().err == ""
