"""One error per job, from the first rank to fail: decorate main() with report_errors."""

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from utils.errors import PeerError, UserError, say

P = ParamSpec("P")
R = TypeVar("R")


def report_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator for main(): the first rank to fail reports its error, and every rank exits.

    A UserError is reported as one line, any other exception as one traceback: in torchrun's error
    file, and so at the end of torchrun's own report, or without torchrun on stderr
    (https://docs.pytorch.org/docs/stable/elastic/errors.html).
    """

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (Exception, KeyboardInterrupt) as error:
            is_first = not isinstance(error, PeerError) and _is_first_to_fail()
            if not is_first:
                _wait_for_the_end()
            if is_first or not dist.is_initialized():  # no other rank has failed
                _report(error)
            sys.exit(getattr(error, "exit_code", 1))

    return wrapper


def _wait_for_the_end():
    """The launcher ends this process once the first one to fail has exited."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(10)


def _is_first_to_fail():
    if not dist.is_initialized():  # all ranks of a node have the same error
        return os.environ.get("LOCAL_RANK", "0") == "0"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps its store
    try:
        return dist.distributed_c10d._get_default_store().add(f"failures-{attempt}", 1) == 1
    except RuntimeError:  # rank 0, which holds the store, has ended
        return False


def _report(error):
    text, outcome = "".join(traceback.format_exception(error)), "failed"
    if isinstance(error, UserError):
        text = f"error (rank {os.environ.get('RANK', 0)}): {error}\n"
    if isinstance(error, KeyboardInterrupt):
        text = outcome = "interrupted"
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        write_error_file(text, outcome)
    else:
        say(text.rstrip(), sys.stderr)


def write_error_file(text: str, outcome: str) -> None:
    """Write torchrun's error file. outcome: failed, interrupted, or stopped, which tools/launch.py
    turns into an exit code."""
    details = {"py_callstack": text.rstrip(), "timestamp": str(int(time.time()))}
    message = {"message": text, "extraInfo": details | {"outcome": outcome}}
    path = os.environ["TORCHELASTIC_ERROR_FILE"]
    try:
        with open(f"{path}.tmp", "w", encoding="utf-8") as file:
            json.dump({"message": message}, file)
        os.replace(f"{path}.tmp", path)  # torchrun cannot parse half a file
    except OSError:  # the disk is full
        say(text.rstrip(), sys.stderr)
