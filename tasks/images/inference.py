"""What predict, evaluate and export share: loading a trained model from its checkpoint alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tasks.images.folder import FolderDataset
from tasks.images.models import build_classifier
from tasks.images.weights import weights_of
from utils.checkpoint import read_checkpoint
from utils.errors import UserError

PREPROCESSING = ("image_size", "resize", "interpolation", "mean", "std")


class Trained(NamedTuple):
    """A trained model, and what is known about it."""

    path: Path  # of the checkpoint
    model: torch.nn.Module  # on the CPU, in eval mode
    facts: dict[str, Any]  # "classes" and PREPROCESSING: what its images look like
    config: dict[str, Any]  # the settings of its run, as in the checkpoint
    data: dict[str, Any]  # what the checkpoint says about its data


class Architecture(NamedTuple):
    """The settings that build_classifier() needs to build a model."""

    model: str
    image_size: int
    weights: str = ""  # the checkpoint holds all weights


def load_trained(path: str | Path) -> Trained:
    """The Trained of a checkpoint. Raises UserError if the file is not a checkpoint of the images
    task, or does not say how its images were prepared."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no file {path}: pass a checkpoint such as runs/x/best.pt")
    checkpoint = read_checkpoint(path)
    config, data = checkpoint["config"], checkpoint["data"]
    missing = [name for name in ("classes", *PREPROCESSING) if name not in data]
    if missing:
        raise UserError(
            f"{path} does not say how its images were prepared ({', '.join(missing)}): was it "
            f"trained with the images task? Its datasets have `preprocessing` with these keys"
        )
    # A BatchNorm that --freeze has replaced is one like any other in eval().
    architecture = Architecture(config["model"], config["image_size"])
    model = build_classifier(architecture, len(data["classes"]))
    if config["dtype"] == "float64":
        model.double()
    model.load_state_dict(weights_of(checkpoint))
    facts = {name: data[name] for name in ("classes", *PREPROCESSING)}
    return Trained(path, model.eval(), facts, config, data)


def folder_set(paths: Sequence[str], labels: Sequence[int], facts: dict[str, Any]) -> FolderDataset:
    """The images at `paths`, prepared like the model's validation images."""
    preprocessing = {name: facts[name] for name in PREPROCESSING}
    return FolderDataset(paths, labels, facts["classes"], preprocessing)
