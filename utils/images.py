"""Folders of image files: find them, decode them, keep them decoded.

A folder holds one folder per class in each split: data_dir/train/<class>/*.jpg and so on.
"""

import hashlib
import io
import json
import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset
from torchvision.io import ImageReadMode
from torchvision.transforms.v2 import functional as F

from utils.distributed import UserError, available_cores

try:
    from torchvision.io import decode_image
except ImportError:  # deprecated in torchvision 0.29: Pillow reads everything, at half the speed
    decode_image = None

SPLITS = {
    "train": ("train", "trainset"),
    "val": ("val", "valset", "test", "testset"),  # the test split where there is no other
    "test": ("test", "testset"),
    "all": ("train", "trainset", ""),  # to be split: the class folders may lie in data_dir itself
}
EXTENSIONS = (*IMG_EXTENSIONS, ".gif")
JPEG, PNG = b"\xff\xd8\xff", b"\x89PNG"


class Files(NamedTuple):
    """What a split consists of: paths[i] shows classes[labels[i]]."""

    folder: Path
    classes: list
    paths: list
    labels: list


def find_images(data_dir, split):
    """The image files of a split (a key of SPLITS) -> Files, sorted, alike on every rank.

    Hidden files and folders are passed over. Raises UserError for a split that is not there and
    for classes without images.
    """
    names = [Path(data_dir) / name for name in SPLITS[split]]
    folder = next((name for name in names if name.is_dir()), None)
    if folder is None:
        raise UserError(
            f"no {split} images: none of {', '.join(map(str, names))} is a folder. "
            f"Each class is a folder of images in there; pass --data-dir"
        )
    others = SPLITS["test"] if folder == Path(data_dir) else ()
    found = (entry.name for entry in os.scandir(folder) if entry.is_dir())
    classes = sorted(name for name in found if name[0] != "." and name not in others)
    if not classes:
        raise UserError(f"{folder} holds no class folders (expected {folder}/<class>/*.jpg)")
    samples = make_dataset(
        folder,
        {name: label for label, name in enumerate(classes)},
        is_valid_file=lambda path: is_image(Path(path).relative_to(folder)),
        allow_empty=True,
    )
    paths, labels = [path for path, _ in samples], [label for _, label in samples]
    used = set(labels)
    empty = [str(folder / name) for label, name in enumerate(classes) if label not in used]
    if empty:
        raise UserError(f"no images in {', '.join(empty)} ({', '.join(EXTENSIONS)})")
    return Files(folder, classes, paths, labels)


def is_image(path):
    """By its name; path: a Path below the folder that was asked for. Nothing hidden is one."""
    return path.suffix.lower() in EXTENSIONS and not any(part[0] == "." for part in path.parts)


def readable(text):
    """`text`, in which file names that are not Unicode can be printed."""
    return os.fsencode(text).decode(errors="replace")


def choose(files, wanted):
    """Those of the Files whose `wanted`, a bool each, is true. UserError where a class has none."""
    kept = [i for i, take in enumerate(wanted) if take]
    paths, labels = ([values[i] for i in kept] for values in (files.paths, files.labels))
    left = set(labels)
    for label, name in enumerate(files.classes):
        if label not in left:
            raise UserError(f"none of the images of {files.folder / name} can be decoded")
    return files._replace(paths=paths, labels=labels)


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
    """An image file, upright and in colour: uint8 (3, height, width). UserError names a bad one.

    Of an animation the first frame; of an image with transparency the colours below it; 16-bit
    pixels by their upper half.
    """
    try:
        data = Path(path).read_bytes()
        return _by_torchvision(data) if decode_image else _by_pillow(data)
    except MemoryError:
        raise
    except Exception as error:  # broken files make Pillow raise whatever its parsers come across
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if isinstance(error, UnidentifiedImageError):
            reason = "not an image in any known format"
        raise UserError(
            f"{readable(str(path))} cannot be decoded ({reason}): mend or remove it, "
            f"or pass --on-bad-sample skip to leave such files out"
        ) from None


def _by_torchvision(data):
    if not data.startswith((JPEG, PNG)):
        return _by_pillow(data)  # torchvision would overlook how a WebP is rotated
    if data.startswith(PNG) or len(data) > 4_000_000:
        _open(data).close()  # refuses what would fill the memory
    try:
        pixels = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        image = decode_image(pixels, ImageReadMode.RGB, apply_exif_orientation=True)
        return F.to_dtype(image, torch.uint8, scale=True)  # a PNG may hold 16 bits
    except RuntimeError:  # broken, or a variant that torchvision does not know: Pillow decides
        return _by_pillow(data)


def _open(data):
    with warnings.catch_warnings():  # of images between 89 and 179 million pixels
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        return Image.open(io.BytesIO(data))


def _by_pillow(data):
    with _open(data) as image:
        image = ImageOps.exif_transpose(image)
        if image.mode == "F":
            raise ValueError("floating-point pixels, whose range is unknown")
        if image.mode.startswith("I"):  # 16 bits, which convert() would clip at 255
            grey = torch.tensor(numpy.asarray(image).astype("int32")).clamp(0, 65535) // 256
            return grey.to(torch.uint8).expand(3, -1, -1).contiguous()
        return F.pil_to_tensor(image.convert("RGB"))


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
    """All images of a FolderSet: uint8 (n, 3, size, size), channels_last, mapped from a file in
    `cache`.

    Decoded by the process that finds no such file; the node's other processes map the same
    memory, and the next start finds it.
    """
    shape = (len(dataset), dataset.size, dataset.size, 3)
    how = "channels_last", dataset.size, dataset.resize, dataset.interpolation
    kept = Path(cache) / f"decoded-{_fingerprint(dataset.paths, *how)}.u8"
    if not kept.exists():
        images, done = torch.empty(shape, dtype=torch.uint8), 0
        for chunk in _in_parallel(dataset.stack, range(len(dataset))):
            if isinstance(chunk, UserError):
                raise chunk
            images[done : done + len(chunk)] = chunk.permute(0, 2, 3, 1)
            done += len(chunk)
        _write(kept, images.numpy())
    pixels = torch.from_file(str(kept), size=dataset.nbytes(), dtype=torch.uint8)
    return pixels.view(shape).permute(0, 3, 1, 2)


def cache_folder(cfg):
    return Path(cfg.cache_dir or Path(cfg.data_dir) / ".cache")


def _fingerprint(paths, *facts):
    """Changes when a file is added, removed, renamed or written."""
    digest = hashlib.sha256(repr(facts).encode())
    for path in paths:
        size = changed = 0
        with suppress(OSError):  # a link to nowhere, which decode() will name
            stat = os.stat(path)
            size, changed = stat.st_size, stat.st_mtime_ns
        digest.update(os.fsencode(f"{os.path.abspath(path)}\0{size}\0{changed}\n"))
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
