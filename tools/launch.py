"""Run torchrun; if a rank fails, its error is the last line on the terminal.

    python -m tools.launch --standalone --nproc_per_node=4 train_ddp.py --epochs 3

The arguments are torchrun's. The exit code is the first failed rank's. After a signal, it is
75 if the ranks have saved before they stopped, 1 if they could not, otherwise 128 plus the signal's
number: before the first step, there is nothing to save. The ranks also receive SIGUSR1, and not
SIGHUP if nohup ignores it; while they save, further signals do not interrupt them. With a c10d
rendezvous over several nodes, two things differ from torchrun: a restart creates a new store,
because the old one holds the addresses of dead ranks; and a node that cannot reach the rendezvous
for a minute gives up, whereas torchrun would never end.
"""

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.distributed import DistError, DistStoreError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import parse_args, run

from utils.errors import say
from utils.signals import SECONDS_OF_ONE_REQUEST, SIGNALS

PATIENCE = 60.0  # seconds without the rendezvous; a collective usually times out later
OUT_OF_MEMORY = "; if nothing else sent it, memory was exhausted: see  dmesg | tail"
TASK = re.compile(r"^import ([\w.]+) as task\b", re.MULTILINE)
NEVER_SENT = "SIGURG"  # in place of the signals that torchrun would handle itself


def root_cause(error):
    """The exit code and the message of the first rank that failed, from its error file."""
    rank, failure = error.get_first_failure()
    code = failure.exitcode if failure.exitcode > 0 else 1
    if isinstance(failure.message, dict):
        return code, failure.message["message"].rstrip()
    if failure.exitcode < 0:
        hint = OUT_OF_MEMORY if failure.exitcode == -signal.SIGKILL else ""
        return code, f"error (rank {rank}): {failure.message}{hint}"
    return code, f"error (rank {rank}): exit code {code}; see the output above, or of other nodes"


def error_files(folder):
    return set(Path(folder).rglob("error.json"))


def reports(folder, old):
    """{outcome: text} of what ranks have reported in torchrun's error files below `folder` which
    are not among `old`."""
    texts = {}
    for path in error_files(folder) - old:
        report = json.loads(path.read_text(encoding="utf-8"))["message"]
        outcome = report["extraInfo"].get("outcome", "failed")  # of other scripts: none
        texts[outcome] = report["message"].rstrip()
    return texts


@contextmanager
def stop_by_signals(numbers):
    """In the body, a first signal raises SignalException, upon which torchrun passes it on and
    waits; so does a second one, at least two seconds later. torchrun's own handlers would raise
    again at each signal, and so end the launcher, and the ranks with it, before they have saved.
    After the body, signals are ignored: the exit code is known.
    """
    received = []  # at what times

    def stop(number, frame):
        now = time.monotonic()
        if not received or (len(received) < 2 and now - received[0] > SECONDS_OF_ONE_REQUEST):
            received.append(now)
            name = signal.Signals(number)
            raise SignalException(f"received {name.name}", name)

    for number in numbers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)


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
    say(f"{text}: check the network, and that its host is running", sys.stderr)
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


def refuse_missing(script):
    """Exit if the script, or the task that it imports, does not exist. Each rank would report that,
    with a traceback."""
    path, text = Path(script), ""
    if not path.is_file():
        text = f"there is no script {script} in {Path.cwd()}"
    elif found := TASK.search(path.read_text(encoding="utf-8", errors="replace")):
        name = found[1]
        if not PathFinder.find_spec(name.partition(".")[0], [str(path.parent), *sys.path]):
            text = f"{script} imports the task {name}, and there is no {name}.py in {path.parent}: "
            text += "write it (docs/own-task.md), or change that line"
    if text:
        say(f"error: {text}", sys.stderr)
        sys.exit(2)


def main():
    args = parse_args(None)
    if not (args.module or args.no_python):
        refuse_missing(args.training_script)
    if args.rdzv_backend == "c10d" and args.nnodes != "1":
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        threading.Thread(target=watch_rendezvous, args=(args.rdzv_endpoint,), daemon=True).start()
    names = getattr(args, "signals_to_handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT") + ",SIGUSR1"
    numbers = {signal.Signals[name.strip()] for name in names.split(",")}
    if signal.SIGHUP not in SIGNALS:  # nohup
        numbers.discard(signal.SIGHUP)
    args.signals_to_handle = NEVER_SENT
    with TemporaryDirectory(prefix="torchelastic_") as folder:
        args.log_dir = args.log_dir or folder
        old = error_files(args.log_dir)
        try:
            with stop_by_signals(numbers):
                run(args)
        except ChildFailedError as error:
            code, text = root_cause(error)
            reported = reports(args.log_dir, old)
            if "stopped" in reported and "failed" not in reported:
                # About one exit in a hundred aborts in C++'s teardown: its code is -6, not 75
                # (pytorch/pytorch#190489).
                code = 75
            else:
                say(text, sys.stderr)
            sys.exit(code)
        except (RendezvousError, DistError) as error:
            failed = reports(args.log_dir, old).get("failed")
            say(failed or explain_rendezvous(args, error), sys.stderr)
            sys.exit(1)
        except SignalException as error:
            reported = reports(args.log_dir, old)
            if "stopped" in reported:
                sys.exit(75)
            if "failed" in reported:
                say(reported["failed"], sys.stderr)
                sys.exit(1)
            sys.exit(128 + error.sigval)


if __name__ == "__main__":
    main()
