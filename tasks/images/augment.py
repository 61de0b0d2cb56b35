"""Augmentation as a pure function of (seed, epoch, sample index). Needs torch and numpy.

With one random number generator per rank or worker, a sample would be cropped differently whenever
the number of ranks or workers changes.
"""

import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor
from torch.nn.functional import pad

from utils.seeds import mix


class CropFlip:
    """Pads images with zeros by an eighth of their size, crops at random, and flips half of them.

    One generator, seeded by (seed, epoch), draws for all samples of a dataset at the start of an
    epoch; the draws are looked up by index. samples: the size of the dataset.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.drawn: tuple[int, int, torch.device] | None = None

    def __call__(self, images: Tensor, indices: Tensor, epoch: int, seed: int) -> Tensor:
        """images: uint8 (n, channels, size, size), on any device; indices: int64 (n,).

        Returns the same shape and dtype, channels_last, the same bit for bit on every device and in
        any batch. `indices` must be on the same device. Does not synchronize with the device.
        """
        if self.drawn != (seed, epoch, images.device):
            generator = torch.Generator().manual_seed(mix(seed, epoch))
            draws = torch.randint(2**31, (self.samples, 3), generator=generator)
            self.draws, self.drawn = draws.to(images.device), (seed, epoch, images.device)
        draws, padding = self.draws[indices], images.shape[-1] // 8
        return crop_flip(images, draws[:, :2] % (2 * padding + 1), draws[:, 2] % 2 == 1)


def crop_flip(images: Tensor, corners: Tensor, flipped: Tensor) -> Tensor:
    """Pad by an eighth of the size, crop to the size at `corners`, and flip where `flipped`.

    images: uint8 (n, channels, size, size); corners: int64 (n, 2), top and left; flipped: bool
    (n,).
    """
    size, padding = images.shape[-1], images.shape[-1] // 8
    images = pad(images.contiguous(memory_format=torch.channels_last), (padding,) * 4)
    crop = _crop_flip_on_cpu if images.device.type == "cpu" else _crop_flip_on_gpu
    images = crop(images.permute(0, 2, 3, 1).contiguous(), size, corners, flipped)
    return images.permute(0, 3, 1, 2)


def _crop_flip_on_gpu(images, size, corners, flipped):
    """(n, height, width, channels) -> (n, size, size, channels), each from its own corner."""
    windows = images.unfold(1, size, 1).unfold(2, size, 1)  # a view
    rows = torch.arange(len(images), device=images.device)
    images = windows[rows, corners[:, 0], corners[:, 1]].permute(0, 2, 3, 1)
    return torch.where(flipped[:, None, None, None], images.flip(2), images)


def _crop_flip_on_cpu(images, size, corners, flipped):
    """The same, by copying whole rows and images: three times as fast on one core."""
    n, height, width, channels = images.shape
    rows = images.view(n, height, width * channels).numpy()
    windows = sliding_window_view(rows, (size, size * channels), (1, 2))
    top, left = corners.T.numpy()
    images = windows[torch.arange(n).numpy(), top, left * channels].reshape(n, size, size, channels)
    flipped = flipped.nonzero()[:, 0]
    images[flipped.numpy()] = torch.from_numpy(images).index_select(0, flipped).flip(2).numpy()
    return torch.from_numpy(images)
