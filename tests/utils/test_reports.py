"""A failing job prints one error, from the first rank to fail, and leaves no process behind."""

import json
import os
import signal
import sys

import pytest
import torch
import torch.distributed as dist

from tests.processes import ROOT, run_ranks
from tests.utils.test_checkpoint import in_fork
from tests.utils.test_distributed import Outcome
from tools.lib.runs import finish_run, start_run
from utils import reports
from utils.config import ConfigError
from utils.errors import PeerError, UserError, required_by, say, warn
from utils.reports import report_errors


@pytest.fixture(autouse=True)
def launcher(monkeypatch):
    """Without one. Returns the seconds for which the code under test would have slept."""
    for name in ("RANK", "LOCAL_RANK", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    naps = []
    monkeypatch.setattr(reports.time, "sleep", naps.append)
    return naps


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


def test_error_of_the_user_is_one_line(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    assert fail(UserError("what to do")) == 1
    assert capsys.readouterr().err == "error (rank 3): what to do\n"
    assert fail(ConfigError("which key")) == 2
    assert capsys.readouterr().err == "error (rank 3): which key\n"
    assert fail(KeyboardInterrupt()) == 1
    assert capsys.readouterr().err == "interrupted\n"


def test_any_other_error_is_one_traceback(capsys):
    assert fail(ValueError("a bug")) == 1
    text = capsys.readouterr().err
    assert text.count("Traceback") == 1
    assert "raise error" in text and text.endswith("ValueError: a bug\n")


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(UserError("what to do"), "failed"), (KeyboardInterrupt(), "interrupted")],
)
def test_error_file_is_written_for_torchrun(error, outcome, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert fail(error) == 1
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["extraInfo"]["outcome"] == outcome
    assert message["extraInfo"]["timestamp"].isdecimal()
    assert message["extraInfo"]["py_callstack"] == message["message"].rstrip()
    assert capsys.readouterr().err == ""


def test_error_file_that_cannot_be_written_is_printed(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "missing" / "error.json"))
    assert fail(UserError("what to do")) == 1
    assert "what to do" in capsys.readouterr().err


def test_terminal_that_is_gone_does_not_end_the_run():
    def body():
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open("/dev/full", os.O_WRONLY), number)
            setattr(sys, name, os.fdopen(number, "w", closefd=False))
        say("epoch 0")
        warn("the run continues")
        os._exit(7)

    assert in_fork(body) == 7


def test_module_that_was_not_copied_is_named():
    with pytest.raises(UserError, match=r"tasks\.text"), required_by("--save-sharded"):
        raise ModuleNotFoundError("No module named 'tasks.text'", name="tasks.text")
    with pytest.raises(ModuleNotFoundError), required_by("--save-sharded"):
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")


# Several ranks


def test_local_rank_0_reports_what_all_meet_before_the_group_exists(monkeypatch, launcher, capsys):
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert fail(UserError("no such file")) == 1
    assert not launcher
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert fail(UserError("no such device")) == 1
    assert launcher == [10]  # in which the launcher ends it, unless no other rank has failed
    assert capsys.readouterr().err.count("no such device") == 1


def fail_in_step_5(rank, error, failing):
    """Train until some ranks fail, and the others lose their connection to them."""
    reports.say = lambda text, stream: texts.append(text)
    texts = []

    @report_errors
    def main():
        for step in range(9):
            dist.all_reduce(torch.zeros(1))
            if step == 5 and rank in failing:
                raise error

    with pytest.raises(SystemExit) as caught:
        main()
    dist.destroy_process_group()
    raise Outcome(caught.value.code, "".join(texts))


@pytest.mark.parametrize("failing", [(1,), (0, 1)], ids=str)
def test_first_rank_to_fail_reports_alone(failing):
    ends = [end.args for end in run_ranks(fail_in_step_5, 2, ConfigError("what to do"), failing)]
    texts = [text for _, text in ends if text]
    assert len(texts) == 1 and "what to do" in texts[0]
    assert [code for code, _ in ends] == [2 if rank in failing else 1 for rank in range(2)]


def test_restarted_job_reports_again():
    """torchrun keeps its store."""

    def body(rank):
        first = reports._is_first_to_fail(), reports._is_first_to_fail()
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
        return *first, reports._is_first_to_fail()

    assert run_ranks(body, 1) == [(True, False, True)]


def test_rank_of_a_failed_job_obeys_its_launcher_at_once():
    """Although the run saves on SIGTERM: there is nothing to save."""

    def body():
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        reports.time.sleep = lambda seconds: os.kill(os.getpid(), signal.SIGTERM)
        fail(PeerError())

    assert in_fork(body) == -signal.SIGTERM


SCRIPT = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
import torch
from utils.distributed import all_reduce, init_distributed
from utils.reports import report_errors

@report_errors
def main():
    init_distributed("cpu", 60)
    for step in range(9):
        all_reduce(torch.zeros(1))
        if step == 5 and os.environ["RANK"] == "1":
            {error}

main()
"""


def launch(error, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.format(root=str(ROOT), error=error))
    run = finish_run(start_run(tmp_path / "script.py", 2, {}), tmp_path)  # no process is left
    assert run.code == 1
    return run


@pytest.mark.slow
def test_torchrun_ends_with_one_report(tmp_path):
    run = launch("1 / 0", tmp_path)
    cause = run.stderr.split("Root Cause")[1]
    assert "rank      : 1 " in cause and "ZeroDivisionError: division by zero" in cause
    assert "RuntimeError" not in run.stderr  # of rank 0, which has lost its connection


@pytest.mark.slow
def test_killed_rank_ends_the_job(tmp_path):
    run = launch("os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    assert "SIGKILL" in run.stderr
    assert run.seconds < 60
