"""Launching the ranks of one machine from Python, as torchrun would."""

import math
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from multiprocessing import resource_tracker

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from utils.config import BaseSettings, free_setting
from utils.errors import say
from utils.signals import SIGNALS


@dataclass(frozen=True)
class SpawnSettings(BaseSettings):
    """Settings of train_ddp_spawn.py."""

    spawn_processes: int = free_setting(
        0, "processes to start; 0: one per visible GPU, or one on a CPU"
    )


def number_of_ranks(cfg: SpawnSettings) -> int:
    """cfg.spawn_processes, or one per visible GPU; on a CPU, one."""
    if cfg.spawn_processes or cfg.device == "cpu":
        return max(1, cfg.spawn_processes)
    return max(1, torch.accelerator.device_count())


def host_store() -> dist.TCPStore:
    """Create the store through which the ranks find each other, on a free port. Keep it alive."""
    listener = socket.create_server(("127.0.0.1", 0))  # PyTorch's own would be on all interfaces
    port, file = listener.getsockname()[1], listener.detach()
    return dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=file
    )


def shield_tracker() -> None:
    """Start multiprocessing's helper process so that it outlives SIGUSR1, as it does SIGTERM.

    Schedulers signal all processes of a job. If the helper dies, its successor prints an error for
    every semaphore.
    """
    handler = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    resource_tracker.ensure_running()  # it inherits what is ignored
    signal.signal(signal.SIGUSR1, handler)


def set_environment(local_rank: int, world_size: int, port: int) -> None:
    """Set the variables that torchrun sets, for ranks on one machine. port: host_store().port."""
    os.environ |= {
        "RANK": str(local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is hosted here, not by rank 0
    }


def wait_for_ranks(ranks: mp.ProcessContext, patience: float = 30.0) -> None:
    """Wait until all ranks have exited. The first failure terminates all of them.

    ranks: what mp.spawn(..., join=False) returned. Signals that stop a run are passed on to the
    ranks (see preemption.py), which are killed if they have not exited `patience` seconds later.
    Exits with the rank's code if a configuration was wrong (2) or the run was stopped and saved
    (75), with 128 plus the signal's number if it was not saved, and with 1 if a rank has failed.
    """
    received, deadline = 0, math.inf

    def pass_on(number, frame):
        nonlocal received, deadline
        received, deadline = number, min(deadline, time.monotonic() + patience)
        for process in ranks.processes:
            if process.is_alive():
                os.kill(process.pid, number)

    for number in SIGNALS:
        signal.signal(number, pass_on)
    try:
        while not ranks.join(timeout=1.0):  # ends the others when one has failed
            if time.monotonic() > deadline:
                for process in ranks.processes:
                    process.kill()
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        code = getattr(error, "exit_code", 1)
        if any(process.exitcode == 75 for process in ranks.processes):
            # All have saved. One may have aborted in C++'s teardown (pytorch/pytorch#190489).
            code = 75
        if code in (2, 75):
            sys.exit(code)
        if received:
            sys.exit(128 + received)
        if isinstance(error, mp.ProcessRaisedException):
            say(error.msg.strip(), sys.stderr)  # the rank's traceback
        elif error.signal_name:  # otherwise the rank has reported its error
            say(f"error: rank {error.error_index} died of {error.signal_name}", sys.stderr)
        sys.exit(1)
