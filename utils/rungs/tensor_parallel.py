"""Tensor parallelism: each rank computes some attention heads and some columns of each MLP."""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from utils.checkpoint import placed_like
from utils.distributed import is_main_process
from utils.errors import UserError, say
from utils.rungs.groups import build_mesh, require_gpu_per_rank
from utils.rungs.parameters import replacing_parameters as replacing_parameters


def init_mesh(device: torch.device, data: int, timeout: float = 300.0) -> DeviceMesh:
    """A mesh of all ranks: the dimension "data" divides the batches, "tensor" the layers.

    data: the number of replicas of the model; 0: as many as ranks. Consecutive ranks hold a replica
    together. timeout: seconds that a collective waits for the other ranks. Rank 0 prints the sizes.
    """
    require_gpu_per_rank()
    data = data or dist.get_world_size()
    tensor = dist.get_world_size() // data
    if is_main_process():
        say(f"ranks: {dist.get_world_size()} = {data} data x {tensor} tensor")
    # It warns that gathering over two dimensions takes two collectives.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    return build_mesh(device.type, (data, tensor), timeout, ("data", "tensor"))


def divide_layers(
    plan: Sequence[tuple[nn.Module, dict[str, ParallelStyle]]], mesh: DeviceMesh
) -> None:
    """parallelize_module() for each module of a task's plan.

    Also makes cuDNN deterministic, and lets it choose no algorithm by time: each rank computes the
    gradients of what is not divided for itself, and all must get the same bits
    (pytorch/pytorch#160169).
    Raises UserError if the plan is empty.
    """
    if not plan:
        raise UserError("the task's tensor_parallel_plan() names no module to divide")
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    for module, styles in plan:
        parallelize_module(module, mesh, styles)


class HeadwiseParallel(ParallelStyle):
    """Divides, for parallelize_module(), the heads of an nn.MultiheadAttention among the ranks.

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

    mesh: DeviceMesh

    def forward(self, tokens: Tensor, *_: Any, need_weights: bool = False) -> tuple[Tensor, None]:
        """tokens: (n, length, channels), the same on all ranks -> the same shape, and None."""
        tokens = DTensor.from_local(tokens, self.mesh, [Replicate()], run_check=False)
        packed: Any = nn.functional.linear(tokens, self.in_proj_weight, self.in_proj_bias)
        heads = packed.to_local().unflatten(-1, (-1, 3, self.head_dim))
        queries, keys, values = heads.permute(3, 0, 2, 1, 4)
        if self.training and self.dropout:
            weights = (queries @ keys.mT * self.head_dim**-0.5).softmax(-1)
            drop = partial(nn.functional.dropout, p=self.dropout)
            outputs = (weights * dropout_mask(weights, 1, drop, self.mesh)) @ values
        else:
            outputs = nn.functional.scaled_dot_product_attention(queries, keys, values)
        # In PyTorch's memory layout, in which dropout draws its mask.
        return self.out_proj(outputs.permute(2, 0, 1, 3).flatten(2)).transpose(0, 1), None


class ColwiseDropout(ParallelStyle):
    """A style for parallelize_module(): an nn.Dropout of columns that the ranks divide."""

    def _apply(self, module, device_mesh):
        drop_whole = module.forward

        def drop(columns):
            if not module.training or not module.p:
                return columns
            return columns * dropout_mask(columns, -1, drop_whole, device_mesh)

        module.forward = drop
        return module


def dropout_mask(
    values: Tensor, dim: int, drop: Callable[[Tensor], Tensor], mesh: DeviceMesh
) -> Tensor:
    """This rank's part of a dropout mask, whose dimension `dim` is divided among the ranks. drop:
    such as the forward() of nn.Dropout.

    Every rank draws the whole mask: it is the mask of a run on one rank, and the generators of all
    ranks advance alike, so that dropout of what all ranks hold stays the same on all.
    """
    whole = torch.cat([torch.ones_like(values)] * mesh.size(), dim)
    return drop(whole).chunk(mesh.size(), dim)[mesh.get_local_rank()]


def update_by_mesh(optimizer: Optimizer) -> None:
    """Let the optimizer update the tensors of each mesh together in each step, and the undivided
    ones: its kernels take many tensors, but not of several meshes. Between steps, and so in a
    checkpoint, its groups of parameters are as they were."""
    whole = []

    def divide(optimizer, *_):
        whole[:] = optimizer.param_groups  # a list that load_state_dict() replaces
        optimizer.param_groups[:] = [
            dict(group, params=same)
            for group in whole
            for same in _by_mesh(group["params"]).values()
        ]

    def join(optimizer, *_):
        optimizer.param_groups[:] = whole

    optimizer.register_step_pre_hook(divide)
    optimizer.register_step_post_hook(join)


def _by_mesh(parameters):
    """{a mesh, or None: the parameters that it divides}."""
    kinds = {}
    for parameter in parameters:
        kinds.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return kinds


def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """torch.nn.utils.clip_grad_norm_(), which does not accept a mix of tensors and DTensors."""
    kinds = _by_mesh(parameter for parameter in parameters if parameter.grad is not None)
    norms = [get_total_norm([p.grad for p in same]) for same in kinds.values()]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    norm = torch.stack(norms).norm()
    for same in kinds.values():
        clip_grads_with_norm_(same, max_norm, norm)
    return norm


def head_order(attention: nn.MultiheadAttention) -> Tensor:
    """The rows of in_proj_weight, head by head: its query, key and value. int64 (3 x channels,)."""
    rows = torch.arange(3 * attention.embed_dim)
    return rows.view(3, attention.num_heads, -1).transpose(0, 1).flatten()


class PytorchRowOrder:
    """Weights whose in_proj_weight has its rows in PyTorch's order in a file, so that all scripts
    can read it."""

    def __init__(self, weights: Any) -> None:
        self.weights, self.model = weights, weights.model

    def state_dict(self) -> dict[str, Any]:
        """See Weights."""
        return self._reorder(self.weights.state_dict(), lambda order: order.argsort())

    def load_state_dict(self, contents: dict[str, Any], with_groups: bool = True) -> None:
        """See Weights."""
        contents = self._reorder(contents, lambda order: order)
        self.weights.load_state_dict(contents, with_groups)

    def _reorder(self, contents, change):
        orders = {}  # {the name of a parameter: the order of its rows}
        for prefix, module in self.model.named_modules():
            if isinstance(module, SplitAttention):
                order = change(head_order(module))
                orders |= {f"{prefix}.in_proj_weight": order, f"{prefix}.in_proj_bias": order}
        model = {name: _rows(value, orders.get(name)) for name, value in contents["model"].items()}
        states = {}
        for name, state in contents["optimizer"].get("state", {}).items():  # empty: not rank 0
            states[name] = {key: _rows(value, orders.get(name)) for key, value in state.items()}
        return contents | {"model": model, "optimizer": contents["optimizer"] | {"state": states}}


def _rows(value, order):
    if order is None or len(value.shape) == 0:  # a number of steps
        return value
    if not isinstance(value, DTensor):
        return value[order]
    return placed_like(value, value.full_tensor()[order])
