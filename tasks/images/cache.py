"""What takes long to compute from image files, kept in a folder: decoded images, and bad files."""

import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tasks.images.decode import BadImageError, decode, readable
from utils.cache_file import write_atomically
from utils.distributed import available_cores, is_main_process
from utils.errors import UserError, say


def cache_folder(cfg: Any) -> Path:
    """The folder of decoded images, lists of bad files, and indices of shards."""
    return Path(cfg.cache_dir or Path(cfg.data_dir) / ".cache")


def decoded_images(dataset: Any, cache: str | Path) -> Tensor:
    """The images of a dataset as uint8 (n, 3, size, size), mapped from a file in the folder `cache`
    that later processes and runs share. The first call decodes all images.

    dataset: a FolderDataset. Raises BadImageError, and UserError if the folder cannot be written.
    """
    shape = (len(dataset), dataset.size, dataset.size, 3)
    facts = dataset.size, dataset.resize, dataset.interpolation.value
    path = Path(cache) / f"decoded-{_fingerprint(dataset.paths, *facts)}.u8"
    if not path.exists() or path.stat().st_size != math.prod(shape):
        images, done = torch.empty(shape, dtype=torch.uint8), 0
        for chunk in in_parallel(dataset.stack, range(len(dataset))):
            images[done : done + len(chunk)] = chunk.permute(0, 2, 3, 1)
            done += len(chunk)
        keep(path, images.numpy())
    pixels = torch.from_file(str(path), size=math.prod(shape), dtype=torch.uint8)
    return pixels.view(shape).permute(0, 3, 1, 2)


def is_writable(cache: str | Path) -> bool:
    """Whether the folder `cache` can be written, or created."""
    cache = Path(cache).absolute()
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    return os.access(existing, os.W_OK)


def bad_files(paths: Sequence[str], cache: str | Path) -> set[str]:
    """The `paths` that cannot be decoded; the main process prints them.

    Reads every file once and keeps the list in the folder `cache` until a file changes.
    """
    listed = Path(cache) / f"bad-{_fingerprint(paths)}.json"
    bad = kept_list(listed, partial(in_parallel, _undecodable, paths))
    if bad and is_main_process():
        names = readable(", ".join(sorted(bad)))
        text = f"skipping {len(bad)} of {len(paths)} files, which cannot be decoded: {names}"
        say(text, sys.stderr)  # which can encode any name, and is not part of --json
    return set(bad)


def _undecodable(paths):
    bad = []
    for path in paths:
        try:
            decode(path)
        except BadImageError:
            bad.append(path)
    return bad


def without_bad(splits: Iterable[Any], cache: str | Path) -> list[Any]:
    bad = bad_files([path for files in splits for path in files.paths], cache)
    splits = [files.select([path not in bad for path in files.paths]) for files in splits]
    if empty := ", ".join(filter(None, (files.empty_classes() for files in splits))):
        raise UserError(f"none of the images in {empty} can be decoded")
    return splits


def in_parallel(function: Callable[[Any], Any], items: Any) -> Iterator[Any]:
    """Yield function(chunk) for each chunk of `items`, in order, from one worker process per core.

    Processes, because threads would wait for the interpreter lock with small images.
    """
    chunks: Any = [items[start : start + 256] for start in range(0, len(items), 256)]
    loader = DataLoader(
        chunks,
        batch_size=None,
        collate_fn=partial(_result_or_error, function),  # runs in the worker
        num_workers=available_cores() if len(chunks) > 4 else 0,
        generator=torch.Generator(),  # leaves the global random state alone
    )
    for result in loader:
        if isinstance(result, UserError):
            raise result
        yield result


def _result_or_error(function, chunk):
    try:
        return function(chunk)
    except UserError as error:  # DataLoader would put the worker's traceback into its message
        return error


def _fingerprint(paths, *facts):
    """A hash that changes when a file is added, removed, renamed or rewritten."""
    digest = hashlib.sha256(repr(facts).encode())
    for path in paths:
        size = modified = 0
        with suppress(OSError):  # a dangling link, which decode() will report
            stat = os.stat(path)
            size, modified = stat.st_size, stat.st_mtime_ns
        digest.update(os.fsencode(f"{os.path.abspath(path)}\0{size}\0{modified}\n"))
    return digest.hexdigest()[:16]


def kept_list(path: Path, find_all: Callable[[], Iterable[list[Any]]]) -> list[Any]:
    """What a file of the cache lists; if there is none, or it is damaged, the chunks of find_all(),
    joined, which it then lists."""
    with suppress(OSError, ValueError):
        return json.loads(path.read_bytes())
    found = [each for chunk in find_all() for each in chunk]
    keep(path, json.dumps(found).encode())
    return found


def keep(path: Path, data: Any) -> None:
    """Write a file of the cache. Raises UserError if that fails."""
    write_atomically(path, lambda file: file.write(data), "pass --cache-dir with a writable folder")
