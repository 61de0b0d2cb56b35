"""Models by name. To train another model, replace build_model()."""

import difflib
from typing import Any

import torch
import torchvision
from torch import nn

from utils.errors import UserError, required_by

SMALL = ("resnet20", "resnet9", "vit_tiny")  # not torchvision's: tasks/images/small_models.py


def build_model(cfg: Any, train_set: Any) -> nn.Module:
    """The model that the config names, with random weights (from the global seed) or cfg.weights.

    The model takes images (n, 3, image_size, image_size), and returns (n, classes of train_set).
    Raises UserError for an unknown name, or for weights that do not fit.
    """
    model = build_classifier(cfg, len(train_set.classes))
    draws = any(getattr(module, "p", 0) for module in model.modules())  # dropout, skipped branches
    if draws and cfg.model not in SMALL:  # these have no dropout
        with required_by("--model with dropout"):
            from utils.sample_random import convert_dropout
        convert_dropout(model)  # the same elements on any number of ranks
    return model


def build_classifier(cfg: Any, num_classes: int) -> nn.Module:
    """See build_model()."""
    if cfg.model in SMALL or cfg.model.endswith(("_cifar", "_gn")):
        from tasks.images.small_models import build

        model = build(cfg, num_classes, _torchvision)
    else:
        model = _torchvision(cfg.model, num_classes, cfg)
    if cfg.weights:
        with required_by("--weights"):
            from tasks.images.weights import load_and_freeze
        model = load_and_freeze(model, cfg)
    return model.to(memory_format=torch.channels_last)


def _torchvision(name, num_classes, cfg):
    from tasks.images.one_pixel import use_middle_weights

    names = torchvision.models.list_models(module=torchvision.models)
    if name not in names:
        close = difflib.get_close_matches(name.lower(), [*SMALL, *names], n=1)
        hint = f"did you mean {close[0]}?" if close else "see torchvision.models.list_models()"
        raise UserError(f"there is no --model {name}: {hint}")
    options = {"image_size": cfg.image_size} if name.startswith("vit_") else {}
    if name in ("googlenet", "inception_v3"):
        options = {"aux_logits": False, "init_weights": True}  # one output, like all others
    model = torchvision.models.get_model(name, num_classes=num_classes, **options)
    return use_middle_weights(model)
