"""The output folder: one run at a time, and what --resume never does to an earlier one."""

import errno
import fcntl
import os
import re
import time

import pytest

from tests.forked import FORK
from tests.launch import run_ranks
from tests.test_checkpoint import checkpointer, make_state, outcome, save
from utils.config import Config
from utils.errors import PeerError, UserError
from utils.run_folder import claim, claim_output_dir


def start(folder, resume="auto"):
    """What a script does when it starts. Returns the epochs done."""
    claim(folder, resume)
    return checkpointer(folder, resume=resume).load()


def test_started_over_run_keeps_the_files_of_the_one_before(tmp_path):
    save(tmp_path, make_state())
    (tmp_path / "metrics.jsonl").write_text("{}")
    assert start(tmp_path) == 1
    assert start(tmp_path, "never") == 0
    (aside,) = tmp_path.glob("previous-*")
    assert {"last.pt", "epoch-0001.pt", "metrics.jsonl"} <= set(os.listdir(aside))
    assert not (tmp_path / "last.pt").exists() and not (tmp_path / "metrics.jsonl").exists()


def test_main_process_claims_the_folder_for_all(tmp_path):
    def body(rank, name):
        return outcome(lambda: claim_output_dir(Config(output_dir=str(tmp_path / name))))

    assert run_ranks(body, 2, "run") == [(None, "")] * 2
    (tmp_path / "file").touch()
    assert [kind for kind, _ in run_ranks(body, 2, "file")] == [UserError, PeerError]


@pytest.mark.parametrize("count", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_restarted_job_resumes_even_a_run_that_started_over(count, tmp_path, monkeypatch):
    """--resume never under --max-restarts or --requeue: a restart is part of the same job."""
    assert start(tmp_path, "never") == 0
    save(tmp_path, make_state())
    monkeypatch.setenv(count, "1")
    assert start(tmp_path, "never") == 1
    monkeypatch.setenv(count, "0")
    assert start(tmp_path, "never") == 0


def test_files_of_others_in_the_folder_stay_where_they_are(tmp_path):
    """As with --output-dir . --resume never in someone's project."""
    theirs = ("thesis.tex", "draft.tmp", "weights.pt", "epochs.txt", ".git/HEAD")
    (tmp_path / ".git").mkdir()
    for name in theirs:
        (tmp_path / name).write_text("theirs")
    save(tmp_path, make_state(), is_best=True)
    ours = {path.name for path in tmp_path.glob("*.pt")} - {"weights.pt"}
    (tmp_path / "epoch-0002.pt.tmp").write_text("of a killed run")
    claim(tmp_path, "never")
    assert all((tmp_path / name).read_text() == "theirs" for name in theirs)
    assert ours <= {path.name for path in next(tmp_path.glob("previous-*")).iterdir()}
    assert not list(tmp_path.glob("*.pt.tmp"))


def test_one_run_per_folder(tmp_path):
    claimed = FORK.Event()

    def other_run():
        claim(tmp_path, "auto")
        claimed.set()
        time.sleep(60)

    process = FORK.Process(target=other_run)
    process.start()
    assert claimed.wait(30)
    with pytest.raises(UserError, match=rf"process {process.pid} on \S+ is writing to"):
        claim(tmp_path, "auto")
    process.kill()
    process.join()
    claim(tmp_path, "auto")


def test_folder_that_cannot_be_created(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write to --output-dir .*: Not a directory"):
        claim(tmp_path / "file" / "run", "auto")


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_file_system_without_locks_is_a_warning(number, tmp_path, monkeypatch, capsys):
    """Such as Lustre without the mount option flock."""

    def flock(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    claim(tmp_path / "run", "auto")
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
        claim(tmp_path / "run", "auto")
