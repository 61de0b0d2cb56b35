"""The settings of the images task."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from utils.config import Config, ConfigError, free_setting, setting
from utils.errors import UserError, required_by


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
    image_size: int = setting(
        0, "pixels per side of the input; 0: what --weights expects, otherwise 32"
    )
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
        "none",
        "with weights; backbone: train only the last layer; all other weights and the BatchNorm "
        "statistics stay as they are",
        choices=("none", "backbone"),
    )
    val_fraction: float = setting(
        0.0, "imagefolder: fraction of each class to validate with if there is no val folder"
    )
    on_bad_sample: str = setting(
        "error",
        "imagefolder, shards: images that cannot be decoded; skip: check all files first and leave "
        "bad ones out",
        choices=("error", "skip"),
    )
    cache_dir: str = free_setting(
        "", "for decoded images, lists of bad files, and indices of shards; empty: data_dir/.cache"
    )

    @property
    def cache_folder(self) -> Path:
        """The folder of decoded images and lists of bad files."""
        return Path(self.cache_dir or Path(self.data_dir) / ".cache")

    def resolved(self) -> Self:
        """See utils.settings. Raises ConfigError if values contradict each other."""
        if self.augment == "resized_crop" and self.loader == "device":
            raise ConfigError("augment=resized_crop crops the original images: use loader=workers")
        if self.val_fraction >= 1:
            raise ConfigError(f"val_fraction={self.val_fraction} leaves nothing to train on")
        if self.freeze != "none" and not self.weights:
            raise ConfigError("--freeze backbone needs pretrained --weights")
        cfg = super().resolved()
        dataset = cfg.dataset
        if dataset == "auto":
            has_cifar10 = (Path(cfg.data_dir) / "cifar-10-batches-py").is_dir()
            dataset = "cifar10" if has_cifar10 else "synthetic"
        only_for_folders = {
            "augment=resized_crop": cfg.augment == "resized_crop",
            "val_fraction": cfg.val_fraction > 0,
            "on_bad_sample": cfg.on_bad_sample == "skip",
            "cache_dir": cfg.cache_dir != "",
        }
        for name, is_set in only_for_folders.items():
            if is_set and dataset not in ("imagefolder", "shards"):
                raise ConfigError(f"{name} is for dataset=imagefolder or shards, not {dataset}")
        size = cfg.image_size
        if size == 0:
            size = expected_inputs(cfg).get("image_size", 32)
        return replace(cfg, dataset=dataset, image_size=size)


def expected_inputs(cfg: Settings) -> dict[str, Any]:
    """What cfg.weights expects of its images, as far as it is known: "image_size", "resize",
    "interpolation", "mean" and "std". Raises ConfigError if there are no such weights."""
    if not cfg.weights:
        return {}
    with required_by("--weights"):
        from tasks.images.weights import inputs_of_run
    try:
        return inputs_of_run(cfg)
    except UserError as error:
        raise ConfigError(str(error)) from None
