"""One error per job, from the first rank to fail. Needs only the standard library."""

import json
import os
import sys
import time
import traceback
from contextlib import contextmanager
from functools import wraps

_failure_store = None  # counts the ranks that fail, so that only the first one reports
_explanations = []  # functions that may add notes to an error before it is reported


class UserError(Exception):
    """Something outside the code is wrong. The message says what, where, and what to do about it;
    it is printed without a traceback."""

    exit_code = 1


class SilentExit(Exception):
    """The run ends here, and everything has been reported."""

    exit_code = 1


class PeerError(SilentExit):
    """A different rank has failed, and reports the error."""


def set_failure_store(store):
    """Count the ranks that fail in `store`, a torch.distributed.Store; None: this rank is alone."""
    global _failure_store
    _failure_store = store


def explain_errors(function):
    """Call function(error) before an error is reported, so that it can add notes to the error."""
    _explanations.append(function)


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
            if isinstance(error, SilentExit) or not is_first_to_fail():
                time.sleep(0.2)  # let the launcher see the reporting rank exit first
            else:
                report(error)
            sys.exit(getattr(error, "exit_code", 1))

    return wrapper


@contextmanager
def required_by(setting):
    """Raise UserError if an optional module, which the body imports, has not been copied."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not str(error.name).startswith(("utils.", "tasks.")):
            raise
        file = error.name.replace(".", "/") + ".py"
        raise UserError(
            f"{setting} needs {file}, which is missing; copy that file as well"
        ) from None


def report(error):
    """Report an error for the whole job: see report_errors()."""
    for explain in _explanations:
        explain(error)
    interrupted = isinstance(error, KeyboardInterrupt)
    text = "".join(traceback.format_exception(error))
    if isinstance(error, UserError) or interrupted:
        rank = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        text = f"error{rank}: {str(error) or 'interrupted'}{notes}\n"
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        write_error_file(text, "interrupted" if interrupted else "failed")
    else:  # one write, so that the output of several processes does not interleave
        os.write(2, text.encode(errors="surrogateescape"))  # file names may need surrogates


def write_error_file(text, outcome):
    """Write torchrun's error file. outcome: failed, interrupted, or stopped, which
    tools/launch.py turns into an exit code."""
    path = os.environ["TORCHELASTIC_ERROR_FILE"]
    details = {"py_callstack": text.rstrip(), "timestamp": str(int(time.time()))}
    message = {"message": text, "extraInfo": details | {"outcome": outcome}}
    with open(f"{path}.tmp", "w") as file:
        json.dump({"message": message}, file)
    os.replace(f"{path}.tmp", path)  # torchrun may kill this process at any moment


def a_rank_has_failed():
    """Whether any rank has reported an error, or is about to."""
    return _failure_store is not None and _failure_store.check(["failures"])


def is_first_to_fail():
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
