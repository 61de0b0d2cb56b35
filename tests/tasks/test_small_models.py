"""resnet20, resnet9, vit_tiny, and the suffixes _cifar and _gn."""

import pytest
import torch
import torchvision
from torch import nn

from tasks.images import Settings
from tasks.images.models import build_classifier
from tasks.images.small_models import build, split_name
from utils.errors import UserError


def make(name, classes=10, image_size=32):
    return build_classifier(Settings(model=name, image_size=image_size), classes)


def test_suffixes_are_split_from_the_name():
    assert split_name("resnet18") == ("resnet18", set())
    assert split_name("resnet18_cifar") == ("resnet18", {"cifar"})
    assert split_name("resnet18_gn_cifar") == ("resnet18", {"cifar", "gn"})
    for name in torchvision.models.list_models(module=torchvision.models):
        assert split_name(name) == (name, set())
        assert split_name(f"{name}_cifar_gn") == (name, {"cifar", "gn"})


@pytest.mark.parametrize(("name", "millions"), [("resnet20", 0.27), ("resnet9", 6.6)])
def test_own_models_take_images_of_any_size(name, millions):
    model = make(name, classes=7).eval()
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.02)
    for size in (16, 32):
        assert model(torch.zeros(2, 3, size, size)).shape == (2, 7)


def test_vit_tiny_takes_images_of_whole_patches():
    model = make("vit_tiny", classes=7, image_size=16)
    size = sum(parameter.numel() for parameter in model.parameters())
    assert size == pytest.approx(140_000, rel=0.02)
    outputs = model(torch.zeros(2, 3, 16, 16))
    assert outputs.shape == (2, 7)
    with pytest.raises(UserError, match=r"^vit_tiny .*--image-size .* 4, not 18"):
        make("vit_tiny", image_size=18)
    with pytest.raises(UserError, match=r"_cifar .*ResNets, .* vit_tiny .*leave"):
        make("vit_tiny_cifar", image_size=16)


def test_cifar_stem_keeps_the_resolution():
    with torch.device("meta"):
        images = torch.zeros(1, 3, 32, 32)
        for name, size in (("resnet18_cifar", 32), ("resnet18", 8)):
            model = make(name)
            assert model.maxpool(model.conv1(images)).shape[2:] == (size, size)
        with pytest.raises(UserError, match=r"_cifar .*ResNets, .* vgg11 .*leave"):
            make("vgg11_cifar")
    with pytest.raises(UserError, match=r"no --model resnet17"):
        make("resnet17_cifar")


def test_resnet20_already_has_the_cifar_stem():
    models = []
    for name in ("resnet20", "resnet20_cifar"):
        torch.manual_seed(0)
        models.append(build(Settings(model=name), 10, build_base=None).state_dict())
    assert all(torch.equal(a, b) for a, b in zip(*(m.values() for m in models), strict=True))


@pytest.mark.parametrize("name", ["resnet18_cifar", "resnet9"])
def test_groupnorm_replaces_every_batchnorm(name):
    batch, group = make(name), make(f"{name}_gn")
    assert [n for n, _ in batch.named_parameters()] == [n for n, _ in group.named_parameters()]
    assert not list(group.buffers())
    assert not any(isinstance(m, nn.BatchNorm2d) for m in group.modules())
    images = torch.randn(4, 3, 32, 32)
    outputs = group(images)  # of each sample alone, although the model is in train()
    torch.testing.assert_close(outputs[:1], group(images[:1]), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(batch(images)[:1], batch(images[[0, 0]])[:1], rtol=1e-2, atol=1e-2)


def test_groups_divide_the_channels():
    model = make("resnet20_gn")
    assert (model.bn1.num_groups, model.layer3[0].bn1.num_groups) == (16, 32)
