"""Observes what is written and read: checkpoints, and files that are opened for writing."""

import contextlib
import io
import os
import pickle
import re
import shutil
import sys
import time
from collections import Counter

from check_inside.record import (
    PLAN,
    ROOT,
    guarded,
    is_user_file,
    passing_on,
    place,
    record,
    replace,
)
from check_inside.state import STATE

BYTES_WRITTEN = 10  # lines within which the bytes of a checkpoint are written

MOST_PARTS = 20_000  # of what is saved, that are looked at

_buffered = None  # the event of a checkpoint that was saved as bytes, to no file yet
_seen = set()
_started = time.time()
_own = tuple(filter(None, (PLAN["folder"], PLAN["exact"])))  # written by the check itself


def install(name, module):
    """Observe saves and loads of torch, torch.distributed.checkpoint or safetensors."""
    if name == "torch":
        replace(module, "save", lambda original: _observe_save(original, "torch.save", 1))
        replace(module, "load", passing_on(_before_torch_load, _after_load, _load_failed))
        replace(pickle, "dump", lambda original: _observe_save(original, "pickle", 1, "dump"))
        replace(pickle, "load", passing_on(after=_after_load))
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            for function in ("save", "savez", "savez_compressed"):
                replace(numpy, function, lambda f: _observe_save(f, "numpy", 0, "dump"))
            replace(numpy, "load", passing_on(after=_after_load))
        sys.addaudithook(_audit)
    elif name == "safetensors.torch":
        for function in ("save_file", "save_model"):
            replace(module, function, lambda f: _observe_save(f, "safetensors", 1))
        replace(module, "load_file", passing_on(_before_safetensors_load, _after_load))
    else:
        for function in ("save", "async_save"):
            replace(module, function, lambda f: _observe_distributed(f, "save"))
        replace(module, "load", lambda f: _observe_distributed(f, "load"))


def _path(target):
    """The path of a file, as the script would find it from its own folder."""
    if not isinstance(target, str | os.PathLike):
        target = getattr(target, "name", None)  # of an open file; a Path's is its last part
        if not isinstance(target, str | os.PathLike):
            return None
    return os.path.realpath(target)


def _observe_save(original, function, position, kind="save"):
    """kind: "dump" if it may be something else than a checkpoint, which only a load will show."""

    def save(*args, **kwargs):
        named = (kwargs[name] for name in ("f", "file", "filename") if name in kwargs)
        target = args[position] if len(args) > position else next(named, None)
        if isinstance(target, str | os.PathLike):
            _detach(os.path.abspath(target), is_emptied=True)  # C++ opens it
        path = _path(target)
        where = place()
        result = original(*args, **kwargs)
        others = [*args[:position], *args[position + 1 :], *kwargs.values()]
        thing = others[0] if others and function != "numpy" else others
        event = {
            "function": function,
            "place": where,
            "keys": _keys(thing),
            "counts": _counts(thing),
            "model": _holds_model(thing),
        }
        if path is not None and not path.startswith(_own):
            record(kind, path=path, **event)
        elif kind == "save" and isinstance(target, io.BytesIO) and where:
            global _buffered
            _buffered = event
        return result

    return save


def _keys(thing):
    return [str(key) for key in thing][:40] if isinstance(thing, dict) else [type(thing).__name__]


def _counts(thing):
    """{key: number} of the epochs or steps that a checkpoint says were made."""
    items = thing.items() if isinstance(thing, dict) else ()
    return {
        str(key): value
        for key, value in items
        if type(value) is int and re.search("epoch|step|iter", str(key))
    }


@guarded
def _holds_model(thing):
    """Whether there are tensors in it with the shapes of the parameters that are trained, or of one
    network of several, as in a checkpoint; False for predictions, statistics and the like; None if
    that cannot be told."""
    import torch

    if not STATE.parameters:
        return None
    leaves = list(_leaves(thing))
    if None in leaves:
        return None
    total = sum(p.numel() for p in STATE.parameters)
    sizes = [torch.Size(shape).numel() for shape in leaves]
    is_sharded = any(hasattr(p, "to_local") or id(p) in STATE.flat for p in STATE.parameters)
    if is_sharded and leaves:
        return None
    if total in sizes:
        return True
    networks = [[*model.parameters()] for model in STATE.models.objects]
    trained = [own for own in networks if len(own) > 1 and id(own[0]) in STATE.parameter_ids]
    return any(_found(own, leaves) >= 0.5 for own in [STATE.parameters, *trained])


def _found(parameters, shapes):
    """The share of these parameters whose shapes are among those of the tensors in a file."""
    counts = Counter(tuple(parameter.shape) for parameter in parameters)
    return (counts & Counter(shapes)).total() / counts.total()


def _leaves(thing):
    """The shapes of all tensors and arrays in a thing; None for what cannot be looked into."""
    import torch

    seen, pending = set(), [thing]
    while pending:
        part = pending.pop()
        if isinstance(part, bool | int | float | complex | str | bytes | os.PathLike | None):
            continue
        if id(part) in seen:
            continue
        seen.add(id(part))
        if len(seen) > MOST_PARTS:
            yield None
            return
        if isinstance(part, torch.Tensor) or type(part).__name__ == "ndarray":
            yield tuple(part.shape)
        elif isinstance(part, torch.nn.Module):
            yield from (tuple(p.shape) for p in part.parameters())
        elif isinstance(part, dict):
            pending += part.values()
        elif isinstance(part, list | tuple | set):
            pending += part
        elif hasattr(part, "__dict__") and not isinstance(part, type):
            pending += vars(part).values()
        elif not isinstance(part, torch.dtype | torch.device | type | range):
            yield None


def _before_torch_load(given):
    if PLAN["device"] == "mapped":
        given["map_location"] = "cpu"


def _before_safetensors_load(given):
    if PLAN["device"] == "mapped":
        given.pop("device", None)


def _path_of_load(given):
    """The path of what is loaded; None if it is no file, or one of the check itself."""
    path = _path(next(iter(given.values())))
    return None if path is None or path.startswith(_own) else path


def _after_load(given, result):
    path = _path_of_load(given)
    if path is not None:
        record("load", path=path, place=place(), counts=_counts(result))


def _load_failed(given, error):
    path = _path_of_load(given)
    if path is not None:
        lines = str(error).splitlines()  # weights_only has many
        line = next((line for line in lines if "Unpickler" in line), "".join(lines[:1]))
        text = f"{type(error).__name__}: {line.strip()}"[:300]
        record("load_failed", path=path, place=place(), error=text)


def _observe_distributed(original, kind):
    def run(*args, **kwargs):
        where = place()
        result = original(*args, **kwargs)
        path = kwargs.get("checkpoint_id", args[1] if len(args) > 1 else None)
        path = _path(path if path is not None else "distributed checkpoint")
        function = "torch.distributed.checkpoint"
        record(kind, path=path, function=function, place=where, keys=[], model=None)
        return result

    return run


def _write_buffered(path):
    """A file is opened. Records a save if a checkpoint was saved into bytes some lines before."""
    global _buffered
    file, line = place() or (None, 0)
    event, _buffered = _buffered, None
    if file == event["place"][0] and 0 <= line - event["place"][1] <= BYTES_WRITTEN:
        record("save", path=path, **event)


@guarded
def _audit(event, args):
    if event == "open":
        path, mode, flags = args
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
        if not isinstance(path, str | os.PathLike):
            return
        if not writes:
            _read(os.path.realpath(os.fspath(path)))
            return
        _detach(os.path.abspath(os.fspath(path)), flags & os.O_TRUNC)
        path = os.path.realpath(os.fspath(path))
        if path.startswith(("/dev/", "/proc/", "/sys/", *_own)):
            return
        if _buffered is not None:
            _write_buffered(path)
        if (path, mode) not in _seen:
            _seen.add((path, mode))
            where = place()
            if where is not None and _by_user():
                record("write", path=path, mode=mode, append=bool(flags & os.O_APPEND), place=where)
    elif event == "os.rename":
        record(
            "rename",
            source=os.path.realpath(os.fspath(args[0])),
            path=os.path.realpath(os.fspath(args[1])),
            by_user=_by_user(),
            place=place(),
        )


def _read(path):
    """The user's code opens a file for reading: one that this run has written?"""
    if (path, "r") in _seen or path.startswith(("/dev/", "/proc/", "/sys/", *_own)):
        return
    with contextlib.suppress(OSError):
        if os.stat(path).st_mtime >= _started - 1 and _by_user(4):
            _seen.add((path, "r"))
            record("read", path=path, place=place())


def _by_user(depth=3):
    """Whether the user's code opened a file itself, or with Python's own modules."""
    frame = sys._getframe(depth)
    while frame is not None:
        name = frame.f_code.co_filename
        if is_user_file(name):
            return True
        if "site-packages" in name or __file__.rpartition(os.sep)[0] in name:
            return False
        frame = frame.f_back
    return False


def _detach(link, is_emptied):
    """Large files of the script's folder are links: one that is written becomes a file, a copy
    unless it is emptied. Native code, which is not seen here, cannot write it."""
    if not link.startswith(ROOT + os.sep) or not os.path.islink(link):
        return
    original = os.path.realpath(link)
    if original.startswith(ROOT + os.sep) or not os.path.isfile(original):
        return  # a link of the user, to a file of the copy
    own = f"{link}.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):  # a different rank has done it
        if is_emptied:
            os.unlink(link)
        else:
            shutil.copy2(original, own)
            os.rename(own, link)
