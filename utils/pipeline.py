"""Pipeline parallelism: each rank holds some of the layers, and micro-batches pass through them."""

import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from utils import distributed
from utils.config import Config, ConfigError, free_setting, setting
from utils.errors import UserError, option

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble")


@dataclass(frozen=True)
class PipelineConfig(Config):
    """Config of train_pp.py."""

    schedule: str = free_setting("1F1B", "order of the passes", choices=SCHEDULES)
    micro_batches: int = setting(4, "per step (changes numerics with BatchNorm)", low=1)
    save_sharded: bool = free_setting(True, "each rank saves its own stages")

    def resolved(self):
        """This config with all open values filled in. Raises ConfigError if values contradict."""
        if not self.save_sharded or self.compile != "none":
            raise ConfigError("a pipeline needs --save-sharded and --compile none")
        return super().resolved()


def hold_one_replica():
    """Declare that all ranks together hold one replica, and train on the same batches."""
    distributed.dp_group, _ = dist.new_subgroups(1)


class Stage(nn.Module):
    """Consecutive layers: a list of (function, the modules and parameters that it uses)."""

    def __init__(self, layers):
        super().__init__()
        self.functions = [function for function, _ in layers]
        parts = [part for _, parts in layers for part in parts]
        self.layers = nn.ModuleList(part for part in parts if isinstance(part, nn.Module))
        self.extra = nn.ParameterList(part for part in parts if isinstance(part, nn.Parameter))

    def forward(self, x):
        """Run the layers, one after another."""
        for function in self.functions:
            x = function(x)
        return x.contiguous()  # gloo sends nothing else


class Pipeline(nn.Module):
    """A model of which this rank holds one or two stages, under the names of the whole model.

    step() trains, forward() evaluates: both run the schedule on a whole batch, and return the last
    stage's outputs, of shape `outputs`, on all ranks. Raises UserError if numbers do not divide.
    """

    def __init__(self, model, outputs, device, cfg):
        super().__init__()
        model = model.to(memory_format=torch.contiguous_format)  # its gradients are sent, too
        self.module, self.outputs, self.device = model, outputs, device
        rank, ranks, layers = dist.get_rank(), dist.get_world_size(), layers_of(model)
        single = cfg.schedule in SCHEDULES[:2]
        numbers = [rank] if single else [rank, ranks + rank]  # of its stages
        count = ranks * len(numbers)
        if len(layers) < count:
            raise UserError(f"{len(layers)} layers cannot be cut into {count} stages")
        if outputs[0] % cfg.micro_batches:
            raise UserError(f"{outputs[0]} samples are not {cfg.micro_batches} equal micro-batches")
        cuts = [len(layers) * i // count for i in range(count + 1)]
        held = nn.ModuleList(Stage(layers[cuts[i] : cuts[i + 1]]) for i in numbers)
        _remove_others(model, {id(tensor) for tensor in (*held.parameters(), *held.buffers())})
        stages = [PipelineStage(m, i, count, device) for m, i in zip(held, numbers, strict=True)]
        self.is_first, self.is_last, self.last_rank = rank == 0, rank == ranks - 1, ranks - 1
        stages = stages[0] if single else stages
        try:
            kind = get_schedule_class(cfg.schedule)
            self.schedule = kind(stages, cfg.micro_batches, loss_fn=lambda *x: self.criterion(*x))
        except ValueError as error:
            raise UserError(f"--schedule {cfg.schedule} on {ranks} ranks: {error}") from None
        if rank == 0:
            sizes = ", ".join(str(b - a) for a, b in itertools.pairwise(cuts))
            print(f"ranks: {ranks} = 1 data x {ranks} pipeline, {count} stages of {sizes} layers")

    def step(self, images, labels, criterion):
        """Forward and backward of all micro-batches: gradients of the mean loss of the batch."""
        is_first_step, self.criterion = not hasattr(self, "criterion"), criterion
        if is_first_step:  # torch 2.11 infers shapes by a pass, which BatchNorm must not see
            self.eval()
            self._run(self.schedule.step, images, labels)
            self.train().zero_grad()
        torch.manual_seed(hash((torch.initial_seed(), dist.get_rank())))  # dropout of its layers
        return self._run(self.schedule.step, images, labels)

    def forward(self, images):
        """images: at most a batch; some are repeated to fill it, and their outputs left out."""
        rows = torch.arange(self.outputs[0], device=self.device) % len(images)
        return self._run(self.schedule.eval, images[rows], 0 * rows)[: len(images)]

    def _run(self, schedule, images, labels):
        outputs = schedule(*[images] * self.is_first, target=labels if self.is_last else None)
        outputs = outputs.detach() if self.is_last else images.new_empty(self.outputs)
        dist.broadcast(outputs, self.last_rank)
        return outputs


def layers_of(model):
    """(function, the modules and parameters that it uses) for each of the model's layers."""
    if isinstance(model, nn.Sequential):
        return [(layer, [layer]) for layer in model]
    with option("a pipeline of anything but an nn.Sequential"):
        from utils.model_layers import layers_of
    return layers_of(model)


def _remove_others(model, ours):
    model._parameters |= {name: None for name, p in model._parameters.items() if id(p) not in ours}
    for name, child in model.named_children():
        tensors = {id(tensor) for tensor in (*child.parameters(), *child.buffers())}
        if tensors and not tensors & ours:
            setattr(model, name, nn.Identity())  # its memory is freed
        else:
            _remove_others(child, ours)


def clip_grad_norm_(parameters, max_norm):
    """torch.nn.utils.clip_grad_norm_() by the norm of all stages' gradients."""
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    squared = nn.utils.get_total_norm([p.grad for p in parameters]).square()
    dist.all_reduce(squared)
    nn.utils.clip_grads_with_norm_(parameters, max_norm, squared.sqrt())


def read_own_stages(checkpoint):
    """Make a Checkpointer load what this rank holds, and compare no replicas. Returns it."""
    with option("a pipeline"):
        from utils.sharded import part_of
    fill = checkpoint._fill
    checkpoint._fill = lambda path, file: fill(path, part_of(checkpoint.model, path, file))
    checkpoint._compare_replicas = lambda *_: None
    return checkpoint
