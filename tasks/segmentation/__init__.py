"""Semantic segmentation: a U-Net that gives each pixel a class, judged by its mean IoU.

Mean IoU is not a mean over samples: the intersection and the union of a class are summed over all
samples of all ranks, and divided only then.
"""

from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tasks.segmentation.data import (
    IGNORED,
    SHAPES,
    Masks,
    Shapes,
    check_classes,
    find_pairs,
    split_pairs,
)
from tasks.segmentation.unet import UNet
from utils.config import Config, ConfigError, free_setting, setting
from utils.data import describe_datasets
from utils.distributed import fail_together, is_main_process
from utils.errors import UserError
from utils.seeds import derive_seed

BEST = ("mean_iou", max)


@dataclass(frozen=True)
class Settings(Config):
    """What to train: the segmentation task."""

    dataset: str = setting(
        "synthetic",
        "folder: the images in data_dir/images with the masks in data_dir/masks",
        choices=("synthetic", "folder"),
    )
    data_dir: str = free_setting("data", "for dataset=folder")
    synthetic_samples: int = setting(2048, "training images in dataset=synthetic", low=1)
    val_fraction: float = setting(0.2, "fraction to validate with in dataset=folder")
    num_classes: int = setting(4, "in the masks; dataset=synthetic has 4", low=2)
    image_size: int = setting(32, "pixels per side, to which images are resized", low=4)
    width: int = setting(16, "channels of the U-Net's first level", low=1)
    norm: str = setting("batch", "group: each sample for itself", choices=("batch", "group"))
    global_batch_size: int = 16
    optimizer: str = "adamw"
    lr: float = 1e-2
    weight_decay: float = 0.01

    def resolved(self) -> Self:
        """See BaseSettings. Raises ConfigError if values contradict each other."""
        if self.image_size % 4:
            raise ConfigError(f"image_size must be a multiple of 4, not {self.image_size}")
        if not 0 < self.val_fraction < 1:
            raise ConfigError(f"val_fraction must be between 0 and 1, not {self.val_fraction}")
        if self.dataset == "synthetic" and self.num_classes != len(SHAPES):
            raise ConfigError(
                f"dataset=synthetic has {len(SHAPES)} classes, not {self.num_classes}: remove "
                f"num_classes, or set dataset=folder"
            )
        return super().resolved()


def build_datasets(cfg: Settings) -> tuple[Masks | Shapes, Masks | Shapes]:
    """The training set and the validation set. All ranks call it together.

    Raises UserError if files are missing, or if the masks hold no class.
    """
    size = cfg.image_size
    if cfg.dataset == "folder":
        train, val = split_pairs(find_pairs(cfg.data_dir), cfg.val_fraction, cfg.seed)
        with fail_together():
            if is_main_process():
                check_classes([mask for _, mask in train], cfg.num_classes)
        train_set = Masks(train, size, cfg.num_classes, augment=True)
        val_set = Masks(val, size, cfg.num_classes)
    else:
        train_seed, val_seed = (derive_seed(cfg.seed, split) for split in (0, 1))
        train_set = Shapes(cfg.synthetic_samples, size, train_seed, augment=True)
        val_set = Shapes(max(1, cfg.synthetic_samples // 4), size, val_seed)
    return train_set, val_set


def build_model(cfg: Settings, train_set: Masks | Shapes) -> UNet:
    """A U-Net with random weights from the global seed."""
    return UNet(cfg.num_classes, cfg.width, cfg.norm)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The sum over all labeled pixels. outputs: (n, classes, height, width); targets: int64 (n,
    height, width)."""
    # With reduction="sum", CUDA has no deterministic kernel for images.
    return cross_entropy(outputs, targets, ignore_index=IGNORED, reduction="none").sum()


def count(targets: Tensor) -> Tensor:
    """The number of labeled pixels, a tensor: it varies."""
    return (targets != IGNORED).sum()


def measure(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """confusion: int64 (classes, classes), how often the row's class was taken for the column's."""
    classes = outputs.shape[1]
    pairs = targets * classes + outputs.argmax(1)
    pairs = torch.where(targets == IGNORED, classes**2, pairs).flatten()
    # Not bincount(), for which the host waits for the device.
    counts = pairs.new_zeros(classes**2 + 1).scatter_add_(0, pairs, torch.ones_like(pairs))
    return {"confusion": counts[:-1].view(classes, classes)}


def summarize(sums: dict[str, Tensor]) -> dict[str, float]:
    """The loss and the accuracy per pixel; and the intersection over union of target and
    prediction, as a mean over the classes that occur in one of them."""
    confusion = sums["confusion"]
    correct = confusion.diagonal()
    targets, predictions = confusion.sum(1), confusion.sum(0)
    union = targets + predictions - correct
    iou = (correct / union)[union > 0]
    return {
        "loss": (sums["loss"] / sums["count"]).item(),
        "mean_iou": iou.mean().item(),
        "accuracy": (correct.sum() / targets.sum()).item(),
    }


def describe(train_set: Masks | Shapes, val_set: Masks | Shapes) -> dict[str, Any]:
    """The sizes of the sets, and a checksum of each."""
    checksums = [train_set.checksum(), val_set.checksum()]
    return describe_datasets(train_set, val_set) | {"checksums": checksums}


def blocks(model: UNet) -> list[nn.Module]:
    """The pairs of convolutions, in the order in which they run."""
    return [model.encoder1, model.encoder2, model.bottom, model.decoder2, model.decoder1]


def layers(model: UNet) -> NoReturn:
    """Raises UserError: there are none."""
    raise UserError(
        "a U-Net is not a sequence of layers, because its encoder's levels feed its decoder's as "
        "well as the next level: use a script that keeps the model whole, such as train_fsdp.py"
    )


def tensor_parallel_plan(model: UNet, ranks: int) -> NoReturn:
    """Raises UserError: there is none."""
    raise UserError(
        "tensor parallelism divides the layers of transformers, and a U-Net has only convolutions: "
        "use train_fsdp.py to divide its parameters"
    )
