"""The images task: classify images, with the loss and the metrics of classification.

A script names this module in one line. A task of your own is a module with the same names; it can
import those from here that it does not replace (docs/own-task.md).
"""

import zlib
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tasks.images.arrays import ArrayDataset
from tasks.images.models import build_model as build_model
from tasks.images.pixels import PixelDataset
from tasks.images.settings import Settings as Settings
from utils.data import describe_datasets
from utils.distributed import current_device, main_process_first
from utils.errors import UserError, required_by

BEST = ("accuracy", max)  # the validation metric that decides which epoch is the best


def build_datasets(cfg: Settings) -> tuple[PixelDataset, PixelDataset]:
    """The training set and the validation set that the config selects. All ranks call it together,
    after the device has been chosen."""
    build: Any  # a function of cfg
    if cfg.dataset == "cifar10":
        from tasks.images.cifar10 import build
    elif cfg.dataset == "synthetic":
        from tasks.images.synthetic import build
    elif cfg.dataset == "imagefolder":
        with required_by("--dataset imagefolder"):
            from tasks.images.folder import build
    else:
        with required_by("--dataset shards"):
            from tasks.images.shards import build
    with main_process_first():  # one download per node
        train_set, val_set = build(cfg)
    is_there = isinstance(train_set, ArrayDataset) and current_device().type == "cpu"
    if cfg.loader == "workers" or is_there:
        return train_set, val_set
    from sources.resident import keep_on_device

    return keep_on_device(train_set, cfg.loader), keep_on_device(val_set, cfg.loader)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The sum of the cross-entropies of a batch, 0-dim.

    outputs: logits (n, classes). targets: integers (n,), or probabilities (n, classes).
    Raises UserError if the shapes do not fit.
    """
    expected = outputs.shape if targets.is_floating_point() else outputs.shape[:1]
    if outputs.dim() != 2 or targets.shape != expected:
        raise UserError(
            f"outputs {tuple(outputs.shape)} and labels {tuple(targets.shape)} do not fit: "
            f"classification needs (n, classes), and integers (n,) or probabilities (n, classes)"
        )
    targets = targets if targets.is_floating_point() else targets.long()
    return cross_entropy(outputs, targets, reduction="sum")


def count(targets: Tensor) -> int:
    """The number of images in a batch: a plain number, as it is the same on every rank."""
    return len(targets)


def measure(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """{"correct": the number of images whose class has the largest output, 0-dim}."""
    classes = targets.argmax(1) if targets.is_floating_point() else targets
    return {"correct": (outputs.argmax(1) == classes).sum()}


def summarize(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """{"loss", "accuracy"} from the sums over all ranks."""
    return {"loss": sums["loss"] / sums["count"], "accuracy": sums["correct"] / sums["count"]}


def describe(train_set: PixelDataset, val_set: PixelDataset) -> dict[str, Any]:
    """What a checkpoint stores about the data, as plain values: preprocessing and class names for
    inference, and enough to notice different data."""
    facts = describe_datasets(train_set, val_set) | {"classes": train_set.classes}
    for name, dataset in (("train", train_set), ("val", val_set)):
        facts[f"{name}_labels"] = zlib.crc32(dataset.labels.numpy().data)  # without a copy
    return facts | train_set.preprocessing | val_set.split


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model, such as a ResNet's."""
    from tasks.images.parts import blocks_of

    return blocks_of(model)


def layers(model: nn.Module) -> list[tuple[Callable[[Tensor], Tensor], list[Any]]]:
    """The layers of a ResNet, a ViT or a Sequential: (function, its modules)."""
    from tasks.images.parts import layers_of

    return layers_of(model)


def tensor_parallel_plan(model: nn.Module, ranks: int) -> list[tuple[nn.Module, dict[str, Any]]]:
    """(block, plan for parallelize_module()) of a vision transformer on this many ranks."""
    from tasks.images.parts import plan_of

    return plan_of(model, ranks)
