"""resnet20, resnet9, vit_tiny, and the suffixes _cifar and _gn."""

import pytest
import torch
import torchvision
from torch import nn

from tasks.images import Settings
from tasks.images.models import build_classifier
from tasks.images.small_models import split_name
from tests.forked import same_bits
from utils.errors import UserError


def make(name, classes=10, image_size=32):
    return build_classifier(Settings(model=name, image_size=image_size), classes)


def test_suffixes_are_split_from_the_name():
    assert split_name("resnet18_cifar") == ("resnet18", {"cifar"})
    assert split_name("resnet18_gn_cifar") == ("resnet18", {"cifar", "gn"})
    for name in torchvision.models.list_models(module=torchvision.models):
        assert split_name(name) == (name, set())


@pytest.mark.parametrize(("name", "millions"), [("resnet20", 0.27), ("resnet9", 6.6)])
def test_own_models_take_images_of_any_size(name, millions):
    model = make(name, classes=7).eval()
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.02)
    for size in (16, 32):
        assert model(torch.zeros(2, 3, size, size)).shape == (2, 7)


def test_vit_tiny_takes_images_of_whole_patches():
    model = make("vit_tiny", classes=7, image_size=16)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(140_000, rel=0.02)
    assert model(torch.zeros(2, 3, 16, 16)).shape == (2, 7)
    with pytest.raises(UserError, match=r"^vit_tiny .*--image-size .* 4, not 18"):
        make("vit_tiny", image_size=18)


def test_cifar_stem_keeps_the_resolution():
    with torch.device("meta"):
        images = torch.zeros(1, 3, 32, 32)
        for name, size in (("resnet18_cifar", 32), ("resnet18", 8)):
            model = make(name)
            assert model.maxpool(model.conv1(images)).shape[2:] == (size, size)


def test_resnet20_already_has_the_cifar_stem():
    torch.manual_seed(0)
    expected = make("resnet20").state_dict()
    torch.manual_seed(0)
    assert same_bits(make("resnet20_cifar").state_dict(), expected)


@pytest.mark.parametrize("name", ["resnet18_cifar", "resnet9"])
def test_groupnorm_replaces_every_batchnorm(name):
    batch, group = make(name), make(f"{name}_gn")
    assert list(dict(batch.named_parameters())) == list(dict(group.named_parameters()))
    assert not list(group.buffers())
    assert not any(isinstance(m, nn.BatchNorm2d) for m in group.modules())
    images = torch.randn(4, 3, 32, 32)
    outputs = group(images)  # of each sample alone, although the model is in train()
    torch.testing.assert_close(outputs[:1], group(images[:1]), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(batch(images)[:1], batch(images[[0, 0]])[:1], rtol=1e-2, atol=1e-2)


def test_groups_divide_the_channels():
    model = make("resnet20_gn")
    assert (model.bn1.num_groups, model.layer3[0].bn1.num_groups) == (16, 32)
