"""What the tests of tools.verify share: they run its cases in forks, most of whose time would
otherwise pass with imports of torch."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

import tools.verify.__main__
from tests import fork_server
from tests.processes import CRASHES
from tools.lib.runs import flag_list, start_run
from tools.verify.cases import SUITES
from tools.verify.run import Verifier

PATIENCE = 10.0  # seconds until what is left of a run counts as left behind
CASES = {f"{suite.task}: {c.name}": (suite, c) for suite in SUITES.values() for c in suite.cases}


class ForkServer:
    """tests/fork_server.py. For `with`: at the end, no run goes on. environment: its variables."""

    def __init__(self, environment=None):
        self.environment = environment or os.environ

    def __enter__(self):
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        hidden = ("PYTHONPATH", "COVERAGE_PROCESS_CONFIG")  # coverage would take longer than runs
        self.process = subprocess.Popen(
            # -u: as torchrun's ranks; -P: sys.path begins without tests/.
            [sys.executable, "-u", "-P", fork_server.__file__, str(theirs.fileno())],
            env={name: self.environment[name] for name in self.environment if name not in hidden},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        return self

    def __exit__(self, *error):
        self.requests.close()
        self.process.wait(60)

    def start(self, script, nproc, flags, environment, cwd, cores, launcher):
        """Start a script, as tools.lib.runs.start_run() does, but with a launcher of its own."""
        outputs = [os.memfd_create(name) for name in ("stdout", "stderr")]
        answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = [str(script), *flag_list(flags)]
        request = {"argv": argv, "nproc": nproc, "cwd": str(cwd), "cores": cores}
        request["environment"] = environment
        files = [*outputs, theirs.fileno()]
        socket.send_fds(self.requests, [json.dumps(request).encode()], files)
        theirs.close()
        return ForkedRun(argv, answers, outputs)


class ForkedRun:
    """What tools.lib.runs needs of a Popen."""

    def __init__(self, args, answers, outputs):
        self.args, self.answers, self.outputs = args, answers, outputs
        self.returncode = None
        self.answers.settimeout(180)  # the server may have to import torch first
        self.pid = int(self.answers.recv(20))
        self.run_tag, self.started = f"fork {self.pid}", time.monotonic()

    def poll(self):
        """The exit code, or None while the launcher runs."""
        return self._wait(0)

    def communicate(self, timeout=None):
        """Wait until the launcher ends, and then its session. Returns what they have printed.
        Raises TimeoutExpired, or AssertionError if processes are left, which are killed."""
        if self._wait(timeout) is None:
            kill_session(self.pid)
            raise subprocess.TimeoutExpired(self.args, timeout)
        end = time.monotonic() + PATIENCE
        while (left := session(self.pid)) and time.monotonic() < end:
            time.sleep(0.02)
        kill_session(self.pid)
        assert not left, f"{self.args} left processes behind: {left}"
        texts = []
        for number in self.outputs:
            os.lseek(number, 0, os.SEEK_SET)
            with open(number) as file:
                texts.append(file.read())
        return texts

    def _wait(self, timeout):
        if self.returncode is None:
            self.answers.settimeout(timeout)
            with suppress(TimeoutError, BlockingIOError):
                code = self.answers.recv(20)
                self.returncode = int(code or -signal.SIGKILL)  # the launcher has been killed
        return self.returncode


def session(leader):
    """The processes of a session that have not ended."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z" and int(fields[3]) == leader:
                pids.append(int(folder.name))
    return pids


def kill_session(leader):
    """Kill the processes of a session, and those that they have started meanwhile."""
    while pids := session(leader):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


# The rows of CI; make test-all has the others. tests/test_same_curve.py and tests/test_resume.py
# train every script with images, without interruption and with one.
IN_CI = """
images: ddp x2
images: one_file ddp, resumed x3
text: fsdp_tp x4, 2 x 2
text: killed, resumed by pp x2
moe: ep killed, resumed by tp x2
diffusion: killed, resumed x3
"""
ROWS_OF_CI = set(IN_CI.strip().splitlines())
assert CASES.keys() >= ROWS_OF_CI


def parametrize(names, fast, rare):
    """A test per case or bug, whose name is its id. fast: those that are part of `make test`.
    rare: those that CI leaves out."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=marks_of(name, fast, rare), id=name) for name in names]
    )


def marks_of(name, fast, rare):
    if name in fast:
        return ()
    return (pytest.mark.slow, pytest.mark.rare) if name in rare else pytest.mark.slow


def selected(request, names):
    """Those of the cases or bugs whose tests are part of this pytest run."""
    tests = [test for test in request.session.items if test.path == request.path]
    chosen = {test.callspec.params.get("name") for test in tests if hasattr(test, "callspec")}
    return [name for name in names if name in chosen]


def rows_of(verifier, names):
    """{name: Row} of cases. One in which a rank crashed in C++ runs once more, for the reason that
    pyproject.toml gives: its rule repeats tests, but not what a fixture has returned."""
    cases = {name: CASES[name][1] for name in names}
    rows = dict(zip(cases, verifier.run([*cases.values()]), strict=True))
    crash = "|".join(CRASHES.values())
    crashed = [name for name in names if re.search(crash, rows[name].details)]
    if crashed:
        again = related(verifier, verifier.folder / "again", root=verifier.root)
        rows |= zip(crashed, again.run([cases[name] for name in crashed]), strict=True)
    return rows


def related(verifier, folder, **arguments):
    """A Verifier of the same task, with the same references, on the same cores."""
    shared = {"cores": verifier.cores, "references": verifier.references, "start": verifier.start}
    return Verifier(folder, verifier.suite, **(shared | arguments))


def run_verify(monkeypatch, *arguments, start=start_run):
    """The exit code of tools.verify with these arguments, in this process."""
    monkeypatch.setattr(sys, "argv", ["verify", *map(str, arguments)])
    monkeypatch.setattr(tools.verify.__main__, "Verifier", partial(Verifier, start=start))
    return tools.verify.__main__.main()
