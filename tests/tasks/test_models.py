"""Models by name."""

from types import SimpleNamespace

import pytest
import torch
import torchvision

from tasks.images import Settings
from tasks.images.models import build_classifier, build_model
from tasks.images.weights import head_of
from tests.processes import run_ranks
from utils.errors import UserError
from utils.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm

# RegNets compute their widths with tensors and so cannot be built on the meta device.
TORCHVISION = [
    name
    for name in torchvision.models.list_models(module=torchvision.models)
    if not name.startswith("regnet")
]


def smallest_of_its_family(name):
    """Whether torchvision's module for this model defines no smaller one."""

    def family_and_size(name):
        builder = torchvision.models.get_model_builder(name)
        weights = torchvision.models.get_model_weights(builder)
        return builder.__module__, weights.DEFAULT.meta["num_params"]

    family, size = family_and_size(name)
    return all(size <= s for f, s in map(family_and_size, TORCHVISION) if f == family)


NAMES = [
    *(
        pytest.param(name, marks=() if smallest_of_its_family(name) else pytest.mark.slow)
        for name in TORCHVISION
    ),
    *("resnet20", "resnet9", "resnet34_cifar", "resnet50_cifar_gn", "vgg11_bn_gn"),
]


def make(name, classes=10, **options):
    return build_classifier(Settings(model=name, **options), classes)


@pytest.mark.parametrize("name", NAMES)
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


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("resnet-50", "resnet50"),
        ("ResNet50", "resnet50"),
        ("resnet_50_cifar", "resnet50"),
        ("vit-tiny", "vit_tiny"),
        ("efficientnet-b0", "efficientnet_b0"),
    ],
)
def test_near_miss_of_a_model_is_named(name, close):
    with pytest.raises(UserError, match=rf"{close}\?$"):
        make(name)


def test_unknown_model_is_refused():
    with pytest.raises(UserError, match="my_net"):
        make("my_net")


def test_model_has_an_output_for_each_class_of_the_training_set():
    train_set = SimpleNamespace(classes=["cat", "dog", "owl"])
    model = build_model(Settings(model="resnet20"), train_set)
    assert model(torch.zeros(2, 3, 8, 8)).shape == (2, 3)
    assert {p.dtype for p in model.parameters()} == {torch.float32}  # the scripts convert it
    weight = make("resnet18").conv1.weight
    assert weight.is_contiguous(memory_format=torch.channels_last)


def test_weights_follow_from_the_global_seed_on_every_rank():
    def body(rank):
        torch.rand(rank)
        torch.manual_seed(5)
        return [p.sum().item() for p in make("resnet20").parameters()]

    first, second = run_ranks(body, 2)
    assert first == second
    torch.manual_seed(6)
    assert first != [p.sum().item() for p in make("resnet20").parameters()]


@pytest.mark.parametrize("name", ["squeezenet1_1", "efficientnet_b0"])
def test_dropout_and_stochastic_depth_draw_by_sample(name):
    model = build_model(Settings(model=name), SimpleNamespace(classes=range(2)))
    own = torchvision.models.get_model(name, num_classes=2)
    assert [*model.state_dict()] == [*own.state_dict()]
    origins = {type(module).__module__ for module in model.modules()}
    assert "utils.sample_random" in origins
    assert not origins & {"torch.nn.modules.dropout", "torchvision.ops.stochastic_depth"}


def test_every_batchnorm_is_synchronized_under_its_name():
    plain = make("resnet20")
    names = list(plain.state_dict())
    norms = [name for name, m in plain.named_modules() if "BatchNorm" in type(m).__name__]
    model = convert_sync_batchnorm(plain)
    synced = [name for name, module in model.named_modules() if isinstance(module, SyncBatchNorm)]
    assert synced == norms != [] and list(model.state_dict()) == names
