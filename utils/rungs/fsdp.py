"""The settings of train_fsdp.py, the arguments of fully_shard(), and what FSDP asks of a model."""

import atexit
import os
import sys
import zlib
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from utils.config import BaseSettings, ConfigError, free_setting, setting
from utils.distributed import (
    control_group,
    default_device_type,
    launched_world_size,
    require_same,
)
from utils.errors import UserError
from utils.guards import Guard
from utils.rungs.groups import build_mesh, require_gpu_per_rank
from utils.rungs.parameters import replacing_parameters as replacing_parameters


@dataclass(frozen=True)
class FsdpSettings(BaseSettings):
    """Settings of train_fsdp.py, train_fsdp_tp.py and train_ep.py."""

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

    def resolved(self) -> Self:
        """See BaseSettings."""
        on_cuda = self.device != "cpu" and torch.cuda.is_available()
        if self.fsdp_offload and self.clip_norm and on_cuda:
            raise ConfigError("NCCL cannot reduce the norm of --fsdp-offload: pass --clip-norm 0")
        if self.compile in ("reduce-overhead", "max-autotune"):
            raise ConfigError(  # FSDP gathers parameters at new addresses in each step
                f"--compile {self.compile} would capture a CUDA graph in each step: pass --compile "
                f"default"
            )
        ranks = launched_world_size()
        if "WORLD_SIZE" in os.environ and self.fsdp_size and ranks % self.fsdp_size:
            raise ConfigError(f"{ranks} ranks cannot be divided by --fsdp-size {self.fsdp_size}")
        return super().resolved()


def check_same_weights(model: nn.Module) -> None:
    """Raise UserError, on all ranks, if their weights differ before they are sharded."""
    total = sum(parameter.detach().double().sum().item() for parameter in model.parameters())
    require_same(": call set_seed(cfg.seed) on all ranks", **{"sum of the weights": total})


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
    kwargs = {"mesh": mesh or _mesh_of_all(device_type, cfg.fsdp_size, cfg.timeout)}
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
def _mesh_of_all(device_type, size, timeout):
    """A DeviceMesh of all ranks, of which `size` divide each parameter and the others replicate."""
    ranks = dist.get_world_size()
    if size in (0, ranks):
        return build_mesh(device_type, (ranks,), timeout)
    return build_mesh(device_type, (ranks // size, size), timeout, ("replicate", "shard"))


def shard_batchnorms(model: nn.Module, cfg: FsdpSettings) -> None:
    """Shard the BatchNorms separately, in float32, which they need, if cfg.fsdp_dtype is set.

    They are gathered together: one by one, each would cost a message, for a few numbers. Raises
    UserError for BatchNorms whose statistics would differ between the ranks.
    """
    modules = list(model.modules())
    is_any = any(isinstance(module, _BatchNorm) for module in modules)
    if is_any and not cfg.sync_bn and dist.get_world_size() > 1:
        raise UserError("FSDP does not broadcast BatchNorm's statistics: pass --sync-bn")
    norms = [module for module in modules if hasattr(module, "running_var")]  # frozen ones, too
    if norms and cfg.fsdp_dtype != "none":
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        fully_shard(norms, **fsdp_kwargs(cfg) | {"mp_policy": policy})


class CompareShards(Guard):
    """Raises UserError, on all ranks, if these have run different blocks in a step, or the same in
    a different order, or if different parameters have a gradient.

    FSDP matches what the ranks send by its order alone: it would average the gradients of different
    parameters of two ranks, or wait forever. The ranks compare a step while the next one runs, and
    before they save. In this step, a parameter without a gradient sends zeros, so that the ranks'
    messages have one size. They are dropped again: an optimizer would decay the parameter.

    Also if forward() writes into a parameter, which is then a copy that FSDP has gathered for this
    pass. It looks at two steps: in the first, a teacher may be equal to its student.
    """

    def at_start(self, checkpoint: Any) -> None:
        self.steps, self.before = 0, {}
        self.parameters = dict(checkpoint.model.named_parameters())
        self.kept = {id(parameter) for parameter in self.parameters.values()}
        self.watched: set[nn.Module] = set()
        self.gathered: set[str] = set()  # parameters, by name
        self.used: set[str] = set()  # those of them that have got a gradient in this step
        self.blocks: list[str] = []  # run since the last step
        self.work: dist.Work | None = None
        if hasattr(checkpoint.model, "set_reduce_scatter_unused_params"):  # since torch 2.14
            checkpoint.model.set_reduce_scatter_unused_params(True)
        checkpoint.optimizer.register_step_pre_hook(self._drop_zeros)
        for name, module in checkpoint.model.named_modules():
            if isinstance(module, FSDPModule):
                module.register_forward_pre_hook(self._noting(name))
                module.register_forward_hook(self._refuse_writes, prepend=True)  # before FSDP's

    def _noting(self, prefix):
        @torch.compiler.disable
        def note(module, _):
            self.blocks.append(prefix or "the model")
            self.before[module] = self._copies(module)
            if module not in self.watched:
                self.watched.add(module)
                self._note_gradients(prefix, module)

        return note

    def _note_gradients(self, prefix, module):
        for name, parameter in module.named_parameters(prefix):
            if id(parameter) not in self.kept and parameter.requires_grad:
                if self.parameters[name]._backward_hooks:
                    raise UserError(
                        f"FSDP calls no hook of {name}: change gradients after loss.backward()"
                    )
                self.gathered.add(name)
                parameter.register_post_accumulate_grad_hook(
                    lambda _, name=name: self.used.add(name)
                )

    def _drop_zeros(self, *_):
        for name in self.gathered - self.used:
            gradient = self.parameters[name].grad
            if gradient is not None and not gradient.to_local().any():
                self.parameters[name].grad = None

    @torch.compiler.disable
    def _refuse_writes(self, module, *_):
        before, now = self.before.pop(module, {}), self._copies(module)
        for name in before.keys() & now:  # a block inside is gathered for a while
            if before[name] != now[name]:
                raise UserError(
                    f"forward() of a {type(module).__name__} changes its {name}, and FSDP drops "
                    f"that: change it after optimizer.step()"
                )

    def _copies(self, module):
        """{the name of a parameter that is a copy: its version and sum} in the first two steps."""
        if self.steps >= 2:
            return {}
        copies = {name: p for name, p in module.named_parameters() if id(p) not in self.kept}
        parts = {n: p.to_local() if isinstance(p, DTensor) else p for n, p in copies.items()}
        # The version does not tell of what is written through `.data`.
        sums = {name: part.detach().sum(dtype=torch.float64) for name, part in parts.items()}
        return {name: (p._version, sums[name].item()) for name, p in copies.items()}

    def after_step(self, checkpoint: Any) -> None:
        self.steps += 1
        self.before_save(checkpoint, between_steps=True)
        self.facts: dict[str, Any] = {f"block {i}": name for i, name in enumerate(self.blocks)}
        self.facts["blocks run in a step"] = len(self.blocks)
        for name, parameter in self.parameters.items():
            is_used = name in self.used or (
                name not in self.gathered and parameter.grad is not None
            )
            self.facts[f"gradient of {name}"] = is_used
        self.blocks.clear()
        self.used.clear()
        number = zlib.crc32(repr(self.facts).encode())
        self.numbers = torch.tensor([number, -number])  # of the same, the maxima add up to 0
        group = control_group()
        self.work = dist.all_reduce(self.numbers, dist.ReduceOp.MAX, group, async_op=True)

    def before_save(self, checkpoint: Any, between_steps: bool) -> None:
        if self.work:
            self.work.wait()
            self.work = None
            if self.numbers.sum():
                remedy = ": forward must use the same parameters on all ranks, in the same order "
                require_same(remedy + "(docs/recipes/unused-parameters.md)", **self.facts)


def exit_process() -> NoReturn:
    """Exit, with code 0, a process that has finished; call it at the very end of a script.

    fully_shard() over gloo leaves threads that destroy_process_group() does not join (torch 2.15):
    about one exit in a hundred then aborts in C++'s teardown (pytorch/pytorch#190489).
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
