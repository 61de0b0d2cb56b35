"""dataset=cifar10 and dataset=synthetic: images in memory, cropped and flipped in whole batches."""

import copy

import torch
import torch.distributed as dist
import torchvision
from torch.utils.data import Dataset
from torchvision.transforms.v2 import functional as F

from utils.augment import CropFlip
from utils.errors import UserError

CIFAR10 = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616)}
NEUTRAL = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}


def build(cfg):
    """The training set, the validation set, and the names of the classes."""
    if cfg.augment == "resized_crop":
        raise UserError(f"augment=resized_crop is for dataset=imagefolder, not {cfg.dataset}")
    return _cifar10(cfg) if cfg.dataset == "cifar10" else _synthetic(cfg)


class ArrayDataset(Dataset):
    """Images in memory, cropped and flipped in whole batches.

    images: uint8 (n, 3, height, width); labels: n integers; mean, std: of the pixels in [0, 1], per
    channel; size: height and width of the images that come out; augment: none or crop_flip.
    """

    def __init__(self, images, labels, mean, std, size, augment="none", seed=0):
        self.nhwc = images.permute(0, 2, 3, 1).contiguous()  # a batch copies whole images
        self.labels = torch.as_tensor(labels)
        self.mean, self.std, self.size = mean, std, size
        self.crop_flip = CropFlip(len(self.labels), seed) if augment == "crop_flip" else None
        self.preprocessing = {"image_size": size, "resize": size, "interpolation": "bilinear"}
        self.preprocessing |= {"mean": list(mean), "std": list(std)}

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        images, labels = self.get_batch(torch.tensor([index]), epoch=0)
        return images[0], int(labels)

    def get_batch(self, indices, epoch):
        """int64 (n,) -> uint8 images (n, 3, size, size) and int64 labels (n,)."""
        images = self.nhwc.index_select(0, indices).permute(0, 3, 1, 2)
        if images.shape[-1] != self.size:
            images = F.resize(images, [self.size, self.size])
        if self.crop_flip:
            images = self.crop_flip(images, indices, epoch)
        return images, self.labels[indices]

    def to(self, device):
        """A copy on `device`, where indices are then expected."""
        moved = copy.copy(self)
        moved.nhwc, moved.labels = self.nhwc.to(device), self.labels.to(device)
        return moved


def _cifar10(cfg):
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
    return *_augmented(arrays, cfg, CIFAR10), train.classes


def _synthetic(cfg):
    """Ten classes: a coarse pattern, shifted, under one of ten other patterns and noise.

    The shifts defeat a linear model; a small ResNet learns them in a few epochs. It uses
    integers, so that every machine creates the same images.
    """
    classes, size, arrays = 10, cfg.image_size, []
    generator = torch.Generator().manual_seed(cfg.seed)
    cells = torch.arange(size) * 8 // size  # of a pattern: 8 x 8 squares
    patterns = torch.randint(256, (2, classes, 3, 8, 8), generator=generator)
    patterns = patterns[..., cells[:, None], cells]
    for split, count in enumerate((cfg.synthetic_samples, max(1, cfg.synthetic_samples // 4))):
        generator.manual_seed(hash((cfg.seed, split)))
        labels, others = torch.randint(classes, (2, count), generator=generator)
        shifts = torch.randint(size // 2 + 1, (count, 2), generator=generator).tolist()
        images = torch.randint(256, (count, 3, size, size), dtype=torch.uint8, generator=generator)
        for image, label, other, shift in zip(images, labels, others, shifts, strict=True):
            mixed = 3 * patterns[0, label] + 2 * patterns[1, other]
            image.copy_((mixed.roll(shift, (1, 2)) + 3 * image) // 8)
        arrays.append((images, labels))
    return *_augmented(arrays, cfg, NEUTRAL), [f"pattern {i}" for i in range(classes)]


def _augmented(arrays, cfg, inputs):
    inputs = inputs | getattr(cfg, "weights_inputs", {})
    fixed = inputs["mean"], inputs["std"], cfg.image_size
    augments = cfg.augment, "none"
    return [
        ArrayDataset(*array, *fixed, a, cfg.seed) for array, a in zip(arrays, augments, strict=True)
    ]
