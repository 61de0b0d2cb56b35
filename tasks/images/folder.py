"""dataset=imagefolder: one folder of image files per class, such as data_dir/train/<class>/*.jpg.

Decodes the files when they are read, and can keep the decoded images in a cache.
"""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from tasks.images.arrays import ArrayDataset
from tasks.images.augment import CropFlip
from tasks.images.cache import cache_folder, decoded_images, is_writable, without_bad
from tasks.images.decode import decode
from tasks.images.files import find_images, find_splits, relative_names, saved_data, split_images
from tasks.images.pixels import PixelDataset
from tasks.images.settings import Settings, expected_inputs
from utils.seeds import derive_seed

IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}  # of pixels in [0, 1]


def build(cfg: Settings) -> tuple["FolderDataset", "FolderDataset"]:
    """The training set and the validation set.

    With --weights, images are prepared as those expect.
    Call it in main_process_first(): with on_bad_sample=skip, one process per node reads all files.
    Raises UserError if a split or a class has no images, or if the splits' classes differ.
    """
    splits = [find_images(cfg.data_dir, "all")] if cfg.val_fraction else find_splits(cfg.data_dir)
    if cfg.on_bad_sample == "skip":
        splits = without_bad(splits, cache_folder(cfg))
    chosen = None
    if cfg.val_fraction:
        splits = split_images(splits[0], cfg, saved_data(cfg))
        val_files = sorted(relative_names(splits[1], cfg.data_dir))
        chosen = {"val_fraction": cfg.val_fraction, "seed": cfg.seed, "val_files": val_files}
    train, val = splits
    options: dict[str, Any] = {"preprocessing": preprocessing_of(cfg), "cache": cache_folder(cfg)}
    train_files, val_files = (train.paths, train.labels, train.classes), (val.paths, val.labels)
    train_set = FolderDataset(*train_files, augment=cfg.augment, **options)
    val_set = FolderDataset(*val_files, train.classes, split=chosen, **options)
    return train_set, val_set


def preprocessing_of(cfg: Settings) -> dict[str, Any]:
    """How images are resized, cropped and normalized: see FolderDataset."""
    # The standard test crop is the middle of an image that is 256 / 224 times as large.
    resize = cfg.image_size * 8 // 7 if cfg.augment == "resized_crop" else cfg.image_size
    inputs = expected_inputs(cfg)
    if inputs.get("image_size") == cfg.image_size:
        resize = inputs.get("resize", resize)
    preprocessing = {"interpolation": "bilinear", **IMAGENET, **inputs}
    return preprocessing | {"image_size": cfg.image_size, "resize": resize}


class FolderDataset(PixelDataset):
    """Image files, decoded when they are read.

    classes: names. preprocessing: {"image_size", "resize", "interpolation", "mean", "std"}: the
    shorter side is resized to `resize` pixels and a square of image_size pixels cropped from the
    middle; mean and std are for the normalization. augment: "none", "crop_flip" or "resized_crop".
    cache: the folder for in_memory(). split: how a validation set was chosen, for the checkpoint:
    {"val_fraction", "seed", "val_files"}, paths relative to data_dir.
    """

    def __init__(
        self,
        paths: Sequence[str],
        labels: Sequence[int],
        classes: Sequence[str],
        preprocessing: dict[str, Any],
        augment: str = "none",
        cache: str | Path = "",
        split: dict[str, Any] | None = None,
    ) -> None:
        labels = torch.tensor(labels, dtype=torch.int64)
        super().__init__(labels, classes, preprocessing, split)
        self.paths, self.augment, self.cache = paths, augment, cache
        self.size, self.resize = preprocessing["image_size"], preprocessing["resize"]
        self.interpolation = InterpolationMode(preprocessing["interpolation"])
        self.crop_flip = CropFlip(len(labels))

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """(uint8 image (3, size, size), label), not augmented. Raises BadImageError."""
        return self._resize(self.original(index)), int(self.labels[index])

    def original(self, index: int) -> Tensor:
        """The image as it is in its file, uint8 (3, height, width). Raises BadImageError."""
        return decode(self.paths[index])

    def get_batch(self, indices: Tensor, epoch: int, seed: int) -> tuple[Tensor, Tensor]:
        """Augmented images, which depend on nothing but (seed, epoch, index), and their labels.

        indices: int64 (n,). Returns uint8 (n, 3, size, size), channels_last, and int64 (n,).
        """
        if self.augment == "resized_crop":
            images = torch.stack([self._resized_crop(i, epoch, seed) for i in indices.tolist()])
        else:
            images = self.stack(indices.tolist())
        if self.augment == "crop_flip":
            images = self.crop_flip(images, indices, epoch, seed)
        return images.contiguous(memory_format=torch.channels_last), self.labels[indices]

    @property
    def nbytes(self) -> int | None:
        """For sources.resident: the bytes of all decoded images; None if the augmentation needs the
        original ones, or they cannot be cached."""
        if self.augment == "resized_crop" or not self.cache or not is_writable(self.cache):
            return None
        return len(self) * 3 * self.size * self.size

    def in_memory(self) -> ArrayDataset:
        """The decoded images. Raises BadImageError, and UserError if the cache folder cannot be
        written."""
        images = decoded_images(self, self.cache)
        options = self.mean, self.std, self.size, self.augment
        return ArrayDataset(images, self.labels, self.classes, *options)

    def stack(self, indices: Sequence[int]) -> Tensor:
        """uint8 (n, 3, size, size): the images with these indices, not augmented."""
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

    def _resized_crop(self, index, epoch, seed):
        image, draws = self.original(index), random.Random(derive_seed(seed, epoch, index))
        box = random_box(image.shape[1], image.shape[2], draws)
        image = F.resized_crop(image, *box, [self.size, self.size], self.interpolation)
        return F.horizontal_flip(image) if draws.random() < 0.5 else image


def random_box(height: int, width: int, draws: random.Random) -> tuple[int, int, int, int]:
    """(top, left, height, width) of a crop by the rule of torchvision's RandomResizedCrop, which
    takes a tenth of the time of decoding: 8 to 100 % of the area, an aspect ratio of 3/4 to 4/3.

    (Szegedy et al. 2015, arXiv 1409.4842)
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
