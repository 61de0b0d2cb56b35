"""Models by name. To train another model, replace build_model()."""

import torch
import torchvision

from utils.errors import UserError, option

SMALL = ("resnet20", "resnet9", "vit_tiny")  # not torchvision's: utils/small_models.py


def build_model(cfg, num_classes):
    """The model that the config names, with random weights (from the global seed) or cfg.weights.

    Takes images (n, 3, image_size, image_size) of cfg.torch_dtype, returns (n, num_classes).
    Raises UserError for an unknown name, or for weights that do not fit.
    """
    if cfg.model in SMALL or cfg.model.endswith(("_cifar", "_gn")):
        with option(f"--model {cfg.model}"):
            from utils.small_models import build
        model = build(cfg, num_classes, _torchvision)
    else:
        model = _torchvision(cfg.model, num_classes, cfg)
    if cfg.weights:
        with option("--weights"):
            from utils.weights import load_and_freeze
        model = load_and_freeze(model, cfg)
    if cfg.compile != "none":
        model.compile(mode=cfg.compile)  # in place, so that parameters keep their names
    return model.to(dtype=cfg.torch_dtype, memory_format=torch.channels_last)


def _torchvision(name, num_classes, cfg):
    names = torchvision.models.list_models(module=torchvision.models)
    if name not in names:
        raise UserError(
            f"model {name!r} is neither {' nor '.join(SMALL)} nor one of torchvision's: "
            f"{', '.join(names)}"
        )
    options = {"image_size": cfg.image_size} if name.startswith("vit_") else {}
    if name in ("googlenet", "inception_v3"):
        options = {"aux_logits": False, "init_weights": True}  # one output, like all others
    return torchvision.models.get_model(name, weights=None, num_classes=num_classes, **options)


def convert_sync_batchnorm(model):
    """`model` with every BatchNorm synchronized over the ranks; parameters keep their names."""
    with option("--sync-bn (pass --no-sync-bn to go without)"):
        from utils.sync_batchnorm import SyncBatchNorm
    return SyncBatchNorm.convert_sync_batchnorm(model)
