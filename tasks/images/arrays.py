"""Images in memory, cropped and flipped in whole batches."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from tasks.images.augment import CropFlip
from tasks.images.pixels import PixelDataset
from tasks.images.settings import Settings, expected_inputs


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
        if images.shape[-2:] != (self.size, self.size):
            images = F.resize(images, [self.size, self.size])
        if self.crop_flip:
            images = self.crop_flip(images, indices, epoch, seed)
        return images, self.labels[indices]

    @property
    def nbytes(self) -> int | None:
        """For sources.resident: the images' bytes; None if a GPU would have to resize them, as it
        rounds differently."""
        is_resized = self.nhwc.shape[1:3] != (self.size, self.size)
        return None if is_resized else self.nhwc.nbytes

    def in_memory(self) -> "ArrayDataset":
        return self


def augmented(
    arrays: list[tuple[Tensor, Any]], classes: Sequence[str], inputs: dict[str, Any], cfg: Settings
) -> tuple[ArrayDataset, ArrayDataset]:
    """The training set and the validation set, of which the first is augmented.

    arrays: (images, labels) of both. inputs: "mean" and "std"; --weights may say others.
    """
    inputs = inputs | expected_inputs(cfg)
    options = inputs["mean"], inputs["std"], cfg.image_size
    (train_images, train_labels), (val_images, val_labels) = arrays
    train_set = ArrayDataset(train_images, train_labels, classes, *options, cfg.augment)
    return train_set, ArrayDataset(val_images, val_labels, classes, *options)
