"""Running the scripts as a user would, always with a time limit, and never leaving one behind."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import NamedTuple

from utils.metrics import read_metrics

ROOT = Path(__file__).parent.parent


class Run(NamedTuple):
    code: int
    stdout: str
    stderr: str
    seconds: float
    rows: list  # of metrics.jsonl
    output_dir: Path


def command(script, nproc, flags):
    """torchrun --standalone for a number of processes, plain Python for nproc=None.

    script: its path, or a list: -m, a module, the module's arguments.
    """
    start = [sys.executable]
    if nproc:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    start += map(str, script if isinstance(script, list) else [script])
    return start + flag_list(flags)


def flag_list(flags):
    """{name: value} -> the flags of a script."""
    flags = {name.replace("_", "-"): value for name, value in flags.items()}
    return [
        f"--{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f"--{flag}={value}"
        for flag, value in flags.items()
    ]


def start_run(script, nproc, flags, environment=None, cwd=ROOT, cores=None):
    """Popen of a script; its whole family carries the attribute run_tag in its environment, after
    the tag of the run that this process itself belongs to.

    cores: the numbers of the CPU cores that it may use; default: one a rank. (Many threads on a
    busy machine wait for each other for minutes.)
    """
    env = {**os.environ, "RUN_TAG": os.environ.get("RUN_TAG", "") + uuid.uuid4().hex}
    env.setdefault("OMP_NUM_THREADS", "1")  # or torchrun warns
    cores = cores or sorted(os.sched_getaffinity(0))[: nproc or 1]
    process = subprocess.Popen(
        command(script, nproc, flags),
        cwd=cwd,
        env=env | (environment or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    process.run_tag, process.started = env["RUN_TAG"], time.monotonic()
    return process


def finish_run(process, output_dir, limit=180):
    """Wait for the end -> Run. AssertionError where it hangs or leaves a process behind."""
    try:
        stdout, stderr = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        kill_family(process.run_tag)
        stdout, stderr = process.communicate()
        said = f"{stdout}\n{stderr}"
        raise AssertionError(f"{process.args} did not end in {limit} s:\n{said}") from None
    except KeyboardInterrupt:
        kill_family(process.run_tag)
        raise
    seconds = time.monotonic() - process.started
    left = wait_for_family(process.run_tag)
    assert not left, f"{process.args} left processes behind: {left}"
    metrics = Path(output_dir) / "metrics.jsonl"
    rows = read_metrics(metrics) if metrics.exists() else []
    return Run(process.returncode, stdout, stderr, seconds, rows, Path(output_dir))


def kill_after_first_save(process, output_dir, limit=120):
    """kill -9 of what launched the run, as soon as there is a checkpoint. AssertionError where
    there never is one, or ranks outlive the launcher."""
    end = time.monotonic() + limit
    while not (Path(output_dir) / "last.pt").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, f"{process.args} saved nothing in {limit} s"
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert wait_for_family(process.run_tag) == [], "a killed launcher left ranks behind"


def family(tag):
    """Process ids whose RUN_TAG in the environment begins with `tag`: a run, and runs of it."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"RUN_TAG={tag}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it ended meanwhile
            continue
    return found


def wait_for_family(tag, limit=10):
    """What is left of a family after at most `limit` seconds; that is killed."""
    end = time.monotonic() + limit
    while (left := family(tag)) and time.monotonic() < end:
        time.sleep(0.1)
    kill_family(tag)
    return left


def kill_family(tag):
    for pid in family(tag):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
