"""Several devices per process, and the assignment of a model's layers to them."""

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, nn

from utils.batches import map_tensors, tensors_of
from utils.checkpoint import Wrapper
from utils.config import BaseSettings, ConfigError, free_setting, setting
from utils.distributed import default_device_type, set_devices
from utils.errors import UserError
from utils.rungs.accumulation import RunningStatistics as RunningStatistics

Layers = Sequence[tuple[Callable[[Tensor], Tensor], Sequence[Any]]]  # see a task's layers()


@dataclass(frozen=True)
class StagesSettings(BaseSettings):
    """Settings of train_mp.py and train_ddp_mp.py."""

    devices: str = free_setting(
        "auto",
        "one per stage; cuda,cuda: two GPUs for each process; auto: share the GPUs, or cpu,cpu",
    )
    split: str = free_setting("", "layers per stage, such as 6,4; empty: balanced")
    micro_batches: int = setting(
        1, "micro-batches per step of a process (changes numerics with BatchNorm)", low=1
    )

    def resolved(self) -> Self:
        """See BaseSettings."""
        if self.compile != "none":
            raise ConfigError("a compiled model cannot be split: pass --compile none")
        return super().resolved()


def get_devices(names: str = "auto") -> list[torch.device]:
    """The devices of this process, in the order of the stages.

    names: such as "cuda:0,cuda:1" or "cpu,cpu", the same for all processes of the node; or
    "cuda,cuda": the process with local rank r owns GPUs 2r and 2r + 1, or the two that a task sees
    under srun --gpus-per-task=2. auto: an equal share of the visible GPUs, or cpu,cpu. Raises
    UserError for names that are not devices of this node.
    """
    numbers = (os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    local_rank, processes = (int(text) if text.isdecimal() else 0 for text in numbers)
    processes, kind = max(1, processes), default_device_type()
    visible = 0 if kind == "cpu" else torch.accelerator.device_count()
    if names == "auto":
        names = ",".join([kind] * max(1, visible // processes)) if visible else "cpu,cpu"
    try:
        devices = [torch.device(name) for name in names.split(",")]
    except RuntimeError as error:
        raise UserError(f"--devices {names}: {str(error).splitlines()[0]}") from None
    is_any = [device.type != "cpu" and device.index is None for device in devices]
    each = sum(is_any)  # GPUs that belong to one process
    if visible == each and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ:
        local_rank, processes = 0, 1  # torchrun's processes all see the same GPUs
    gpus = itertools.count(local_rank * each)
    for position, device in enumerate(devices):
        if is_any[position]:
            devices[position] = torch.device(device.type, next(gpus))
    needed = max([processes * each, *(d.index + 1 for d in devices if d.type != "cpu")])
    if needed > visible:
        raise UserError(
            f"--devices {names} with {processes} processes needs {needed} GPUs, but "
            f"{visible} are visible: name fewer, or pass --devices cpu,cpu"
        )
    if devices[0].type != "cpu":
        torch.accelerator.set_device_index(devices[0])
    if devices[0].type != "cpu" and len(devices) > 1:
        # PyTorch's newer NCCL backend binds a process group to one device, the older one does not.
        os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")
    return set_devices(devices)


class MicroBatches(Wrapper):
    """Runs a model on a batch in at most `count` micro-batches, of equal size except for the last.

    Stages on several GPUs then work at the same time: the CPU does not wait for a GPU, so the first
    stage starts on a micro-batch while the next stage still computes the previous one. On CPUs, the
    micro-batches run one after another. (https://docs.pytorch.org/tutorials/intermediate/model_parallel_tutorial.html)
    """

    def __init__(self, model: nn.Module, count: int) -> None:
        super().__init__()
        self.module, self.count = model, count

    @property
    def _ddp_params_and_buffers_to_ignore(self):
        """The buffers that DistributedDataParallel need not broadcast (utils/sync_batchnorm.py): it
        asks the module that it gets, not the one inside."""
        names = getattr(self.module, "_ddp_params_and_buffers_to_ignore", [])
        return [f"module.{name}" for name in names]

    def forward(self, inputs: Any) -> Tensor:
        """inputs: tensors (n, ...), nested in any way -> the model's outputs, a tensor (n, ...)."""
        if self.count == 1:
            return self.module(inputs)
        columns = tensors_of(inputs)
        parts = [column.chunk(self.count) for column in columns]
        outputs = []
        for number in range(len(parts[0])):
            pieces = [chunks[number] for chunks in parts]
            outputs.append(self.module(_replace_tensors(inputs, pieces)))
        return torch.cat(outputs)


def _replace_tensors(batch, tensors):
    remaining = iter(tensors)
    return map_tensors(lambda _: next(remaining), batch)


def assign_layers(
    layers: Layers, devices: Sequence[torch.device], split: str = ""
) -> list[tuple[nn.Module, torch.device]]:
    """The modules of the layers, in order, each with its device.

    A module that several layers share stays with the first. Each device gets a stage of consecutive
    layers. split: layers per stage, such as "6,4"; empty: so that the largest stage has as few
    parameters as possible. Raises UserError if the layers cannot be split that way, or not for
    DistributedDataParallel.
    """
    if torch.distributed.is_initialized() and len({device.type for device in devices}) > 1:
        raise UserError("DistributedDataParallel needs stages on GPUs only, or on CPUs only")
    count = len(devices)
    if split:
        sizes = [int(size) if size.strip().isdecimal() else 0 for size in split.split(",")]
        if len(sizes) != count or sum(sizes) != len(layers) or 0 in sizes:
            raise UserError(
                f"--split {split} must be {count} positive numbers that add up to the model's "
                f"{len(layers)} layers"
            )
    elif len(layers) < count:
        raise UserError(f"{len(layers)} layers cannot be split into {count} stages")
    else:
        sizes = _balance([_count_parameters(parts) for _, parts in layers], count)
    remaining, assigned = iter(layers), {}
    for device, size in zip(devices, sizes, strict=True):
        for _, parts in itertools.islice(remaining, size):
            for part in parts:
                if isinstance(part, nn.Module):
                    assigned.setdefault(part, device)
    return list(assigned.items())


def move_inputs_to(device: torch.device) -> Callable[..., Any]:
    """A forward pre-hook that moves all tensors among a module's arguments to a device."""

    def move(_, args, kwargs):
        return map_tensors(lambda tensor: tensor.to(device), (args, kwargs))

    return move


def move_the_rest(
    model: nn.Module, placed: Iterable[tuple[nn.Module, torch.device]], device: torch.device
) -> nn.Module:
    """Move to a device what belongs to none of the placed modules. Moving the whole model before
    its layers would need memory for all of it. Returns the model."""
    held = {
        id(tensor)
        for module, _ in placed
        for tensor in itertools.chain(module.parameters(), module.buffers())
    }
    return model._apply(lambda tensor: tensor if id(tensor) in held else tensor.to(device))


def _count_parameters(parts):
    modules = [part for part in parts if isinstance(part, nn.Module)]
    return sum(p.numel() for module in modules for p in module.parameters())


def _balance(weights, count):
    """The sizes of `count` consecutive groups of `weights` whose largest sum is the smallest."""

    @cache
    def best(first, runs):
        if runs == 1:
            return sum(weights[first:]), (len(weights) - first,)
        options = []
        for end in range(first + 1, len(weights) - runs + 2):
            rest, sizes = best(end, runs - 1)
            options.append((max(sum(weights[first:end]), rest), (end - first, *sizes)))
        return min(options)

    return best(0, count)[1]
