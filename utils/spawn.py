"""Launching the ranks of one machine from Python, as torchrun would."""

import os
import sys
import time
from dataclasses import dataclass

import torch.distributed as dist
import torch.multiprocessing as mp

from utils.config import Config, setting


@dataclass(frozen=True)
class SpawnConfig(Config):
    """Config of train_ddp_spawn.py."""

    spawn_processes: int = setting(0, "processes to start; 0: one per visible GPU", free=True)


def host_store():
    """Create the store through which the ranks find each other, on a free port. Keep it alive."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def set_environment(local_rank, world_size, port):
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


def wait_for_ranks(ranks, patience=5.0):
    """Wait until all ranks have exited. The first failure, or Ctrl-C, terminates all of them.

    ranks: what mp.spawn(..., join=False) returned. patience: seconds to wait for them after Ctrl-C.
    Exits with code 1 if a rank has failed, with 2 if its configuration was wrong, and with 130
    after Ctrl-C.
    """
    try:
        while not ranks.join():  # ends the others when one has failed
            pass
    except mp.ProcessRaisedException as error:
        print(error.msg.strip(), file=sys.stderr, flush=True)  # the rank's traceback
        sys.exit(1)
    except mp.ProcessExitedException as error:
        if error.signal_name:  # otherwise the rank has reported its error
            text = f"error: rank {error.error_index} was killed by {error.signal_name}"
            print(text, file=sys.stderr, flush=True)
        sys.exit(error.exit_code if error.exit_code == 2 else 1)
    except KeyboardInterrupt:
        end = time.monotonic() + patience
        for process in ranks.processes:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
        sys.exit(130)
