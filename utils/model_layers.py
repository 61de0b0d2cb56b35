"""The layers of a ResNet or ViT as functions, which run one after another. Needs torchvision."""

from functools import partial

import torch
from torchvision.models import VisionTransformer

from utils.errors import UserError


def layers_of(model):
    """(function, the modules and parameters that it uses) for each layer: the first ones, each
    block, and the last ones. Raises UserError for other models."""
    if isinstance(model, VisionTransformer):
        first = [model.conv_proj, model.class_token, model.encoder.pos_embedding]
        blocks, last = model.encoder.layers, [model.encoder.ln, model.heads]
        functions = partial(_embed, model), partial(_classify_tokens, model)
    elif hasattr(model, "layer1") and hasattr(model, "fc"):
        first, last = [model.conv1, model.bn1], [model.fc]
        groups = [child for name, child in model.named_children() if name.startswith("layer")]
        blocks = [block for group in groups for block in group]
        functions = partial(_stem, model), partial(_classify_features, model)
    else:
        raise UserError(
            f"the order of the layers of a {type(model).__name__} is unknown: use a ResNet, a ViT "
            f"or a Sequential"
        )
    return [(functions[0], first), *((block, [block]) for block in blocks), (functions[1], last)]


def _embed(vit, images):
    tokens = vit._process_input(images)
    tokens = torch.cat([vit.class_token.expand(len(tokens), -1, -1), tokens], dim=1)
    return vit.encoder.dropout(tokens + vit.encoder.pos_embedding)


def _classify_tokens(vit, tokens):
    return vit.heads(vit.encoder.ln(tokens)[:, 0])


def _stem(resnet, images):
    features = resnet.relu(resnet.bn1(resnet.conv1(images)))
    return resnet.maxpool(features) if hasattr(resnet, "maxpool") else features


def _classify_features(resnet, features):
    return resnet.fc(resnet.avgpool(features).flatten(1))
