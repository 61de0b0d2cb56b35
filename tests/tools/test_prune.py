"""Copies without guards: they are complete, and train the same model."""

import subprocess
import sys

import pytest

from tests.copies import copied, refused, run_alone, write
from tests.verifying import ForkServer, run_verify
from tools.copy import texts
from tools.lib.closure import small_flags
from tools.lib.ladder import RUNGS
from tools.lib.prune import GUARDS, SETTINGS

ROWS = {"train_ddp.py": "killed, resumed x3", "train_fsdp.py": "fsdp x2"}
WITHOUT = [name for name in GUARDS if name != "options"]  # --audit, which the rows need
OFTEN = ("train_ddp.py", "train_pp.py")


@pytest.mark.parametrize(
    "script",
    [pytest.param(script, marks=[pytest.mark.slow] * (script not in OFTEN)) for script in RUNGS],
)
def test_nothing_is_left_of_what_is_left_out(script, tmp_path):
    choices = [[name] for name in GUARDS]
    for number, names in enumerate([*choices, list(GUARDS)]):
        files = texts({script: "images"}, [], names)
        for name in names:
            assert GUARDS[name].path not in files
        write(files, tmp_path / str(number))
    unused = "F,RUF100"  # what is imported and not used, and names that are not defined
    command = ["ruff", "check", "--isolated", "--select", unused, "--ignore=F841", tmp_path]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_lines_of_a_guard_are_gone_and_those_of_others_stay():
    script = texts({"train_ddp.py": "images"}, [], ["replicas", "progress"])["train_ddp.py"]
    text = script.decode()
    assert "from utils.guards import finite, hang, lock, preemption\n" in text
    assert "lock.LockFolder()" in text and "*option_guards(cfg)" in text
    assert "CompareReplicas" not in text and "Progress" not in text
    plain = texts({"train_ddp.py": "images"}, [], GUARDS)["train_ddp.py"].decode()
    assert "    guards = []\n" in plain and "convert_sync_batchnorm(model)" in plain


def test_settings_that_nothing_reads_are_gone():
    """A flag that does nothing would be worse than one that is unknown."""
    config = texts({"train_ddp.py": "images"}, [])[SETTINGS].decode()
    without_saves = texts({"train_ddp.py": "images"}, [], ["preemption"])[SETTINGS].decode()
    plain = texts({"train_ddp.py": "images"}, [], GUARDS)[SETTINGS].decode()
    for name in ("save_minutes", "log_steps", "logger", "max_skipped_steps"):
        assert f"    {name}:" in config and f"    {name}:" not in plain
    assert "save_minutes" not in without_saves and "    log_steps:" in without_saves
    assert "    save_steps:" in plain and "    seed:" in plain


@pytest.mark.slow
def test_plain_copy_runs_its_default_command(tmp_path):
    folder = tmp_path / "mine"
    printed = copied("train_ddp.py", folder, "--plain")
    assert all(f"  {name}: " in printed for name in GUARDS)
    run = run_alone(folder, "train_ddp.py", small_flags(folder / "train_ddp.py", tmp_path))
    assert run.returncode == 0 and run.stderr == "", run.stderr
    assert "epoch 0: train loss" in run.stdout
    assert "--update" in refused("train_1gpu.py", folder, "--with", "lock")
    copied("train_1gpu.py", folder)  # the modules are those of the first script
    assert "check_task" not in (folder / "train_1gpu.py").read_text()


def test_guards_are_named_by_their_modules(tmp_path):
    copied("train_1gpu.py", tmp_path / "kept", "--plain", "--with", "preemption")
    kept = {path.stem for path in (tmp_path / "kept" / "utils" / "guards").iterdir()}
    assert kept == {"__init__", "preemption"}
    assert "progres" in refused("train_ddp.py", tmp_path, "--without", "hang,progres", code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize(
    ("script", "names"),
    [
        *(("train_ddp.py", name) for name in WITHOUT),
        ("train_ddp.py", ",".join(WITHOUT)),
        ("train_fsdp.py", ",".join(WITHOUT)),
    ],
)
def test_copy_without_guards_trains_the_same_weights(script, names, tmp_path, monkeypatch, capsys):
    """A row of make verify."""
    copied(script, tmp_path, "--without", names, "--with", "audit")
    with ForkServer() as server:
        arguments = "--script", tmp_path / script, "--only", ROWS[script]
        code = run_verify(monkeypatch, *arguments, start=server.start)
    printed = capsys.readouterr().out
    assert code == 0 and "cases passed" in printed, printed
