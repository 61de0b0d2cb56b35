"""Starts processes in tests: always with a time limit, and without leaving any behind."""

import http.server
import itertools
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import threading
import time
import traceback
from contextlib import contextmanager, suppress

from torch import set_num_threads  # as it is before a fixture replaces it

from tools.lib.runs import ROOT, finish_run, start_run

# {exit code: signal} of a process that crashed in C++; pyproject.toml says why its test is rerun.
CRASHES = {-number: number.name for number in (signal.SIGSEGV, signal.SIGABRT)}

# A small run of a BatchNorm model; tests pass what they change.
SMALL = {
    "dataset": "synthetic",
    "synthetic_samples": 96,
    "image_size": 16,
    "model": "resnet20",
    "epochs": 2,
    "global_batch_size": 12,
    "lr": 0.01,
    "device": "cpu",
}


def start_script(script, nproc=None, environment=None, **flags):
    """Popen of a script with SMALL's settings and `flags`."""
    return start_run(script, nproc, SMALL | flags, environment)


def run_script(script, nproc=None, limit=600, environment=None, **flags):
    """Run a script to its end. Returns its Run. Fails if it hangs or leaves a process behind."""
    process = start_script(script, nproc, environment, **flags)
    return finish_run(process, flags.get("output_dir", "/nowhere"), limit)


def planted(tmp_path, script, line, instead):
    """A copy of a script with a bug in it."""
    text = (ROOT / script).read_text()
    assert text.count(line) == 1
    copy = tmp_path / script
    copy.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n" + text.replace(line, instead)
    )
    return copy


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


# Below the system's ephemeral ports, and different for each of pytest's processes, also those of
# other checkouts: no other process takes one before the ranks do.
_ports = itertools.count(20000 + os.getpid() % 120 * 100)


def free_port():
    for port in _ports:
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


@contextmanager
def web_server(folder, requests):
    """Serve the files of `folder` at http://127.0.0.1:PORT; yields that URL. Logs GET requests."""
    requests.touch()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(folder))

        def do_GET(self):
            if self.headers["Method"] != "HEAD":  # torchvision looks for redirects like that
                with open(requests, "a") as file:
                    file.write(self.path + "\n")
            super().do_GET()

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def run_ranks(function, world_size, *args, local_world_size=None, timeout=60, limit=600):
    """Run function(rank, *args) in `world_size` forked processes that form a gloo group.

    Returns what each rank returned, in order; an exception comes back as an Exception object.
    local_world_size: ranks per node, to simulate several nodes (default: all on one).
    """
    context = multiprocessing.get_context("fork")
    results, done, port = context.Queue(), context.Semaphore(0), free_port()
    started = context.Barrier(world_size)  # a test's timeout does not cover how long a fork takes
    nodes = local_world_size or world_size
    ranks = [
        context.Process(
            target=_rank,
            args=(results, started, done, port, rank, world_size, nodes, timeout, function, args),
        )
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    returned, end = {}, time.monotonic() + limit
    try:
        while len(returned) < world_size:
            try:
                returned.update([results.get(timeout=1)])
            except queue.Empty:
                if any(rank.exitcode for rank in ranks) or time.monotonic() > end:
                    codes = [CRASHES.get(rank.exitcode, rank.exitcode) for rank in ranks]
                    text = f"no result from a rank; the exit codes: {codes}"
                    raise AssertionError(text) from None
    finally:
        for _ in ranks:
            done.release()  # an Event would wait for ranks that have been killed
        for rank in ranks:
            rank.join(5)
            rank.kill()
    return [pickle.loads(returned[rank]) for rank in range(world_size)]


def run_isolated(function):
    """Run function() in a fork of this process. For torch.compile and torch.export, which start
    autograd threads: a process with such threads can no longer be forked to run backward()."""
    (result,) = run_ranks(lambda rank: function(), 1)
    if isinstance(result, Exception):
        raise result
    return result


def _rank(
    results, started, done, port, rank, world_size, local_world_size, timeout, function, args
):
    import torch.distributed as dist

    from utils.distributed import init_distributed

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one thread per rank
    set_num_threads(1)  # or two threads may create PyTorch's pool at once, and abort
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % local_world_size),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    started.wait(60)
    try:
        init_distributed("cpu", timeout)
        result = function(rank, *args)
        dist.barrier()
    except Exception as error:
        traceback.print_exc()
        result = error
    results.put((rank, pickle.dumps(result)))  # or a tensor would have to outlive its process
    done.acquire(timeout=60)  # rank 0 holds the store, to which another one may be about to connect
    if dist.is_initialized():
        dist.destroy_process_group()
