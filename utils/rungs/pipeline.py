"""Pipeline parallelism: each rank holds some of the layers, and micro-batches pass through them."""

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from utils.checkpoint import Wrapper
from utils.config import BaseSettings, ConfigError, free_setting, setting
from utils.distributed import all_gather_object
from utils.errors import UserError, say
from utils.metrics import Meter, Task, mean_loss
from utils.options import sharded as sharded  # its files have parts
from utils.rungs.accumulation import RunningStatistics as RunningStatistics
from utils.rungs.groups import set_single_replica as set_single_replica
from utils.sample_random import micro_batches
from utils.seeds import derive_seed

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble")
ONE_STAGE_PER_RANK = ("GPipe", "1F1B")
Layers = Sequence[tuple[Callable[[Tensor], Tensor], Sequence[Any]]]  # see a task's layers()


@dataclass(frozen=True)
class PipelineSettings(BaseSettings):
    """Settings of train_pp.py."""

    schedule: str = free_setting("1F1B", "order of the passes", choices=SCHEDULES)
    micro_batches: int = setting(4, "per step (changes numerics with BatchNorm)", low=1)
    save_sharded: bool = free_setting(True, "each rank saves its own part of the tensors")

    def resolved(self) -> Self:
        """See BaseSettings."""
        if not self.save_sharded or self.compile != "none":
            raise ConfigError("a pipeline needs --save-sharded and --compile none")
        if self.global_batch_size % self.micro_batches:
            raise ConfigError(
                f"--global-batch-size {self.global_batch_size} is not a multiple of "
                f"--micro-batches {self.micro_batches}"
            )
        return super().resolved()


@torch.no_grad()
def check_layers(
    model: nn.Module, layers_of: Callable[[nn.Module], Layers], inputs: Tensor
) -> None:
    """Raise UserError if the layers, one after another, do not compute what the model computes.

    A class that overrides forward() may look like a sequence without being one.
    """
    model = copy.deepcopy(model).eval()
    for parameter in model.parameters():
        if not parameter.any():  # as the head of torchvision's ViT, which would hide all before it
            nn.init.normal_(parameter, generator=torch.Generator(parameter.device).manual_seed(0))
    expected, outputs, reason = model(inputs), inputs, ""
    try:
        for function, _ in layers_of(model):
            outputs = function(outputs).contiguous()  # a tensor, as is passed to a next stage
        is_same = outputs.shape == expected.shape
        is_same = is_same and torch.allclose(outputs, expected, 1e-4, 1e-5)
    except (AttributeError, RuntimeError, TypeError) as error:  # shapes or types do not fit
        is_same, reason = False, " (" + str(error).partition("\n")[0] + ")"
    if not is_same:
        raise UserError(
            f"layers() of the task, one after another, do not compute what the "
            f"{type(model).__name__} computes{reason}"
        )


class Stage(nn.Module):
    """Consecutive layers."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self.functions = [function for function, _ in layers]
        parts = [part for _, parts in layers for part in parts]
        self.layers = nn.ModuleList(part for part in parts if isinstance(part, nn.Module))
        self.extra = nn.ParameterList(part for part in parts if isinstance(part, nn.Parameter))

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers, one after another."""
        for function in self.functions:
            x = function(x)
        return x.contiguous()  # gloo sends nothing else


@contextmanager
def part_of_batch(number: int, count: int) -> Iterator[None]:
    """A context for the forward or backward pass of one of `count` micro-batches, which do not run
    one after another, for random numbers by sample (utils/sample_random.py)."""
    micro_batches.append((number, count))
    try:
        yield
    finally:
        micro_batches.pop()


class NumberedStage(PipelineStage):
    """Tells random numbers by sample (utils/sample_random.py) which micro-batch it computes."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with part_of_batch(fwd_chunk_id, self.chunks or 1):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with part_of_batch(bwd_chunk_id, self.chunks or 1):  # for activation checkpointing
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)


def sums_of(task: Task, outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a micro-batch; and {name: sum} of it and of what the task measures."""
    loss = task.loss(outputs, targets)
    return loss, {"loss": loss.detach(), **task.measure(outputs.detach(), targets)}


class Pipeline(Wrapper):
    """A model of which this rank holds one or two stages, under the names of the whole model.

    step() trains, measure() evaluates: both run the schedule on a whole batch. The last rank alone
    has outputs, and sums the loss and what the task measures over the micro-batches.

    layers_of: a task's layers(). Raises UserError if the layers cannot be cut into stages, or do
    not compute what the model computes for a sample of `loader`.
    """

    def __init__(
        self,
        model: nn.Module,
        layers_of: Callable[[nn.Module], Layers],
        loader: Any,
        device: torch.device,
        cfg: PipelineSettings,
    ) -> None:
        super().__init__()
        inputs, _ = loader.prepare(*loader.examples([0, min(1, len(loader.dataset) - 1)]))
        if not isinstance(inputs, Tensor):
            raise UserError("a pipeline needs inputs that are one tensor: use train_fsdp.py")
        check_layers(model, layers_of, inputs)
        self.module = model.to(memory_format=torch.contiguous_format)  # its gradients are sent, too
        self.device = device
        self.batch_size = cfg.global_batch_size
        self.micro_batches = cfg.micro_batches
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()
        self.loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None
        self.input_shape: torch.Size | None = None  # known after the first batch
        self.shapes: dict[str, torch.Size] | None = None  # of the sums, likewise
        self.prepared = False  # for training
        stages = self._cut(layers_of(model), cfg.schedule)
        held = nn.ModuleList(stages[number] for number in self._numbers(cfg.schedule, self.rank))
        self.shared = self._find_shared_parameters(stages, cfg)
        kept = {id(tensor) for tensor in (*held.parameters(), *held.buffers())}
        _remove_others(self.module, kept)
        self.schedule = self._build_schedule(held, len(stages), cfg)

    def _numbers(self, schedule, rank):
        """The stages that a rank holds."""
        return [rank] if schedule in ONE_STAGE_PER_RANK else [rank, self.ranks + rank]

    def _cut(self, layers, schedule):
        count = self.ranks * len(self._numbers(schedule, 0))
        if len(layers) < count:
            raise UserError(f"{len(layers)} layers cannot be cut into {count} stages")
        cuts = [len(layers) * i // count for i in range(count + 1)]
        stages = [Stage(layers[start:end]) for start, end in itertools.pairwise(cuts)]
        for rank in range(self.ranks):
            numbers = self._numbers(schedule, rank)
            parameters = [p for number in numbers for p in stages[number].parameters()]
            if not any(parameter.requires_grad for parameter in parameters):
                raise UserError(
                    f"rank {rank} would hold no trainable parameters: start fewer processes"
                )
        if self.rank == 0:
            sizes = ", ".join(str(end - start) for start, end in itertools.pairwise(cuts))
            say(
                f"ranks: {self.ranks} = 1 data x {self.ranks} pipeline, {count} stages of {sizes} "
                f"layers"
            )
        return stages

    def _find_shared_parameters(self, stages, cfg):
        """{a parameter that several ranks hold, such as a tied embedding: their group}."""
        owners = {}
        for rank in range(self.ranks):
            for number in self._numbers(cfg.schedule, rank):
                for parameter in stages[number].parameters():
                    owners.setdefault(parameter, set()).add(rank)
        shared = {}
        for parameter, ranks in owners.items():
            if len(ranks) > 1 and parameter.requires_grad:
                timeout = timedelta(seconds=cfg.timeout)
                group = dist.new_group(sorted(ranks), timeout)  # all ranks take part
                if self.rank in ranks:
                    shared[parameter] = group
        return shared

    def _build_schedule(self, held, count, cfg):
        numbers = self._numbers(cfg.schedule, self.rank)
        # Of its own: on a GPU, what a group sends waits for what it has been given before.
        messages: Any = dist.new_group(timeout=timedelta(seconds=cfg.timeout))
        stages = [
            NumberedStage(module, number, count, self.device, group=messages)
            for module, number in zip(held, numbers, strict=True)
        ]
        try:
            return get_schedule_class(cfg.schedule)(
                stages[0] if cfg.schedule in ONE_STAGE_PER_RANK else stages,
                cfg.micro_batches,
                loss_fn=lambda outputs, targets: self.loss_fn(outputs, targets),
                scale_grads=False,  # the losses add up to the batch's
            )
        except ValueError as error:
            message = f"--schedule {cfg.schedule} on {self.ranks} ranks: {error}"
            raise UserError(message) from None

    def step(
        self, inputs: Tensor, targets: Tensor, task: Task, count: Tensor | float
    ) -> dict[str, Tensor]:
        """Forward and backward of all micro-batches: the gradients of the sum of task.loss(outputs,
        targets) over the micro-batches, divided by `count`.

        Returns the sums of the batch for Meter.add(), on all ranks: {name: float64 tensor}.
        """
        if not self.prepared:  # PyTorch infers shapes by a pass, which BatchNorm must not see
            self.eval()
            self._run(self.schedule.step, inputs, targets, lambda outputs, _: outputs.sum())
            self.train().zero_grad()
            self.prepared = True
        torch.manual_seed(derive_seed(torch.initial_seed(), self.rank))  # dropout of its layers
        measured = []

        def loss_fn(outputs: Tensor, part: Tensor) -> Tensor:
            loss, sums = sums_of(task, outputs, part)
            measured.append(sums)
            return mean_loss(loss, count)

        self._run(self.schedule.step, inputs, targets, loss_fn)
        for parameter, group in self.shared.items():  # each rank has its part of the gradient
            dist.all_reduce(parameter.grad, group=group)
        # PyTorch may have called loss_fn once before, to infer the shapes of gradients.
        return self._share(measured[-self.micro_batches :])

    def measure(self, inputs: Tensor, targets: Tensor, task: Task) -> dict[str, Tensor]:
        """The sums of a batch, as step() returns them, without training.

        inputs: at most a batch; some are repeated to fill it, and their outputs are left out.
        """
        rows = torch.arange(self.batch_size, device=self.device) % len(inputs)
        measured = []
        left = len(inputs)

        def loss_fn(outputs: Tensor, part: Tensor) -> Tensor:
            nonlocal left
            if left > 0:
                measured.append(sums_of(task, outputs[:left], part[:left])[1])
            left -= len(part)
            return outputs.sum()  # the schedule asks for one

        self._run(self.schedule.eval, inputs[rows], targets[rows], loss_fn)
        return self._share(measured)

    def _run(self, schedule, inputs, targets, loss_fn):
        if self.input_shape not in (None, inputs.shape):
            raise UserError(
                f"a pipeline needs batches of one shape, but {tuple(inputs.shape)} follows "
                f"{tuple(self.input_shape)}: pad them to one size (--padding context, for text)"
            )
        self.input_shape = inputs.shape
        self.loss_fn = loss_fn
        arguments = [inputs] if self.rank == 0 else []
        target = targets if self.rank == self.ranks - 1 else None
        with part_of_batch(0, 1):  # of a pass that infers shapes, outside of NumberedStage
            # The outputs of a batch may be larger than the model: for text, a row per token.
            schedule(*arguments, target=target, return_outputs=False)

    def _share(self, measured):
        """The sums of the last rank's micro-batches, on all ranks."""
        if self.shapes is None:
            shapes = {
                name: torch.as_tensor(v).shape for sums in measured for name, v in sums.items()
            }
            self.shapes = all_gather_object(shapes)[-1]
        sizes = [shape.numel() for shape in self.shapes.values()]
        total = torch.zeros(sum(sizes), dtype=torch.float64, device=self.device)
        for sums in measured:
            parts = [torch.as_tensor(value, device=self.device) for value in sums.values()]
            total += torch.cat([part.double().reshape(-1) for part in parts])
        dist.broadcast(total, self.ranks - 1)
        pieces = zip(self.shapes.items(), total.split(sizes), strict=True)
        return {name: piece.reshape(shape) for (name, shape), piece in pieces}

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """torch.nn.utils.clip_grad_norm_() by the norm of all stages' gradients, in which a
        parameter that several ranks hold counts once."""
        gradients = {p: p.grad for p in self.parameters() if p.grad is not None}
        own = [
            gradient
            for parameter, gradient in gradients.items()
            if parameter not in self.shared or dist.get_rank(self.shared[parameter]) == 0
        ]
        # One dtype on all ranks: the norm of no gradients would be float32.
        squared = nn.utils.get_total_norm(own).to(self.device, torch.float64).square()
        dist.all_reduce(squared)
        norm = squared.sqrt().to(next(self.parameters()).dtype.to_real())
        nn.utils.clip_grads_with_norm_(list(gradients), max_norm, norm)
        return norm


def _remove_others(model, kept):
    """Remove the parameters whose id is not in `kept`, and replace modules without any by Identity,
    so that their memory is freed."""
    for name, parameter in model.named_parameters(recurse=False):
        if id(parameter) not in kept:
            model.register_parameter(name, None)
    for name, child in model.named_children():
        tensors = {id(tensor) for tensor in (*child.parameters(), *child.buffers())}
        if tensors and not tensors & kept:
            setattr(model, name, nn.Identity())
        else:
            _remove_others(child, kept)


@torch.no_grad()
def evaluate(model: Pipeline, loader: Any, task: Task) -> dict[str, float]:
    """utils.metrics.evaluate() of a pipeline, whose ranks share sums in place of outputs."""
    model.eval()
    meter = Meter(task, loader)
    for inputs, targets in loader:
        meter.add(model.measure(inputs, targets, task), targets)
    return meter.compute()


class OwnStages:
    """Weights of which this rank loads what it holds, of any script's checkpoint."""

    def __init__(self, weights: Any) -> None:
        self.weights, self.model = weights, weights.model

    def state_dict(self) -> dict[str, Any]:
        """See Weights."""
        contents: dict[str, Any] = self.weights.state_dict()
        return contents

    def load_state_dict(self, contents: dict[str, Any], with_groups: bool = True) -> None:
        """See Weights."""
        own = {name: contents["model"][name] for name in self.model.state_dict()}
        self.weights.load_state_dict(contents | {"model": own}, with_groups)
