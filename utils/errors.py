"""Errors that need no traceback, and messages that cannot fail themselves.

Needs only the standard library.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


class UserError(Exception):
    """Something outside the code is wrong. The message says what, where, and what to do about it;
    it is printed without a traceback."""

    exit_code = 1


class SilentExit(Exception):
    """The run ends here, and everything has been reported."""

    exit_code = 1


class PeerError(SilentExit):
    """A different rank has failed, and reports the error."""


def say(text: str, stream: Any = None) -> None:
    """Print what only informs, to stdout by default. That it cannot be written, to a full disk, a
    closed pipe or a terminal that is gone, does not end the run."""
    with suppress(OSError, ValueError):  # ValueError: a letter that the stream does not have
        print(text, file=stream, flush=True)


def warn(text: str) -> None:
    """say() on stderr."""
    say(f"warning: {text}", sys.stderr)


def write_to_stderr(text: str) -> None:
    """Like say(), in one write, so that the output of several processes does not interleave."""
    with suppress(OSError):
        os.write(2, text.encode(errors="surrogateescape"))  # file names may need surrogates


def drop_unwritten() -> None:
    """Drop output that cannot be written. Otherwise, Python would exit with code 120, and a child
    process of multiprocessing with 1."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            number = stream.fileno()
            kept = os.dup(number)
            with open(os.devnull, "w", encoding="utf-8") as nowhere:
                os.dup2(nowhere.fileno(), number)
                stream.flush()
            os.dup2(kept, number)
            os.close(kept)


@contextmanager
def required_by(setting: str) -> Iterator[None]:
    """Raise UserError if an optional module, which the body imports, has not been copied."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not str(error.name).startswith(("utils.", "tasks.")):
            raise
        file = str(error.name).replace(".", "/") + ".py"
        raise UserError(
            f"{setting} needs {file}, which is missing: in a clone, run "
            f"`python -m tools.copy {Path(sys.argv[0]).name} DEST --with {Path(file).stem}`"
        ) from None
