"""Starts a script with faults planted in its ranks, and waits until no process is left."""

import json
import multiprocessing
import os
import re
import signal
import sys
import time
from contextlib import suppress
from typing import NamedTuple

import torch.multiprocessing as mp

from lab.chaos.plant import plant, session
from tools.lessons import ROOT
from tools.runs import family, flag_list, start_run
from utils.distributed import die_with_parent
from utils.rungs.spawn import host_store, set_environment, wait_for_ranks

FORK = multiprocessing.get_context("fork")
# What torch's launchers and Python's resource tracker log, before or after the error.
NOISE = re.compile(
    r"^[WE][0-9]{4} .*torch/(distributed|multiprocessing)/.*\n"
    r"|^.*resource_tracker.py:[0-9]+: UserWarning.*\n  warnings.warn.*\n",
    re.MULTILINE,
)

# A sitecustomize.py: plants the faults in every process that imports the Checkpointer.
HOOK = """
import importlib.util, json, os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "utils.checkpoint":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            from lab.chaos.plant import plant
            plant(**json.loads(os.environ["CHAOS"]), tag=os.environ["RUN_TAG"])
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


class Ended(NamedTuple):
    """How a run ended."""

    code: int | None  # None: it did not end within the limit
    stderr: str
    fired: dict  # {number of a fault: its line in the log}
    gone_at: float  # when no process was left
    left: list  # processes that had to be killed


def forked_run(module, nproc, flags, faults, folder, limit, patience):
    """Run a script in forks of this process, with the launcher of utils/rungs/spawn.py.

    faults: dicts, for plant(). folder: for logs. limit: seconds after which it counts as hanging.
    patience: seconds after which a process that has outlived its launcher counts as an orphan.
    Returns an Ended.
    """
    log = _new_log(folder)
    process = FORK.Process(target=_launch, args=(module, nproc, flags, faults, log, folder))
    process.start()
    return _wait(
        lambda: process.exitcode, lambda: session(process.pid), folder, limit, patience, log
    )


def real_run(script, nproc, flags, faults, folder, limit, patience):
    """The same, started as a user would: with tools.launch, or with Python if nproc is None."""
    log, hook = _new_log(folder), folder / "hook"
    hook.mkdir(exist_ok=True)
    (hook / "sitecustomize.py").write_text(HOOK)
    environment = {
        "PYTHONPATH": os.pathsep.join(map(str, (hook, ROOT))),
        "CHAOS": json.dumps({"faults": faults, "log": str(log)}),
    }
    with open(folder / "stdout", "w") as stdout, open(folder / "stderr", "w") as stderr:
        process = start_run(
            script, nproc, flags, environment, launcher="tools.launch", streams=(stdout, stderr)
        )
    return _wait(process.poll, lambda: family(process.run_tag), folder, limit, patience, log)


def _new_log(folder):
    log = folder / "faults.jsonl"
    log.write_text("")
    return log


def _wait(exit_code, members, folder, limit, patience, log):
    end = time.monotonic() + limit
    try:
        while (code := exit_code()) is None and time.monotonic() < end:
            time.sleep(0.02)
        end = time.monotonic() + (0 if code is None else patience)
        while (left := members()) and time.monotonic() < end:
            time.sleep(0.02)
        gone_at = time.monotonic()
    finally:
        for pid in members():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    fired = {line["number"]: line for line in map(json.loads, log.read_text().splitlines())}
    text = (folder / "stderr").read_text(errors="replace")
    return Ended(code, NOISE.sub("", text), fired, gone_at, left)


def _launch(module, nproc, flags, faults, log, folder):
    os.setsid()
    die_with_parent()
    for number, name in ((1, "stdout"), (2, "stderr")):
        flag = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND
        os.dup2(os.open(folder / name, flag), number)
        setattr(sys, name, os.fdopen(number, "w", buffering=1, closefd=False))
    sys.argv = [f"{module.__name__}.py", *flag_list(flags)]
    if nproc is None:
        plant(faults, log)
        module.main()
        return
    # A fork may inherit a lock of the store's thread, which is busy once the first rank connects.
    store, all_started = host_store(), FORK.Event()
    arguments = module, nproc, store.port, faults, log, all_started
    ranks = mp.start_processes(_rank, arguments, nproc, join=False, start_method="fork")
    all_started.set()
    wait_for_ranks(ranks)


def _rank(local_rank, module, nproc, port, faults, log, all_started):
    set_environment(local_rank, nproc, port)
    plant(faults, log)
    all_started.wait()
    module.main()
    module.dist.destroy_process_group()
