"""Convolutions of one pixel compute what nn.Conv2d computes, with the middle of their weights."""

import copy

import pytest
import torch
import torchvision
from torch import nn

from tasks.images import Settings
from tasks.images.models import build_classifier
from tasks.images.one_pixel import OnePixelConv2d, use_middle_weights
from tests.forked import ROUNDING


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "padding": 1, "stride": 2},
        {"kernel_size": (3, 5), "padding": (1, 2), "groups": 2, "bias": True},
    ],
    ids=str,
)
def test_same_results_and_gradients(options, size):
    plain = nn.Conv2d(4, 6, **{"bias": False} | options).double()
    plain = plain.to(memory_format=torch.channels_last)
    ours = use_middle_weights(nn.Sequential(copy.deepcopy(plain)))
    assert type(ours[0]) is OnePixelConv2d
    results = []
    for conv in (plain, ours[0]):
        images = torch.linspace(-1, 1, 3 * 4 * size**2).double().view(3, 4, size, size)
        outputs = conv(images.requires_grad_())
        outputs.square().sum().backward()
        assert conv.weight.grad.stride() == conv.weight.stride()
        results.append([outputs, images.grad, *(p.grad for p in conv.parameters())])
    torch.testing.assert_close(*results, rtol=ROUNDING, atol=ROUNDING)


def test_other_convolutions_stay_as_they_are():
    for conv in (
        nn.Conv2d(2, 6, 1),
        nn.Conv2d(2, 6, 3),
        nn.Conv2d(2, 6, 4, padding=2),
        nn.Conv2d(2, 6, 3, padding=2, dilation=2),
        nn.Conv2d(2, 6, 3, padding=1, groups=2),
        nn.Conv2d(2, 6, 3, padding=1, padding_mode="circular"),
    ):
        use_middle_weights(nn.Sequential(conv))
        assert type(conv) is nn.Conv2d


def test_images_task_uses_it_with_the_same_names():
    model = build_classifier(Settings(model="resnet18"), 10)
    assert type(model.layer4[0].conv1) is OnePixelConv2d
    assert model.state_dict().keys() == torchvision.models.resnet18().state_dict().keys()


def test_bfloat16_gradients_do_not_depend_on_memory():
    """With nn.Conv2d, they contain what the memory held before: here, NaN."""
    torch.manual_seed(0)
    conv = use_middle_weights(nn.Sequential(nn.Conv2d(64, 128, 3, stride=2, padding=1)))
    for _ in range(5):
        # The next tensors of these sizes get this memory.
        freed = [torch.full((128 * 64 * 9,), torch.nan, dtype=d) for d in (torch.bfloat16, None)]
        del freed
        with torch.autocast("cpu", torch.bfloat16):
            loss = conv(torch.ones(8, 64, 1, 1)).float().sum()
        conv.zero_grad()
        loss.backward()
        assert conv[0].weight.grad.isfinite().all()
