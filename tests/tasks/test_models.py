"""Models by name."""

from types import SimpleNamespace

import pytest
import torch
import torchvision

from tasks.images import Settings
from tasks.images.models import build_classifier, build_model
from tasks.images.weights import head_of
from utils.errors import UserError
from utils.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm

# With options, an attribute or a last layer of their own.
FAST = ["resnet18", "googlenet", "inception_v3", "squeezenet1_1", "vit_b_16"]
FAST += ["resnet20", "resnet9", "resnet34_cifar", "resnet50_cifar_gn", "vgg11_bn_gn"]


def every_name():
    """Of these, and of all others of torchvision, which are rare."""
    yield from FAST
    for name in torchvision.models.list_models(module=torchvision.models):
        # RegNets compute their widths with tensors and so cannot be built on the meta device.
        if name not in FAST and not name.startswith("regnet"):
            yield pytest.param(name, marks=[pytest.mark.slow, pytest.mark.rare])


def make(name, classes=10, **options):
    return build_classifier(Settings(model=name, **options), classes)


@pytest.mark.parametrize("name", [*every_name()])
def test_model_is_built_by_name(name):
    size = 299 if name == "inception_v3" else 224
    with torch.device("meta"):
        model = make(name, classes=7, image_size=size)
        assert model.train()(torch.empty(2, 3, size, size)).shape == (2, 7)
    head = model.get_submodule(head_of(model))  # which --weights leaves out
    assert getattr(head, "out_features", getattr(head, "out_channels", 0)) == 7


def test_vision_transformer_takes_the_image_size_of_the_config():
    with torch.device("meta"):
        model = make("vit_b_16", classes=7, image_size=32)
        assert model(torch.empty(2, 3, 32, 32)).shape == (2, 7)


def test_near_miss_of_a_model_is_named():
    with pytest.raises(UserError, match=r"no --model ResNet-50: .* resnet50\?$"):
        make("ResNet-50")


def test_weights_are_channels_last():
    weight = make("resnet18").conv1.weight
    assert weight.is_contiguous(memory_format=torch.channels_last)


def test_dropout_and_stochastic_depth_draw_by_sample():
    model = build_model(Settings(model="efficientnet_b0"), SimpleNamespace(classes=range(2)))
    own = torchvision.models.get_model("efficientnet_b0", num_classes=2)
    assert list(model.state_dict()) == list(own.state_dict())
    origins = {type(module).__module__ for module in model.modules()}
    assert "utils.sample_random" in origins
    assert "torch.nn.modules.dropout" not in origins
    assert "torchvision.ops.stochastic_depth" not in origins


def test_every_batchnorm_is_synchronized_under_its_name():
    plain = make("resnet20")
    names = list(plain.state_dict())
    norms = [name for name, m in plain.named_modules() if "BatchNorm" in type(m).__name__]
    model = convert_sync_batchnorm(plain)
    synced = [name for name, module in model.named_modules() if isinstance(module, SyncBatchNorm)]
    assert synced == norms != [] and list(model.state_dict()) == names
