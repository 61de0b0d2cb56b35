"""Writes what happens in one process as lines of JSON, for check/events.py to read."""

import functools
import inspect
import json
import os
import sys
import sysconfig
import threading
import time
import traceback
import zlib
from array import array
from pathlib import Path

PLAN = json.loads(os.environ["TOOLS_CHECK_PLAN"])
ROOT = PLAN["root"]  # the copy of the script's folder in which this run works
_LIBRARIES = tuple(
    {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    | {os.path.dirname(os.path.dirname(os.path.realpath(__file__)))}
)
_lock = threading.RLock()
_failed = set()
_is_user = {}
_file = None
_pid = None
_number = 0


def rank():
    """The rank of this process: of its process group, else from the environment, else None."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ["RANK"]) if os.environ.get("RANK", "").isdigit() else None


def record(kind, **fields):
    """Write an event at once: the process may be killed at any time."""
    global _file, _pid, _number
    with _lock:
        if _pid != os.getpid():  # at first, or in a fork
            _pid = os.getpid()
            path = Path(PLAN["folder"]) / f"{_pid}.jsonl"
            # Opened by number, so that the observer of files does not see it.
            _file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        _number += 1
        event = {"kind": kind, "pid": _pid, "parent": os.getppid(), "rank": rank()}
        event |= {"number": _number, "time": time.time(), **fields}
        os.write(_file, (json.dumps(event, default=str) + "\n").encode())


def is_user_file(name):
    """Whether this is code of the user: not of Python, of an installed package, or of the check."""
    if name not in _is_user:
        path = os.path.realpath(name)
        _is_user[name] = not name.startswith("<") and (
            path.startswith(ROOT + os.sep)
            or not (path.startswith(_LIBRARIES) or "site-packages" in path)
        )
    return _is_user[name]


def place(is_left_out=lambda frame: False):
    """The innermost line of the user's code that is being run: [file, line], or None."""
    frames = _lines(sys._getframe(1))
    return place_of((frame, line) for frame, line in frames if not is_left_out(frame))


def _lines(frame):
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def place_of(lines):
    """The first one of these (frame, line) that is in the user's folder, or else in code that is
    not installed, as what PYTHONPATH names: [file, line], or None."""
    other = None
    for frame, line in lines:
        name = frame.f_code.co_filename
        if is_user_file(name):
            path = os.path.realpath(name)
            if path.startswith(ROOT + os.sep):
                return [os.path.relpath(path, ROOT), line]
            other = other or [path, line]
    return other


def called_by_user(depth=2):
    """Whether the function that calls this one was called directly from the user's code."""
    return is_user_file(sys._getframe(depth).f_code.co_filename)


def guarded(observe):
    """An observer whose own mistake does not end the script: what it would see is not checked."""

    @functools.wraps(observe)
    def safely(*args, **kwargs):
        try:
            return observe(*args, **kwargs)
        except Exception as error:
            if observe.__qualname__ not in _failed:
                _failed.add(observe.__qualname__)
                text = traceback.format_exc()[-1500:]
                record("observer_failed", what=observe.__name__, why=repr(error)[:200], text=text)
            return None

    return safely


def checksum(tensor, start=0):
    """A CRC-32 of the bytes of a tensor; of this rank's part, if it is distributed.

    Of the dense form of a sparse one; of what has no such bytes, of the type and the shape.
    """
    import torch

    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.is_meta or tensor.numel() == 0:
        return start
    if tensor.layout != torch.strided or tensor.is_quantized:
        try:
            tensor = tensor.dequantize() if tensor.is_quantized else tensor.to_dense()
        except (RuntimeError, NotImplementedError):
            return zlib.crc32(
                repr((tensor.layout, tensor.dtype, tuple(tensor.shape))).encode(), start
            )
    # A copy: it has bytes where a subclass of Tensor has none, such as the result of a collective
    # that goes on. A storage of which NumPy holds a part cannot be resized; FSDP resizes its own.
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
    return zlib.crc32(copy.reshape(-1).view(torch.uint8).numpy(), start)


def write_numbers(name, tensor):
    """Write a tensor, as float64, to a file in the folder of the run."""
    numbers = array("d", tensor.detach().double().reshape(-1).tolist())
    (Path(PLAN["folder"]) / name).write_bytes(numbers.tobytes())


def once_computed(args, kwargs, note):
    """For a pre-hook of Optimizer.step: calls note() when the gradients are there, which is now, or
    after the first call of a closure: LBFGS calls it again. Returns the arguments of the step."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        note()
        return None
    is_first = [True]

    def observed():
        result = closure()
        if is_first:
            is_first.clear()
            note()
        return result

    if "closure" in kwargs:
        return args, kwargs | {"closure": observed}
    return (args[0], observed, *args[2:]), kwargs


def replace(owner, name, make):
    """Replace owner.name by make(original), which keeps the name and the documentation."""
    original = getattr(owner, name)
    replacement = make(original)
    for attribute in ("__name__", "__qualname__", "__doc__", "__module__"):
        if hasattr(original, attribute):
            try:
                setattr(replacement, attribute, getattr(original, attribute))
            except (AttributeError, TypeError):
                break
    setattr(owner, name, replacement)
    return original


def passing_on(before=None, after=None, failed=None):
    """For replace(): calls before(given) and after(given, result), and between them the original;
    failed(given, error) if it raises.

    given: its arguments by the names that its own signature has; `before` may change them. Other
    names are for `after` alone.
    """

    def make(original):
        signature = inspect.signature(original)

        @functools.wraps(original)
        def function(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            if before is not None:
                before(bound.arguments)
            try:
                result = original(*bound.args, **bound.kwargs)
            except Exception as error:
                if failed is not None:
                    failed(bound.arguments, error)
                raise
            if after is not None:
                after(bound.arguments, result)
            return result

        return function

    return make
