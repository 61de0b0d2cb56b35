"""The parts of image models, for scripts that divide a model: blocks, layers, and slices."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import VisionTransformer
from torchvision.models.vision_transformer import EncoderBlock

from utils.errors import UserError, required_by


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The children of Sequentials and ModuleLists that have children of their own, such as the
    blocks of a ResNet, a ViT or a ConvNeXt. An empty list if there are none.

    A stage, which is a Sequential or a ModuleList of blocks itself, is not a block: all of it would
    be gathered at once.
    """
    blocks = []
    is_list = isinstance(module, nn.Sequential | nn.ModuleList)
    for child in module.children():
        if is_list and any(child.children()) and not _is_stage(child):
            blocks.append(child)
        else:
            blocks += blocks_of(child)
    return blocks


def _is_stage(module):
    if type(module) is nn.Sequential:
        return any(any(child.children()) for child in module)
    return type(module) is nn.ModuleList


def layers_of(model: nn.Module) -> list[tuple[Callable[[Tensor], Tensor], list[Any]]]:
    """(function, the modules and parameters that it uses) for each layer: the first ones, each
    block, and the last ones. Raises UserError for other models than ResNets, ViTs and
    Sequentials."""
    if isinstance(model, nn.Sequential):
        return [(layer, [layer]) for layer in model]
    if isinstance(model, VisionTransformer):
        first = [model.conv_proj, model.class_token, model.encoder.pos_embedding]
        blocks, last = model.encoder.layers, [model.encoder.ln, model.heads]
        functions = partial(_embed, model), partial(_classify_tokens, model)
    elif all(hasattr(model, name) for name in ("conv1", "bn1", "layer1", "avgpool", "fc")):
        first, last = [model.conv1, model.bn1], [model.fc]
        groups: Any = [m for name, m in model.named_children() if name.startswith("layer")]
        blocks = [block for group in groups for block in group]
        functions = partial(_stem, model), partial(_classify_features, model)
    else:
        raise UserError(
            f"the order of the layers of a {type(model).__name__} is unknown: use a ResNet, a ViT "
            f"or a Sequential, or write layers() for it in a task of your own"
        )
    return [(functions[0], first), *((block, [block]) for block in blocks), (functions[1], last)]


def plan_of(model: nn.Module, ranks: int) -> list[tuple[nn.Module, dict[str, Any]]]:
    """[(block, plan)] for parallelize_module(): the attention heads and MLP columns of each
    transformer block, divided among this many ranks.

    The first linear layer of each pair is divided by columns, the second by rows, so that the ranks
    communicate once per pair, to add up their outputs (Megatron-LM, arXiv 1909.08053).
    Raises UserError if there are no transformer blocks, or if the numbers do not divide.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    with required_by("tensor_parallel_plan()"):
        from utils.rungs.tensor_parallel import ColwiseDropout, HeadwiseParallel

    blocks = [module for module in model.modules() if isinstance(module, EncoderBlock)]
    if not blocks:
        raise UserError(
            f"a {type(model).__name__} has no transformer blocks for tensor parallelism to divide: "
            f"pass --model vit_tiny, or one of torchvision's, such as vit_b_16"
        )
    for block in blocks:
        heads, columns = block.num_heads, block.mlp[0].out_features
        if heads % ranks or columns % ranks:
            raise UserError(
                f"{heads} attention heads and {columns} MLP columns cannot both be divided evenly "
                f"among {ranks} ranks"
            )
    plan = {
        "self_attention": HeadwiseParallel(),
        "self_attention.out_proj": RowwiseParallel(),
        "mlp.0": ColwiseParallel(),
        "mlp.2": ColwiseDropout(),
        "mlp.3": RowwiseParallel(),
    }
    return [(block, plan) for block in blocks]


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
