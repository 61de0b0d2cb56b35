"""What predict, evaluate and export share: loading a trained model from its checkpoint alone."""

from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

import torch

from utils.checkpoint import read_checkpoint
from utils.config import Config
from utils.errors import UserError
from utils.image_folder import FolderDataset
from utils.models import build_model

PREPROCESSING = ("image_size", "resize", "interpolation", "mean", "std")


class Trained(NamedTuple):
    """A trained model, and what is known about it."""

    model: torch.nn.Module  # on the CPU, in eval mode
    cfg: Config  # of its run, only the settings of Config itself
    facts: dict  # "classes" and PREPROCESSING: what its images look like
    config: dict  # all settings of its run, as in the checkpoint
    data: dict  # what the checkpoint says about its data


def load_trained(path):
    """The Trained of a checkpoint. Raises UserError if the file is not a checkpoint of these
    scripts, or does not say how its images were prepared."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no file {path}: pass a checkpoint such as runs/x/best.pt")
    checkpoint = read_checkpoint(path)
    config, data = checkpoint["config"], checkpoint["data"]
    names = {field.name for field in fields(Config)} & config.keys()
    # The checkpoint contains the weights, and a frozen BatchNorm is one like any other in eval().
    cfg = replace(Config(**{n: config[n] for n in names}), weights="", compile="none")
    missing = [name for name in PREPROCESSING if name not in data]
    if missing:
        raise UserError(
            f"{path} does not say how its images were prepared ({', '.join(missing)}): give the "
            f"training set an attribute `preprocessing` with these keys"
        )
    model = build_model(cfg, len(data["classes"]))
    model.load_state_dict(checkpoint["model"])
    facts = {name: data[name] for name in ("classes", *PREPROCESSING)}
    return Trained(model.eval(), cfg, facts, config, data)


def folder_set(paths, labels, facts):
    """The images at `paths`, prepared like the model's validation images."""
    return FolderDataset(paths, labels, {name: facts[name] for name in PREPROCESSING})
