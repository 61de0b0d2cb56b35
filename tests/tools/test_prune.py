"""Copies without the modules that only watch a run: they are complete, and train the same model."""

import re
import subprocess
import sys

import pytest

from tests.tools.test_copy import copy, run_alone
from tests.verifying import ForkServer, run_verify
from tools.copy import texts
from tools.lib.closure import small_flags
from tools.lib.ladder import RUNGS
from tools.lib.prune import GUARDS, SETTINGS, CannotLeaveOut, can_leave_out, without
from tools.verify.cases import IMAGES, cases_of

# guards that report through another one
REPORTING = {"preemption", "progress", "reports", "watchdog"}
ALONE = ("train_1gpu.py", "train_1gpu_graph.py", "train_dp.py", "train_mp.py")


@pytest.fixture(scope="module")
def server():
    with ForkServer() as server:
        yield server


def write(files, folder):
    for path, contents in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(contents)


@pytest.mark.parametrize("script", RUNGS)
def test_nothing_is_left_of_what_is_left_out(script, tmp_path):
    files = texts({script: "images"}, ["audit"])
    expected = set(GUARDS)
    if script in ALONE:
        expected -= {"replicas"}  # one process has none
    assert set(can_leave_out(files)) == expected
    for names in [*([name] for name in expected - {"reports"}), REPORTING & expected, expected]:
        left = without(files, names)
        gone = {GUARDS[name].path for name in names}
        assert files.keys() - left.keys() == gone
        for path, contents in left.items():
            text = contents.decode()
            assert not any(re.search(rf"{GUARDS[name].module}\b", text) for name in names), path
            compile(text, path, "exec") if path.endswith(".py") else None
    write(left, tmp_path)
    unused = "F,RUF100"  # and names that are not defined
    command = ["ruff", "check", "--isolated", "--select", unused, "--ignore=F841", tmp_path]
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_guard_that_other_code_needs_stays():
    files = texts({"train_1gpu.py": "images"}, [])
    files["tasks/own.py"] = b"from utils.contract import check_task\nchecks = [check_task]\n"
    with pytest.raises(CannotLeaveOut, match=r"^tasks/own\.py needs utils/contract\.py$"):
        without(files, ["contract"])
    assert set(can_leave_out(files)) == GUARDS.keys() - {"contract", "replicas"}


def test_guard_that_others_report_through_goes_with_them():
    files = texts({"train_1gpu.py": "images"}, [])
    with pytest.raises(CannotLeaveOut, match=r"utils/progress\.py needs utils/reports\.py$"):
        without(files, ["reports", "preemption", "watchdog"])
    assert "reports" in can_leave_out(files)
    with_loggers = texts({"train_1gpu.py": "images"}, ["loggers"])
    assert "reports" not in can_leave_out(with_loggers)


def test_settings_that_nothing_reads_are_gone():
    """A flag that does nothing would be worse than one that is unknown."""
    files = texts({"train_ddp.py": "images"}, [])
    for name, setting in (("preemption", "save_minutes"), ("replicas", "check_replicas_every")):
        assert f"    {setting}:" in files[SETTINGS].decode()
        left = without(files, [name])
        assert not any(setting in text.decode() for text in left.values())
    fsdp = without(texts({"train_fsdp.py": "images"}, []), ["replicas"])
    assert "    check_replicas_every:" in fsdp[SETTINGS].decode()  # CompareShards reads it


def test_plain_copy_runs_its_default_command(tmp_path):
    copied = copy("train_ddp.py", tmp_path / "mine", "--plain")
    assert copied.returncode == 0, copied.stderr
    assert all(f"  {name}: {guard.purpose}" in copied.stdout for name, guard in GUARDS.items())
    table = tmp_path / "mine/utils/options/__init__.py"  # without rows whose files were not copied
    lines = table.read_text().splitlines(keepends=True)
    rows = [line for line in lines if '"utils.options.' in line]
    table.write_text("".join(line for line in lines if line not in rows))
    assert len(rows) == 7 and [*table.parent.glob("[a-z]*.py")] == []
    run = run_alone(
        tmp_path / "mine", "train_ddp.py", small_flags(tmp_path / "mine/train_ddp.py", tmp_path)
    )
    assert run.returncode == 0 and run.stderr == "", run.stderr
    assert "epoch 0: train loss" in run.stdout
    unknown = copy("train_ddp.py", tmp_path / "other", "--without", "watchdog,progres")
    assert unknown.returncode == 2 and "out progres: choose" in unknown.stderr
    both = copy("train_1gpu.py", tmp_path / "other", "--without=finite", "--with=finite")
    assert both.returncode == 2 and "--with and --without" in both.stderr
    kept = copy("train_1gpu.py", tmp_path / "kept", "--plain", "--with", "preemption")
    assert kept.returncode == 0, kept.stderr
    names = {path.stem for path in (tmp_path / "kept/utils").iterdir()}
    assert "preemption" in names and not names & {"contract", "progress", "watchdog"}
    needs = copy("train_ddp.py", tmp_path / "mine", "--with", "loggers")
    assert needs.returncode == 1 and "utils/reports.py" in needs.stderr
    assert f"--update {tmp_path / 'mine'} --with NAME" in needs.stderr
    more = copy("train_1gpu.py", tmp_path / "mine")  # the modules are those of the first script
    assert more.returncode == 0 and not (tmp_path / "mine" / "utils" / "contract.py").exists()
    assert "contract" not in (tmp_path / "mine" / "train_1gpu.py").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options"),
    [
        *(
            pytest.param("train_ddp.py", ["--without", names], marks=pytest.mark.rare)
            for names in (*(GUARDS.keys() - {"reports"}), ",".join(REPORTING))
        ),
        *((name, ["--plain"]) for name in ("train_1gpu.py", "train_ddp.py", "train_ddp_amp.py")),
        ("train_fsdp.py", ["--plain"]),
    ],
    ids=lambda value: value if isinstance(value, str) else value[-1],
)
def test_copy_without_guards_trains_the_same_weights(
    script, options, tmp_path, server, monkeypatch, capsys
):
    """A row of make verify."""
    copied = copy(script, tmp_path, *options, "--with", "audit")
    assert copied.returncode == 0, copied.stderr
    row = {"train_1gpu.py": "1gpu, resumed", "train_fsdp.py": "fsdp x2"}.get(script)
    row = row or {"train_ddp_amp.py": "amp x2, float16"}.get(script, "killed, resumed x3")
    assert any(case.name == row for case in cases_of(IMAGES, script))
    arguments = "--script", tmp_path / script, "--only", row
    code = run_verify(monkeypatch, *arguments, start=server.start)
    printed = capsys.readouterr().out
    assert code == 0 and "cases passed" in printed, printed
