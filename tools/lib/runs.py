"""Running the scripts as a user would, always with a time limit and without orphaned processes."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from tools.lib.ladder import ROOT


class Run(NamedTuple):
    """A run that has ended."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    rows: list  # of metrics.jsonl
    output_dir: Path


class TooSlow(AssertionError):
    """A run did not end within its time limit."""


def end_runs_on_sigterm():
    """Let SIGTERM raise an exception, as Ctrl-C does, so that a run that goes on is ended, too."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # A fork that waits in C++ would not call the handler.
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def command(script, nproc, flags, launcher="torch.distributed.run"):
    """The command that runs a script: torchrun for a number of processes, Python for nproc=None.

    script: its path, or a list: -m, a module, the module's arguments.
    """
    parts = [sys.executable]
    if nproc:
        parts += ["-m", launcher, "--standalone", f"--nproc_per_node={nproc}"]
    parts += map(str, script if isinstance(script, list) else [script])
    return parts + flag_list(flags)


def flag_list(flags):
    """{name: value} -> the flags of a script."""
    texts = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if value is True:
            texts.append(f"--{flag}")
        elif value is False:
            texts.append(f"--no-{flag}")
        else:
            texts.append(f"--{flag}={value}")
    return texts


def load_script(script):
    """Import a script as a module, whose main() forks of this process can call."""
    spec = importlib.util.spec_from_file_location(Path(script).stem, ROOT / script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # imports many modules, here and not in each fork
    return module


def start_run(
    script,
    nproc,
    flags,
    environment=None,
    cwd=ROOT,
    cores=None,
    launcher="torch.distributed.run",
    streams=(subprocess.PIPE, subprocess.PIPE),
):
    """Start a script. Returns its Popen, with the attributes `run_tag` and `started`.

    All its processes have RUN_TAG in their environment: the tag of the run that this process
    belongs to, if any, followed by run_tag.

    cores: the CPU cores that it may use (default: one per process). Many threads on a busy machine
    wait for each other for minutes. streams: where stdout and stderr go.
    """
    env = {**os.environ, "RUN_TAG": os.environ.get("RUN_TAG", "") + uuid.uuid4().hex}
    env.setdefault("OMP_NUM_THREADS", "1")  # otherwise, torchrun warns
    cores = cores or sorted(os.sched_getaffinity(0))[: nproc or 1]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))

    def prepare():
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.sched_setaffinity(0, cores)

    try:
        try:
            process = subprocess.Popen(
                command(script, nproc, flags, launcher),
                cwd=cwd,
                env=env | (environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=streams[0],
                stderr=streams[1],
                text=True,
                start_new_session=True,
                preexec_fn=prepare,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    except BaseException:  # such as KeyboardInterrupt, which waited for the process to start
        kill_family(env["RUN_TAG"])
        raise
    process.run_tag, process.started = env["RUN_TAG"], time.monotonic()
    return process


def finish_run(process, output_dir, limit=180):
    """Wait until a run ends. Returns its Run.

    Raises AssertionError if it leaves processes behind, TooSlow if it takes more than `limit`
    seconds.
    """
    try:
        stdout, stderr = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        kill_family(process.run_tag)
        stdout, stderr = process.communicate()
        output = f"{stdout}\n{stderr}"
        raise TooSlow(f"{process.args} did not end in {limit} s:\n{output}") from None
    except BaseException:  # such as KeyboardInterrupt
        kill_family(process.run_tag)
        raise
    seconds = time.monotonic() - process.started
    left = wait_for_family(process.run_tag)
    assert not left, f"{process.args} left processes behind: {left}"
    rows = read_rows(Path(output_dir))
    return Run(process.returncode, stdout, stderr, seconds, rows, Path(output_dir))


def read_rows(folder):
    """The rows of a run's metrics.jsonl; [] if it has not written any."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kill_within_second_epoch(process, output_dir, limit=120):
    """Kill the launcher of a run with SIGKILL after its first save within the second epoch.

    Raises AssertionError if there is none in time, or if processes outlive the launcher.
    """
    end = time.monotonic() + limit
    first, last = Path(output_dir) / "epoch-0001.pt", Path(output_dir) / "last.pt"
    while not _is_newer(last, first):
        if process.poll() is not None:
            raise AssertionError(
                f"the run ended before {last} was saved within the second epoch: "
                f"{last_line(process.communicate()[1])}"
            )
        assert time.monotonic() < end, f"{process.args} saved nothing in {limit} s"
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert wait_for_family(process.run_tag) == [], "processes outlived the launcher"


def _is_newer(one, other):
    """Whether a file has been written after another one. Neither may be there yet."""
    try:
        return one.stat().st_mtime_ns > other.stat().st_mtime_ns
    except FileNotFoundError:
        return False


def family(tag):
    """The ids of the processes whose RUN_TAG starts with `tag`: a run's, and its runs'."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"RUN_TAG={tag}".encode() in (folder / "environ").read_bytes():
                pids.append(int(folder.name))
        except OSError:  # the process has ended
            continue
    return pids


def wait_for_family(tag, limit=10):
    """Wait up to `limit` seconds until a family has ended; kill and return what is left of it."""
    end = time.monotonic() + limit
    while (left := family(tag)) and time.monotonic() < end:
        time.sleep(0.1)
    kill_family(tag)
    return left


def kill_family(tag):
    """Kill the processes of a family, and those that they have started meanwhile."""
    for _ in range(100):  # a process may need a moment to end
        pids = family(tag)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            return
        time.sleep(0.01)


LENGTH = 160  # of an error in a table


def last_line(text):
    """The last line of some output: if a run failed, its error. Without the sentences that do not
    fit into a table."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = (lines or ["no output"])[-1].replace("|", "/")
    if len(line) <= LENGTH:
        return line
    sentences = line[: LENGTH + 1].rpartition(". ")[0]
    return f"{sentences}." if sentences else line[:LENGTH]
