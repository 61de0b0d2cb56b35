"""Models by name: torchvision's classification models, with a stem for small images."""

import math

import torch
import torchvision
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torchvision.models.resnet import BasicBlock

from utils.conv import convert_convolutions
from utils.distributed import UserError, all_gather_object
from utils.sync_batchnorm import SyncBatchNorm
from utils.weights import freeze_backbone, load_weights


def build_model(cfg, num_classes):
    """The model that the config names, with random weights from the global seed, or cfg.weights.

    cfg.model: a name of OWN, or from torchvision.models.list_models(module=torchvision.models).
    Takes images (n, 3, image_size, image_size) of cfg.dtype, gives outputs (n, num_classes).
    Raises UserError for an unknown name, a stem that the model does not have, weights that do not
    fit, or ranks that drew different weights.
    """
    # Of PyTorch's two ways to say so the older: export fails where the newer sets only these two.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = cfg.tf32
    model = _plain_model(cfg, num_classes)
    if cfg.norm == "group":
        model = _convert_groupnorm(model)
    if cfg.stem == "cifar" and cfg.model not in OWN:  # which have no other stem
        _shrink_stem(model, cfg.model)
    if cfg.weights:
        load_weights(model, cfg.model, cfg.weights)
    if cfg.freeze == "backbone":
        model = freeze_backbone(model)
    model = convert_convolutions(model)
    if cfg.compile != "none":
        model.compile(mode=cfg.compile)  # at its first step; parameters keep their names
    # DistributedDataParallel would hide a seed per rank, other ways to share a model would not.
    sums = all_gather_object([parameter.sum().item() for parameter in model.parameters()])
    if any(other != sums[0] for other in sums):
        raise UserError("the ranks drew different weights: call seed_everything(cfg.seed) on all")
    return model.to(dtype=getattr(torch, cfg.dtype), memory_format=torch.channels_last)


def _plain_model(cfg, num_classes):
    if cfg.model in OWN:
        return OWN[cfg.model](num_classes)
    names = torchvision.models.list_models(module=torchvision.models)
    if cfg.model not in names:
        raise UserError(
            f"model {cfg.model!r} is neither {' nor '.join(OWN)} nor one of torchvision's: "
            f"{', '.join(names)}"
        )
    options = {}
    if cfg.model.startswith("vit_"):
        options = {"image_size": cfg.image_size}
    if cfg.model in ("googlenet", "inception_v3"):  # one output, as all others
        options = {"aux_logits": False, "init_weights": True}
    return torchvision.models.get_model(cfg.model, weights=None, num_classes=num_classes, **options)


class ResNet20(nn.Module):
    """The ResNet of 20 layers for 32x32 images: He et al. 2016, section 4.2 (arXiv 1512.03385).

    270,000 parameters in torchvision's blocks and under torchvision's names, but for a 1x1
    convolution in the two shortcuts that change shape.
    """

    def __init__(self, num_classes):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, kernel_size=3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = self._layer(16, 16, stride=1)
        self.layer2 = self._layer(16, 32, stride=2)
        self.layer3 = self._layer(32, 64, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @staticmethod
    def _layer(inputs, width, stride):
        shortcut = None
        if stride > 1:
            convolution = nn.Conv2d(inputs, width, kernel_size=1, stride=stride, bias=False)
            shortcut = nn.Sequential(convolution, nn.BatchNorm2d(width))
        first = BasicBlock(inputs, width, stride, shortcut)
        return nn.Sequential(first, BasicBlock(width, width), BasicBlock(width, width))

    def forward(self, images):
        """images: (n, 3, height, width) -> outputs (n, num_classes)."""
        x = self.relu(self.bn1(self.conv1(images)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(self.avgpool(x).flatten(1))


class ResNet9(nn.Sequential):
    """A wide and shallow network for 32x32 images, quick to 94 % on CIFAR-10: Page 2018
    (https://github.com/davidcpage/cifar10-fast). 6.6 million parameters."""

    def __init__(self, num_classes):
        super().__init__(
            _conv(3, 64),
            _conv(64, 128, nn.MaxPool2d(2)),
            _Residual(_conv(128, 128), _conv(128, 128)),
            _conv(128, 256, nn.MaxPool2d(2)),
            _conv(256, 512, nn.MaxPool2d(2)),
            _Residual(_conv(512, 512), _conv(512, 512)),
            nn.Sequential(nn.AdaptiveMaxPool2d(1), nn.Flatten(), _Scaled(512, num_classes)),
        )


class _Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


class _Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 8  # small outputs at first, or a high learning rate diverges


def _conv(inputs, width, *then):
    convolution = nn.Conv2d(inputs, width, kernel_size=3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width), *then, nn.ReLU(inplace=True))


OWN = {"resnet20": ResNet20, "resnet9": ResNet9}


def _convert_groupnorm(module):
    """`module` with GroupNorm (Wu and He 2018, arXiv 1803.08494) in place of each BatchNorm.

    32 groups, or the most that divide the channels. Parameters keep their names.
    """
    if isinstance(module, nn.BatchNorm2d):
        channels = module.num_features
        return nn.GroupNorm(math.gcd(32, channels), channels, module.eps)
    for name, child in module.named_children():
        setattr(module, name, _convert_groupnorm(child))
    return module


def layers_of(model):
    """The layers of a model that run one after another, in that order: a list of modules.

    Blocks of a ResNet or a ViT, and what stands before and after them. Their parameters are all
    of the model's but a ViT's class token and position embedding. UserError for other models.
    """
    if isinstance(model, torchvision.models.VisionTransformer):
        encoder = model.encoder
        return [model.conv_proj, *encoder.layers, encoder.ln, model.heads]
    if isinstance(model, ResNet9):
        return list(model)
    if isinstance(model, torchvision.models.ResNet | ResNet20):
        stages = [child for name, child in model.named_children() if name.startswith("layer")]
        return [model.conv1, model.bn1, *(block for s in stages for block in s), model.fc]
    raise UserError(
        f"a {type(model).__name__} is neither a ResNet nor a ViT: its layers are unknown"
    )


def blocks_of(model):
    """The composite ones of layers_of(model): what is worth sharding on its own."""
    return [layer for layer in layers_of(model) if any(layer.children())]


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


def prepare_ddp(model, cfg):
    """Make a fresh and a resumed run add up gradients in the same order, bit for bit; and have
    them sent in cfg.gradient_dtype.

    DistributedDataParallel rebuilds its buckets after the first backward pass, in the order in
    which gradients came, so the very first step sums in another order than all later ones. This
    takes that first step: forward and backward on blank images, leaving weights and buffers alone.
    """
    if cfg.gradient_dtype != "float32":
        hook = {
            "bfloat16": default_hooks.bf16_compress_hook,
            "float16": default_hooks.fp16_compress_hook,
        }
        model.register_comm_hook(None, hook[cfg.gradient_dtype])
    buffers = [buffer.clone() for buffer in model.buffers()]
    images = next(model.parameters()).new_zeros(2, 3, cfg.image_size, cfg.image_size)
    with torch.compiler.set_stance("force_eager"):  # or a step of 2 images would be compiled, too
        model(images).sum().backward()
    model.zero_grad(set_to_none=True)
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
