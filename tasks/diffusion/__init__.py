"""Generate images: a denoiser that is trained by flow matching, and judged by its loss.

Noise and its level are numbers of the sample (utils/sample_random.py): each image gets new ones in
each epoch, the same on any number of ranks. In validation, they are the same in every epoch.
`python -m tasks.diffusion.sample` draws images with a trained model.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import tasks.images
from tasks.diffusion.denoiser import Denoiser
from tasks.images.arrays import ArrayDataset
from utils.config import Config, ConfigError, free_setting, setting
from utils.data import BatchDataset
from utils.errors import UserError

BEST = ("loss", min)


@dataclass(frozen=True)
class Settings(Config):
    """What to train: the diffusion task."""

    dataset: str = setting(
        "auto",
        "auto: cifar10 if data_dir holds it, else synthetic",
        choices=("auto", "cifar10", "synthetic"),
    )
    data_dir: str = free_setting("data", "where CIFAR-10 is, or is downloaded to")
    synthetic_samples: int = setting(8192, "training images in dataset=synthetic", low=1)
    image_size: int = setting(32, "pixels per side; a multiple of patch_size", low=1)
    patch_size: int = setting(4, "pixels per side of a token", low=1)
    loader: str = free_setting(
        "auto",
        "device: keep the images on the device; workers: loader processes read them; auto: on the "
        "device if they fit",
        choices=("auto", "device", "workers"),
    )
    layers: int = setting(6, "transformer blocks", low=1)
    heads: int = setting(4, "attention heads per block", low=1)
    width: int = setting(256, "features per token; a multiple of 2 * heads", low=2)
    optimizer: str = "adamw"
    lr: float = 3e-4
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    # What the datasets of the images task ask for.
    augment: ClassVar[str] = "none"  # a model would learn to generate the borders of crops
    weights: ClassVar[str] = ""

    def resolved(self) -> Self:
        """See BaseSettings. Raises ConfigError if values contradict each other."""
        if self.image_size % self.patch_size:
            raise ConfigError(
                f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}"
            )
        if self.width % (2 * self.heads):
            raise ConfigError(
                f"width {self.width} is not a multiple of {2 * self.heads}, twice the heads"
            )
        cfg = super().resolved()
        if cfg.dataset == "auto":
            has_cifar10 = (Path(cfg.data_dir) / "cifar-10-batches-py").is_dir()
            cfg = replace(cfg, dataset="cifar10" if has_cifar10 else "synthetic")
        return cfg


class Unlabeled(BatchDataset):
    """The images of an ArrayDataset, which are inputs and targets at once."""

    def __init__(self, labeled: ArrayDataset) -> None:
        self.labeled, self.device = labeled, labeled.device

    def __len__(self) -> int:
        return len(self.labeled)

    def __getitem__(self, index: int) -> Tensor:
        return self.labeled[index][0]

    def get_batch(self, indices: Tensor, epoch: int, seed: int) -> Tensor:
        """int64 (n,) -> uint8 images (n, 3, size, size)."""
        return self.labeled.get_batch(indices, epoch, seed)[0]

    def on_device(self, batch: Tensor, dtype: torch.dtype) -> Tensor:
        """uint8 images -> normalized images of `dtype`."""
        return self.labeled.on_device((batch, None), dtype)[0]


def build_datasets(cfg: Settings) -> tuple[Unlabeled, Unlabeled]:
    """The training set and the validation set that the config selects."""
    train_set, val_set = tasks.images.build_datasets(cfg)  # type: ignore[arg-type]
    return Unlabeled(train_set), Unlabeled(val_set)  # type: ignore[arg-type]


def build_model(cfg: Settings, train_set: Unlabeled) -> Denoiser:
    """A Denoiser with random weights from the global seed."""
    return Denoiser(cfg.image_size, cfg.patch_size, cfg.layers, cfg.heads, cfg.width)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The sum of the squared errors. outputs, targets: images (n, 3, size, size)."""
    return mse_loss(outputs, targets, reduction="sum")


def count(targets: Tensor) -> int:
    """The number of values in a batch: a plain number, as it is the same on every rank."""
    return targets.numel()


def measure(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Nothing: the loss is the metric."""
    return {}


def summarize(sums: dict[str, Tensor]) -> dict[str, float]:
    """The mean squared error of a normalized value: 1, the variance, for a model that guesses."""
    return {"loss": (sums["loss"] / sums["count"]).item()}


def describe(train_set: Unlabeled, val_set: Unlabeled) -> dict[str, Any]:
    """What a checkpoint stores about the data: as of the images task, with the preprocessing that
    sampling reverses."""
    return tasks.images.describe(train_set.labeled, val_set.labeled)


def blocks(model: Denoiser) -> list[nn.Module]:
    """The transformer blocks."""
    return list(model.blocks)


def layers(model: Denoiser) -> list[tuple[Callable[[Tensor], Tensor], list[Any]]]:
    """(function, parts) for the noise and the embeddings, each block, and the output layer."""
    return [
        (model.add_noise, [model.patches, model.positions, model.level]),
        *((block, [block]) for block in model.blocks),
        (model.predict, [model.norm, model.output]),
    ]


def tensor_parallel_plan(model: Denoiser, ranks: int) -> list[tuple[nn.Module, dict[str, Any]]]:
    """A plan for parallelize_module(): each rank computes some heads and MLP columns of each block.

    Raises UserError if the ranks cannot have the same number.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    first: Any = model.blocks[0]
    columns = first.mlp[0].out_features
    heads = first.query.out_features // first.head_width
    if heads % ranks or columns % ranks:
        raise UserError(
            f"{heads} attention heads and {columns} MLP columns cannot both be divided evenly "
            f"among {ranks} ranks: pass a different --heads or --width"
        )
    plan: dict[str, Any] = {name: ColwiseParallel() for name in ("query", "key", "value", "mlp.0")}
    plan |= {"output": RowwiseParallel(), "mlp.2": RowwiseParallel()}
    return [(block, plan) for block in model.blocks]
