"""tasks/images: loss, metrics, settings, what a checkpoint stores, and the parts of models."""

import tracemalloc
from dataclasses import fields

import numpy
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import tasks.images as task
from tasks.images.arrays import ArrayDataset
from tasks.images.models import build_classifier
from tasks.images.pixels import PixelDataset
from utils.config import Config
from utils.errors import UserError

NEUTRAL = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25), "size": 8}


def make(name, image_size=32):
    torch.manual_seed(0)
    return build_classifier(task.Settings(model=name, image_size=image_size), 10)


# Settings


def test_settings_fit_together():
    own = [f for f in fields(task.Settings) if f.name not in {g.name for g in fields(Config)}]
    assert {f.name for f in own if f.metadata["free"]} == {"data_dir", "cache_dir", "loader"}
    for values, named in (
        ({"augment": "resized_crop"}, "augment=resized_crop"),
        ({"freeze": "backbone"}, "--freeze"),
        ({"weights": "/no/file"}, "/no/file"),
    ):
        with pytest.raises(UserError, match=named):
            task.Settings(**values).resolved()


def test_dataset_auto_is_cifar10_where_its_folder_is(tmp_path):
    cfg = task.Settings(data_dir=str(tmp_path))
    assert cfg.resolved().dataset == "synthetic"
    (tmp_path / "cifar-10-batches-py").mkdir()
    assert cfg.resolved().dataset == "cifar10"


# Loss and metrics


def test_loss_is_the_sum_over_the_labels():
    outputs, labels = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0, 1])
    expected = cross_entropy(outputs, labels) * 6
    for targets in (labels, labels.int()):
        torch.testing.assert_close(task.loss(outputs, targets), expected)
    soft = nn.functional.one_hot(labels, 4).double()
    torch.testing.assert_close(task.loss(outputs, soft), expected)
    mixed = 0.7 * soft + 0.3 * soft.flip(0)
    both = 0.7 * task.loss(outputs, labels) + 0.3 * task.loss(outputs, labels.flip(0))
    torch.testing.assert_close(task.loss(outputs, mixed), both)
    assert task.loss(outputs, labels).shape == ()


@pytest.mark.parametrize(
    ("outputs", "labels", "dtype"),
    [
        ((4, 10), (3,), torch.int64),
        ((4, 10), (4, 10), torch.int64),  # several classes per image
        ((4, 10), (4,), torch.float32),  # numbers to be predicted
        ((4, 10), (4, 9), torch.float32),
        ((4,), (4,), torch.int64),
        ((4, 10, 8, 8), (4, 8, 8), torch.int64),  # masks: each image would count 64 times
        ((4, 10, 8, 8), (4, 10, 8, 8), torch.float32),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_are_refused(outputs, labels, dtype):
    """Otherwise, some of them would give an accuracy of more than 100 %."""
    with pytest.raises(UserError) as caught:
        task.loss(torch.zeros(outputs), torch.zeros(labels, dtype=dtype))
    assert f"{outputs} and labels {labels}" in str(caught.value)


def test_accuracy_is_the_fraction_of_correct_images():
    outputs = torch.tensor([[3.0, 1, 2], [0, 5, 1], [9, 8, 7], [0, 0, 1]])
    labels = torch.tensor([0, 1, 2, 2])
    soft = torch.tensor([[0.6, 0.4, 0], [0.1, 0.9, 0], [0.2, 0.2, 0.6], [0.3, 0.3, 0.4]])
    for targets in (labels, soft):
        assert task.measure(outputs, targets)["correct"].item() == 3
        assert task.count(targets) == 4 and isinstance(task.count(targets), int)
    sums = {"loss": task.loss(outputs, labels), "count": 4, **task.measure(outputs, labels)}
    sums = {name: torch.tensor(float(value), dtype=torch.float64) for name, value in sums.items()}
    result = task.summarize(sums)
    assert result.keys() == {"loss", "accuracy"} and result["accuracy"] == 0.75
    assert result["loss"].item() == pytest.approx(cross_entropy(outputs, labels).item())
    assert task.BEST[0] in result and task.BEST[1] is max


# What a checkpoint stores


def test_description_is_of_plain_values(tmp_path):
    images = torch.zeros(6, 3, 8, 8, dtype=torch.uint8)
    classes = numpy.array(["cat", "dog"])
    mean, std = numpy.array([0.1, 0.2, 0.3]), torch.tensor([0.5, 0.25, 1.0])
    train = ArrayDataset(images, numpy.array([0, 1] * 3), classes, mean, std, 8)
    val = ArrayDataset(images[:2], [0, 1], classes, mean, std, 8)
    facts = task.describe(train, val)
    assert facts["classes"] == ["cat", "dog"] and {type(c) for c in facts["classes"]} == {str}
    assert (facts["train_samples"], facts["val_samples"]) == (6, 2)
    assert (facts["mean"], facts["std"]) == ([0.1, 0.2, 0.3], [0.5, 0.25, 1.0])
    assert {type(number) for number in facts["mean"] + facts["std"]} == {float}
    torch.save(facts, tmp_path / "facts.pt")
    assert torch.load(tmp_path / "facts.pt", weights_only=True) == facts


def test_description_changes_with_the_labels_and_needs_no_memory():
    preprocessing = {"mean": [0.5] * 3, "std": [0.25] * 3}
    labels = torch.zeros(1_000_000, dtype=torch.int64)
    train, val = (PixelDataset(labels, ["a", "b"], preprocessing) for _ in range(2))
    tracemalloc.start()
    facts = task.describe(train, val)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000
    labels[-1] = 1
    changed = task.describe(train, val)
    assert {name for name in facts if facts[name] != changed[name]} == {
        "train_labels",
        "val_labels",
    }


# Blocks, for FSDP


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width))


class ConvNeXt(nn.Module):
    """The structure of the original ConvNeXt: stages in a ModuleList."""

    def __init__(self):
        super().__init__()
        convolution = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8))
        self.downsample_layers = nn.ModuleList([convolution, nn.Sequential(nn.Conv2d(8, 16, 2))])
        stages = [nn.Sequential(Block(8), Block(8)), nn.Sequential(Block(16), Block(16))]
        self.stages = nn.ModuleList([*stages, nn.ModuleList([Block(16)])])
        self.head = nn.Linear(16, 3)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("resnet18", 8),
        ("vit_b_16", 12),
        ("resnet9", 7),
        ("convnext_tiny", 1 + 3 + 18),
        ("alexnet", 0),
        (ConvNeXt, 2 + 5),
    ],
)
def test_blocks_are_the_members_of_sequentials_and_module_lists(name, count):
    with torch.device("meta"):
        model = name() if name is ConvNeXt else make(name, image_size=224)
    blocks = task.blocks(model)
    assert len(blocks) == count
    assert not any(isinstance(block, nn.ModuleList) for block in blocks)  # FSDP refuses them
    inside = [parameter for block in blocks for parameter in block.parameters()]
    assert len(inside) == len(set(inside))  # no block inside another
    if count:
        assert sum(p.numel() for p in inside) > 0.75 * sum(p.numel() for p in model.parameters())
    if "conv" in str(name).lower():  # a whole stage is not gathered at once
        sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
        assert max(sizes) < 0.5 * sum(sizes)


# Layers, for pipeline and model parallelism


@pytest.mark.parametrize(("name", "count"), [("resnet18", 10), ("resnet9", 7), ("vit_tiny", 6)])
def test_layers_one_after_another_are_the_model(name, count):
    model = make(name, image_size=16).double()
    layers, images = task.layers(model), torch.randn(4, 3, 16, 16, dtype=torch.float64)
    expected = model(images)
    outputs = images
    for function, _ in layers:
        outputs = function(outputs)
    assert torch.equal(outputs, expected) and len(layers) == count
    tensors = []
    for _, parts in layers:
        for part in parts:
            tensors += part.parameters() if isinstance(part, nn.Module) else [part]
    assert len(tensors) == len(set(tensors))
    assert set(tensors) == set(model.parameters())


@pytest.mark.parametrize("name", ["vgg11", "googlenet"])
def test_layers_in_an_unknown_order_are_refused(name):
    with torch.device("meta"):
        model = make(name)
    with pytest.raises(UserError, match=type(model).__name__):
        task.layers(model)


# Slices, for tensor parallelism


def test_tensor_parallel_plan_divides_each_transformer_block():
    model = make("vit_tiny")
    plan = task.tensor_parallel_plan(model, 2)
    assert [block for block, _ in plan] == list(model.encoder.layers)
    for block, styles in plan:
        assert len(styles) == 5 and all(block.get_submodule(name) for name in styles)
    with pytest.raises(UserError, match="3 ranks"):
        task.tensor_parallel_plan(model, 3)
    with pytest.raises(UserError, match="ResNet20"):
        task.tensor_parallel_plan(make("resnet20"), 2)
