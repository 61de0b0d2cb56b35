"""What commands print."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def may_be_closed() -> Iterator[None]:
    """A context for a command whose reader may end before it, as in `... | head`. The command then
    ends without a message (https://docs.python.org/3/library/signal.html#note-on-sigpipe)."""
    try:
        try:
            yield
        finally:
            if sys.stdout:  # it may have been closed from the start
                sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
        sys.exit(128 + signal.SIGPIPE)
