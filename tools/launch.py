"""Run torchrun; if a rank fails, its error is the last line on the terminal.

    python -m tools.launch --standalone --nproc_per_node=4 train_ddp.py --epochs 3

The arguments are torchrun's. The exit code is that of the first rank to fail. After a signal, it is
75 if the ranks have saved before they stopped, 1 if they could not, otherwise 128 plus the signal's
number: before the first step, there is nothing to save. The ranks also receive SIGUSR1. With a c10d
rendezvous over several nodes, two things differ from torchrun: a restart creates a new store,
because the old one holds the addresses of dead ranks; and a node that cannot reach the rendezvous
for a minute gives up, whereas torchrun would never end.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.distributed import DistError, DistStoreError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import parse_args, run

from utils.rungs.spawn import OUT_OF_MEMORY

PATIENCE = 60.0  # seconds without the rendezvous; a collective usually times out later
SECONDS_OF_REPORT = 3.0  # in which ranks of other nodes can read the error of one of this node


def root_cause(error):
    """The exit code and the message of the first rank that failed, from its error file."""
    rank, failure = error.get_first_failure()
    code = failure.exitcode if failure.exitcode > 0 else 1
    if isinstance(failure.message, dict):
        return code, failure.message["message"].rstrip()
    if failure.exitcode < 0:
        hint = OUT_OF_MEMORY if failure.exitcode == -signal.SIGKILL else ""
        return code, f"error (rank {rank}): {failure.message}{hint}"
    return code, f"error (rank {rank}): exit code {code}; see the output above"


def reports(folder, since):
    """What ranks have reported in torchrun's error files below `folder` after `since`, in seconds
    since 1970: {outcome: the text of a report}. See utils.errors.write_error_file()."""
    texts = {}
    for path in Path(folder).rglob("error.json"):
        if path.stat().st_mtime >= since:
            report = json.loads(path.read_text())["message"]
            outcome = report["extraInfo"].get("outcome", "failed")  # of other scripts: none
            texts[outcome] = report["message"].rstrip()
    return texts


def watch_rendezvous(endpoint, patience=PATIENCE):
    """Exit, with code 1, once HOST:PORT has been unreachable for `patience` seconds.

    The time counts from the first connection: torchrun itself limits how long it waits for the
    host to start. The ranks, if they still run, die with this process.
    """
    reached = None
    while reached is None or time.monotonic() - reached < patience:
        try:
            socket.create_connection(parse_rendezvous_endpoint(endpoint, 29400), 5).close()
            reached = time.monotonic()
        except OSError:
            pass
        time.sleep(patience / 12)
    text = f"error: the rendezvous at {endpoint} has been unreachable for {patience:.0f} seconds"
    os.write(2, f"{text}: check the network, and that its host is running\n".encode())
    os._exit(1)


def explain_rendezvous(args, error):
    """The message for a launcher that has not found the other nodes, or has lost them."""
    endpoint = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port}"
    if isinstance(error, RendezvousTimeoutError | DistStoreError):
        return (
            f"error: not all nodes have joined the rendezvous at {endpoint} in time: start "
            f"--nnodes={args.nnodes} of them, all with the same arguments"
        )
    reason = str(error.__cause__ or error).splitlines()[0]
    return (
        f"error: the rendezvous at {endpoint} has failed ({reason}): see the output of that host, "
        f"where the job may have ended, or which may be down"
    )


def main():
    args = parse_args(None)
    if args.rdzv_backend == "c10d" and args.nnodes != "1":
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        threading.Thread(target=watch_rendezvous, args=(args.rdzv_endpoint,), daemon=True).start()
    if "SIGUSR1" not in getattr(args, "signals_to_handle", "SIGUSR1"):
        args.signals_to_handle += ",SIGUSR1"
    start = time.time()
    with TemporaryDirectory(prefix="torchelastic_") as folder:
        args.log_dir = args.log_dir or folder
        try:
            run(args)
        except ChildFailedError as error:
            code, text = root_cause(error)
            reported = reports(args.log_dir, start)
            if "stopped" not in reported:  # which rank 0 has printed
                print(text, file=sys.stderr)
            elif "failed" not in reported:
                # About one exit in a hundred aborts in C++'s teardown: its code is -6, not 75
                # (pytorch/pytorch#190489).
                code = 75
            if args.nnodes not in ("1", "1:1"):  # this process may hold the store
                time.sleep(SECONDS_OF_REPORT)
            sys.exit(code)
        except (RendezvousError, DistError) as error:
            failed = reports(args.log_dir, start).get("failed")
            print(failed or explain_rendezvous(args, error), file=sys.stderr)
            sys.exit(1)
        except SignalException as error:
            reported = reports(args.log_dir, start)
            if "stopped" in reported:
                sys.exit(75)
            if "failed" in reported:
                print(reported["failed"], file=sys.stderr)
                sys.exit(1)
            sys.exit(128 + error.sigval)
        except KeyboardInterrupt:
            sys.exit(130)


if __name__ == "__main__":
    main()
