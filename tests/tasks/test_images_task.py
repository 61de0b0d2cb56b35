"""tasks/images: loss, metrics, settings, what a checkpoint stores, and the parts of models."""

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


def make(name, image_size=32):
    torch.manual_seed(0)
    return build_classifier(task.Settings(model=name, image_size=image_size), 10)


# Settings


def test_settings_fit_together():
    with pytest.raises(UserError, match="augment=resized_crop"):
        task.Settings(augment="resized_crop").resolved()
    with pytest.raises(UserError, match="/no/file"):
        task.Settings(weights="/no/file").resolved()


def test_settings_that_a_resumed_run_may_change():
    shared = {field.name for field in fields(Config)}
    own = [field for field in fields(task.Settings) if field.name not in shared]
    free = {field.name for field in own if field.metadata["free"]}
    assert free == {"data_dir", "cache_dir", "loader"}


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


@pytest.mark.parametrize(
    ("outputs", "labels", "dtype"),
    [
        ((4, 10), (3,), torch.int64),
        ((4, 10), (4, 10), torch.int64),  # several classes per image
        ((4, 10), (4,), torch.float32),  # numbers to be predicted
        ((4, 10, 8, 8), (4, 8, 8), torch.int64),  # masks: each image would count 64 times
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
    result = task.summarize(sums)
    assert result["accuracy"] == 0.75
    torch.testing.assert_close(result["loss"], cross_entropy(outputs, labels))
    assert ("accuracy", max) == task.BEST


# What a checkpoint stores


def test_description_is_of_plain_values(tmp_path):
    images = torch.zeros(6, 3, 8, 8, dtype=torch.uint8)
    classes = numpy.array(["cat", "dog"])
    mean, std = numpy.array([0.1, 0.2, 0.3]), torch.tensor([0.5, 0.25, 1.0])
    train = ArrayDataset(images, numpy.array([0, 1] * 3), classes, mean, std, 8)
    val = ArrayDataset(images[:2], [0, 1], classes, mean, std, 8)
    facts = task.describe(train, val)
    assert facts["classes"] == ["cat", "dog"]
    assert (facts["train_samples"], facts["val_samples"]) == (6, 2)
    assert facts["mean"] == [0.1, 0.2, 0.3]
    assert facts["std"] == [0.5, 0.25, 1.0]
    torch.save(facts, tmp_path / "facts.pt")
    assert torch.load(tmp_path / "facts.pt", weights_only=True) == facts


def test_description_changes_with_the_labels():
    labels = torch.zeros(6, dtype=torch.int64)
    dataset = PixelDataset(labels, ["a", "b"], {"mean": [0.5] * 3, "std": [0.25] * 3})
    facts = task.describe(dataset, dataset)
    labels[-1] = 1
    changed = task.describe(dataset, dataset)
    assert changed["train_labels"] != facts["train_labels"]
    assert changed["val_labels"] != facts["val_labels"]


# Blocks, for FSDP


@pytest.mark.parametrize(
    ("name", "count"),
    [("resnet18", 8), ("vit_b_16", 12), ("resnet9", 7), ("convnext_tiny", 1 + 3 + 18)],
)
def test_blocks_are_the_members_of_sequentials(name, count):
    with torch.device("meta"):
        model = make(name, image_size=224)
    blocks = task.blocks(model)
    assert len(blocks) == count
    inside = [parameter for block in blocks for parameter in block.parameters()]
    assert len(inside) == len(set(inside))  # no block inside another
    assert sum(p.numel() for p in inside) > 0.75 * sum(p.numel() for p in model.parameters())


def test_stages_and_module_lists_are_no_blocks():
    """A whole stage would be gathered at once, and FSDP refuses a ModuleList."""
    blocks = [nn.Sequential(nn.Linear(2, 2)) for _ in range(5)]
    first, second, *others = blocks
    stages = [nn.Sequential(first, second), nn.ModuleList(others)]
    model = nn.ModuleDict({"stages": nn.ModuleList(stages), "head": nn.Linear(2, 2)})
    assert task.blocks(model) == blocks
    assert task.blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []


# Layers, for pipeline and model parallelism


@pytest.mark.parametrize(("name", "count"), [("resnet18", 10), ("resnet9", 7), ("vit_tiny", 6)])
def test_layers_one_after_another_are_the_model(name, count):
    model = make(name, image_size=16).double()
    layers, images = task.layers(model), torch.randn(4, 3, 16, 16, dtype=torch.float64)
    expected = model(images)
    outputs, held = images, []
    for function, parts in layers:
        outputs = function(outputs)
        for part in parts:
            held += part.parameters() if isinstance(part, nn.Module) else [part]
    assert torch.equal(outputs, expected)
    assert len(layers) == count
    assert len(held) == len(set(held))
    assert set(held) == set(model.parameters())


def test_layers_in_an_unknown_order_are_refused():
    with torch.device("meta"):
        model = make("googlenet")
    with pytest.raises(UserError, match="GoogLeNet"):
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
