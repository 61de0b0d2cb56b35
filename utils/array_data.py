"""dataset=cifar10 and dataset=synthetic: images in memory, cropped and flipped in whole batches."""

import torch
import torchvision
from torch.utils.data import Dataset
from torchvision.transforms.v2 import functional as F

from utils.augment import crop_flip, random_bits
from utils.distributed import get_local_rank
from utils.errors import UserError

CIFAR10 = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616)}
NEUTRAL = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}


def build(cfg, inputs):
    """-> the training set, the validation set, and the names of the classes.

    inputs: "mean" and "std" of the pixels, if pretrained weights expect others than the dataset's.
    """
    if cfg.augment == "resized_crop":
        raise UserError(f"augment=resized_crop is for dataset=imagefolder, not {cfg.dataset}")
    return _cifar10(cfg, inputs) if cfg.dataset == "cifar10" else _synthetic(cfg, inputs)


class ArrayDataset(Dataset):
    """Images in memory, cropped and flipped in whole batches.

    images: uint8 (n, 3, height, width); labels: n integers; mean, std: of the pixels in [0, 1], per
    channel; size: height and width of the images that come out; augment: none or crop_flip.
    """

    def __init__(self, images, labels, mean, std, size, augment="none", seed=0):
        self.nhwc = images.permute(0, 2, 3, 1).contiguous()  # a batch copies whole images
        self.labels = torch.as_tensor(labels)
        self.mean, self.std, self.size, self.augment, self.seed = mean, std, size, augment, seed
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
        if self.augment == "crop_flip":
            images = crop_flip(images, indices, self.seed, epoch)
        return images, self.labels[indices]

    def to(self, device):
        """Move the images and labels to `device`, where indices are then expected."""
        self.nhwc, self.labels = self.nhwc.to(device), self.labels.to(device)
        return self


def _cifar10(cfg, inputs):
    try:
        train, val = (
            torchvision.datasets.CIFAR10(cfg.data_dir, split, download=get_local_rank() == 0)
            for split in (True, False)
        )
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"CIFAR-10 is incomplete in {cfg.data_dir} and could not be downloaded from "
            f"{torchvision.datasets.CIFAR10.url}: {error}. Put the file there yourself, or pass "
            f"--data-dir, or --dataset synthetic"
        ) from None
    arrays = [(torch.from_numpy(s.data).permute(0, 3, 1, 2), s.targets) for s in (train, val)]
    return *_augmented(arrays, cfg, CIFAR10 | inputs), train.classes


def _synthetic(cfg, inputs):
    """Ten classes: a coarse pattern, shifted, under one of ten other patterns and noise.

    A function of (seed, split, index), in integers: the same on every machine. The shifts defeat a
    linear model; a small ResNet learns them in a few epochs.
    """
    classes, grid, size = 10, 8, cfg.image_size
    patterns = random_bits(cfg.seed, 2, torch.arange(2 * classes), 3 * grid**2) % 256
    patterns = patterns.view(2, classes, 3, grid, grid)
    channels = torch.arange(3)[None, :, None, None]

    def images_and_labels(split, indices):
        bits = random_bits(cfg.seed, split, indices, 4 + 3 * size * size)
        labels, clutter = bits[:, 0] % classes, bits[:, 1] % classes
        shift = bits[:, 2:4] % (size // 2 + 1) - size // 4
        cells = (torch.arange(size) + shift[:, :, None]) % size * grid // size
        rows, columns = cells[:, 0, None, :, None], cells[:, 1, None, None, :]
        signal = patterns[0][labels[:, None, None, None], channels, rows, columns]
        clutter = patterns[1][clutter[:, None, None, None], channels, rows, columns]
        noise = bits[:, 4:].view(-1, 3, size, size) % 256
        return ((3 * signal + 2 * clutter + 3 * noise) // 8).to(torch.uint8), labels

    arrays = []
    for split, count in enumerate((cfg.synthetic_samples, max(1, cfg.synthetic_samples // 4))):
        parts = [images_and_labels(split, part) for part in torch.arange(count).split(1024)]
        arrays.append([torch.cat(part) for part in zip(*parts, strict=True)])
    names = [f"pattern {i}" for i in range(classes)]
    return *_augmented(arrays, cfg, NEUTRAL | inputs), names


def _augmented(arrays, cfg, inputs):
    how = inputs["mean"], inputs["std"], cfg.image_size
    augments = cfg.augment, "none"
    return [
        ArrayDataset(*array, *how, a, cfg.seed) for array, a in zip(arrays, augments, strict=True)
    ]
