"""The settings of the images task."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from utils.config import Config, ConfigError, free_setting, setting
from utils.errors import required_by


@dataclass(frozen=True)
class Settings(Config):
    """What to train: the images task."""

    dataset: str = setting(
        "auto",
        "auto: cifar10 if data_dir holds it, else synthetic",
        choices=("auto", "cifar10", "imagefolder", "shards", "synthetic"),
    )
    data_dir: str = free_setting("data", "where the images are, or are downloaded to")
    synthetic_samples: int = setting(8192, "training images in dataset=synthetic", low=1)
    image_size: int = setting(0, "pixels per side; 0: what --weights expects, otherwise 32")
    augment: str = setting(
        "crop_flip",
        "crop_flip: pad, crop, flip; resized_crop: ImageNet's (for imagefolder and shards)",
        choices=("none", "crop_flip", "resized_crop"),
    )
    model: str = setting(
        "resnet18", "a torchvision model, resnet20, resnet9 or vit_tiny; suffixes _cifar, _gn"
    )
    weights: str = setting("", "pretrained: torchvision's name (DEFAULT), or a file; empty: none")
    freeze: str = setting(
        "none", "backbone: with weights, train only the last layer", choices=("none", "backbone")
    )
    val_fraction: float = setting(0.0, "imagefolder: share of each class if there is no val folder")
    on_bad_sample: str = setting(
        "error", "imagefolder, shards: skip: leave bad images out", choices=("error", "skip")
    )
    cache_dir: str = free_setting("", "decoded images, indices, ...; empty: data_dir/.cache")
    loader: str = free_setting(
        "auto",
        "device: keep the images on it; workers: loader processes read them; auto: if they fit",
        choices=("auto", "device", "workers"),
    )

    def resolved(self) -> Self:
        """See BaseSettings. Raises ConfigError if values contradict each other."""
        cfg, dataset = super().resolved(), self.dataset
        if dataset == "auto":
            has_cifar10 = Path(cfg.data_dir, "cifar-10-batches-py").is_dir()
            dataset = "cifar10" if has_cifar10 else "synthetic"
        if cfg.augment == "resized_crop" and dataset in ("cifar10", "synthetic"):
            raise ConfigError(f"augment=resized_crop is for imagefolder or shards, not {dataset}")
        if cfg.freeze != "none" and not cfg.weights:
            raise ConfigError("--freeze backbone needs pretrained --weights")
        size = cfg.image_size or expected_inputs(cfg).get("image_size", 32)
        return replace(cfg, dataset=dataset, image_size=size)


def expected_inputs(cfg: Settings) -> dict[str, Any]:
    """What cfg.weights expects of its images, as far as it is known: "image_size", "resize",
    "interpolation", "mean" and "std". Raises UserError if there are no such weights."""
    if not cfg.weights:
        return {}
    with required_by("--weights"):
        from tasks.images.weights import inputs_of_run
    return inputs_of_run(cfg)
