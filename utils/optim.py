"""The optimizer and the learning rate schedule, from the config."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler


def build_optimizer(model: nn.Module, cfg: Any) -> Optimizer:
    """SGD, Adam or AdamW over the model's trainable parameters.

    It is fused: one kernel updates all of them, on CUDA and on the CPU. For FSDP's sharded
    parameters, SGD has no such kernel (torch 2.15): a few update all of them (foreach). Neither
    takes tensors of several meshes together: see tensor_parallel.update_by_mesh().
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    options = {"lr": cfg.lr, "weight_decay": cfg.weight_decay}
    is_whole = not any(hasattr(parameter, "device_mesh") for parameter in parameters)
    is_adam = cfg.optimizer in ("adam", "adamw")
    is_real = all(parameter.is_floating_point() for parameter in parameters)  # not complex
    options["fused" if is_real and (is_whole or is_adam) else "foreach"] = True
    if is_adam:
        kind = torch.optim.AdamW if cfg.optimizer == "adamw" else torch.optim.Adam
        return kind(parameters, **options)
    nesterov = cfg.optimizer == "sgd_nesterov" and cfg.momentum > 0
    optimizer = torch.optim.SGD(parameters, momentum=cfg.momentum, nesterov=nesterov, **options)
    if cfg.momentum:
        # Fused SGD creates these in its first step and, if a GradScaler skips that step, leaves
        # them uninitialized (torch 2.15): the next step would read arbitrary memory.
        for parameter in parameters:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def build_scheduler(optimizer: Optimizer, cfg: Any, steps_per_epoch: int) -> LRScheduler:
    """Linear warmup, then cfg.lr_schedule. Call step() after every optimizer step."""
    total = cfg.epochs * steps_per_epoch
    warmup = round(cfg.warmup_epochs * steps_per_epoch)

    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, total - warmup))
        if cfg.lr_schedule == "cosine":
            return (1 + math.cos(math.pi * done)) / 2
        if cfg.lr_schedule == "step":
            return 0.1 ** (3 * step // total)
        return 1 - done if cfg.lr_schedule == "linear" else 1.0

    return Schedule(optimizer, factor, steps_per_epoch)


class Schedule(LambdaLR):
    """A rate that depends only on the step. A run that resumes with a different peak, or with a
    different number of steps per epoch, continues at the same place of its new schedule."""

    def __init__(
        self, optimizer: Optimizer, factor: Callable[[int], float], steps_per_epoch: int
    ) -> None:
        self.steps_per_epoch = steps_per_epoch
        super().__init__(optimizer, factor)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the same place, in epochs, of this schedule."""
        step = state["last_epoch"] * self.steps_per_epoch // state["steps_per_epoch"]
        ours = {"base_lrs": self.base_lrs, "steps_per_epoch": self.steps_per_epoch}
        super().load_state_dict(state | ours | {"last_epoch": step})
        for group, peak in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = peak * self.lr_lambdas[0](step)
