"""Folders of image files: find them, decode them, keep them decoded.

A folder holds one folder per class in each split: data_dir/train/<class>/*.jpg and so on.
"""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms.v2 import functional as F

from utils.distributed import UserError, available_cores

SPLITS = {
    "train": ("train", "trainset"),
    "val": ("val", "valset", "test", "testset"),  # the test split where there is no other
}


class Files(NamedTuple):
    """What a split consists of: paths[i] shows classes[labels[i]]."""

    folder: Path
    classes: list
    paths: list
    labels: list


def find_images(data_dir, split):
    """The image files of a split ("train" or "val") -> Files, sorted, alike on every rank.

    Hidden files and folders are passed over. Raises UserError for a split that is not there and
    for a class without images.
    """
    names = [Path(data_dir) / name for name in SPLITS[split]]
    folder = next((name for name in names if name.is_dir()), None)
    if folder is None:
        raise UserError(
            f"no {split} images: none of {', '.join(map(str, names))} is a folder. "
            f"Each class is a folder of images in there; pass --data-dir"
        )
    classes = sorted(e.name for e in os.scandir(folder) if e.is_dir() and e.name[0] != ".")
    if not classes:
        raise UserError(f"{folder} holds no class folders (expected {folder}/<class>/*.jpg)")
    samples = make_dataset(
        folder,
        {name: label for label, name in enumerate(classes)},
        is_valid_file=_is_image,
        allow_empty=True,
    )
    paths, labels = [path for path, _ in samples], [label for _, label in samples]
    empty = [name for label, name in enumerate(classes) if label not in set(labels)]
    if empty:
        raise UserError(f"no images in {folder / empty[0]} ({', '.join(IMG_EXTENSIONS)})")
    return Files(folder, classes, paths, labels)


def _is_image(path):
    path = Path(path)
    return path.name[0] != "." and path.suffix.lower() in IMG_EXTENSIONS


def check_classes(train, val):
    """Raise UserError unless both splits hold the same classes: a missing one shifts the labels."""
    if train.classes != val.classes:
        only = {
            train.folder: sorted(set(train.classes) - set(val.classes)),
            val.folder: sorted(set(val.classes) - set(train.classes)),
        }
        lists = [f"only {folder} has {', '.join(names)}" for folder, names in only.items() if names]
        raise UserError(f"the classes of the splits differ: {'; '.join(lists)}")


def decode(path):
    """An image file, upright and in colour: uint8 (3, height, width). UserError names a bad one."""
    try:
        data = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)
        try:
            image = decode_image(data, ImageReadMode.RGB, apply_exif_orientation=True)
            return F.to_dtype(image, torch.uint8, scale=True)  # a PNG may hold 16 bits
        except RuntimeError:  # not one of torchvision's formats, or broken: Pillow decides
            with Image.open(path) as image:
                return F.pil_to_tensor(ImageOps.exif_transpose(image).convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(
            f"{path} cannot be decoded ({error}): mend or remove it, "
            f"or pass --on-bad-sample skip to leave such files out"
        ) from None


class _Chunks(Dataset):
    """function(items[a:b]) by number, or the UserError it raised: an exception that crosses from
    a DataLoader worker would come out with the worker's traceback in its message."""

    def __init__(self, function, items, length=256):
        self.function, self.items, self.length = function, items, length

    def __len__(self):
        return -(-len(self.items) // self.length)

    def __getitem__(self, i):
        try:
            return self.function(self.items[i * self.length : (i + 1) * self.length])
        except UserError as error:
            return error


def _in_parallel(function, items):
    """function(chunk) of each chunk of `items`, in order, from one worker process a core.

    Processes, because threads would wait for each other's interpreter lock on small images.
    """
    chunks = _Chunks(function, items)
    workers = available_cores() if len(chunks) > 4 else 0
    # A generator of its own, to leave the global random numbers alone.
    return DataLoader(chunks, None, num_workers=workers, generator=torch.Generator())


def find_bad(paths, cache):
    """Those of `paths` that cannot be decoded. Reads every file once; the list stays in `cache`."""
    kept = Path(cache) / f"bad-{_fingerprint(paths)}.json"
    if not kept.exists():
        bad = [path for chunk in _in_parallel(_bad_ones, paths) for path in chunk]
        _write(kept, json.dumps(bad).encode())
    return json.loads(kept.read_text())


def _bad_ones(paths):
    bad = []
    for path in paths:
        try:
            decode(path)
        except UserError:
            bad.append(path)
    return bad


def decoded(dataset, cache):
    """All images of a FolderSet: uint8 (n, 3, size, size), mapped from a file in `cache`.

    Decoded by the process that finds no such file; the node's other processes map the same
    memory, and the next start finds it.
    """
    shape = (len(dataset), 3, dataset.size, dataset.size)
    kept = Path(cache) / f"decoded-{_fingerprint(dataset.paths, dataset.size, dataset.resize)}.u8"
    if not kept.exists():
        images, done = torch.empty(shape, dtype=torch.uint8), 0
        for chunk in _in_parallel(dataset.stack, range(len(dataset))):
            if isinstance(chunk, UserError):
                raise chunk
            images[done : done + len(chunk)] = chunk
            done += len(chunk)
        _write(kept, images.numpy())
    return torch.from_file(str(kept), size=dataset.nbytes(), dtype=torch.uint8).view(shape)


def cache_folder(cfg):
    return Path(cfg.cache_dir or Path(cfg.data_dir) / ".cache")


def _fingerprint(paths, *facts):
    """Changes when a file is added, removed, renamed or written."""
    digest = hashlib.sha256(repr(facts).encode())
    for path in paths:
        stat = os.stat(path)
        digest.update(f"{os.path.abspath(path)}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _write(path, data):
    """Whole or not at all, so that no later start finds half a file."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise UserError(
            f"cannot write {path}: {error.strerror}; pass --cache-dir, or --loader workers"
        ) from None
