"""Several devices for one process, and which layers of a model go to which of them."""

import itertools
import os
from functools import cache

import torch

from utils.distributed import UserError, get_device, get_local_rank, init_distributed
from utils.models import layers_of


def get_devices(names="auto"):
    """The devices of a script that runs as one process: a list of torch.device, first stage first.

    names: such as "cuda:0,cuda:1" or "cpu,cpu"; "cuda,cuda" is the first two; auto: all visible
    GPUs, or cpu,cpu.
    """
    names = _names(names, processes=1)
    devices = _devices(names, first=0)
    get_device(str(devices[0]))
    return devices


def init_distributed_devices(names="auto", timeout=300.0):
    """Join the process group as init_distributed() does; return the devices of this process.

    names: as for get_devices(), but "cuda,cuda" is two of this node's for each process: local rank
    r owns 2r and 2r + 1. Numbered ones ("cuda:0,cuda:1") are the same for all processes.
    """
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "1")
    names = _names(names, int(local_world_size) if local_world_size.isdecimal() else 1)
    own = names.count("cuda")
    init_distributed("cuda" if own else names[0], timeout, max(1, own))
    return _devices(names, first=get_local_rank() * own)


def _names(names, processes):
    if names != "auto":
        return names.split(",")
    visible = torch.cuda.device_count()
    return ["cuda"] * max(1, visible // processes) if visible else ["cpu", "cpu"]


def _devices(names, first):
    numbers = itertools.count(first)
    try:
        devices = [
            torch.device("cuda", next(numbers)) if n == "cuda" else torch.device(n) for n in names
        ]
    except RuntimeError:
        devices = []
    if not devices or any(device.type not in ("cpu", "cuda") for device in devices):
        raise UserError(f"--devices {','.join(names)} is no list such as cuda:0,cuda:1 or cpu,cpu")
    needed = max((device.index + 1 for device in devices if device.type == "cuda"), default=0)
    if needed > torch.cuda.device_count():
        raise UserError(
            f"--devices {','.join(names)} needs {needed} CUDA devices here, but "
            f"{torch.cuda.device_count()} are visible: name fewer, or pass --devices cpu,cpu"
        )
    return devices


class MicroBatches(torch.nn.Module):
    """A model that computes its batch in parts: at most `count`, of equal size but for the last.

    Where its stages lie on several GPUs they work at the same time: nothing waits for a GPU, so
    the first starts on a part while the next still has the one before. On CPUs the parts follow
    one another. (https://docs.pytorch.org/tutorials/intermediate/model_parallel_tutorial.html)
    """

    def __init__(self, model, count):
        super().__init__()
        self.module, self.count = model, count

    def forward(self, images):
        """images: (n, channels, height, width) -> the model's outputs (n, ...)."""
        return torch.cat([self.module(part) for part in images.chunk(self.count)])


def assign_layers(model, devices, split=""):
    """The model's layers, in order, each with its device: a list of (module, torch.device).

    A stage of successive layers for each device. split: layers a stage, such as "6,4"; empty: so
    that the stage with the most parameters has as few as can be. Raises UserError where the layers
    cannot be cut so.
    """
    if model._compiled_call_impl is not None:
        raise UserError("a model in stages is not called as a whole: pass --compile none")
    layers, count = layers_of(model), len(devices)
    if split:
        sizes = [int(size) if size.strip().isdecimal() else 0 for size in split.split(",")]
        if len(sizes) != count or sum(sizes) != len(layers) or 0 in sizes:
            raise UserError(
                f"--split {split} must be {count} positive numbers that add up to the model's "
                f"{len(layers)} layers: {_table(layers)}"
            )
    elif len(layers) < count:
        raise UserError(f"{len(layers)} layers cannot be cut into {count} stages")
    else:
        sizes = _balance([sum(p.numel() for p in layer.parameters()) for layer in layers], count)
    owners = [d for device, size in zip(devices, sizes, strict=True) for d in [device] * size]
    return list(zip(layers, owners, strict=True))


def _balance(weights, count):
    """The sizes of `count` runs of `weights` whose heaviest is as light as possible."""

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


def _table(layers):
    return ", ".join(type(layer).__name__ for layer in layers)
