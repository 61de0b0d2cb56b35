"""Augmentation as a pure function of (seed, epoch, sample index). Needs torch and numpy.

With one random number generator per rank or worker, a sample would be cropped differently whenever
the number of ranks or workers changes. Here, each draw is a hash of what it is for.
"""

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
    """Independent uniform integers in [0, 2**62): int64 (len(indices), draws).

    indices: int64 (n,), on any device; the result is on the same device.
    """
    key = int(_mix(_mix(torch.tensor(_signed(seed * _GOLDEN))) + epoch))  # on the CPU: a
    rows = _mix(indices * _signed(_GOLDEN) + key)  # CUDA tensor of a number would synchronize
    columns = torch.arange(1, draws + 1, device=indices.device) * _signed(_GOLDEN)
    return _shift_right(_mix(rows[:, None] + columns), 2)


def crop_flip(images, indices, seed, epoch):
    """Pad with zeros by an eighth of the size, crop at random, and flip half of the images.

    images: uint8 (n, channels, size, size), on any device; indices: int64 (n,), the samples'
    indices in their dataset, on the same device. Returns the same shape and dtype, channels_last,
    bit for bit the same on every device and in any batch. Does not synchronize with the device.
    """
    size, padding = images.shape[-1], images.shape[-1] // 8
    bits = random_bits(seed, epoch, indices, 3)
    corners = bits[:, :2] % (2 * padding + 1)
    images = pad(images.contiguous(memory_format=torch.channels_last), (padding,) * 4)
    crop = _crop_flip_on_cpu if images.device.type == "cpu" else _crop_flip_on_gpu
    images = crop(images.permute(0, 2, 3, 1).contiguous(), size, corners, bits[:, 2] % 2 == 1)
    return images.permute(0, 3, 1, 2)


def _crop_flip_on_gpu(images, size, corners, flipped):
    """(n, height, width, channels) -> (n, size, size, channels), each from its own corner."""
    windows = images.unfold(1, size, 1).unfold(2, size, 1)  # a view
    rows = torch.arange(len(images), device=images.device)
    images = windows[rows, corners[:, 0], corners[:, 1]].permute(0, 2, 3, 1)
    return torch.where(flipped[:, None, None, None], images.flip(2), images)


def _crop_flip_on_cpu(images, size, corners, flipped):
    """The same by copying whole rows and images, three times as fast on one core."""
    n, height, width, channels = images.shape
    rows = images.view(n, height, width * channels).numpy()
    windows = sliding_window_view(rows, (size, size * channels), (1, 2))
    top, left = corners.T.numpy()
    images = windows[torch.arange(n).numpy(), top, left * channels].reshape(n, size, size, channels)
    flipped = flipped.nonzero()[:, 0]
    images[flipped.numpy()] = torch.from_numpy(images).index_select(0, flipped).flip(2).numpy()
    return torch.from_numpy(images)
