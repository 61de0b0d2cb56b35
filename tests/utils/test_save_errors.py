"""Checkpoints that cannot be written, which a run may outlive."""

import errno
import fcntl
import os
import shutil
import threading

import pytest

from tests.forked import FIVE_STEPS, fork_script
from tests.utils.test_checkpoint import checkpointer
from utils.checkpoint import Checkpointer
from utils.checkpoint_file import read_checkpoint
from utils.config import Config
from utils.distributed import dp_rank
from utils.errors import UserError
from utils.preemption import Interrupts, Preempted
from utils.run_folder import OutputFolder


class Stop(Interrupts):
    """A stop by a signal, at the save at which `agreed` is set. Handles no signals."""

    def after_load(self, checkpoint):
        pass


def tolerant(folder, *hooks):
    """A Checkpointer of a run with --save-errors warn."""
    return checkpointer(folder, None, hooks, epochs=3, save_errors="warn")


@pytest.fixture
def full_disk(monkeypatch):
    """A list; while it is not empty, nothing can be flushed to the disk."""
    full, fsync = [], os.fsync

    def flush(file):
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(file)

    monkeypatch.setattr(os, "fsync", flush)
    return full


def test_failed_save_is_a_warning_and_the_next_one_is_tried(tmp_path, full_disk, capsys):
    checkpoint = tolerant(tmp_path)
    full_disk.append(True)
    checkpoint.save(1)
    checkpoint.wait()
    text = capsys.readouterr().err
    assert text.startswith(f"warning: cannot save {tmp_path}/epoch-0001.pt: No space left ")
    assert "MB are needed" in text and "MB are free" in text and "run continues" in text
    full_disk.clear()
    checkpoint.save(2)
    checkpoint.wait()
    assert read_checkpoint(tmp_path / "last.pt")["epoch"] == 2
    full_disk.append(True)
    with pytest.raises(UserError, match="No space left"):
        checkpoint.save(3)  # the last one
    assert read_checkpoint(tmp_path / "last.pt")["epoch"] == 2


def test_save_before_a_stop_must_succeed(tmp_path, full_disk, capsys):
    """Otherwise, exit code 75 would claim that the run is saved. An earlier save need not."""
    stop = Stop(Config(), {})
    checkpoint = tolerant(tmp_path, stop)
    full_disk.append(True)
    checkpoint.save(0, between_steps=True)
    stop.agreed = 15
    checkpoint.request_save(ends_run=True)
    with pytest.raises(UserError, match="No space left"):
        checkpoint.save(0, between_steps=True)
    assert capsys.readouterr().err.count("No space left") == 1


def test_stop_is_saved_in_spite_of_a_failed_save_before(tmp_path, full_disk, capsys):
    stop = Stop(Config(), {})
    checkpoint = tolerant(tmp_path, stop)
    full_disk.append(True)
    blocked = threading.Event()
    checkpoint.writer.submit(blocked.wait)  # so that the first save fails when the second is due
    checkpoint.save(1)
    checkpoint.writer.submit(full_disk.clear)
    stop.agreed = 15
    checkpoint.request_save(ends_run=True)
    threading.Timer(0.2, blocked.set).start()
    with pytest.raises(Preempted):
        checkpoint.save(1, between_steps=True)
    assert "warning: cannot save" in capsys.readouterr().err
    assert read_checkpoint(tmp_path / "last.pt")["epoch"] == 1


def test_deleted_folder_is_created_again(tmp_path):
    def before():
        real = Checkpointer.step

        def step(checkpoint):
            if (checkpoint.epoch, checkpoint.state["loader"].step, dp_rank()) == (0, 2, 0):
                shutil.rmtree(checkpoint.folder)
            real(checkpoint)

        Checkpointer.step = step

    flags = FIVE_STEPS | {"save_errors": "warn"}
    run = fork_script("train_ddp.py", 2, before, output_dir=tmp_path / "run", **flags)
    assert run.code == 0 and run.stderr.count("is created again") == 1
    assert read_checkpoint(tmp_path / "run" / "last.pt")["epoch"] == 2
    assert len(run.rows) == 2 and (tmp_path / "run" / "config.yaml").exists()


def test_folder_that_is_created_again_is_locked(tmp_path, capsys):
    cfg = Config(output_dir=str(tmp_path / "run"), save_errors="warn")
    checkpoint = tolerant(tmp_path / "run", OutputFolder(cfg, {}))
    shutil.rmtree(tmp_path / "run")
    checkpoint.save(1)
    checkpoint.wait()
    assert "run was deleted" in capsys.readouterr().err
    assert read_checkpoint(tmp_path / "run" / "last.pt")["epoch"] == 1
    with open(tmp_path / "run" / ".lock") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
