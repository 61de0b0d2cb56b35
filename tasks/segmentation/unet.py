"""The U-Net: Ronneberger et al. 2015 (arXiv 1505.04597), with three levels in place of five."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d


class UNet(nn.Module):
    """An encoder that halves the resolution twice, and a decoder that restores it and adds, at each
    level, what the encoder saw there.

    Differs from the paper in its size, its norms, and padded convolutions: the outputs have the
    size of the images. width: channels of the first level; norm: "batch" or "group".
    """

    def __init__(self, num_classes: int, width: int, norm: str = "batch") -> None:
        super().__init__()
        twice, fourfold = 2 * width, 4 * width
        self.encoder1 = _double_conv(3, width, norm)
        self.encoder2 = _double_conv(width, twice, norm)
        self.bottom = _double_conv(twice, fourfold, norm)
        self.up2 = nn.ConvTranspose2d(fourfold, twice, kernel_size=2, stride=2)
        self.decoder2 = _double_conv(fourfold, twice, norm)
        self.up1 = nn.ConvTranspose2d(twice, width, kernel_size=2, stride=2)
        self.decoder1 = _double_conv(twice, width, norm)
        self.head = nn.Conv2d(width, num_classes, kernel_size=1)

    def forward(self, images: Tensor) -> Tensor:
        """images: (n, 3, height, width), multiples of 4 -> outputs (n, classes, height, width)."""
        level1 = self.encoder1(images)
        level2 = self.encoder2(max_pool2d(level1, 2))
        x = self.bottom(max_pool2d(level2, 2))
        x = self.decoder2(torch.cat([level2, self.up2(x)], 1))
        x = self.decoder1(torch.cat([level1, self.up1(x)], 1))
        return self.head(x)


def _double_conv(in_channels, channels, norm):
    return nn.Sequential(
        *_conv(in_channels, channels, norm),
        *_conv(channels, channels, norm),
    )


def _conv(in_channels, channels, norm):
    convolution = nn.Conv2d(in_channels, channels, kernel_size=3, padding=1, bias=False)
    if norm == "batch":
        normalization = nn.BatchNorm2d(channels)
    else:
        normalization = nn.GroupNorm(math.gcd(8, channels), channels)
    return convolution, normalization, nn.ReLU(inplace=True)
