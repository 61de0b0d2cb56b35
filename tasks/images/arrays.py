"""dataset=cifar10 and dataset=synthetic: images in memory, cropped and flipped in whole batches."""

import copy
from collections.abc import Sequence
from typing import Self

import torch
import torch.distributed as dist
import torchvision
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from tasks.images.augment import CropFlip
from tasks.images.pixels import PixelDataset
from tasks.images.settings import Settings, expected_inputs
from utils.errors import UserError
from utils.seeds import derive_seed

CIFAR10 = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616)}
NEUTRAL = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}


class ArrayDataset(PixelDataset):
    """Images in memory, cropped and flipped in whole batches.

    images: uint8 (n, 3, height, width); labels: n integers; classes: their names; mean, std: of the
    pixels in [0, 1], per channel; size: height and width of the images that come out; augment: none
    or crop_flip.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Sequence[int] | Tensor,
        classes: Sequence[str],
        mean: Sequence[float],
        std: Sequence[float],
        size: int,
        augment: str = "none",
    ) -> None:
        preprocessing = {"image_size": size, "resize": size, "interpolation": "bilinear"}
        preprocessing |= {"mean": list(map(float, mean)), "std": list(map(float, std))}
        super().__init__(labels, classes, preprocessing)
        self.nhwc = images.permute(0, 2, 3, 1).contiguous()  # a batch copies whole images
        self.size = size
        self.crop_flip = CropFlip(len(self.labels)) if augment == "crop_flip" else None

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        images, labels = self.get_batch(torch.tensor([index]), epoch=0, seed=0)
        return images[0], int(labels)

    def get_batch(self, indices: Tensor, epoch: int, seed: int) -> tuple[Tensor, Tensor]:
        """int64 (n,) -> uint8 images (n, 3, size, size) and int64 labels (n,)."""
        images = self.nhwc.index_select(0, indices).permute(0, 3, 1, 2)
        if images.shape[-1] != self.size:
            images = F.resize(images, [self.size, self.size])
        if self.crop_flip:
            images = self.crop_flip(images, indices, epoch, seed)
        return images, self.labels[indices]

    def resident_bytes(self) -> int:
        return len(self) * 3 * self.size * self.size

    def resident(self, device: torch.device) -> Self | None:
        """A copy on `device`; None if a GPU would have to resize, as it rounds differently."""
        is_resized = self.nhwc.shape[1] != self.size
        if is_resized and device.type != "cpu":
            return None
        moved = copy.copy(self)
        moved.nhwc, moved.labels = self.nhwc.to(device), self.labels.to(device)
        return moved


def build_cifar10(cfg: Settings) -> tuple[ArrayDataset, ArrayDataset]:
    """The training set and the test set of CIFAR-10, downloaded if necessary."""
    download = dist.get_node_local_rank(0) == 0
    try:
        train, val = (
            torchvision.datasets.CIFAR10(cfg.data_dir, split, download=download)
            for split in (True, False)
        )
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"CIFAR-10 is incomplete in {cfg.data_dir} and could not be downloaded from "
            f"{torchvision.datasets.CIFAR10.url}: {error}. Put the file there yourself, or pass "
            f"--data-dir, or --dataset synthetic"
        ) from None
    arrays = [(torch.from_numpy(s.data).permute(0, 3, 1, 2), s.targets) for s in (train, val)]
    return _augmented(arrays, train.classes, CIFAR10, cfg)


def build_synthetic(cfg: Settings) -> tuple[ArrayDataset, ArrayDataset]:
    """Ten classes: each image blends its class's shifted pattern with a distractor and noise.

    The shifts defeat a linear model; a small ResNet learns them in a few epochs. It uses
    integers, so that every machine creates the same images.
    """
    classes, size, arrays = 10, cfg.image_size, []
    generator = torch.Generator().manual_seed(cfg.seed)
    cells = torch.arange(size) * 8 // size  # of a pattern: 8 x 8 squares
    patterns = torch.randint(256, (2, classes, 3, 8, 8), generator=generator)
    patterns = patterns[..., cells[:, None], cells]
    for split, count in enumerate((cfg.synthetic_samples, max(1, cfg.synthetic_samples // 4))):
        generator.manual_seed(derive_seed(cfg.seed, split))
        labels, distractors = torch.randint(classes, (2, count), generator=generator)
        shifts = torch.randint(size // 2 + 1, (count, 2), generator=generator).tolist()
        shape = count, 3, size, size
        images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        draws = zip(images, labels, distractors, shifts, strict=True)
        for image, label, distractor, shift in draws:
            mixed = 3 * patterns[0, label] + 2 * patterns[1, distractor]
            image.copy_((mixed.roll(shift, (1, 2)) + 3 * image) // 8)
        arrays.append((images, labels))
    return _augmented(arrays, [f"pattern {i}" for i in range(classes)], NEUTRAL, cfg)


def _augmented(arrays, classes, inputs, cfg):
    inputs = inputs | expected_inputs(cfg)
    options = inputs["mean"], inputs["std"], cfg.image_size
    (train_images, train_labels), (val_images, val_labels) = arrays
    train_set = ArrayDataset(train_images, train_labels, classes, *options, cfg.augment)
    return train_set, ArrayDataset(val_images, val_labels, classes, *options)
