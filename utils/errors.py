"""Errors that need no traceback, and lines for the user."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


class UserError(Exception):
    """Something outside the code is wrong; printed as one line, without a traceback."""


class PeerError(Exception):
    """A different rank has failed, and reports the error."""


def say(text: str, stream: Any = None) -> None:
    """Print a line, to stdout by default. A terminal that is gone does not end the run."""
    with suppress(OSError):
        print(text, file=stream, flush=True)


def warn(text: str) -> None:
    say(f"warning: {text}", sys.stderr)


@contextmanager
def required_by(setting: str) -> Iterator[None]:
    """Raise UserError if a module that only this setting needs has not been copied."""
    try:
        yield
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in ("utils", "tasks", "sources"):
            raise
        raise UserError(
            f"{setting} needs {error.name}, which this copy lacks: see docs/copy.md"
        ) from None
