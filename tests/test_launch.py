"""tools.launch: torchrun, but the last line on the terminal is the error."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from tools.launch import root_cause
from tools.lessons import ROOT

SCRIPT = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from utils.errors import UserError, report_errors
rank = os.environ["RANK"]

@report_errors
def main():
    print("rank", rank, "of", os.environ["WORLD_SIZE"], *sys.argv[1:], flush=True)
    if sys.argv[1] == "sleep":
        time.sleep(60)
    if rank == "1":
        time.sleep(30)
    if sys.argv[1] == "user":
        raise UserError("the folder data/ is empty: pass --data-dir")
    if sys.argv[1] == "bug":
        raise ValueError("not a number")
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "exit":
        sys.exit(7)

main()
"""


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launch")
    (folder / "script.py").write_text(SCRIPT.format(root=str(ROOT)))

    def start(*arguments, nproc=2):
        command = [sys.executable, "-m", "tools.launch", "--standalone"]
        command += [f"--nproc_per_node={nproc}", str(folder / "script.py"), *arguments]
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.mark.parametrize(
    ("mode", "last"),
    [
        ("user", "error (rank 0): the folder data/ is empty: pass --data-dir"),
        ("bug", "ValueError: not a number"),
        ("kill", "error (rank 0): Signal 9 (SIGKILL) received by PID"),
        ("exit", "error (rank 0): exit code 7; see the output above"),
    ],
)
def test_last_line_is_the_error(mode, last, launch):
    process = launch(mode)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert error.strip().splitlines()[-1].startswith(last), error
    assert error.count("Traceback") == (mode == "bug")  # the script's own, none of torchrun's


def test_arguments_are_torchruns(launch):
    process = launch("--steps", "3", nproc=1)
    output, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    assert output == "rank 0 of 1 --steps 3\n"


def test_ctrl_c_prints_no_traceback(launch):
    process = launch("sleep", nproc=1)
    assert process.stdout.readline().startswith("rank 0")
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in error


def test_root_cause_is_the_first_failure():
    message = {"message": "error (rank 1): disk full\n", "extraInfo": json.dumps({})}
    failure = SimpleNamespace(message=message, exitcode=1)
    error = SimpleNamespace(get_first_failure=lambda: (1, failure))
    assert root_cause(error) == "error (rank 1): disk full"
