"""Convolutions of maps of one pixel, as in the last layers of a ResNet for small images."""

import torch
from torch import Tensor, nn


class OnePixelConv2d(nn.Conv2d):
    """Conv2d, which uses only the middle of its weights where the input is (n, channels, 1, 1).

    The other weights meet the padding alone, so that their products and gradients are zero: for a
    3x3 kernel, a ninth of the work. In bfloat16 on a CPU, it is also right: if the stride is larger
    than 1, oneDNN leaves the gradients of these weights as memory that nothing has written.
    """

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[-2:] != (1, 1):
            return super().forward(images)
        rows, columns = self.kernel_size[0] // 2, self.kernel_size[1] // 2
        middle = self.weight[:, :, rows : rows + 1, columns : columns + 1]
        return torch.conv2d(images, middle, self.bias, groups=self.groups)


def use_middle_weights(model: nn.Module) -> nn.Module:
    """Turn the model's padded convolutions into OnePixelConv2d, in place. Returns the model."""
    for module in model.modules():
        if type(module) is nn.Conv2d and _uses_only_the_middle(module):
            module.__class__ = OnePixelConv2d  # the parameters, their names and hooks stay
    return model


def _uses_only_the_middle(conv):
    """Whether, for a single pixel, all weights but the middle ones meet zeros."""
    if conv.padding_mode != "zeros" or conv.dilation != (1, 1) or conv.kernel_size == (1, 1):
        return False
    # With one channel per group, the gradients would not have the strides of the weights, of which
    # DistributedDataParallel warns.
    if conv.in_channels == conv.groups:
        return False
    has_middle = all(size % 2 == 1 for size in conv.kernel_size)
    return has_middle and conv.padding == tuple(size // 2 for size in conv.kernel_size)
