"""Models by name: torchvision's classification models, with a stem for small images."""

import torch
import torchvision
from torch import nn

from utils.distributed import UserError, all_gather_object
from utils.sync_batchnorm import SyncBatchNorm


def build_model(cfg, num_classes):
    """The model that the config names, with random weights from the global seed.

    cfg.model: a name from torchvision.models.list_models(module=torchvision.models).
    Takes images (n, 3, image_size, image_size) of cfg.dtype, gives outputs (n, num_classes).
    Raises UserError for an unknown name, a stem that the model does not have, or ranks that drew
    different weights.
    """
    names = torchvision.models.list_models(module=torchvision.models)
    if cfg.model not in names:
        raise UserError(f"model {cfg.model!r} is not one of torchvision's: {', '.join(names)}")
    options = {}
    if cfg.model.startswith("vit_"):
        options = {"image_size": cfg.image_size}
    if cfg.model in ("googlenet", "inception_v3"):  # one output, as all others
        options = {"aux_logits": False, "init_weights": True}
    model = torchvision.models.get_model(
        cfg.model, weights=None, num_classes=num_classes, **options
    )
    if cfg.stem == "cifar":
        _shrink_stem(model, cfg.model)
    # DistributedDataParallel would hide a seed per rank, other ways to share a model would not.
    sums = all_gather_object([parameter.sum().item() for parameter in model.parameters()])
    if any(other != sums[0] for other in sums):
        raise UserError("the ranks drew different weights: call seed_everything(cfg.seed) on all")
    return model.to(dtype=getattr(torch, cfg.dtype), memory_format=torch.channels_last)


def _shrink_stem(model, name):
    """The stem of He et al. 2016, section 4.2 (arXiv 1512.03385): 32x32 images stay 32x32."""
    if not isinstance(model, torchvision.models.ResNet):
        raise UserError(f"stem=cifar is for ResNets, and {name} is none: pass --stem imagenet")
    width = model.conv1.out_channels
    model.conv1 = nn.Conv2d(3, width, kernel_size=3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()


def convert_sync_batchnorm(model, device):
    """`model` with every BatchNorm synchronised over the ranks; parameters and names stay.

    PyTorch's module on CUDA; ours elsewhere, because PyTorch's refuses CPU tensors.
    """
    kind = nn.SyncBatchNorm if device.type == "cuda" else SyncBatchNorm
    return kind.convert_sync_batchnorm(model)


def settle_buckets(model, image_size):
    """Make a fresh and a resumed run add up gradients in the same order, bit for bit.

    DistributedDataParallel rebuilds its buckets after the first backward pass, in the order in
    which gradients came, so the very first step sums in another order than all later ones. This
    takes that first step: forward and backward on blank images, leaving weights and buffers alone.
    """
    buffers = [buffer.clone() for buffer in model.buffers()]
    first = next(model.parameters())
    model(first.new_zeros(2, 3, image_size, image_size)).sum().backward()
    model.zero_grad(set_to_none=True)
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
