"""One error per job, from the first rank to fail: decorate main() with report_errors."""

import atexit
import io
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from utils.errors import PeerError, SilentExit, UserError, drop_unwritten, write_to_stderr

PATIENCE = 30.0  # seconds that ranks wait for the report of the first one to fail
_failure_store: Any = None  # counts the ranks that fail, and holds the report of the first one
_explanations = []  # functions that may explain an error before it is reported
_child_handler: Any = None  # of SIGCHLD, taken away by report_errors() until its next call

P = ParamSpec("P")
R = TypeVar("R")


def set_failure_store(store: Any) -> None:
    """Count the ranks that fail in `store`, a torch.distributed.Store, until Python exits."""
    global _failure_store
    _failure_store = store
    atexit.register(globals().update, _failure_store=None)


def explain_errors(function: Callable[[BaseException], BaseException | None]) -> None:
    """Call function(error) before an error is reported. It may add notes to the error, or return an
    exception to report in its place."""
    _explanations.append(function)


def report_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator for main(): the first rank to fail reports its error, and every rank exits.

    A UserError is reported as one line, any other exception as one traceback. Under torchrun, the
    report goes into torchrun's error file and so ends torchrun's own report of the root cause
    (https://docs.pytorch.org/docs/stable/elastic/errors.html), on every node; otherwise it is
    written to stderr.
    """

    @wraps(function)
    def wrapper(*args, **kwargs):
        global _child_handler
        with suppress(ValueError):  # only the main thread may set handlers
            if _child_handler and signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL:
                signal.signal(signal.SIGCHLD, _child_handler)  # which PyTorch sets only once
        if isinstance(sys.stdout, io.TextIOWrapper):  # not in a notebook
            with suppress(OSError):  # what has been printed before cannot be written
                sys.stdout.reconfigure(errors="backslashreplace")  # names that it cannot encode
        try:
            return function(*args, **kwargs)
        except (Exception, KeyboardInterrupt) as error:
            # A DataLoader's handler raises wherever this process is, here too, for a dead worker.
            with suppress(ValueError):  # only the main thread may, which runs the handlers
                _child_handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if isinstance(error, PeerError):
                repeat_report()
            elif not isinstance(error, SilentExit):
                report(error)
            sys.exit(getattr(error, "exit_code", 1))
        finally:
            drop_unwritten()

    return wrapper


def report(error: BaseException) -> None:
    """Report an error for the whole job, if no rank has failed before: see report_errors()."""
    if not is_first_to_fail():
        repeat_report()
        return
    for explain in _explanations:
        error = explain(error) or error
    interrupted = isinstance(error, KeyboardInterrupt)
    text = "".join(traceback.format_exception(error))
    if isinstance(error, UserError) or interrupted:
        rank = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        text = f"error{rank}: {str(error) or 'interrupted'}{notes}\n"
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        write_error_file(text, "interrupted" if interrupted else "failed")
    else:
        write_to_stderr(text)
    with suppress(Exception):  # there is no store, or it has ended
        _failure_store.set("report", json.dumps([socket.gethostname(), text]))


def repeat_report() -> None:
    """A different rank has failed first: wait until it has reported its error. On a different node,
    repeat the report, for torchrun on this node, which knows only its own ranks."""
    host = text = None
    end = time.monotonic() + PATIENCE
    with suppress(Exception):  # there is no store, or it has ended
        while text is None and time.monotonic() < end:
            time.sleep(0.05)  # wait() would lock the store, which a signal handler may need
            if _failure_store.check(["report"]):
                host, report = json.loads(_failure_store.get("report"))
                text = f"the job has failed on {host}:\n{report}"
    time.sleep(0.2)  # let the launcher see the reporting rank exit first
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", 1))  # set by torchrun
    if nodes > 1 and host != socket.gethostname():
        lost = (
            f"error (rank {os.environ['RANK']}): lost the job's store on "
            f"{os.environ['MASTER_ADDR']}: the job has ended there, or that host is down"
        )
        write_error_file(text or lost, "failed")


def write_error_file(text: str, outcome: str) -> None:
    """Write torchrun's error file. outcome: failed, interrupted, or stopped, which
    tools/launch.py turns into an exit code. On a full disk, an empty file says that much, and an
    error is printed."""
    path = os.environ["TORCHELASTIC_ERROR_FILE"]
    details = {"py_callstack": text.rstrip(), "timestamp": str(int(time.time()))}
    message = {"message": text, "extraInfo": details | {"outcome": outcome}}
    try:
        with open(f"{path}.tmp", "w", encoding="utf-8") as file:
            json.dump({"message": message}, file)
        os.replace(f"{path}.tmp", path)  # torchrun may kill this process at any moment
    except OSError:
        with suppress(OSError):
            open(f"{path}.{outcome}", "w", encoding="utf-8").close()
        if outcome != "stopped":
            write_to_stderr(text)


def a_rank_has_failed() -> bool:
    """Whether any rank has reported an error, or is about to."""
    try:
        return _failure_store is not None and _failure_store.check(["failures"])
    except Exception:  # the store ended with rank 0
        return True


def is_first_to_fail() -> bool:
    """Whether this rank, which has failed, is the one that reports its error."""
    launched = "TORCHELASTIC_USE_AGENT_STORE" in os.environ  # by torchrun, or by spawn.py
    if _failure_store is None:  # no process group yet: every rank of a node has the same error
        if os.environ.get("LOCAL_RANK", "0") != "0" and launched:
            time.sleep(10)  # local rank 0 reports, and the launcher then ends this process
        return True  # local rank 0 has not failed: only this rank has the error
    try:
        return _failure_store.add("failures", 1) == 1
    except Exception:  # the store ended with rank 0, which the launcher reports
        return not launched
