"""How the tests start several processes: always with a time limit, and never leaving one behind."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import uuid
from pathlib import Path
from typing import NamedTuple

from utils.metrics import read_metrics

ROOT = Path(__file__).parent.parent
# One small run of a BatchNorm model; each test says what it changes.
SMALL = {
    "dataset": "synthetic",
    "synthetic_samples": 96,
    "image_size": 16,
    "model": "resnet18",
    "stem": "imagenet",
    "epochs": 2,
    "global_batch_size": 12,
    "lr": 0.01,
    "timeout": 60,
    "device": "cpu",
}


class Run(NamedTuple):
    code: int
    stdout: str
    stderr: str
    seconds: float
    rows: list  # of metrics.jsonl
    output_dir: Path


def command(script, nproc, flags):
    """torchrun --standalone for a number of processes, plain Python for nproc=None."""
    start = [sys.executable]
    if nproc:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            script = [*_words(script), f"--{flag}" if value else f"--no-{flag}"]
        else:
            script = [*_words(script), f"--{flag}={value}"]
    return [*start, *_words(script)]


def _words(script):
    return script if isinstance(script, list) else [str(script)]


def start_script(script, nproc=None, environment=None, **flags):
    """Popen of a script with SMALL's settings and `flags`; its whole family carries run_tag()."""
    env = {**os.environ, "RUN_TAG": uuid.uuid4().hex}
    # One thread a rank: many threads on a busy machine wait for each other for minutes.
    cores = sorted(os.sched_getaffinity(0))[: nproc or 1]
    process = subprocess.Popen(
        command(script, nproc, {**SMALL, **flags}),
        cwd=ROOT,
        env=env | (environment or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    process.run_tag = env["RUN_TAG"]
    return process


def run_script(script, nproc=None, limit=180, environment=None, **flags):
    """Run a script to its end -> Run. Fails where it hangs or leaves a process behind."""
    start = time.monotonic()
    process = start_script(script, nproc, environment, **flags)
    try:
        stdout, stderr = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        kill_family(process.run_tag)
        stdout, stderr = process.communicate()
        raise AssertionError(f"{script} did not end in {limit} s:\n{stdout}\n{stderr}") from None
    seconds = time.monotonic() - start
    left = wait_for_family(process.run_tag)
    assert not left, f"{script} left processes behind: {left}"
    output_dir = Path(flags.get("output_dir", "/nowhere"))
    metrics = output_dir / "metrics.jsonl"
    rows = read_metrics(metrics) if metrics.exists() else []
    return Run(process.returncode, stdout, stderr, seconds, rows, output_dir)


def family(tag):
    """Process ids that carry RUN_TAG=tag in their environment."""
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


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def run_ranks(function, world_size, *args, local_world_size=None, timeout=20, limit=60):
    """function(rank, *args) in `world_size` forked processes that form a gloo group.

    Returns what each rank returned, in order; an exception comes back as an Exception object.
    local_world_size: ranks a node, to play several nodes (default: all on one).
    """
    context = multiprocessing.get_context("fork")
    results, port = context.Queue(), free_port()
    nodes = local_world_size or world_size
    ranks = [
        context.Process(
            target=_rank, args=(results, port, rank, world_size, nodes, timeout, function, args)
        )
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    try:
        found = dict(results.get(timeout=limit) for _ in ranks)
    finally:
        for rank in ranks:
            rank.join(5)
            rank.kill()
    return [found[rank] for rank in range(world_size)]


def _rank(results, port, rank, world_size, local_world_size, timeout, function, args):
    import torch.distributed as dist

    from utils.distributed import init_distributed

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one thread a rank
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % local_world_size),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        init_distributed("cpu", timeout)
        result = function(rank, *args)
        dist.barrier()
    except Exception as error:
        traceback.print_exc()
        result = error
    results.put((rank, result))
    if dist.is_initialized():
        dist.destroy_process_group()
