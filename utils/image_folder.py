"""dataset=imagefolder: one folder of image files per class, such as data_dir/train/<class>/*.jpg.

Finds and decodes the files, keeps decoded images in a cache, leaves out files that cannot be
decoded, and splits off a validation set where there is none.
"""

import hashlib
import io
import json
import math
import os
import random
import uuid
import warnings
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset
from torchvision.io import ImageReadMode
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from utils.augment import CropFlip
from utils.config import ConfigError, free_setting, setting
from utils.distributed import available_cores, is_main_process
from utils.errors import UserError

try:
    from torchvision.io import decode_image
except ImportError:  # deprecated in torchvision 0.29: Pillow reads everything, at half the speed
    decode_image = None

FOLDERS = {
    "train": ("train", "trainset"),
    "val": ("val", "valset", "test", "testset"),  # the test split if there is no other
    "test": ("test", "testset"),
    "all": ("train", "trainset", ""),  # for val_fraction; data_dir itself may hold the classes
}
EXTENSIONS = (*IMG_EXTENSIONS, ".gif")
JPEG, PNG = b"\xff\xd8\xff", b"\x89PNG"
IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}  # of pixels in [0, 1]


@dataclass(frozen=True)
class Settings:
    """What dataset=imagefolder adds to the Config."""

    val_fraction: float = setting(
        0.0, "fraction of each class to validate with if there is no val folder"
    )
    on_bad_sample: str = setting(
        "error",
        "images that cannot be decoded; skip: check all files first and leave bad ones out",
        choices=("error", "skip"),
    )
    cache_dir: str = free_setting(
        "", "for decoded images and lists of bad files; empty: data_dir/.cache"
    )

    @property
    def cache_folder(self):
        """Where decoded images and lists of bad files are kept."""
        return Path(self.cache_dir or Path(self.data_dir) / ".cache")

    def resolved(self):
        """The config, checked. Raises ConfigError if values contradict."""
        if self.augment == "resized_crop" and self.loader == "device":
            raise ConfigError("augment=resized_crop crops the original images: use loader=workers")
        if self.val_fraction >= 1:
            raise ConfigError(f"val_fraction={self.val_fraction} leaves nothing to train on")
        return super().resolved()


class BadImageError(UserError):
    """A file that cannot be decoded. Attributes: path (str) and reason (str)."""

    def __init__(self, path, reason):
        super().__init__(str(path), reason)  # both, so that a worker process can pickle it
        self.path, self.reason = self.args

    def __str__(self):
        return (
            f"{readable(self.path)} cannot be decoded ({self.reason}): fix or remove the file, "
            f"or pass --on-bad-sample skip to leave such files out"
        )


class Files(NamedTuple):
    """The image files of a split: paths[i] is an image of classes[labels[i]]."""

    folder: Path
    classes: list
    paths: list
    labels: list

    def select(self, keep):
        """The files for which `keep`, a list of bools, is true."""
        kept = [i for i, take in enumerate(keep) if take]
        return self._replace(
            paths=[self.paths[i] for i in kept], labels=[self.labels[i] for i in kept]
        )

    def empty_classes(self):
        """The folders of the classes without files, as one string."""
        used = set(self.labels)
        names = (name for label, name in enumerate(self.classes) if label not in used)
        return ", ".join(str(self.folder / name) for name in names)


def build(cfg):
    """The training set, the validation set and the names of their classes.

    cfg: a Config with this module's Settings; with --weights, images are prepared as those expect.
    Call it in main_process_first(): with on_bad_sample=skip, one process per node reads all files.
    Raises UserError if a split or a class has no images, or if the splits' classes differ.
    """
    names = ("all",) if cfg.val_fraction else ("train", "val")
    splits = [find_images(cfg.data_dir, name) for name in names]
    for one, other in permutations(splits, 2):
        if only := sorted(set(one.classes) - set(other.classes)):
            raise UserError(
                f"{one.folder} has classes that {other.folder} lacks: {', '.join(only)}"
            )
    if cfg.on_bad_sample == "skip":
        splits = _without_bad(splits, cfg.cache_folder)
    chosen = None
    if cfg.val_fraction:
        splits = split_images(splits[0], cfg, _saved_data(cfg))
        val_files = sorted(_relative(splits[1], cfg.data_dir))
        chosen = {"val_fraction": cfg.val_fraction, "seed": cfg.seed, "val_files": val_files}
    train, val = splits
    # The standard test crop is the middle of an image that is 256 / 224 times as large.
    resize = cfg.image_size * 8 // 7 if cfg.augment == "resized_crop" else cfg.image_size
    inputs = getattr(cfg, "weights_inputs", {})
    if inputs.get("image_size") == cfg.image_size:
        resize = inputs.get("resize", resize)
    preprocessing = {"interpolation": "bilinear", **IMAGENET, **inputs}
    preprocessing |= {"image_size": cfg.image_size, "resize": resize}
    options = {"preprocessing": preprocessing, "seed": cfg.seed, "cache": cfg.cache_folder}
    train_set = FolderDataset(train.paths, train.labels, augment=cfg.augment, **options)
    val_set = FolderDataset(val.paths, val.labels, split=chosen, **options)
    return train_set, val_set, train.classes


class FolderDataset(Dataset):
    """Image files, decoded when they are read.

    paths, labels: lists of length n. preprocessing: {"image_size", "resize", "interpolation",
    "mean", "std"}: the shorter side is resized to `resize` pixels and a square of image_size pixels
    cropped from the middle; mean and std are for the normalization. augment: "none", "crop_flip"
    or "resized_crop". cache: the folder for as_array(). split: how a validation set was chosen, for
    the checkpoint: {"val_fraction", "seed", "val_files"}, paths relative to data_dir.
    """

    def __init__(self, paths, labels, preprocessing, augment="none", seed=0, cache="", split=None):
        self.paths, self.labels = paths, torch.tensor(labels, dtype=torch.int64)
        self.preprocessing = preprocessing
        self.size, self.resize = preprocessing["image_size"], preprocessing["resize"]
        self.interpolation = InterpolationMode(preprocessing["interpolation"])
        self.mean, self.std = preprocessing["mean"], preprocessing["std"]
        self.augment, self.seed, self.cache, self.split = augment, seed, cache, split or {}
        self.crop_flip = CropFlip(len(paths), seed)

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        """(uint8 image (3, size, size), label), not augmented. Raises BadImageError."""
        return self._resize(decode(self.paths[index])), int(self.labels[index])

    def get_batch(self, indices, epoch):
        """Augmented images, which depend on nothing but (seed, epoch, index), and their labels.

        indices: int64 (n,). Returns uint8 (n, 3, size, size), channels_last, and int64 (n,).
        """
        if self.augment == "resized_crop":
            images = torch.stack([self._resized_crop(i, epoch) for i in indices.tolist()])
        else:
            images = self._stack(indices.tolist())
        if self.augment == "crop_flip":
            images = self.crop_flip(images, indices, epoch)
        return images.contiguous(memory_format=torch.channels_last), self.labels[indices]

    def as_array(self):
        """The set as an ArrayDataset, mapped from a file in the cache: later processes and runs
        share it. None without a cache, and for augment="resized_crop", which crops the originals.

        The first call decodes all images. Raises BadImageError, and UserError if the cache folder
        cannot be written.
        """
        if self.augment == "resized_crop" or not self.cache:
            return None
        shape = (len(self), self.size, self.size, 3)
        key = _fingerprint(self.paths, self.size, self.resize, self.interpolation.value)
        path = Path(self.cache) / f"decoded-{key}.u8"
        if not path.exists() or path.stat().st_size != math.prod(shape):
            images, done = torch.empty(shape, dtype=torch.uint8), 0
            for chunk in _in_parallel(self._stack, range(len(self))):
                images[done : done + len(chunk)] = chunk.permute(0, 2, 3, 1)
                done += len(chunk)
            _write(path, images.numpy())
        pixels = torch.from_file(str(path), size=math.prod(shape), dtype=torch.uint8)
        images = pixels.view(shape).permute(0, 3, 1, 2)
        from utils.array_data import ArrayDataset

        options = {"size": self.size, "augment": self.augment, "seed": self.seed}
        return ArrayDataset(images, self.labels, self.mean, self.std, **options)

    def _stack(self, indices):
        return torch.stack([self[index][0] for index in indices])

    def _resize(self, image):
        shape = image.shape[1:]
        if shape == (self.size, self.size) and self.resize == self.size:
            return image
        longest = 16 * min(shape)
        if max(shape) > longest:  # a 1-pixel line, resized as a whole, would take gigabytes
            image = F.center_crop(image, [min(side, longest) for side in shape])
        image = F.resize(image, [self.resize], self.interpolation)
        return F.center_crop(image, [self.size])

    def _resized_crop(self, index, epoch):
        image, draws = decode(self.paths[index]), random.Random(hash((self.seed, epoch, index)))
        box = random_box(*image.shape[1:], draws)
        image = F.resized_crop(image, *box, [self.size, self.size], self.interpolation)
        return F.horizontal_flip(image) if draws.random() < 0.5 else image


def random_box(height, width, draws):
    """(top, left, height, width) of a crop by the rule of torchvision's RandomResizedCrop, which
    takes a tenth of the time of decoding: 8 to 100 % of the area, an aspect ratio of 3/4 to 4/3.

    draws: a random.Random. (Szegedy et al. 2015, arXiv 1409.4842)
    """
    for _ in range(10):
        area = height * width * draws.uniform(0.08, 1)
        ratio = math.exp(draws.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return draws.randint(0, height - h), draws.randint(0, width - w), h, w
    # A very long image: its middle, with the aspect ratio limited to the range.
    w, h = min(width, max(1, height * 4 // 3)), min(height, max(1, width * 4 // 3))
    return (height - h) // 2, (width - w) // 2, h, w


# Finding files


def find_images(data_dir, split):
    """The image files of a split (a key of FOLDERS), as Files in sorted order.

    Hidden files and folders are ignored. Raises UserError if the split does not exist or a class
    has no images.
    """
    folders = [Path(data_dir) / name for name in FOLDERS[split]]
    folder = next((folder for folder in folders if folder.is_dir()), None)
    if folder is None:
        raise UserError(
            f"no {split} images: none of {', '.join(map(str, folders))} is a folder. "
            f"Put one folder of images per class there, or pass another --data-dir"
        )
    others = FOLDERS["test"] if folder == Path(data_dir) else ()
    names = (entry.name for entry in os.scandir(folder) if entry.is_dir())
    classes = sorted(name for name in names if name[0] != "." and name not in others)
    if not classes:
        raise UserError(f"{folder} has no class folders (expected {folder}/<class>/*.jpg)")
    samples = make_dataset(
        folder,
        {name: label for label, name in enumerate(classes)},
        is_valid_file=lambda path: is_image(Path(path).relative_to(folder)),
        allow_empty=True,
    )
    paths, labels = [path for path, _ in samples], [label for _, label in samples]
    real = {}
    for name in sorted({os.path.dirname(path) for path in paths}):
        if (other := real.setdefault(os.path.realpath(name), name)) != name:
            raise UserError(
                f"{name} is the same folder as {other}, whose images would count twice: remove the "
                f"symbolic link"
            )
    files = Files(folder, classes, paths, labels)
    if empty := files.empty_classes():
        raise UserError(f"no images in {empty} (expected files {', '.join(EXTENSIONS)})")
    return files


def is_image(path):
    """Whether the name is that of an image. path: a Path relative to the folder that was searched;
    files in hidden folders do not count."""
    return path.suffix.lower() in EXTENSIONS and not any(part[0] == "." for part in path.parts)


def readable(text):
    """`text` in printable form: file names need not be valid Unicode."""
    return os.fsencode(text).decode(errors="replace")


def has_validation_images(data_dir):
    """Whether data_dir has a folder of validation images, so that val_fraction is not needed."""
    return any((Path(data_dir) / name).is_dir() for name in ("val", "valset"))


# Splitting off a validation set


def split_images(files, cfg, saved=None):
    """All Files -> the Files to train with, the Files to validate with.

    Takes cfg.val_fraction of each class, at least one image, ordered by a hash of file name and
    cfg.seed. saved: the "data" of the checkpoint that the run resumes from; its choice is kept if
    it was made with the same settings, and files that were added since are for training.
    Raises UserError if a class has a single image or a file of the saved choice is missing.
    """
    if has_validation_images(cfg.data_dir):
        raise UserError(f"{cfg.data_dir} already has validation images: pass --val-fraction 0")
    names, current = _relative(files, cfg.data_dir), (cfg.val_fraction, cfg.seed)
    if saved and (saved.get("val_fraction"), saved.get("seed")) == current:
        chosen = set(saved["val_files"])
    else:
        chosen = _choose(files, names, cfg)
    if missing := sorted(chosen.difference(names)):
        raise UserError(
            f"{readable(str(Path(cfg.data_dir) / missing[0]))} is missing or cannot be decoded, "
            f"one of {len(missing)} such files that the run in {cfg.output_dir} validates with: "
            f"restore it, or pass --resume never to start over with another choice"
        )
    train, val = (files.select([(name in chosen) == is_val for name in names]) for is_val in (0, 1))
    if empty := train.empty_classes():
        raise UserError(f"no images are left to train with in {empty}: add some")
    return train, val


def _choose(files, names, cfg):
    by_class = [[] for _ in files.classes]
    for name, label in zip(names, files.labels, strict=True):
        digest = hashlib.sha256(os.fsencode(f"{cfg.seed}/{name}")).digest()
        by_class[label].append((digest, name))
    chosen = set()
    for class_name, members in zip(files.classes, by_class, strict=True):
        if len(members) == 1:
            raise UserError(
                f"{files.folder / class_name} has a single image, but training and validation need "
                f"one each: add images, or remove the class"
            )
        count = min(max(1, round(cfg.val_fraction * len(members))), len(members) - 1)
        chosen.update(name for _, name in sorted(members)[:count])
    return chosen


def _relative(files, data_dir):
    return [os.path.relpath(path, data_dir) for path in files.paths]


def _saved_data(cfg):
    """The "data" of the newest readable checkpoint of the run that is to be resumed, or None."""
    paths = Path(cfg.output_dir).glob("*.pt") if cfg.resume != "never" else ()
    for path in sorted(paths, key=os.path.getmtime, reverse=True):
        with suppress(Exception):  # damaged: Checkpointer.load() will resume from an older one, too
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)["data"]
    return None


# Decoding


def decode(path):
    """An image file as uint8 (3, height, width), upright and in color. Raises BadImageError.

    Reads the first frame of an animation, ignores transparency, and keeps the upper 8 of 16 bits.
    """
    try:
        data = Path(path).read_bytes()
        return _decode_with_torchvision(data) if decode_image else _decode_with_pillow(data)
    except MemoryError:
        raise
    except PermissionError as error:  # the file may be fine
        raise UserError(f"cannot read {readable(path)}: {error.strerror}") from None
    except Exception as error:  # Pillow's parsers raise all kinds of exceptions for broken files
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if isinstance(error, UnidentifiedImageError):
            reason = "not an image in any known format"
        raise BadImageError(path, reason) from None


def _decode_with_torchvision(data):
    if not data.startswith((JPEG, PNG)):
        return _decode_with_pillow(data)  # torchvision ignores the rotation of a WebP
    if data.startswith(PNG) or len(data) > 4_000_000:
        _open(data).close()  # refuses decompression bombs
    try:
        pixels = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        image = decode_image(pixels, ImageReadMode.RGB, apply_exif_orientation=True)
        return F.to_dtype(image, torch.uint8, scale=True)  # a PNG may have 16 bits
    except RuntimeError:  # broken, or a variant unknown to torchvision: Pillow decides
        return _decode_with_pillow(data)


def _open(data):
    with warnings.catch_warnings():  # Pillow warns from 89 million pixels, refuses from 179 million
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        return Image.open(io.BytesIO(data))


def _decode_with_pillow(data):
    with _open(data) as image:
        image = ImageOps.exif_transpose(image)
        if image.mode == "F":
            raise ValueError("floating-point pixels, whose range is unknown")
        if image.mode.startswith("I"):  # 16 bits, which convert() would clip at 255
            gray = F.pil_to_tensor(image.convert("I")).clamp(0, 65535) // 256
            return gray.to(torch.uint8).expand(3, -1, -1).contiguous()
        return F.pil_to_tensor(image.convert("RGB"))


# Reading every file, with the result kept in the cache


def bad_files(paths, cache):
    """The set of those `paths` that cannot be decoded; the main process prints them.

    Reads every file once and keeps the list in the folder `cache` until a file changes.
    """
    listed = Path(cache) / f"bad-{_fingerprint(paths)}.json"
    if not listed.exists():
        bad = [path for chunk in _in_parallel(_undecodable, paths) for path in chunk]
        _write(listed, json.dumps(bad).encode())
    bad = json.loads(listed.read_text())
    if bad and is_main_process():
        names = readable(", ".join(sorted(bad)))
        print(f"skipping {len(bad)} of {len(paths)} files, which cannot be decoded: {names}")
    return set(bad)


def _undecodable(paths):
    bad = []
    for path in paths:
        try:
            decode(path)
        except BadImageError:
            bad.append(path)
    return bad


def _without_bad(splits, cache):
    bad = bad_files([path for files in splits for path in files.paths], cache)
    splits = [files.select([path not in bad for path in files.paths]) for files in splits]
    if empty := ", ".join(filter(None, (files.empty_classes() for files in splits))):
        raise UserError(f"none of the images in {empty} can be decoded")
    return splits


def _in_parallel(function, items):
    """Yield function(chunk) for each chunk of `items`, in order, from one worker process per core.

    Processes, because threads would wait for the interpreter lock with small images.
    """
    chunks = [items[start : start + 256] for start in range(0, len(items), 256)]
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


def _write(path, data):
    """Write atomically: no later run may find a partial file."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")  # nodes may share the folder
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise UserError(
            f"cannot write {path}: {error.strerror}; pass --cache-dir with a writable folder"
        ) from None
