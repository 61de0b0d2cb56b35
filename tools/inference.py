"""What predict, evaluate and export share: a trained model out of its checkpoint alone."""

from dataclasses import fields, replace
from pathlib import Path

from utils.checkpoint import read_checkpoint
from utils.datasets import FolderSet
from utils.distributed import UserError
from utils.models import build_model
from utils.runtime import seed_everything
from utils.settings import Config


def load_trained(path, device):
    """-> (model in eval mode on `device`, its Config, facts about its images).

    The facts: "classes", "image_size", "resize", "interpolation", "mean", "std". UserError where
    the file is no checkpoint of these scripts.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no file {path}: name a checkpoint such as runs/x/best.pt")
    checkpoint = read_checkpoint(path)
    known = {field.name for field in fields(Config)}
    saved = {name: value for name, value in checkpoint["config"].items() if name in known}
    # The checkpoint has its weights in it, and a frozen BatchNorm computes what any does in eval().
    cfg = replace(Config(**saved), weights="", freeze="none", compile="none")
    facts = checkpoint["data"]
    facts = {"resize": facts["image_size"], "interpolation": "bilinear"} | facts
    seed_everything(cfg.seed)  # build_model() refuses ranks that draw different weights
    model = build_model(cfg, len(facts["classes"]))
    model.load_state_dict(checkpoint["model"])
    return model.eval().to(device), cfg, facts


def prepare_alike(images, facts):
    """The set, its images from now on prepared as the model's validation images were."""
    images.mean, images.std, images.size = facts["mean"], facts["std"], facts["image_size"]
    images.resize, images.interpolation = facts["resize"], facts["interpolation"]
    return images


def folder_set(paths, labels, facts):
    """The images at `paths`, prepared as the model's validation images were."""
    pixels = facts["mean"], facts["std"]
    return prepare_alike(
        FolderSet(paths, facts["classes"], labels, pixels, facts["image_size"]), facts
    )
