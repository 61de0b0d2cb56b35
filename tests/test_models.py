"""Models by name."""

import pytest
import torch
import torchvision

from tests.launch import run_ranks
from utils.config import Config
from utils.errors import UserError
from utils.models import build_model, convert_sync_batchnorm
from utils.sync_batchnorm import SyncBatchNorm

# RegNets compute their widths with tensors and so cannot be built on the meta device.
NAMES = [
    *(
        name
        for name in torchvision.models.list_models(module=torchvision.models)
        if not name.startswith("regnet")
    ),
    *("resnet20", "resnet9", "resnet34_cifar", "resnet50_cifar_gn", "vgg11_bn_gn"),
]


@pytest.mark.parametrize("name", NAMES)
def test_model_is_built_by_name(name):
    size = 299 if name == "inception_v3" else 224
    with torch.device("meta"):
        model = build_model(Config(model=name, image_size=size), num_classes=7)
        assert model.train()(torch.empty(2, 3, size, size)).shape == (2, 7)


def test_vision_transformer_takes_the_image_size_of_the_config():
    with torch.device("meta"):
        model = build_model(Config(model="vit_b_16", image_size=32), num_classes=7)
        assert model(torch.empty(2, 3, 32, 32)).shape == (2, 7)


def test_unknown_model_lists_the_known_ones():
    with pytest.raises(UserError, match=r"'resnet17' is neither resnet20 nor resnet9 nor .*vit_b"):
        build_model(Config(model="resnet17"), 10)
    with pytest.raises(UserError, match=r"'resnet17' is neither"):
        build_model(Config(model="resnet17_cifar"), 10)


def test_dtype_and_memory_format():
    model = build_model(Config(model="resnet20", dtype="float64"), 10)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    weight = build_model(Config(model="resnet18"), 10).conv1.weight
    assert weight.dtype == torch.float32
    assert weight.is_contiguous(memory_format=torch.channels_last)


def test_weights_follow_from_the_global_seed_on_every_rank():
    def body(rank):
        torch.rand(rank)
        torch.manual_seed(5)
        model = build_model(Config(model="resnet20"), 10)
        return [p.sum().item() for p in model.parameters()]

    first, second = run_ranks(body, 2)
    assert first == second
    torch.manual_seed(6)
    other = build_model(Config(model="resnet20"), 10)
    assert first != [p.sum().item() for p in other.parameters()]


def test_compiled_model_keeps_the_names_of_its_parameters():
    plain, compiled = (
        build_model(Config(model="resnet20", compile=mode), 10) for mode in ("none", "default")
    )
    assert list(plain.state_dict()) == list(compiled.state_dict())
    assert compiled._compiled_call_impl is not None and plain._compiled_call_impl is None


def test_every_batchnorm_is_synchronized_under_its_name():
    plain = build_model(Config(model="resnet20"), 10)
    names, norms = (
        list(plain.state_dict()),
        [name for name, module in plain.named_modules() if "BatchNorm" in type(module).__name__],
    )
    model = convert_sync_batchnorm(plain)
    synced = [name for name, module in model.named_modules() if isinstance(module, SyncBatchNorm)]
    assert synced == norms != [] and list(model.state_dict()) == names
