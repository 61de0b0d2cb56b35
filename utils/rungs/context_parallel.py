"""Context parallelism: each rank computes some positions of every sequence.

PyTorch's own torch.distributed.tensor.experimental.context_parallel has no operator for CPUs (torch
2.14: "_scaled_dot_product_flash_attention_for_cpu does not have a sharding strategy"), so that
nothing could compare it with one process in float64. Here, keys and values are gathered.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from utils.checkpoint import Wrapper
from utils.errors import UserError
from utils.rungs.groups import set_single_replica as set_single_replica

# torch 2.14 has new names, and warns of these.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def own_part(values: Tensor) -> Tensor:
    """This rank's positions, of (n, length, ...): two of 2 N chunks, the first from the front and
    the second from the back.

    A query sees the keys before it: with one chunk each, the last rank would compute almost twice
    the mean. The two chunks together see as many keys on every rank. Raises UserError if the length
    cannot be divided.
    """
    chunks = 2 * dist.get_world_size()
    if values.shape[1] % chunks:
        raise UserError(
            f"sequences of length {values.shape[1]} cannot be divided into {chunks} chunks, two "
            f"for each rank: pass a different length (of text, --context with --padding context)"
        )
    parts = values.chunk(chunks, 1)
    return torch.cat([parts[dist.get_rank()], parts[-1 - dist.get_rank()]], 1)


def gather(parts: Tensor, dim: int) -> Tensor:
    """All positions, in order, of this rank's along dimension `dim`. In backward, each rank gets
    the sum of the ranks' gradients of its part."""
    chunks = [chunk for part in _AllGather.apply(parts) for chunk in part.chunk(2, dim)]
    return torch.cat(chunks[::2] + chunks[::-2], dim)


class _AllGather(torch.autograd.Function):
    """A list of all ranks' tensors, of one shape."""

    @staticmethod
    def forward(ctx, own):
        whole = own.new_empty(dist.get_world_size(), *own.shape)
        _all_gather(whole.flatten(0, 1), own.contiguous())
        return tuple(whole.unbind())

    @staticmethod
    def backward(ctx, *gradients):
        own = torch.empty_like(gradients[0], memory_format=torch.contiguous_format)
        _reduce_scatter(own, torch.cat(gradients))
        return own


class ContextParallel(Wrapper):
    """A model whose blocks get this rank's positions of their inputs, (n, length, features), and
    whose attention gathers the keys and values of all positions. Its outputs are (n, this rank's
    positions, ...).

    What is before the first block gets all positions, so that position embeddings are right.
    loader: of training samples. Raises UserError for what cannot be divided in this way.
    """

    def __init__(self, model: nn.Module, task: Any, loader: Any, cfg: Any) -> None:
        super().__init__()
        if cfg.compile != "none":
            raise UserError("train_cp.py replaces attention while the model runs: --compile none")
        if getattr(cfg, "padding", "context") != "context":  # few lengths of batches would fit
            raise UserError("train_cp.py divides sequences of one length: pass --padding context")
        blocks = task.blocks(model)
        if not blocks:
            raise UserError(f"the task names no blocks of the {type(model).__name__} to divide")
        for name, module in nn.ModuleList(blocks).named_modules():
            if type(module).__name__.startswith("Dropout") and module.p:  # also by sample
                raise UserError(
                    f"each rank would drop the same of its positions in {name}: pass --dropout 0"
                )
        self.module = copy.deepcopy(model)
        self.eval()
        self._check(task, loader)
        self.module = model
        self.train()
        blocks[0].register_forward_pre_hook(_divide_positions)

    @torch.no_grad()
    def _check(self, task, loader):
        inputs, _ = loader.prepare(*loader.examples([0, min(1, len(loader.dataset) - 1)]))
        expected = self.module(inputs)
        if not isinstance(expected, Tensor):
            raise UserError("train_cp.py divides outputs that are one tensor, (n, length, ...)")
        task.blocks(self.module)[0].register_forward_pre_hook(_divide_positions)
        outputs, expected = self(inputs), own_part(expected)
        limit = 1e-5 * expected.abs().max().item()
        if outputs.shape != expected.shape or (outputs - expected).abs().max() > limit:
            raise UserError(
                f"with some positions on each rank, the {type(self.module).__name__} does not "
                f"compute what it computes as a whole: its blocks may mix positions only in "
                f"scaled_dot_product_attention(queries, keys, values, is_causal=...)"
            )

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs: of all positions, the same on all ranks."""
        with _GatheredAttention():
            return self.module(inputs)


def _divide_positions(block, args):
    return own_part(args[0]), *args[1:]


class _GatheredAttention(TorchFunctionMode):
    """A context in which scaled_dot_product_attention() gets the queries of this rank's positions,
    and gathers the keys and values of all."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        call = _attend if func is scaled_dot_product_attention else func
        return call(*args, **(kwargs or {}))


def _attend(queries, keys, values, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
    if attn_mask is not None or dropout_p:
        raise UserError(
            "train_cp.py cannot divide attention with a mask or dropout: is_causal=True"
        )
    keys, values = gather(torch.stack([keys, values]), dim=-2)
    if not is_causal:
        return scaled_dot_product_attention(queries, keys, values, **options)
    outputs, rank, last = [], dist.get_rank(), 2 * dist.get_world_size() - 1
    for part, chunk in zip(queries.chunk(2, -2), (rank, last - rank), strict=True):
        size = part.shape[-2]
        end = (chunk + 1) * size  # the last position's, and so the last key that it sees
        seen = keys[..., :end, :], values[..., :end, :]
        mask: Any = causal_lower_right(size, end)
        outputs.append(scaled_dot_product_attention(part, *seen, attn_mask=mask, **options))
    return torch.cat(outputs, -2)


def sum_over_ranks(loss_sum: Tensor) -> Tensor:
    """The sum over all ranks' positions, on every rank. The gradient of this rank's part is
    multiplied by the number of ranks, because DistributedDataParallel averages instead of adding
    up."""
    total = loss_sum.detach().clone()
    dist.all_reduce(total)
    return total + dist.get_world_size() * (loss_sum - loss_sum.detach())


class SumsOfAllRanks:
    """A task whose loss and metrics include all positions. outputs: of this rank's positions;
    targets: of all, (n, length, ...)."""

    def __init__(self, task: Any) -> None:
        self.task = task

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return sum_over_ranks(self.task.loss(outputs, own_part(targets)))

    def count(self, targets: Tensor) -> Any:
        return self.task.count(targets)

    def measure(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        measured = self.task.measure(outputs, own_part(targets))
        return {name: sum_over_ranks(value) for name, value in measured.items()}

    def summarize(self, sums: dict[str, Tensor]) -> Mapping[str, Any]:
        return self.task.summarize(sums)
