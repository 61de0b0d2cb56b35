"""Starting the ranks from Python, as torchrun would. Needs only torch."""

import os
import sys
import time

import torch.distributed as dist
import torch.multiprocessing as mp


def host_store():
    """The store where the ranks of this machine meet, on a free port. Keep it while they run."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def set_environment(local_rank, world_size, port):
    """Tell this process who it is: the variables that torchrun sets, for ranks on one machine.

    port: of host_store(), which the ranks then only visit.
    """
    os.environ |= {
        "RANK": str(local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def wait_for_ranks(ranks, patience=5.0):
    """Wait until all have ended; the first that fails, or Ctrl-C, ends all of them.

    ranks: what mp.spawn(..., join=False) returned. patience: seconds that Ctrl-C leaves them.
    Ends this process with code 1 where one failed, and with 130 after Ctrl-C.
    """
    try:
        while not ranks.join():  # ends the others when one has failed
            pass
    except mp.ProcessRaisedException as error:
        print(error.msg.strip(), file=sys.stderr, flush=True)  # the rank's traceback
        sys.exit(1)
    except mp.ProcessExitedException as error:
        if error.signal_name:  # otherwise it has said itself what was wrong
            said = f"error: rank {error.error_index} was killed by {error.signal_name}"
            print(said, file=sys.stderr, flush=True)
        sys.exit(1)
    except KeyboardInterrupt:
        end = time.monotonic() + patience
        for process in ranks.processes:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
        sys.exit(130)
