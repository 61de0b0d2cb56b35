"""Models for small images: resnet20, resnet9, vit_tiny, and suffixes of torchvision's names.

NAME_cifar   a ResNet whose first convolution is 3x3 with stride 1, without max-pooling
NAME_gn      GroupNorm instead of BatchNorm: no sample depends on the others in its batch
Both together: resnet18_cifar_gn.
"""

import math

from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet
from torchvision.models.vision_transformer import VisionTransformer

from utils.errors import UserError

SUFFIXES = ("cifar", "gn")


def split_name(name):
    """Split resnet18_cifar_gn into resnet18 and the set of its suffixes, {"cifar", "gn"}."""
    base, _, suffix = name.rpartition("_")
    if suffix not in SUFFIXES:
        return name, set()
    base, others = split_name(base)
    return base, others | {suffix}


def build(cfg, num_classes, build_base):
    """The model that cfg.model names, with random weights from the global seed.

    build_base: function(name, num_classes, cfg) that builds a model of torchvision's. resnet20 and
    resnet9 have the stem for small images with or without _cifar. Raises UserError for _cifar on
    anything but a ResNet.
    """
    base, suffixes = split_name(cfg.model)
    if base == "resnet20":
        model = ResNet20(num_classes)
    elif base == "resnet9":
        model = ResNet9(num_classes)
    else:
        if base == "vit_tiny":
            model = vit_tiny(num_classes, cfg.image_size)
        else:
            model = build_base(base, num_classes, cfg)
        if "cifar" in suffixes:
            _shrink_stem(model, base)
    return _convert_groupnorm(model) if "gn" in suffixes else model


class ResNet20(nn.Module):
    """The ResNet with 20 layers for 32x32 images: He et al. 2016, section 4.2 (arXiv 1512.03385).

    270,000 parameters in torchvision's blocks and with torchvision's names, except for a 1x1
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
    def _layer(in_channels, width, stride):
        shortcut = None
        if stride > 1:
            convolution = nn.Conv2d(in_channels, width, kernel_size=1, stride=stride, bias=False)
            shortcut = nn.Sequential(convolution, nn.BatchNorm2d(width))
        first = BasicBlock(in_channels, width, stride, shortcut)
        return nn.Sequential(first, BasicBlock(width, width), BasicBlock(width, width))

    def forward(self, images):
        """images: (n, 3, height, width) -> outputs (n, num_classes)."""
        x = self.relu(self.bn1(self.conv1(images)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(self.avgpool(x).flatten(1))


class ResNet9(nn.Sequential):
    """A wide and shallow network for 32x32 images, which soon reaches 94 % on CIFAR-10: Page 2018
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
        return super().forward(x) / 8  # small initial outputs: a high learning rate would diverge


def vit_tiny(num_classes, image_size):
    """torchvision's ViT with 4 layers, 4 heads and patches of 4x4 pixels: 140,000 parameters."""
    if image_size % 4:
        raise UserError(f"vit_tiny needs an --image-size that is a multiple of 4, not {image_size}")
    sizes = {"num_layers": 4, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 128}
    return VisionTransformer(image_size, patch_size=4, num_classes=num_classes, **sizes)


def _conv(in_channels, width, *pool):
    convolution = nn.Conv2d(in_channels, width, kernel_size=3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width), *pool, nn.ReLU(inplace=True))


def _shrink_stem(model, name):
    """The stem of He et al. 2016, section 4.2 (arXiv 1512.03385): 32x32 images stay 32x32."""
    if not isinstance(model, ResNet):
        raise UserError(f"the suffix _cifar is for ResNets, and {name} is not one: leave it out")
    width = model.conv1.out_channels
    model.conv1 = nn.Conv2d(3, width, kernel_size=3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()


def _convert_groupnorm(module):
    """`module` with GroupNorm (Wu and He 2018, arXiv 1803.08494) in place of each BatchNorm.

    32 groups, or as many as divide the number of channels. Parameters keep their names.
    """
    if isinstance(module, nn.BatchNorm2d):
        channels = module.num_features
        return nn.GroupNorm(math.gcd(32, channels), channels, module.eps)
    for name, child in module.named_children():
        setattr(module, name, _convert_groupnorm(child))
    return module
