"""The output folder: one run at a time, and what --resume never does to an earlier one."""

import errno
import fcntl
import os
import re
import sys
import time

import pytest

from tests.forked import FORK
from tests.test_checkpoint import checkpointer, make_state, save
from utils.errors import UserError


@pytest.mark.parametrize("count", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_restarted_job_resumes_even_a_run_that_started_over(count, tmp_path, monkeypatch):
    """--resume never under --max-restarts or --requeue: a restart is part of the same job."""
    state = make_state()
    checkpointer(tmp_path, state, resume="never").load()
    save(tmp_path, state)
    monkeypatch.setenv(count, "1")
    assert checkpointer(tmp_path, state, resume="never").load() == 1
    monkeypatch.setenv(count, "0")
    assert checkpointer(tmp_path, state, resume="never").load() == 0


def test_files_of_others_in_the_folder_stay_where_they_are(tmp_path):
    """As with --output-dir . --resume never in someone's project."""
    theirs = ("thesis.tex", "draft.tmp", "weights.pt", "epochs.txt", ".git/HEAD")
    (tmp_path / ".git").mkdir()
    for name in theirs:
        (tmp_path / name).write_text("theirs")
    save(tmp_path, make_state(), is_best=True)
    ours = {path.name for path in tmp_path.glob("*.pt")} - {"weights.pt"}
    (tmp_path / "epoch-0002.pt.tmp").write_text("of a killed run")
    checkpointer(tmp_path, resume="never").load()
    assert all((tmp_path / name).read_text() == "theirs" for name in theirs)
    assert ours <= {path.name for path in next(tmp_path.glob("previous-*")).iterdir()}
    assert not list(tmp_path.glob("*.pt.tmp"))


def test_one_run_per_folder(tmp_path):
    loaded = FORK.Event()

    def other_run():
        checkpointer(tmp_path).load()
        loaded.set()
        time.sleep(60)

    process = FORK.Process(target=other_run)
    process.start()
    assert loaded.wait(30)
    with pytest.raises(UserError, match=rf"process {process.pid} on \S+ is writing to"):
        checkpointer(tmp_path).load()
    process.kill()
    process.join()
    assert checkpointer(tmp_path).load() == 0


def test_folder_that_cannot_be_created(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write to --output-dir .*: Not a directory"):
        checkpointer(tmp_path / "file" / "run").load()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_file_system_without_locks_is_a_warning(number, tmp_path, monkeypatch, capsys):
    """Such as Lustre without the mount option flock."""

    def flock(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    assert checkpointer(tmp_path / "run").load() == 0
    assert re.fullmatch(
        rf"warning: the file system of .*/run has no locks \({os.strerror(number)}\): make sure "
        "that no other run uses this --output-dir\n",
        capsys.readouterr().err,
    )


def test_other_errors_of_the_lock_are_errors(tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(UserError, match=r"cannot write to --output-dir .*: Input/output error"):
        checkpointer(tmp_path / "run").load()


def test_starting_over_needs_the_module(tmp_path, monkeypatch):
    """Without it, --resume never must not resume."""
    save(tmp_path, make_state())
    monkeypatch.setitem(sys.modules, "utils.run_folder", None)
    with pytest.raises(UserError, match=r"--resume never needs utils/run_folder\.py"):
        checkpointer(tmp_path, resume="never").load()
