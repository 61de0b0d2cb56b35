"""Messages cannot fail themselves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT
from utils import errors
from utils.errors import UserError, required_by


def test_missing_option_names_the_file_to_copy():
    missing = ("utils.options.sharded", "utils/options/sharded.py"), ("tasks.text", "tasks/text.py")
    for module, file in missing:
        with pytest.raises(UserError) as caught, required_by("--save-sharded"):
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
        assert f"--save-sharded needs {file}, which is missing" in str(caught.value)
        assert f"--with {Path(file).stem}" in str(caught.value)
    with pytest.raises(ModuleNotFoundError), required_by("--save-sharded"):
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")


UNHEARD = """
import multiprocessing, os
from utils.errors import SilentExit, say, warn
from utils.reports import report_errors

class Stopped(SilentExit):
    exit_code = 75

@report_errors
def main():
    for number in range(3):
        say(f"epoch {number}")
        warn("the run continues")
    print("a line of the task")
    raise Stopped

"""
IN_A_CHILD = """
child = multiprocessing.get_context("fork").Process(target=main)
child.start()
child.join()
os._exit(child.exitcode)
"""


AFTER_A_LINE = "print('a line before main()')\nmain()"


@pytest.mark.parametrize(
    "call", ["main()", AFTER_A_LINE, IN_A_CHILD], ids=["script", "after a line", "child process"]
)
def test_output_that_cannot_be_written_ends_no_run(call, monkeypatch):
    """To a full disk here, as to a pipe or a terminal that is gone: the exit code is the run's."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", UNHEARD + call]
        run = subprocess.run(command, cwd=ROOT, stdout=full, stderr=full, timeout=60)
    assert run.returncode == 75


def test_output_continues_once_it_can_be_written_again(tmp_path):
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        errors.say("lost")
        errors.drop_unwritten()
        os.dup2(os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT), 1)
        errors.say("found")
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert (tmp_path / "log").read_text() == "found\n"
