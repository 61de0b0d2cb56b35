"""A convolution of a tiny map is a matrix product, and the same numbers."""

import itertools
import re

import pytest
import torch
import torchvision
from torch import nn

from utils.conv import FEWEST_IMAGES, Conv2d, convert_convolutions, restore_convolutions

CASES = [
    (size, kernel, stride, padding)
    for size, kernel, stride, padding in itertools.product(
        ((1, 1), (2, 2), (1, 2), (3, 3), (4, 3)), (1, 2, 3, 5), (1, 2, 3), (0, 1, 2)
    )
    if min(size) + 2 * padding >= kernel
]


def both(images, *args, **options):
    torch.manual_seed(0)
    plain = nn.Conv2d(*args, **options).double()
    results = []
    for module in (plain, convert_convolutions(nn.Sequential(plain))[0]):
        inputs = images.clone().requires_grad_()
        outputs = module(inputs)
        module.zero_grad()
        (outputs * torch.arange(outputs.numel()).view_as(outputs)).sum().backward()
        gradients = [p.grad.clone() for p in module.parameters()]
        results.append([outputs, inputs.grad, *gradients])
    return results


@pytest.mark.parametrize(("size", "kernel", "stride", "padding"), CASES)
def test_outputs_and_gradients_are_those_of_a_convolution(size, kernel, stride, padding):
    images = torch.randn(FEWEST_IMAGES, 4, *size, dtype=torch.float64)
    for memory in (torch.contiguous_format, torch.channels_last):
        pair = both(images.to(memory_format=memory), 4, 5, kernel, stride, padding)
        for plain, ours in zip(*pair, strict=True):
            assert plain.shape == ours.shape
            torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"padding": "same"},
        {"padding": "valid"},
        {"padding": 1, "groups": 2},
        {"padding": 1, "padding_mode": "reflect"},
        {"padding": 1, "dilation": 2},
        {"padding": 2, "dilation": 2},
        {"padding": (1, 0), "stride": (2, 1)},
        {"padding": 1, "bias": False},
        {"kernel_size": 1},
        {"kernel_size": 1, "stride": (2, 1), "bias": False},
        {"kernel_size": 1, "groups": 2},
    ],
)
def test_every_option_of_a_convolution(options):
    options = {"kernel_size": 3} | options
    for side, count in itertools.product((1, 2, 3, 4, 5), (2, FEWEST_IMAGES)):
        images = torch.randn(count, 4, side, side).double()
        try:
            plain_and_ours = both(images, 4, 6, **options)
        except RuntimeError as error:
            assert re.search("Kernel size can't be|Padding size should be", str(error))  # no fit
            continue
        for plain, ours in zip(*plain_and_ours, strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)


def test_a_resnet_on_small_images_uses_products_and_keeps_its_names(monkeypatch):
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=3).double().eval()
    names, images = list(model.state_dict()), torch.randn(16, 3, 32, 32).double()
    expected = model(images)
    products = []
    real = torch.nn.functional.linear
    monkeypatch.setattr("utils.conv.linear", lambda *a: products.append(1) or real(*a))
    converted = convert_convolutions(model)
    torch.testing.assert_close(converted(images), expected, rtol=1e-12, atol=1e-12)
    # The last stage, four 3x3 convolutions and the shortcut; before it the three on 2x2 maps with
    # their shortcut, and the shortcut to 4x4.
    assert len(products) == 10
    assert list(converted.state_dict()) == names
    assert all(type(m) is Conv2d for m in converted.modules() if isinstance(m, nn.Conv2d))
    del products[:]
    converted(images[:15])
    assert len(products) == 7  # too few images for the 2x2 maps' matrices
    restore_convolutions(converted)
    assert not any(type(m) is Conv2d for m in converted.modules())
    torch.testing.assert_close(converted(images), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_autocast_and_no_images(size):
    torch.manual_seed(0)
    plain = nn.Conv2d(8, 6, 1 if size == 4 else 3, padding=0 if size == 4 else 1)
    ours = convert_convolutions(nn.Sequential(plain))[0]
    images = torch.randn(FEWEST_IMAGES, 8, size, size)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = ours(images)
        assert outputs.dtype == torch.bfloat16
        torch.testing.assert_close(outputs, plain(images), rtol=2e-2, atol=2e-2)
    assert ours(images[:0]).shape == (0, 6, size, size)


def test_a_map_smaller_than_the_kernel_is_the_convolutions_error():
    module = convert_convolutions(nn.Sequential(nn.Conv2d(4, 5, 3)))[0]
    with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
        module(torch.randn(2, 4, 2, 2))
