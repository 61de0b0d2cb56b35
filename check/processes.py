"""Processes for the script, without the seconds in which each of them would import PyTorch.

Two processes import it, and are forked for each run. There are two because the ranks of a run, and
a run and its restart, must not share the random seed of Python's hashes: in a real job, the order
of a set of strings is a different one in each process.
"""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

INSIDE = Path(__file__).parent / "inside"
MARK = "TOOLS_CHECK_MARK"  # a variable in the environment of whatever is started here
NO_TORCH = f"{sys.executable} cannot import torch: start the check with the Python of the script"


@contextlib.contextmanager
def exits_on_signals():
    """A context in which SIGTERM, and SIGHUP of a terminal that is closed, raise SystemExit, so
    that no process and no folder is left behind. What is ignored, as by nohup, stays ignored."""
    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class CannotRun(Exception):
    """The script did not run by itself; the message holds its own traceback."""


class Process:
    """A process that runs the script. It has the methods of subprocess.Popen."""

    def __init__(self, prepared, pid):
        self.pid = pid
        self.code = None
        self._prepared = prepared

    def poll(self):
        """The exit code, or None while the process runs."""
        if self.code is None:
            self.code = _ask(self._prepared, self.pid)
        return self.code


def signal_marked(pid, number, mark=MARK):
    """Send a signal to a process, if its environment holds `mark`: its id may be known from a
    process that has ended since."""
    with contextlib.suppress(OSError):  # it has ended, or is of another user
        if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
            os.kill(pid, number)


class Processes:
    """Starts processes, and ends them with everything that they have started.

    environment: variables that the processes have from their start, such as PYTHONHASHSEED.
    """

    def __init__(self, environment=None):
        if importlib.util.find_spec("torch") is None:
            raise CannotRun(NO_TORCH)
        self._mark = uuid.uuid4().hex
        self._temporary = tempfile.TemporaryDirectory(prefix="check-", ignore_cleanup_errors=True)
        self.temporary = os.path.realpath(self._temporary.name)  # of the script
        environment = with_observers(os.environ | (environment or {}))
        environment["TMPDIR"] = self.temporary
        self._prepared = [
            subprocess.Popen(
                [sys.executable, INSIDE / "prepared.py"],
                env=environment | {MARK: self._mark},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C is for the check
            )
            for _ in range(2)
        ]

    def start(self, number, command, folder, environment, log, writable=None, moved=None):
        """Run a command, without its interpreter, in a fork of prepared process number % 2. Its
        output goes to the file log. writable: the only folders in which it may write. moved: a
        folder and its copy, from which modules are imported in its place."""
        prepared = self._prepared[number % 2]
        log.touch()
        request = {
            "command": [str(word) for word in command],
            "folder": str(folder),
            "environment": environment | {MARK: self._mark, "TMPDIR": self.temporary},
            "log": str(log),
            "writable": writable,
            "moved": moved,
        }
        return Process(prepared, _ask(prepared, request))

    def host_store(self):
        """Start a process that hosts a store, which ends with the processes that use it. Returns
        it, and its port."""
        answer = _ask(self._prepared[0], "store")
        if answer is None:
            raise CannotRun("no store for the ranks: see the error above")
        pid, port = answer
        return Process(self._prepared[0], pid), port

    def end(self, processes):
        """End these processes, and everything that any process of this object has started."""
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        prepared = {prepared.pid for prepared in self._prepared}
        for folder in Path("/proc").glob("[0-9]*"):
            if int(folder.name) not in prepared:
                signal_marked(int(folder.name), signal.SIGKILL, self._mark)
        while any(process.poll() is None for process in processes):
            time.sleep(0.01)

    def close(self):
        """End the prepared processes."""
        for prepared in self._prepared:
            prepared.kill()
            prepared.communicate()
        self._temporary.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


def with_observers(environment):
    """An environment in which Python imports inside/sitecustomize.py."""
    paths = [str(INSIDE), environment.get("PYTHONPATH")]
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _ask(prepared, request):
    answer = ""
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(request), file=prepared.stdin, flush=True)
        answer = prepared.stdout.readline()
    if not answer:
        raise CannotRun(NO_TORCH)
    return json.loads(answer)
