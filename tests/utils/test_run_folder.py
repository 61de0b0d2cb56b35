"""The output folder: one run at a time, and what --resume never does to an earlier one."""

import errno
import fcntl
import os
import shutil
import time

import pytest

from tests.forked import FORK
from tests.processes import run_ranks
from tests.utils.test_checkpoint import checkpointer, make_state, outcome, save
from utils.config import Config
from utils.distributed import RESTART_COUNTS, job_ids
from utils.errors import PeerError, UserError
from utils.metrics import write_rows
from utils.run_folder import OutputFolder, lock_folder


def lock(folder):
    lock_folder(Config(output_dir=str(folder)))


def start(folder, resume="auto"):
    """What a script does when it starts. Returns the epochs done."""
    lock(folder)
    return checkpointer(folder, resume=resume).load()


def test_started_over_run_keeps_the_files_of_the_one_before(tmp_path):
    save(tmp_path, make_state())
    (tmp_path / "metrics.jsonl").write_text("{}")
    (tmp_path / "previous-epoch-0012.pt").touch()
    assert start(tmp_path) == 1
    assert checkpointer(tmp_path, resume="never").load() == 0  # also in a copy without the lock
    (aside,) = tmp_path.glob("previous-*")
    names = {"last.pt", "epoch-0001.pt", "metrics.jsonl", "previous-epoch-0012.pt"}
    assert names <= set(os.listdir(aside))
    assert not (tmp_path / "last.pt").exists() and not (tmp_path / "metrics.jsonl").exists()


def test_metrics_without_a_checkpoint_are_not_overwritten(tmp_path, monkeypatch):
    """As after someone has deleted the checkpoints to free space."""
    (tmp_path / "metrics.jsonl").write_text("{}")
    (tmp_path / "epoch-0001.parts").mkdir()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # of a job that had no time to save
    assert start(tmp_path) == 0
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    with pytest.raises(UserError, match="no checkpoint"):
        start(tmp_path, "always")
    assert (tmp_path / "metrics.jsonl").exists()
    assert start(tmp_path) == 0
    (kept,) = tmp_path.glob("previous-*/metrics.jsonl")
    assert kept.read_text() == "{}" and not (tmp_path / "metrics.jsonl").exists()
    (tmp_path / "metrics.jsonl").touch()  # as a run does that is about to start
    assert start(tmp_path) == 0
    assert (tmp_path / "metrics.jsonl").exists()


def test_settings_that_a_person_wrote_are_kept(tmp_path, capsys):
    """--config may be a file in the output folder, in which a run writes a config.yaml."""
    path, folder = tmp_path / "config.yaml", OutputFolder(Config(output_dir=str(tmp_path)), {})
    path.write_text(Config().dump())
    folder.after_load(None)
    assert capsys.readouterr().err == "" and path.exists()
    path.write_text("lr: 0.1  # not 0.2: it diverges\n")
    lock(tmp_path)
    assert path.exists()  # a run that is refused can be started again with it
    folder.after_load(None)
    (kept,) = tmp_path.glob("config-*.yaml")
    assert "it diverges" in kept.read_text() and str(kept) in capsys.readouterr().err


def test_two_starts_in_one_second_keep_both_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda form: "previous-20261126-000000")
    for text in ("first", "second"):
        (tmp_path / "metrics.jsonl").write_text(text)
        start(tmp_path, "never")
    found = {path.read_text() for path in tmp_path.glob("previous-*/metrics.jsonl")}
    assert found == {"first", "second"}


def test_two_configs_of_one_second_are_both_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda form: "config-20261126-000000.yaml")
    for text in ("lr: 0.1  # first", "lr: 0.1  # second"):
        (tmp_path / "config.yaml").write_text(text)
        OutputFolder(Config(output_dir=str(tmp_path)), {}).after_load(None)
    kept = [path.read_text() for path in tmp_path.glob("config-*.yaml")]
    assert sorted(kept) == ["lr: 0.1  # first", "lr: 0.1  # second"]


def test_main_process_claims_the_folder_for_all(tmp_path):
    def body(rank, name):
        return outcome(lambda: OutputFolder(Config(output_dir=str(tmp_path / name)), {}))

    assert run_ranks(body, 2, "run") == [(None, "")] * 2
    (tmp_path / "file").touch()
    assert [kind for kind, _ in run_ranks(body, 2, "file")] == [UserError, PeerError]


@pytest.mark.parametrize(("name", "count"), RESTART_COUNTS.items())
def test_restarted_job_resumes_even_a_run_that_started_over(name, count, tmp_path, monkeypatch):
    """--resume never under --max-restarts or --requeue: a restart is part of the same job."""
    monkeypatch.delenv(name, raising=False)
    assert start(tmp_path, "never") == 0
    save(tmp_path, make_state())
    monkeypatch.setenv(count, "1")
    assert start(tmp_path, "never") == 1
    monkeypatch.setenv(name, "one")
    write_rows(tmp_path / "starts.jsonl", [{"epoch": 0, **job_ids()}])
    assert start(tmp_path, "never") == 1
    monkeypatch.setenv(name, "two")  # which ended before it could put the files aside
    assert start(tmp_path, "never") == 0
    save(tmp_path, make_state())
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
    killed = ("epoch-0002.pt.tmp", "metrics.jsonl.tmp", "loggers.json.tmp", "config.yaml.tmp")
    for name in killed:
        (tmp_path / name).write_text("of a killed run")
    start(tmp_path, "never")
    assert all((tmp_path / name).read_text() == "theirs" for name in theirs)
    assert ours <= {path.name for path in next(tmp_path.glob("previous-*")).iterdir()}
    assert not any((tmp_path / name).exists() for name in killed)


def test_one_run_per_folder(tmp_path):
    claimed = FORK.Event()

    def other_run():
        lock(tmp_path)
        claimed.set()
        time.sleep(60)

    process = FORK.Process(target=other_run)
    process.start()
    assert claimed.wait(30)
    with pytest.raises(UserError, match=rf"process {process.pid} on \S+ is writing to"):
        lock(tmp_path)
    process.kill()
    process.join()
    lock(tmp_path)


@pytest.mark.parametrize("save_errors", ["stop", "warn"])
def test_folder_in_the_place_of_the_locked_one_is_noticed(save_errors, tmp_path, capsys):
    """By rm -r, mkdir, and perhaps a second run, whose files would be overwritten."""
    cfg = Config(output_dir=str(tmp_path / "run"), save_errors=save_errors)
    hook = OutputFolder(cfg, {})
    hook.before_save(None, between_steps=False)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()
    if save_errors == "stop":
        with pytest.raises(UserError, match="run was deleted, or replaced"):
            hook.before_save(None, between_steps=False)
        return
    hook.before_save(None, between_steps=False)
    assert "is created again" in capsys.readouterr().err
    (tmp_path / "run" / ".lock").unlink()
    with open(tmp_path / "run" / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="is writing to"):
            hook.before_save(None, between_steps=False)


def test_link_to_a_folder_that_is_gone_creates_it(tmp_path):
    """As after the cleaning of a file system for temporary files."""
    (tmp_path / "runs").symlink_to(tmp_path / "scratch" / "runs")
    assert start(tmp_path / "runs" / "first") == 0
    assert (tmp_path / "scratch" / "runs" / "first" / ".lock").is_file()


def test_folder_that_cannot_be_created(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--output-dir .*/file/run: Not a directory"):
        lock(tmp_path / "file" / "run")


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_file_system_without_locks_is_a_warning(number, tmp_path, monkeypatch, capsys):
    """Such as Lustre without the mount option flock."""

    def flock(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    lock(tmp_path / "run")
    warning = capsys.readouterr().err
    assert warning.startswith("warning: ") and warning.count("\n") == 1
    for part in (f"{tmp_path / 'run'} ", "no locks", os.strerror(number), "--output-dir"):
        assert part in warning


def test_other_errors_of_the_lock_are_errors(tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(UserError, match=r"--output-dir .*/run: Input/output error"):
        lock(tmp_path / "run")
