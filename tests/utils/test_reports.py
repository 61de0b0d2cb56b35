"""A failing job prints one error, from the first rank to fail, and leaves no process behind."""

import errno
import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.processes import ROOT, run_ranks, start_script
from tools.launch import reports
from tools.lib.runs import family, finish_run, start_run, wait_for_family
from utils import reports as reporting
from utils.config import ConfigError
from utils.distributed import all_reduce
from utils.errors import PeerError, SilentExit, UserError
from utils.reports import a_rank_has_failed, explain_errors, report_errors

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHER += ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def naps(monkeypatch):
    """The seconds for which the code under test would have slept."""
    seconds = []
    monkeypatch.setattr(reporting.time, "sleep", seconds.append)
    return seconds


def fail(error):
    """Raise `error` in a main() with report_errors; return the exit code."""

    @report_errors
    def main():
        raise error

    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code


# One process


def test_results_and_exits_pass_through():
    assert report_errors(lambda a, b: a - b)(3, b=1) == 2
    with pytest.raises(SystemExit, match="7"):
        report_errors(sys.exit)(7)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UserError("what, where, what to do"), 1, "error: what, where, what to do\n"),
        (ConfigError("lr is wrong"), 2, "error: lr is wrong\n"),
        (KeyboardInterrupt(), 1, "error: interrupted\n"),
        (PeerError("rank 1 failed"), 1, ""),
        (SilentExit(), 1, ""),
        (UserError("caf\udce9.jpg is broken"), 1, "error: caf\udce9.jpg is broken\n"),
    ],
    ids=str,
)
def test_user_error_is_one_line(error, code, text, capfdbinary, naps):
    assert fail(error) == code
    assert capfdbinary.readouterr().err == text.encode(errors="surrogateescape")


def test_other_exceptions_are_one_traceback(capfd):
    assert fail(ValueError("a bug")) == 1
    text = capfd.readouterr().err
    assert text.startswith("Traceback") and text.endswith("ValueError: a bug\n")
    assert text.count("Traceback") == 1 and "raise error" in text


def test_rank_is_named_even_in_an_incomplete_environment(monkeypatch, capfd):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert fail(UserError("no")) == 1
    assert capfd.readouterr().err == "error (rank 3): no\n"
    monkeypatch.delenv("RANK")
    assert fail(UserError("no")) == 1
    assert capfd.readouterr().err == "error: no\n"


def test_notes_are_part_of_the_report(monkeypatch, capfd):
    monkeypatch.setattr(reporting, "_explanations", [])
    explain_errors(lambda error: error.add_note(f"a note on {error}"))
    assert fail(UserError("no")) == 1
    assert capfd.readouterr().err == "error: no\na note on no\n"
    assert fail(ValueError("a bug")) == 1
    assert capfd.readouterr().err.endswith("ValueError: a bug\na note on a bug\n")


USE_TORCHRUN = "torchrun --standalone --nproc_per_node=N"


@pytest.mark.parametrize(
    ("command", "environment", "code", "part"),
    [
        ("train_ddp.py", {}, 1, f"{USE_TORCHRUN} train_ddp.py"),
        ("train_ddp_amp.py", {}, 1, f"{USE_TORCHRUN} train_ddp_amp.py"),
        ("train_ddp_accum.py", {}, 1, f"{USE_TORCHRUN} train_ddp_accum.py"),
        ("train_fsdp.py", {}, 1, f"{USE_TORCHRUN} train_fsdp.py"),
        ("train_tp.py", {}, 1, f"{USE_TORCHRUN} train_tp.py"),
        ("train_pp.py", {}, 1, f"{USE_TORCHRUN} train_pp.py"),
        (
            "train_fsdp.py --fsdp-size=3",
            {"WORLD_SIZE": "4"},
            2,
            "fsdp_size 3: pass one of 1, 2, 4",
        ),
        (
            "train_fsdp_tp.py --fsdp-size=2",
            {"WORLD_SIZE": "1"},
            2,
            "fsdp_size 2: pass one of 1",
        ),
        ("train_1gpu.py", {"WORLD_SIZE": "2"}, 1, "python train_1gpu.py"),
        ("train_dp.py", {"WORLD_SIZE": "2", "RANK": "1"}, 1, "python train_dp.py"),
        ("train_mp.py --lrr=1", {}, 2, "'--lr'"),
        ("train_ddp.py --lr=x", {"WORLD_SIZE": "2"}, 2, "'x'"),
    ],
)
def test_script_started_wrongly_prints_one_line(
    command, environment, code, part, monkeypatch, capfd, tmp_path
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    name, *flags = command.split()
    monkeypatch.setattr(sys, "argv", [name, f"--output-dir={tmp_path}", "--device=cpu", *flags])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(ROOT / name), run_name="__main__")
    text = capfd.readouterr().err
    assert caught.value.code == code
    assert text.startswith("error") and text.count("\n") == 1
    assert part in text


# Before the ranks have met: each of them meets the same error


def test_local_rank_0_reports_first(monkeypatch, naps, capfd):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for local_rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert fail(UserError("no such file")) == 1
        assert capfd.readouterr().err == "error: no such file\n"
        assert naps == ([] if local_rank == "0" else [10])  # for local rank 0 to report
    naps.clear()
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")  # no launcher that would end it
    assert fail(UserError("no such file")) == 1
    assert (capfd.readouterr().err, naps) == ("error: no such file\n", [])


# Several ranks, without torchrun


class Outcome(Exception):
    """What a rank returns if it leaves a broken group behind: skips the barrier of run_ranks()."""


def fail_in_step_5(rank, error, folder, failing=(1,)):
    """Train until some ranks fail, and the others lose their connection to them."""

    @report_errors
    def main():
        for step in range(9):
            all_reduce(torch.zeros(1))
            if step == 5 and rank in failing:
                raise error

    file = os.open(folder / f"{rank}.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 2)
    code = None
    try:
        main()
    except SystemExit as caught:
        code = caught.code
    text = (folder / f"{rank}.txt").read_text()
    dist.destroy_process_group()
    raise Outcome(code, text)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("what, where, what to do"), 1, "error (rank 1): what, where, what to do\n"),
        (ConfigError("which key"), 2, "error (rank 1): which key\n"),
        (ValueError("a bug"), 1, "ValueError: a bug\n"),
        (KeyboardInterrupt(), 1, "error (rank 1): interrupted\n"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_the_first_rank_to_fail_reports(error, code, message, tmp_path):
    outcomes = [outcome.args for outcome in run_ranks(fail_in_step_5, 3, error, tmp_path)]
    assert [code for code, _ in outcomes] == [1, code, 1]
    assert outcomes[0][1] == outcomes[2][1] == ""
    assert outcomes[1][1].endswith(message)
    assert outcomes[1][1].count("Traceback") == isinstance(error, ValueError)


def test_error_of_all_ranks_is_reported_once(tmp_path):
    error = UserError("what, where, what to do")
    outcomes = [o.args for o in run_ranks(fail_in_step_5, 3, error, tmp_path, (0, 1, 2))]
    assert [code for code, _ in outcomes] == [1, 1, 1]
    texts = [text for _, text in outcomes if text]
    assert len(texts) == 1
    assert re.fullmatch(rf"error \(rank [012]\): {error}\n", texts[0])


class Gone:
    """A store whose host has died."""

    def add(self, key, amount):
        raise dist.DistNetworkError("Connection reset by peer")

    def check(self, keys):
        raise dist.DistNetworkError("Connection reset by peer")


def test_dead_worker_does_not_interrupt_the_report(monkeypatch, capfd, naps):
    """A DataLoader's handler raises for it, and the error was taken for that of a lost store."""

    class Store:
        def add(self, *_):
            os.kill(os.getpid(), signal.SIGCHLD)  # of one more process that ends
            return 1

        def set(self, *_):
            pass

    def handler(*_):
        raise RuntimeError("DataLoader worker is killed")

    @report_errors
    def next_main():  # of a notebook, whose loaders rely on the handler
        return signal.getsignal(signal.SIGCHLD)

    monkeypatch.setattr(reporting, "_child_handler", None)
    monkeypatch.setattr(reporting, "_failure_store", Store())
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    before = signal.signal(signal.SIGCHLD, handler)
    try:
        fail(UserError("the first error"))
        assert next_main() is handler
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert "the first error" in capfd.readouterr().err


def test_store_that_is_gone_leaves_the_report_to_the_launcher(monkeypatch, capfd, naps):
    monkeypatch.setattr(reporting, "_failure_store", Gone())
    assert fail(UserError("lost")) == 1
    assert capfd.readouterr().err == "error: lost\n"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert fail(UserError("lost")) == 1
    assert capfd.readouterr().err == ""


def test_all_ranks_learn_of_a_failure(monkeypatch):
    assert not a_rank_has_failed()
    monkeypatch.setattr(reporting, "_failure_store", dist.HashStore())
    assert not a_rank_has_failed()
    assert reporting.is_first_to_fail() and not reporting.is_first_to_fail()
    assert a_rank_has_failed()
    monkeypatch.setattr(reporting, "_failure_store", Gone())
    assert a_rank_has_failed()


@pytest.mark.parametrize(
    ("error", "outcome", "end"),
    [
        (ValueError("a bug"), "failed", "ValueError: a bug\n"),
        (UserError("what to do"), "failed", "error: what to do\n"),
        (KeyboardInterrupt(), "interrupted", "error: interrupted\n"),
    ],
    ids=str,
)
def test_error_file_is_written_for_torchrun(error, outcome, end, tmp_path, monkeypatch, capfd):
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    assert fail(error) == 1
    message = json.loads(path.read_text())["message"]
    assert message["message"].endswith(end)
    assert message["extraInfo"]["timestamp"].isdecimal()
    assert message["extraInfo"]["outcome"] == outcome
    assert capfd.readouterr().err == "" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("outcome", ["failed", "stopped"])
def test_error_file_without_space_still_tells_the_outcome(outcome, tmp_path, monkeypatch, capfd):
    def fail_to_write(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(reporting.json, "dump", fail_to_write)
    if outcome == "failed":
        assert fail(UserError("last.pt: no space")) == 1
        assert capfd.readouterr().err == "error: last.pt: no space\n"
    else:
        reporting.write_error_file("stopped by SIGTERM", outcome)  # which rank 0 has printed
        assert capfd.readouterr().err == ""
    assert reports(tmp_path, old=set()) == {outcome: ""}


def fail_on_two_hosts(rank, error, folder):
    """As fail_in_step_5(), with one rank per host. The text is that of torchrun's error file."""
    os.environ |= {"GROUP_WORLD_SIZE": "2", "TORCHELASTIC_ERROR_FILE": str(folder / str(rank))}
    reporting.socket.gethostname = lambda: f"node{rank}"
    with pytest.raises(Outcome) as caught:
        fail_in_step_5(rank, error, folder)
    text = json.loads((folder / str(rank)).read_text())["message"]["message"]
    raise Outcome(caught.value.args[0], text)


@pytest.mark.parametrize("error", [UserError("what to do"), ValueError("a bug")], ids=str)
def test_report_is_repeated_on_the_other_host(error, tmp_path):
    """Its torchrun would only know that its rank has failed."""
    outcomes = [outcome.args for outcome in run_ranks(fail_on_two_hosts, 2, error, tmp_path)]
    assert [code for code, _ in outcomes] == [1, 1]
    (_, repeated), (_, reported) = outcomes
    assert reported.endswith(f"{error}\n")
    first, _, rest = repeated.partition("\n")
    assert "failed on node1" in first and rest == reported


def test_host_of_the_store_is_named_when_it_is_lost(tmp_path, monkeypatch, naps):
    environment = {"GROUP_WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "node0"}
    environment |= {"TORCHELASTIC_USE_AGENT_STORE": "1", "TORCHELASTIC_ERROR_FILE": "error.json"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reporting, "_failure_store", Gone())
    assert fail(RuntimeError("Connection reset by peer")) == 1
    text = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert text.startswith("error (rank 1): lost ") and "\n" not in text
    assert "store on node0" in text


# With torchrun


def assert_report_ends_with(run, *lines):
    """torchrun's output ends with one report of the root cause, whose last lines are `lines`."""
    end = run.stderr.splitlines()[-1 - len(lines) :]
    assert run.code == 1
    assert [line.strip() for line in end[:-1]] == [*lines], run.stderr
    assert set(end[-1]) == {"="}
    assert run.stderr.count(lines[-1]) == 1
    elastic = run.stderr.count("torch.distributed.elastic.multiprocessing.errors.ChildFailedError")
    tracebacks = run.stderr.count("Traceback (most recent call last)") - elastic
    assert tracebacks == lines[-1].startswith("Zero"), run.stderr


SCRIPT = """
import os, sys, time
sys.path.insert(0, {root!r})
from utils.reports import report_errors

@report_errors
def main():
    {body}

main()
"""


def launch(body, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(root=str(ROOT), body=body))
    return finish_run(start_run(script, 2, {}), tmp_path)


def test_exception_on_one_rank_shows_one_traceback(tmp_path):
    body = """
    import torch
    from utils.distributed import all_reduce, init_distributed
    init_distributed("cpu", 20)
    for step in range(9):
        all_reduce(torch.zeros(1))
        if step == 5:
            1 / (int(os.environ["RANK"]) - 1)
    """
    run = launch(body, tmp_path)
    assert "rank      : 1 (local_rank: 1)" in run.stderr.split("Root Cause")[1]
    underline = next(line for line in run.stderr.splitlines()[::-1] if "~" in line).strip()
    assert_report_ends_with(run, underline, "ZeroDivisionError: division by zero")


def test_configuration_error_of_all_ranks_is_reported_once(tmp_path):
    """Before the ranks have met, and although local rank 0 is two seconds behind."""
    body = """
    time.sleep(2 * (os.environ["RANK"] == "0"))
    from utils.config import load_config
    load_config(argv=["--lrr=1"])
    """
    run = launch(body, tmp_path)
    (report,) = [line.strip() for line in run.stderr.splitlines() if "--lrr=1" in line]
    assert report.startswith("traceback : error (rank 0): ") and "'--lr'" in report
    assert_report_ends_with(run, report)
    assert run.seconds < 60


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_killed_rank_ends_the_job(tmp_path):
    process = start_script(
        "train_ddp.py", 2, output_dir=tmp_path, epochs=1000, loader="workers", num_workers=1
    )
    end = time.monotonic() + 120
    while not (tmp_path / "last.pt").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)
    ranks = [
        pid
        for pid in family(process.run_tag)
        if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    ]
    assert len(ranks) >= 2  # the rank and its loader's worker
    (rank,) = (pid for pid in ranks if parent_of(pid) not in ranks)  # ids may begin anew
    os.kill(rank, signal.SIGKILL)
    try:
        _, stderr = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        wait_for_family(process.run_tag, limit=0)
        raise
    assert process.returncode == 1
    assert "exitcode  : -9" in stderr.split("Root Cause")[1] and "SIGKILL" in stderr
    assert "error (rank" not in stderr  # rank 0 has only lost its connection
    assert wait_for_family(process.run_tag) == []


def test_names_that_stdout_cannot_encode_are_printed(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", stream)
    report_errors(print)("caf\u00e9/\u65e5\u672c.jpg", "\udcff.jpg", flush=True)
    assert stream.buffer.getvalue() == b"caf\xe9/\\u65e5\\u672c.jpg \\udcff.jpg\n"
    for other in (None, io.StringIO()):  # closed; of a notebook
        monkeypatch.setattr(sys, "stdout", other)
        report_errors(print)("text")
