"""Copies of the scripts, as tools.copy makes them, and runs of these."""

import os
import subprocess
import sys

from tests.processes import free_port
from tools.lib.ladder import ONE_PROCESS, ROOT


def copy(*arguments, project=ROOT):
    """Run tools.copy of this tree, or of a clone, as a user does. Returns the CompletedProcess."""
    command = [sys.executable, "-m", "tools.copy", *map(str, arguments)]
    return subprocess.run(command, cwd=project, capture_output=True, text=True)


def copied(*arguments, project=ROOT):
    """The same, which must succeed. Returns what is printed."""
    done = copy(*arguments, project=project)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def refused(*arguments, project=ROOT, code=1):
    """The same, which must fail in one line, with this exit code. Returns the line."""
    done = copy(*arguments, project=project)
    assert done.returncode == code, done.stdout + done.stderr
    assert code != 1 or done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def write(files, folder):
    """Write {path: bytes}."""
    for path, contents in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(contents)


def contents_of(folder):
    """{path: bytes} of all files in a folder, but for compiled ones."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {path: path.read_bytes() for path in paths}


def run_alone(folder, script, flags):
    """Run a script as the only process of a job. Returns the CompletedProcess."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if script not in (*ONE_PROCESS, "train_ddp_spawn.py"):
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, script, *flags]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
