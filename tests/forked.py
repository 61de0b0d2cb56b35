"""Runs scripts in forks of this process, which has already imported torch: about a second each.

These forks have this process's modules of the project, into which `before` may plant a bug.
tests/fork_server.py runs copies of the scripts, with modules of their own.
"""

import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import time
import warnings
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path

import torch
from torch import set_num_threads  # as it is before a fixture replaces it

import utils.guards.progress
import utils.reports
from tests.processes import CRASHES, SMALL, wait_until
from tools.lib.runs import Run, flag_list, load_script, read_rows
from utils.checkpoint import Checkpointer, read_checkpoint
from utils.rungs.spawn import host_store, set_environment

ENDED = "ended"  # a file among a run's logs: a rank has failed
FORK = multiprocessing.get_context("fork")
_scripts = {}

# In float64, the order of a sum changes results by 1e-16, which some runs amplify: an adversarial
# loss reached 1.1e-9 with AVX2. The mistakes that tests look for change them by more than 1e-2.
ROUNDING = 1e-6

# A run of five steps per epoch, saved after the second and the fourth.
FIVE_STEPS = {"synthetic_samples": 60, "image_size": 8, "save_steps": 2}


def fork_script(script, nproc=None, before=None, limit=600, settings=SMALL, **flags):
    """Run a script with these settings and `flags`. Returns its Run, with rank 0's exit code.

    nproc: the number of ranks; None for a script that runs as one process. before: called in each
    rank before the script starts, to kill it later or to plant a bug. Raises AssertionError, with
    the stacks of all ranks, if the script does not end within `limit` seconds.
    """
    if script not in _scripts:
        _scripts[script] = load_script(script)
    flags = settings | flags
    folder = Path(flags["output_dir"])
    logs = folder.parent / f"{folder.name}.logs"
    logs.mkdir(exist_ok=True, parents=True)
    (logs / ENDED).unlink(missing_ok=True)
    store = host_store() if nproc else None
    # A fork may inherit a lock of the store's thread, which is busy once the first rank connects.
    all_started = FORK.Event()
    arguments = nproc, store and store.port, _scripts[script], flags, logs, before, limit
    ranks = [
        FORK.Process(target=_run, args=(rank, all_started, *arguments))
        for rank in range(nproc or 1)
    ]
    for rank in ranks:
        rank.start()
    all_started.set()
    try:
        end = time.monotonic() + limit
        waiting = [rank.sentinel for rank in ranks]
        while waiting and time.monotonic() < end:
            wait(waiting, end - time.monotonic())
            waiting = [rank.sentinel for rank in ranks if rank.is_alive()]
            if any(rank.exitcode for rank in ranks):
                (logs / ENDED).touch()
        alive = [number for number, rank in enumerate(ranks) if rank.is_alive()]
    finally:
        for rank in ranks:
            rank.kill()
    stdout, stderr = (
        "".join((logs / f"{name}-{rank}").read_text() for rank in range(len(ranks)))
        for name in ("stdout", "stderr")
    )
    for number, rank in enumerate(ranks):
        name = CRASHES.get(rank.exitcode)
        assert name is None, f"rank {number} of {script} died of {name}:\n{stdout}{stderr}"
    assert not alive, f"ranks {alive} of {script} did not end in {limit} s:\n{stdout}{stderr}"
    if ranks[0].exitcode:  # for the report of a test that does not expect it
        print(f"{script} ended with {ranks[0].exitcode}:\n{stdout}{stderr}")
    return Run(ranks[0].exitcode, stdout, stderr, 0.0, read_rows(folder), folder)


def _run(rank, all_started, nproc, port, module, flags, logs, before, limit):
    gc.freeze()  # what the tests have left is not collected here, where it may cause warnings
    set_num_threads(1)  # or two threads may create PyTorch's pool at once, and abort
    for number, name in ((1, "stdout"), (2, "stderr")):
        flag = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
        os.dup2(os.open(logs / f"{name}-{rank}", flag), number)
        setattr(sys, name, os.fdopen(number, "w", closefd=False))
    faulthandler.enable()  # to this stderr: pytest's own is that of the process that was forked
    faulthandler.dump_traceback_later(limit - 10)  # all threads, to stderr
    warnings.resetwarnings()
    # Since Python 3.12, about workers of a loader, for example. Python hides it by default.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    warnings.showwarning = _show_warning  # pytest collects them, and so would this process
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    sys.argv = [f"{module.__name__}.py", *flag_list(flags)]
    if nproc:
        set_environment(rank, nproc, port)
    utils.guards.progress.SECONDS_BETWEEN_LINES = 10**6  # or stderr would depend on the load
    utils.reports._wait_for_the_end = partial(_wait_for, logs / ENDED)
    if before:
        before()
    all_started.wait()
    module.main()
    if nproc:
        module.dist.destroy_process_group()


def _wait_for(file):
    """Instead of a launcher's SIGTERM, which ends a rank whose peer has failed."""
    with suppress(AssertionError):
        wait_until(file.exists, 10)


def _show_warning(message, category, filename, lineno, file=None, line=None):
    print(warnings.formatwarning(message, category, filename, lineno), file=sys.stderr)


def killed_at(epoch, step):
    """For fork_script(before=...): kill all ranks with SIGKILL after this step of this epoch.

    The last save, of that step or of an earlier one, is on the disk by then.
    """

    def before():
        real = Checkpointer.step

        def step_and_die(checkpoint):
            real(checkpoint)
            if (checkpoint.epoch, checkpoint.state["loader"].step) == (epoch, step):
                checkpoint.wait()
                os.kill(os.getpid(), signal.SIGKILL)

        Checkpointer.step = step_and_die

    return before


def same_bits(ours, theirs):
    """Whether two parts of checkpoints hold the same tensors and values; tuples equal lists."""
    if isinstance(theirs, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same_bits(ours[k], theirs[k]) for k in theirs)
    if isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(same_bits, ours, theirs))
    return ours == theirs


def largest_difference(ours, theirs):
    """The largest difference between two dicts of tensors with the same names, as a float."""
    assert ours.keys() == theirs.keys()
    return max((ours[k].double() - theirs[k].double()).abs().max().item() for k in theirs)


def without_seconds(rows):
    """The rows of a metrics.jsonl without what differs from run to run."""
    return [{k: v for k, v in row.items() if not k.endswith("seconds")} for row in rows]


def assert_resumes(tmp_path, script, nproc, killed=None, saved_step=2, **flags):
    """Assert that a run that is killed within its last epoch and resumed, and an uninterrupted
    run, reach the same bits. Returns the last checkpoints of both."""
    flags = FIVE_STEPS | flags
    killed = killed or (flags.get("epochs", 2) - 1, 3)
    straight = fork_script(script, nproc, output_dir=tmp_path / "straight", **flags)
    folder = tmp_path / "killed"
    dead = fork_script(script, nproc, killed_at(*killed), output_dir=folder, **flags)
    assert (straight.code, dead.code) == (0, -9), straight.stderr + dead.stderr
    checkpoint = read_checkpoint(folder / "last.pt")
    assert (checkpoint["epoch"], checkpoint["loader"]["step"]) == (killed[0], saved_step)
    resumed = fork_script(script, nproc, output_dir=folder, **flags)
    assert (resumed.code, resumed.stderr) == (0, "")
    assert f"from epoch {killed[0]}, step {saved_step}, in" in resumed.stdout
    assert without_seconds(resumed.rows) == without_seconds(straight.rows)
    files = [read_checkpoint(run.output_dir / "last.pt") for run in (resumed, straight)]
    for name in ("model", "optimizer", "scheduler", "scaler", "data"):
        if name in files[1]:
            assert same_bits(files[0][name], files[1][name]), name
    return files
