"""Tensor parallelism for vision transformers: each rank computes some heads and MLP columns."""

import logging
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torchvision.models.vision_transformer import EncoderBlock

from utils import distributed
from utils.errors import UserError


def init_mesh(device, data):
    """A DeviceMesh of all ranks: the dimension "data" divides the batches, "tensor" the layers.

    data: the number of replicas of the model; 0: as many as ranks. Consecutive ranks hold a replica
    together. Returns the mesh, and for samplers the number of replicas and the number of this
    rank's replica. Rank 0 prints the sizes.
    """
    data = data or dist.get_world_size()
    tensor = dist.get_world_size() // data
    mesh = init_device_mesh(device.type, (data, tensor), mesh_dim_names=("data", "tensor"))
    distributed.dp_group = mesh.get_group("data")
    # It warns that gathering over two dimensions takes two collectives.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    if distributed.is_main_process():
        print(f"ranks: {mesh.size()} = {data} data x {tensor} tensor")
    return mesh, (data, mesh.get_local_rank("data"))


def blocks_to_split(model, ranks):
    """The transformer blocks of `model`, whose heads and columns `ranks` ranks can share.

    Raises UserError if there are none, or if the numbers do not divide.
    """
    blocks = [module for module in model.modules() if isinstance(module, EncoderBlock)]
    if not blocks:
        raise UserError(
            f"a {type(model).__name__} has no transformer blocks for tensor parallelism to split: "
            f"pass --model vit_tiny, or one of torchvision's, such as vit_b_16"
        )
    for block in blocks:
        sizes = f"{block.num_heads} attention heads and {block.mlp[0].out_features} MLP columns"
        if block.num_heads % ranks or block.mlp[0].out_features % ranks:
            raise UserError(f"{sizes} cannot both be divided evenly among {ranks} ranks")
    return blocks


class HeadwiseParallel(ParallelStyle):
    """For parallelize_module(): divides the heads of an nn.MultiheadAttention among the ranks.

    ColwiseParallel cannot, because in_proj_weight holds all queries, then all keys, then all
    values: half of its rows would not be half of the heads. Here its rows are in head_order().
    """

    def _apply(self, module, device_mesh):
        for name in ("in_proj_weight", "in_proj_bias"):
            whole = getattr(module, name)
            rows = distribute_tensor(whole.detach()[head_order(module)], device_mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(rows, whole.requires_grad))
        module.__class__, module.mesh = SplitAttention, device_mesh
        return module


class SplitAttention(nn.MultiheadAttention):
    """Self-attention in this rank's heads. out_proj adds up the ranks' outputs."""

    def forward(self, tokens, *_, need_weights=False):
        """tokens: (n, length, channels), the same on all ranks -> the same shape, and None."""
        tokens = DTensor.from_local(tokens, self.mesh, [Replicate()], run_check=False)
        packed = nn.functional.linear(tokens, self.in_proj_weight, self.in_proj_bias).to_local()
        queries, keys, values = packed.unflatten(-1, (-1, 3, self.head_dim)).permute(3, 0, 2, 1, 4)
        if self.training and self.dropout:
            weights = (queries @ keys.mT * self.head_dim**-0.5).softmax(-1)
            outputs = (weights * dropout_mask(weights, 1, self.dropout, self.mesh)) @ values
        else:
            outputs = nn.functional.scaled_dot_product_attention(queries, keys, values)
        # In PyTorch's memory layout, in which dropout draws its mask.
        return self.out_proj(outputs.permute(2, 0, 1, 3).flatten(2)).transpose(0, 1), None


class ColwiseDropout(ParallelStyle):
    """For parallelize_module(): an nn.Dropout of columns that are divided among the ranks."""

    def _apply(self, module, device_mesh):
        def drop(columns):
            active = module.training and module.p
            return columns * dropout_mask(columns, -1, module.p, device_mesh) if active else columns

        module.forward = drop
        return module


def dropout_mask(values, dim, p, mesh):
    """This rank's part of a dropout mask, whose dimension `dim` is divided among the ranks.

    Every rank draws the whole mask: it is the mask of a run on one rank, and the generators of all
    ranks advance alike, so that dropout of what all ranks hold stays the same on all.
    """
    whole = torch.cat([torch.ones_like(values)] * mesh.size(), dim)
    return nn.functional.dropout(whole, p).chunk(mesh.size(), dim)[mesh.get_local_rank()]


def clip_grad_norm_(parameters, max_norm):
    """torch.nn.utils.clip_grad_norm_(), which does not accept a mix of tensors and DTensors."""
    kinds = {}
    for parameter in parameters:
        if parameter.grad is not None:
            kinds.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    norms = [get_total_norm([p.grad for p in same]) for same in kinds.values()]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    for same in kinds.values():
        clip_grads_with_norm_(same, max_norm, torch.stack(norms).norm())


def head_order(attention):
    """The rows of in_proj_weight, head by head: its query, key and value. int64 (3 x channels,)."""
    rows = torch.arange(3 * attention.embed_dim)
    return rows.view(3, attention.num_heads, -1).transpose(0, 1).flatten()


def keep_row_order(checkpoint):
    """Make a Checkpointer's files hold in_proj_weight in PyTorch's order. Returns the Checkpointer.

    All scripts can then read them. The rows are moved before a file is read or written, and back
    afterwards.
    """

    def in_pytorch_order(method, *args, **kwargs):
        _reorder(checkpoint, lambda order: order.argsort())
        result = method(*args, **kwargs)
        _reorder(checkpoint, lambda order: order)
        return result

    checkpoint.load = partial(in_pytorch_order, checkpoint.load)
    checkpoint.save = partial(in_pytorch_order, checkpoint.save)
    return checkpoint


@torch.no_grad()
def _reorder(checkpoint, change):
    for attention in checkpoint.model.modules():
        if isinstance(attention, SplitAttention):
            order = change(head_order(attention))
            for parameter in (attention.in_proj_weight, attention.in_proj_bias):
                for tensor in (parameter, *checkpoint.optimizer.state.get(parameter, {}).values()):
                    if tensor.shape == parameter.shape:  # not a number of steps
                        rows, mesh = tensor.full_tensor()[order], tensor.device_mesh
                        tensor.copy_(distribute_tensor(rows, mesh, [Replicate()] * mesh.ndim))
