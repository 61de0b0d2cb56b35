"""Augmentation as a pure function of (seed, epoch, sample index). Needs torch and numpy.

A random number generator per rank or per worker would give a sample another crop whenever the
number of ranks or workers changes, and the same crop on every rank when the seeds coincide. Here
each draw is a hash of what it is for, so that one sample in one epoch looks the same everywhere.
"""

import math

import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch.nn.functional import pad

_GOLDEN = 0x9E3779B97F4A7C15


def _signed(number):
    """A Python integer modulo 2**64, as the int64 with the same bits."""
    return (number + 2**63) % 2**64 - 2**63


def _shift_right(x, bits):
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # int64's own >> would copy the sign


def _mix(x):
    """SplitMix64's finalizer on int64 (Steele, Lea, Flood 2014, doi 10.1145/2660193.2660195)."""
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def random_bits(seed, epoch, indices, draws):
    """Independent uniform integers: int64 (len(indices), draws), each in [0, 2**62).

    indices: int64 (n,), on any device; the result is there too, the same on all.
    """
    key = int(_mix(_mix(torch.tensor(_signed(seed * _GOLDEN))) + epoch))  # not on the device: a
    rows = _mix(indices * _signed(_GOLDEN) + key)  # tensor of a number would make it wait
    columns = torch.arange(1, draws + 1, device=indices.device) * _signed(_GOLDEN)
    return _shift_right(_mix(rows[:, None] + columns), 2)


def crop_flip(images, indices, seed, epoch):
    """Pad by an eighth of the size with zeros, crop back at random, mirror every other image.

    images: uint8 (n, channels, size, size) on any device; indices: int64 (n,) of the samples in
    their set, on the same device. Returns the same shape and dtype, channels_last, bit for bit
    alike on all devices and in any batch. Nothing waits for the device.
    """
    size, padding = images.shape[-1], images.shape[-1] // 8
    bits = random_bits(seed, epoch, indices, 3)
    corners = bits[:, :2] % (2 * padding + 1)
    images = pad(images.contiguous(memory_format=torch.channels_last), (padding,) * 4)
    crop = _crop_flip_on_cpu if images.device.type == "cpu" else _crop_flip_on_gpu
    images = crop(images.permute(0, 2, 3, 1).contiguous(), size, corners, bits[:, 2] % 2 == 1)
    return images.permute(0, 3, 1, 2)


def _crop_flip_on_gpu(images, size, corners, mirrored):
    """(n, height, width, channels) -> (n, size, size, channels), each from its own corner."""
    windows = images.unfold(1, size, 1).unfold(2, size, 1)  # a view
    rows = torch.arange(len(images), device=images.device)
    images = windows[rows, corners[:, 0], corners[:, 1]].permute(0, 2, 3, 1)
    return torch.where(mirrored[:, None, None, None], images.flip(2), images)


def _crop_flip_on_cpu(images, size, corners, mirrored):
    """The same in copies of whole rows and images: three times as fast on a core."""
    n, height, width, channels = images.shape
    rows = images.view(n, height, width * channels).numpy()
    windows = sliding_window_view(rows, (size, size * channels), (1, 2))
    top, left = corners.T.numpy()
    images = windows[torch.arange(n).numpy(), top, left * channels].reshape(n, size, size, channels)
    mirrored = mirrored.nonzero()[:, 0]
    images[mirrored.numpy()] = torch.from_numpy(images).index_select(0, mirrored).flip(2).numpy()
    return torch.from_numpy(images)


def resized_crop_boxes(sizes, indices, seed, epoch):
    """Where to crop, by the rule of torchvision's RandomResizedCrop, and whether to mirror.

    sizes: a (height, width) in pixels per sample; indices: int64 (n,). Returns a list of
    (top, left, height, width, mirror): an area of 8 to 100 % with an aspect of 3/4 to 4/3.
    (Szegedy et al. 2015, arXiv 1409.4842)
    """
    tries = 10
    draws = random_bits(seed, epoch, indices, 2 * tries + 3).double() / 2**62
    return [_box(size, row, tries) for size, row in zip(sizes, draws.tolist(), strict=True)]


def _box(size, draws, tries):
    (height, width), (top, left, mirror) = size, draws[-3:]
    for area, aspect in zip(draws[:tries], draws[tries : 2 * tries], strict=True):
        pixels = height * width * (0.08 + 0.92 * area)
        ratio = math.exp(math.log(3 / 4) + aspect * (math.log(4 / 3) - math.log(3 / 4)))
        w, h = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
        if 0 < w <= width and 0 < h <= height:
            break
    else:  # a very long image: its middle, with the aspect cut to the range
        w = min(width, max(1, round(height * 4 / 3)))
        h = min(height, max(1, round(width * 4 / 3)))
        return (height - h) // 2, (width - w) // 2, h, w, mirror < 0.5
    return int(top * (height - h + 1)), int(left * (width - w + 1)), h, w, mirror < 0.5
