"""Records the exceptions that end a process of the script, in the process itself."""

import contextlib
import functools
import multiprocessing.process
import sys
import traceback

from check_inside.record import guarded, place_of, record, replace

MOST = 400  # characters


def install(name, torch):
    """Record those that PyTorch and Python catch in the processes that they start."""
    # The package has a function of this name.
    replace(sys.modules["torch.multiprocessing.spawn"], "_wrap", _observe_wrap)
    replace(multiprocessing.process.BaseProcess, "run", recording)


def hook(kind, error, frames):
    """For sys.excepthook."""
    _record(error)
    sys.__excepthook__(kind, error, frames)


@contextlib.contextmanager
def recorded():
    """A context that records an exception which leaves it."""
    try:
        yield
    except Exception as error:
        _record(error)
        raise


def recording(function):
    """A function that records an exception which it raises."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        with recorded():
            return function(*args, **kwargs)

    return run


def _observe_wrap(original):
    def _wrap(fn, *args):
        return original(recording(fn), *args)

    return _wrap


@guarded
def _record(error):
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    if len(text) > MOST:  # the error of a worker of a loader is at the end
        text = f"{text[: MOST // 2]} ... {text[-MOST // 2 :]}"
    frames = list(traceback.walk_tb(error.__traceback__))
    record(
        "exception",
        error=text,
        place=place_of(reversed(frames)),
        waits=bool(frames) and _waits(frames[-1][0]),
        imports=isinstance(error, ImportError | SyntaxError),
    )


def _waits(frame):
    """Whether a frame is at a collective, or at a backward, which has some: these fail if a
    different rank has ended."""
    module = frame.f_globals.get("__name__", "")
    return module.startswith(("torch.distributed", "torch.autograd"))
