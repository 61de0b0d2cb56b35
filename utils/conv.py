"""Convolutions on tiny maps, several times faster on a CPU. Needs only torch."""

import torch
from torch import nn
from torch.nn.functional import linear

MOST_PIXELS = 16  # of a map; on larger ones a 1x1 convolution is as fast as a product
FEWEST_IMAGES = 16  # for which the matrix of several outputs is worth making


class Conv2d(nn.Conv2d):
    """nn.Conv2d that computes tiny maps as matrix products, on a CPU, where oneDNN is slow on them.

    A 1x1 kernel is a matrix for each pixel. And where every output sees every pixel, as all do in a
    3x3 convolution of a 2x2 map, the layer is one matrix between all pixels and all outputs, of the
    taps that lie between them; a convolution multiplies padding as well (5/9 of its work there, 8/9
    on one pixel). The last stages of an ImageNet model on 32x32 images are like that. The sums have
    the same terms: outputs and gradients differ by rounding alone. Outputs are channels_last.
    """

    def forward(self, images):
        """images: (n, channels, height, width) -> (n, out_channels, height', width')."""
        plain = self.groups == 1 and self.padding_mode == "zeros" and self.padding != "same"
        if not plain or images.device.type != "cpu" or images.dim() != 4:
            return super().forward(images)
        padding = (0, 0) if self.padding == "valid" else self.padding
        if self.kernel_size == (1, 1) and padding == (0, 0):
            seen = images[:, :, :: self.stride[0], :: self.stride[1]].permute(0, 2, 3, 1)
            if seen.shape[1] * seen.shape[2] <= MOST_PIXELS:
                return linear(seen, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)
        taps = [
            _taps(*dimension)
            for dimension in zip(
                images.shape[2:], self.kernel_size, self.stride, padding, self.dilation, strict=True
            )
        ]
        if None in taps:
            return super().forward(images)
        rows, columns = taps
        outputs = len(rows) * len(columns)
        few = not torch.compiler.is_compiling() and images.shape[0] < FEWEST_IMAGES
        if few and outputs > 1:
            return super().forward(images)
        numbers = [
            y * self.kernel_size[1] + x for ys in rows for xs in columns for y in ys for x in xs
        ]
        # The tap of each (output, pixel); then the matrix, in the order of channels_last images.
        weights = self.weight.permute(2, 3, 0, 1).flatten(0, 1)
        weights = weights.index_select(0, torch.tensor(numbers)).unflatten(0, (outputs, -1))
        matrix = weights.transpose(1, 2).flatten(2).flatten(0, 1)
        bias = None if self.bias is None else self.bias.repeat(outputs)
        maps = linear(images.permute(0, 2, 3, 1).flatten(1), matrix, bias)
        return maps.unflatten(1, (len(rows), len(columns), -1)).permute(0, 3, 1, 2)


def _taps(size, kernel, stride, padding, dilation):
    """In one dimension the number of the tap between each output (a list each) and each pixel;
    None unless there is one between all of them."""
    outputs = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    if dilation != 1 or outputs < 1 or size > kernel - padding:
        return None
    starts = (padding - output * stride for output in range(outputs))
    return [list(range(start, start + size)) for start in starts]


def convert_convolutions(module):
    """`module` with each nn.Conv2d in it replaced; parameters and names stay."""
    if type(module) is nn.Conv2d:
        faster = Conv2d.__new__(Conv2d)
        faster.__dict__ = module.__dict__
        return faster
    for name, child in module.named_children():
        setattr(module, name, convert_convolutions(child))
    return module


def restore_convolutions(model):
    """Make each Conv2d in `model` PyTorch's again, in place: for what shall run elsewhere."""
    for module in model.modules():
        if type(module) is Conv2d:
            module.__class__ = nn.Conv2d
