"""The settings of train_fsdp.py, and the arguments of fully_shard()."""

import atexit
import os
import sys
import textwrap
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import zip_longest
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn.modules.batchnorm import _BatchNorm

from utils.distributed import (
    all_gather_object,
    control_group,
    default_device_type,
    is_main_process,
    launched_world_size,
    require_gpu_per_rank,
)
from utils.errors import UserError, warn
from utils.hooks import Checkpoint, FileForm, Hook
from utils.rungs.half_precision import warnings_of
from utils.settings import BaseSettings, ConfigError, free_setting, setting


@dataclass(frozen=True)
class FsdpSettings(BaseSettings):
    """BaseSettings of train_fsdp.py and train_fsdp_tp.py."""

    fsdp_dtype: str = setting(
        "none",
        "bfloat16: for gathered parameters and computation (changes numerics); gradients summed "
        "in float32",
        choices=("none", "bfloat16"),
    )
    fsdp_offload: bool = free_setting(False, "keep the shards in the CPU's memory")
    fsdp_size: int = free_setting(
        0,
        "number of ranks that shard each parameter; 0: all. If fewer: replicate across groups "
        "(HSDP); in train_fsdp_tp.py, the other dimension is tensor parallel",
    )

    @property
    def precision(self) -> str:
        """A readable description of the precision."""
        return super().precision if self.fsdp_dtype == "none" else f"{self.fsdp_dtype} blocks"

    def warnings(self, device: torch.device) -> list[str]:
        """See utils.settings."""
        own = warnings_of(self.fsdp_dtype, device, "pass --fsdp-dtype none")
        return [*super().warnings(device), *own]

    def resolved(self) -> Self:
        """See utils.settings. Raises ConfigError if values contradict each other."""
        on_cuda = self.device != "cpu" and torch.cuda.is_available()
        if self.fsdp_offload and self.clip_norm and on_cuda:
            raise ConfigError(
                "fsdp_offload keeps gradients on the CPU, where NCCL cannot reduce their norm: "
                "pass --clip-norm 0, or --no-fsdp-offload"
            )
        if self.compile in ("reduce-overhead", "max-autotune"):
            raise ConfigError(
                f"compile {self.compile} makes CUDA graphs, which would be captured again in each "
                f"step, because FSDP gathers parameters at new addresses: pass --compile default"
            )
        ranks = launched_world_size()
        is_launched = "WORLD_SIZE" in os.environ
        if is_launched and self.fsdp_size and ranks % self.fsdp_size:
            sizes = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
            raise ConfigError(
                f"{ranks} processes cannot be divided by fsdp_size {self.fsdp_size}: pass one of "
                f"{sizes}"
            )
        return super().resolved()


def check_same_weights(model: nn.Module) -> None:
    """Raise UserError, on all ranks, if their weights differ before they are sharded."""
    sums = all_gather_object([parameter.sum().item() for parameter in model.parameters()])
    if any(other != sums[0] for other in sums):
        raise UserError("the ranks have different weights: call set_seed(cfg.seed) on all")


def checked_blocks(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """The blocks, which fully_shard() is to gather one at a time. Rank 0 warns if there are none:
    the whole model is then gathered at once. Raises UserError for parameters that it rejects."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0 or parameter.is_complex():
            kind, remedy = "has no dimension", "give it the shape (1,), as in torch.ones(1)"
            if parameter.is_complex():
                kind, remedy = "is complex", "keep torch.view_as_real(...) of it as the parameter"
            raise UserError(f"FSDP cannot shard the parameter {name}, which {kind}: {remedy}")
    if not blocks and is_main_process():
        warn(
            f"the task names no blocks of the {type(model).__name__}: FSDP gathers the whole model "
            f"at once, and saves less memory"
        )
    return blocks


def fsdp_kwargs(
    cfg: FsdpSettings, root: bool = False, mesh: DeviceMesh | None = None
) -> dict[str, Any]:
    """Keyword arguments for fully_shard(): the ranks, the precision, where the shards are kept.

    root: for the whole model, whose outputs are float32 in any case. mesh: the ranks, if not all.
    (https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html)
    """
    require_gpu_per_rank()
    on_cpu = dist.get_backend() == "gloo"
    device_type = "cpu" if on_cpu else default_device_type()
    kwargs = {"mesh": mesh or _mesh_of_all(device_type, cfg.fsdp_size)}
    if cfg.fsdp_offload:
        kwargs["offload_policy"] = CPUOffloadPolicy(pin_memory=not on_cpu)
    if cfg.fsdp_dtype != "none":
        kwargs["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=getattr(torch, cfg.fsdp_dtype),
            reduce_dtype=torch.float32,
            output_dtype=torch.float32 if root else None,
        )
    return kwargs


@cache
def _mesh_of_all(device_type, size):
    """A DeviceMesh of all ranks, of which `size` divide each parameter and the others replicate."""
    ranks = dist.get_world_size()
    if size in (0, ranks):
        return init_device_mesh(device_type, (ranks,))
    names = ("replicate", "shard")
    return init_device_mesh(device_type, (ranks // size, size), mesh_dim_names=names)


def shard_batchnorms(model: nn.Module, cfg: FsdpSettings) -> None:
    """Shard the BatchNorms separately, in float32, which they need, if cfg.fsdp_dtype is set.

    They are gathered together: one by one, each would cost a message, for a few numbers. Raises
    UserError for BatchNorms whose statistics would differ between the ranks.
    """
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    modules = list(model.modules())
    is_any = any(isinstance(module, _BatchNorm) for module in modules)
    if is_any and not cfg.sync_bn and dist.get_world_size() > 1:
        raise UserError("FSDP does not broadcast BatchNorm's statistics: pass --sync-bn")
    norms = [module for module in modules if hasattr(module, "running_var")]  # frozen ones, too
    if norms and cfg.fsdp_dtype != "none":
        fully_shard(norms, **fsdp_kwargs(cfg) | {"mp_policy": policy})


class CompareShards(Hook):
    """Raises UserError, on all ranks, if these have run different blocks in a step, or the same in
    a different order, or if different parameters have a gradient.

    FSDP matches what the ranks send by its order alone: it would average the gradients of different
    parameters of two ranks, or wait forever. The ranks compare a step during the next one, and
    before they save. On CPUs, where gloo would abort the process, they also compare each block
    before they gather it.
    """

    def __init__(self, cfg: Any, state: Mapping[str, Any]) -> None:
        self.is_on = cfg.check_replicas_every >= 0
        self.parameters = dict(state["model"].named_parameters())
        self.blocks: list[str] = []  # run since the last step
        self.used: list[list[str]] = []  # the blocks, and the parameters, of that step
        self.work: dist.Work | None = None
        if self.is_on:
            for name, module in state["model"].named_modules():
                if isinstance(module, FSDPModule):
                    note = partial(_note_block, self.blocks, name or "the model")
                    module.register_forward_pre_hook(note, prepend=True)  # before FSDP's
            end = partial(_note_block, self.blocks, "the end of forward")
            state["model"].register_forward_hook(end)

    def after_step(self, checkpoint: Checkpoint) -> None:
        if self.is_on:
            self._compare()
            with_grad = [name for name, p in self.parameters.items() if p.grad is not None]
            self.used = [[*self.blocks], with_grad]
            self.blocks.clear()
            self.numbers = _both_signs(self.used)
            group = control_group()
            self.work = dist.all_reduce(self.numbers, dist.ReduceOp.MAX, group, async_op=True)

    def before_save(self, checkpoint: Checkpoint, between_steps: bool) -> None:
        self._compare()

    def _compare(self):
        if self.work:
            self.work.wait()
            _refuse_different(self.numbers, self.used)
            self.work = None


class OffloadBuffers(FileForm):
    """Keeps the buffers on the CPU, as fsdp_offload does the shards, while a file is read or
    written: PyTorch distributes the tensors of a file only to a model on one device."""

    @contextmanager
    def context(self, checkpoint: Checkpoint) -> Iterator[None]:
        """Buffers, such as BatchNorm's statistics, move to the CPU, and back afterwards."""
        buffers = [*checkpoint.model.buffers()] if checkpoint.cfg.fsdp_offload else []
        devices = [buffer.device for buffer in buffers]
        for buffer in buffers:
            buffer.data = buffer.cpu()
        try:
            yield
        finally:
            for buffer, device in zip(buffers, devices, strict=True):
                buffer.data = buffer.to(device)


@torch.compiler.disable
def _note_block(blocks, name, *_):
    blocks.append(name)
    if dist.get_backend() == "gloo":
        numbers = _both_signs(name)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        _refuse_different(numbers, [[name], []])


def _both_signs(used):
    """A number that depends on what a rank has used, and its negative: the maxima over the ranks
    have the same absolute value only if all ranks have the same number."""
    number = zlib.crc32(repr(used).encode())
    return torch.tensor([number, -number])


def _refuse_different(numbers, used):
    if numbers.sum():
        ranks = all_gather_object(used)
        rank = next(rank for rank, other in enumerate(ranks) if other != ranks[0])
        (blocks, names), (other_blocks, other_names) = ranks[0], ranks[rank]
        pairs = zip_longest(blocks, other_blocks, fillvalue="no block")
        different = [f"{a} on rank 0 but {b} on rank {rank}" for a, b in pairs if a != b][:1]
        different += [n for n in names + other_names if n not in names or n not in other_names]
        raise UserError(
            f"ranks 0 and {rank} have not used the same parameters in a step, as FSDP needs: "
            f"{textwrap.shorten(', '.join(different), 300)}. Let forward use the same ones in the "
            f"same order for every batch (docs/recipes/multimodal.md), or use train_ddp.py "
            f"(docs/recipes/unused-parameters.md)"
        )


def exit_process() -> NoReturn:
    """Exit, with code 0, a process that has finished; call it at the very end of a script.

    fully_shard() over gloo leaves threads that destroy_process_group() does not join (torch 2.15):
    about one exit in a hundred then aborts in C++'s teardown (pytorch/pytorch#190489).
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
