"""One error per job, from the first rank to fail. Needs only the standard library."""

import json
import os
import sys
import time
import traceback
from contextlib import contextmanager
from functools import wraps

# Set by init_distributed(): counts failed ranks, so that only the first reports.
failure_store = None


class UserError(Exception):
    """Something outside the code is wrong. The message says what, where, and what to do about it;
    it is printed without a traceback."""

    exit_code = 1


class PeerError(Exception):
    """Another rank has reported the error; this rank exits silently."""


def save_failed(text):
    """Called when a checkpoint or metrics cannot be written. --save-errors warn replaces it."""
    raise UserError(text)


def report_errors(function):
    """Decorator for main(): the first rank to fail reports its error, and every rank exits.

    A UserError is reported as one line, any other exception as one traceback. Under torchrun, the
    report goes into torchrun's error file and so ends torchrun's own report of the root cause
    (https://docs.pytorch.org/docs/stable/elastic/errors.html); otherwise it is written to stderr.
    """

    @wraps(function)
    def wrapper(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, PeerError) or not _first_to_fail():
                time.sleep(0.2)  # let the launcher see the reporting rank exit first
            else:
                _report(error)
            sys.exit(getattr(error, "exit_code", 1))

    return wrapper


@contextmanager
def option(setting):
    """Raise UserError if an optional module, which the body imports, has not been copied."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("utils."):
            raise
        file = error.name.replace(".", "/") + ".py"
        raise UserError(f"{setting} needs {file}, which is missing: copy that file, too") from None


def _report(error):
    text = "".join(traceback.format_exception(error))
    if isinstance(error, UserError | KeyboardInterrupt):
        rank = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
        text = f"error{rank}: {str(error) or 'interrupted'}\n"
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:  # one write, so that the output of several processes does not interleave
        os.write(2, text.encode(errors="surrogateescape"))  # file names may need surrogates
        return
    details = {"py_callstack": text.rstrip(), "timestamp": str(int(time.time()))}
    with open(f"{path}.tmp", "w") as file:
        json.dump({"message": {"message": text, "extraInfo": details}}, file)
    os.replace(f"{path}.tmp", path)  # torchrun may kill this process at any moment


def _first_to_fail():
    launched = "TORCHELASTIC_USE_AGENT_STORE" in os.environ  # by torchrun, or by spawn.py
    if failure_store is None:  # no process group yet: every rank of a node has the same error
        if os.environ.get("LOCAL_RANK", "0") != "0" and launched:
            time.sleep(10)  # local rank 0 reports, and the launcher then ends this process
        return True  # local rank 0 has not failed: only this rank has the error
    try:
        return failure_store.add("failures", 1) == 1
    except Exception:  # the store ended with rank 0, which the launcher reports
        return not launched
