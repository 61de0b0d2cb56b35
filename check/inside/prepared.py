"""A process that has imported PyTorch, whose forks run the script. See check/processes.py.

A request is a line of JSON, and so is its answer: what to run, answered by the id of the process;
the id of a process, answered by its exit code, or by null while it runs; or "store", answered by
the id of a process that hosts a store, and its port, or by null if it has failed.
"""

import gc
import json
import os
import runpy
import socket
import sys
import time
import types
import warnings


def prepare():
    """Import what takes most of the time until a script makes its first step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        import torch.distributed

        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # an optimizer imports more
    gc.freeze()  # forks then neither collect what is there, nor list it: check_inside/training.py


def serve():
    """Answer requests until there are no more. Returns in each fork, with its request."""
    for line in sys.stdin:
        request = json.loads(line)
        if isinstance(request, int):
            answer = exit_code(request)
        else:
            answer = os.fork()
            if not answer:
                return request
            if request == "store":
                continue  # the fork answers
        print(json.dumps(answer), flush=True)
    return None


def host_store():
    """Host a store as torchrun's agent has it, which outlives each rank."""
    os.setsid()
    answer, parent = None, os.getppid()
    try:
        # PyTorch's own would be on all interfaces.
        listener = socket.create_server(("127.0.0.1", 0))
        port, options = listener.getsockname()[1], {"is_master": True, "wait_for_workers": False}
        kind = sys.modules["torch"].distributed.TCPStore
        store = kind("127.0.0.1", port, master_listen_fd=listener.detach(), **options)
        answer = os.getpid(), store.port
    finally:
        print(json.dumps(answer), flush=True)
    while os.getppid() == parent:  # until the check ends, or ends this process
        time.sleep(0.5)


def exit_code(pid):
    """The exit code of a fork as subprocess has it, or None while it runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def become(request):
    """Give a fork what a new process has: a session, an environment, open files, a seed."""
    from check_inside import landlock

    os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND)
    for number, file in enumerate((null, log, log)):
        os.dup2(file, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    if request["writable"] is not None:
        landlock.restrict(request["writable"])
    if request["moved"]:  # what PYTHONPATH meant when this process was started
        source, copy = request["moved"]
        own = os.path.dirname(os.path.abspath(__file__))
        for i, path in enumerate(sys.path):
            if path != own and (path + os.sep).startswith(source + os.sep):
                sys.path[i] = copy + path[len(source) :]
    if "numpy" in sys.modules:  # the module random does so by itself
        sys.modules["numpy"].random.seed()
    sys.modules["torch"].default_generator.seed()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].ORIGINAL_DIR = os.getcwd()


def run(command):
    """Run a script, or a module after -m, as `__main__`, with the observers of a check."""
    import check_inside

    sys.orig_argv[1:] = command
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    check_inside.start()
    from check_inside import failures

    with failures.recorded():
        if command[0] == "-m":
            sys.argv, sys.path[0] = command[1:], os.getcwd()
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            path = os.path.abspath(command[0])
            sys.argv, sys.path[0] = command, os.path.dirname(os.path.realpath(path))
            main.__file__ = path
            with open(path, "rb") as file:
                code = compile(file.read(), path, "exec")
            exec(code, main.__dict__)


if __name__ == "__main__":
    prepare()
    work = serve()
    if work == "store":
        host_store()
    elif work is not None:
        become(work)
        run(work["command"])
