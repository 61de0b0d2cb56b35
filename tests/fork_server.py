"""Runs scripts in forks of this process, which has imported torch, and nothing of the project:
the forks import that themselves, so that they also run copies of it, with a bug for example.

tests/verifying.py starts it, because to import torch and torchvision takes a process 4 s of CPU
time, and to train in most small runs less than one. Unlike real processes, the forks share the seed
of hash(), and so the order of a set of strings.
"""

import ctypes
import gc
import json
import os
import runpy
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import numpy
import torch.distributed

# What the scripts, or the optimizers that they create, import of torch.
MODULES = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining")
MODULES += ("torch.distributed.checkpoint.state_dict", "torch.distributed.tensor.parallel")
MODULES += ("torchvision.transforms.v2",)


def serve(requests):
    """Fork for each request. Returns in the fork: the request, and the file descriptors for its
    stdout, its stderr and the answers: the launcher's id, and at the end its exit code."""
    while True:
        request, files, _, _ = socket.recv_fds(requests, 2**17, 3)
        with suppress(ChildProcessError):  # there is none
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not request:  # the other end has been closed
            sys.exit()
        if os.fork() == 0:
            requests.close()
            return json.loads(request), files
        for file in files:
            os.close(file)


def launch(request, stdout, stderr, answers):
    """Fork the ranks, and return in each. This process, the launcher, waits for them, and ends with
    the exit code of the first to fail; it then ends the others."""
    die_with_parent()
    os.setsid()
    os.chdir(request["cwd"])
    os.sched_setaffinity(0, request["cores"])
    os.environ |= request["environment"]
    for number, file in ((1, stdout), (2, stderr)):
        os.dup2(file, number)
        os.close(file)
    reader, writer = os.pipe()
    ranks = {}
    for rank in range(request["nproc"] or 1):
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            os.setpgrp()  # as torchrun's ranks are
            os.close(answers)
            os.close(writer)
            port = int(os.read(reader, 5))
            os.close(reader)
            if request["nproc"]:
                set_environment(rank, request["nproc"], port)
            return
        ranks[pid] = rank
    # Only now, because it starts a thread.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(answers, str(os.getpid()).encode())
    os.write(writer, f"{store.port:5}".encode() * len(ranks))
    code = wait_for(ranks)
    os.write(answers, str(code).encode())
    os._exit(code)


def wait_for(ranks):
    """The exit code of the first of the ranks, {pid: rank}, to fail, or 0."""

    def kill(number, frame):
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill)
    failed = 0
    while ranks:
        pid, status = os.wait()
        rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
        if code == 0 or failed:
            continue
        failed = max(1, code)
        if code < 0:
            print(f"error (rank {rank}): {signal.Signals(-code).name}", file=sys.stderr)
        for other in ranks:
            os.kill(other, signal.SIGTERM)
        signal.alarm(30)
    return failed


def die_with_parent():
    """As utils/distributed.py does; nothing of the project may be imported here."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG


def set_environment(rank, world_size, port):
    """As utils/rungs/spawn.py does."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def run_script(script, *flags):
    """Run a script as Python does, with the PYTHONPATH of the environment."""
    sys.argv = [script, *flags]
    folders = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [str(Path(script).resolve().parent), *folders]
    sys.modules.pop("sitecustomize", None)
    with suppress(ModuleNotFoundError):
        __import__("sitecustomize")
    numpy.random.seed()  # or it would draw the same in each fork
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    for module in MODULES:
        __import__(module)
    gc.freeze()
    request, files = serve(socket.socket(fileno=int(sys.argv[1])))
    launch(request, *files)
    run_script(*request["argv"])
