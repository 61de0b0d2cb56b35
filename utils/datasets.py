"""Data sets by name. Each gives uint8 images of one size, their labels, and what they are called.

A set is a map-style torch Dataset: `dataset[i]` is (uint8 tensor (3, size, size), label).
"""

import torch
import torchvision
from torch.utils.data import Dataset
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from utils.augment import random_bits
from utils.distributed import UserError, get_local_rank, is_main_process, main_process_first
from utils.images import (
    cache_folder,
    check_classes,
    choose,
    decode,
    decoded,
    find_bad,
    find_images,
    readable,
)
from utils.split import split_images
from utils.weights import find_weights

# Mean and standard deviation of the pixels, in [0, 1], a number a channel.
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CIFAR10 = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
NEUTRAL = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)


def build_datasets(cfg):
    """The training and the validation set that the config names, as cfg.weights expect them."""
    build = {"cifar10": _cifar10, "imagefolder": _imagefolder, "synthetic": _synthetic}
    inputs = find_weights(cfg.model, cfg.weights).inputs
    with main_process_first():  # one download a node; the others find it done
        return build[cfg.dataset](cfg, inputs)


class ImageSet(Dataset):
    """Images by number; the subclasses say where they come from.

    classes: names, in the order of the labels; labels: int64 (n,); mean_std: see IMAGENET; size:
    pixels of the square that comes out; resize: pixels of the shorter side before that square is
    cut from the middle (default: size), by bilinear or bicubic interpolation.
    """

    def __init__(self, classes, labels, mean_std, size, resize=None, interpolation="bilinear"):
        self.classes, self.labels = list(classes), torch.as_tensor(labels)
        self.mean, self.std = mean_std
        self.size, self.resize, self.interpolation = size, resize or size, interpolation

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.image(index), int(self.labels[index])

    def load(self, index):
        """The image as it is stored: uint8 (3, height, width)."""
        raise NotImplementedError

    def image(self, index):
        """The image at the set's size: uint8 (3, size, size)."""
        image = self.load(index)
        if image.shape[1:] == (self.size, self.size) and self.resize == self.size:
            return image
        longest = 16 * min(image.shape[1:])
        if max(image.shape[1:]) > longest:  # a line of pixels, resized whole, would be gigabytes
            image = F.center_crop(image, [min(side, longest) for side in image.shape[1:]])
        image = F.resize(image, [self.resize], InterpolationMode(self.interpolation))
        return F.center_crop(image, [self.size])

    def stack(self, indices):
        """uint8 (len(indices), 3, size, size)."""
        return torch.stack([self.image(int(index)) for index in indices])

    def nbytes(self):
        """Memory of all images at the set's size, in bytes."""
        return len(self) * 3 * self.size**2

    def resident(self, cache):
        """All images: uint8 (n, 3, size, size), channels_last."""
        chunks = torch.arange(len(self)).split(1024)  # bounds what making them takes meanwhile
        images = [
            self.stack(chunk).contiguous(memory_format=torch.channels_last) for chunk in chunks
        ]
        return torch.cat(images)

    def meta(self):
        """What a prediction has to know of the training set, in plain values."""
        return {
            "classes": self.classes,
            "image_size": self.size,
            "resize": self.resize,
            "interpolation": self.interpolation,
            "mean": list(self.mean),
            "std": list(self.std),
        }


class ArraySet(ImageSet):
    """Images that lie in memory: uint8 (n, 3, height, width)."""

    def __init__(self, images, *args):
        super().__init__(*args)
        self.images = images

    def load(self, index):
        return self.images[index]

    def stack(self, indices):
        same = self.images.shape[-2:] == (self.size, self.size) and self.resize == self.size
        return self.images[indices] if same else super().stack(indices)


class FolderSet(ImageSet):
    """Image files: kept as paths, decoded when asked for."""

    def __init__(self, paths, *args):
        super().__init__(*args)
        self.paths = paths

    def load(self, index):
        return decode(self.paths[index])

    def resident(self, cache):
        return decoded(self, cache)


class SyntheticSet(ImageSet):
    """Ten classes of made-up images, a pure function of (seed, split, index), of any number.

    An image is its class's coarse pattern, shifted by up to a quarter of the size, under one of
    ten meaningless patterns and noise: a linear model fails on the shifts, a small ResNet learns
    them in a few epochs. In integers, so that every machine makes the same.
    """

    CLASSES, GRID = 10, 8

    def __init__(self, count, size, seed, split, mean_std=NEUTRAL):
        self.stream = (seed, split)
        labels = random_bits(*self.stream, torch.arange(count), 1)[:, 0] % self.CLASSES
        super().__init__([f"pattern {i}" for i in range(self.CLASSES)], labels, mean_std, size)
        patterns = random_bits(seed, 2, torch.arange(2 * self.CLASSES), 3 * self.GRID**2) % 256
        self.patterns = patterns.view(2, self.CLASSES, 3, self.GRID, self.GRID)

    def load(self, index):
        return self.stack([index])[0]

    def stack(self, indices):
        n, size = len(indices), self.size
        bits = random_bits(*self.stream, torch.as_tensor(indices), 4 + 3 * size * size)
        label, clutter = bits[:, 0] % self.CLASSES, bits[:, 1] % self.CLASSES
        noise = bits[:, 4:].view(n, 3, size, size) % 256
        shift = bits[:, 2:4] % (size // 2 + 1) - size // 4
        cells = (torch.arange(size) + shift[:, :, None]) % size * self.GRID // size

        def spread(pattern, which):  # (n, 3, size, size): each cell of the grid as a square
            rows, columns = cells[:, 0, None, :, None], cells[:, 1, None, None, :]
            channels = torch.arange(3)[None, :, None, None]
            return pattern[which[:, None, None, None], channels, rows, columns]

        mixed = 3 * spread(self.patterns[0], label) + 2 * spread(self.patterns[1], clutter)
        return ((mixed + 3 * noise) // 8).to(torch.uint8)


def _normalisation(inputs, default):
    return inputs.get("mean", default[0]), inputs.get("std", default[1])


def _synthetic(cfg, inputs):
    train, val = cfg.synthetic_samples, max(1, cfg.synthetic_samples // 4)
    size, seed, how = cfg.image_size, cfg.seed, _normalisation(inputs, NEUTRAL)
    return SyntheticSet(train, size, seed, 0, how), SyntheticSet(val, size, seed, 1, how)


def _cifar10(cfg, inputs):
    def split(train):
        try:
            stored = torchvision.datasets.CIFAR10(
                cfg.data_dir, train, download=get_local_rank() == 0
            )
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"CIFAR-10 is not whole in {cfg.data_dir} and could not be downloaded from "
                f"{torchvision.datasets.CIFAR10.url}: {error}. Put the file there yourself, or "
                f"pass --data-dir, or --dataset synthetic"
            ) from None
        images = torch.from_numpy(stored.data).permute(0, 3, 1, 2).contiguous()
        pixels = _normalisation(inputs, CIFAR10)
        return ArraySet(images, stored.classes, stored.targets, pixels, cfg.image_size)

    return split(train=True), split(train=False)


def _imagefolder(cfg, inputs):
    names = ("all",) if cfg.val_fraction else ("train", "val")
    splits = [find_images(cfg.data_dir, name) for name in names]
    if len(splits) == 2:
        check_classes(*splits)
    if cfg.on_bad_sample == "skip":
        splits = _without_bad(splits, cache_folder(cfg))
    train, val = splits if len(splits) == 2 else split_images(*splits, cfg)
    # The standard test crop is the middle of an image 256 / 224 times as large.
    resize = cfg.image_size * 8 // 7 if cfg.augment == "resized_crop" else cfg.image_size
    if inputs.get("image_size") == cfg.image_size:
        resize = inputs.get("resize", resize)
    how = cfg.image_size, resize, inputs.get("interpolation", "bilinear")
    pixels = _normalisation(inputs, IMAGENET)
    return tuple(
        FolderSet(files.paths, files.classes, files.labels, pixels, *how) for files in (train, val)
    )


def bad_files(paths, cache):
    """Those of `paths` that cannot be decoded, as a set; the main process lists them."""
    bad = set(find_bad(paths, cache))
    if bad and is_main_process():
        names = readable(", ".join(sorted(bad)))
        print(f"left out: {len(bad)} of {len(paths)} files cannot be decoded: {names}")
    return bad


def _without_bad(splits, cache):
    bad = bad_files([path for files in splits for path in files.paths], cache)
    return [choose(files, [path not in bad for path in files.paths]) for files in splits]
