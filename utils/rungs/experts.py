"""Expert parallelism: each rank holds some experts, to which all ranks send their tokens."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.func import functional_call

from utils.distributed import is_main_process
from utils.errors import UserError, say
from utils.rungs.fsdp import FsdpSettings, fsdp_kwargs


def init_mesh(cfg: FsdpSettings) -> DeviceMesh:
    """A mesh of all ranks. Raises UserError for settings of FSDP that divided experts do not
    have."""
    ranks = dist.get_world_size()
    if cfg.fsdp_size not in (0, ranks):
        raise UserError("train_ep.py divides experts among all ranks: leave --fsdp-size out")
    if cfg.fsdp_offload:
        raise UserError("train_ep.py keeps experts on the device: leave --fsdp-offload out")
    mesh: DeviceMesh = fsdp_kwargs(cfg)["mesh"]  # the mesh of the parameters which FSDP shards
    return mesh


def divide_experts(task: Any, model: nn.Module, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Leave each rank the same number of the experts of each module that the task names. Returns
    their parameters. Rank 0 prints the numbers.

    Raises UserError if the task has no experts, or the ranks cannot have the same number of them.
    """
    modules = task.experts(model) if hasattr(task, "experts") else []
    if not modules:
        raise UserError(
            "the task has no experts to divide: give it experts(model), as in tasks.moe"
        )
    count, ranks = min(len(p) for module in modules for p in module.parameters()), mesh.size()
    if any(len(p) % ranks for module in modules for p in module.parameters()):
        raise UserError(
            f"{count} experts cannot be divided evenly among {ranks} ranks: pass --experts with a "
            f"multiple of {ranks}"
        )
    if is_main_process():
        say(f"ranks: {ranks}, each with {count // ranks} of {count} experts per block")
    for module in modules:
        parallelize_module(module, mesh, ExpertParallel())
    return {parameter for module in modules for parameter in module.parameters()}


class ExpertParallel(ParallelStyle):
    """A module of experts, for parallelize_module(); called with the tokens of all of them, sorted
    by expert, and with their numbers (docs/own-task.md). Tokens go to the rank that holds their
    expert, and its outputs come back."""

    def _apply(self, module, device_mesh):
        few = copy.deepcopy(module).to("meta")  # computes with the parameters that it is given
        for name, whole in module.named_parameters():
            part = distribute_tensor(whole.detach(), device_mesh, [Shard(0)])
            parameter = nn.Parameter(part, whole.requires_grad)
            if whole.requires_grad:
                # It is the sum over all ranks' tokens, of losses that were each divided by a mean
                # over the ranks: other gradients are averaged (pytorch/pytorch#160285).
                parameter.register_hook(lambda gradient: gradient / device_mesh.size())
            module.register_parameter(name, parameter)

        def forward(tokens, counts):
            own = {name: parameter.to_local() for name, parameter in module.named_parameters()}
            return _exchange(
                lambda *arrived: functional_call(few, own, arrived), tokens, counts, device_mesh
            )

        module.forward = forward
        return module


def _exchange(compute, tokens, counts, mesh):
    """compute(tokens, counts) for this rank's experts: of the tokens of all ranks. Returns what the
    ranks of this rank's tokens have computed, in their order.

    tokens: (n, width), the first expert's tokens first. counts: int64 (experts,), how many.
    """
    group, ranks = mesh.get_group(), mesh.size()
    arriving = torch.empty_like(counts)  # by sender, then by expert
    dist.all_to_all_single(arriving, counts, group=group)
    arriving, counts = arriving.view(ranks, -1), counts.view(ranks, -1)
    received, sent = torch.stack([arriving.sum(1), counts.sum(1)]).tolist()  # waits for the device
    arrived = all_to_all_single_autograd(tokens, received, sent, group)
    numbers = torch.arange(arriving.numel(), device=tokens.device) % arriving.shape[1]
    order = numbers.repeat_interleave(arriving.flatten()).argsort(stable=True)  # by expert
    outputs = compute(arrived[order], arriving.sum(0))
    back: Tensor = all_to_all_single_autograd(outputs[order.argsort()], sent, received, group)
    return back
