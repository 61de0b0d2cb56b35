"""A training step as one CUDA graph, for train_1gpu_graph.py.

Follows "Whole-network capture" in https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from utils.batches import map_tensors, tensors_of
from utils.config import BaseSettings, ConfigError, setting
from utils.errors import UserError

WARMUP_STEPS = 3


@dataclass(frozen=True)
class GraphSettings(BaseSettings):
    """Settings of train_1gpu_graph.py."""

    amp_dtype: str = setting(
        "none", "precision under autocast (changes numerics)", choices=("none", "bfloat16")
    )

    def autocast(self, device: torch.device) -> torch.autocast:
        """torch.autocast on the device, which changes nothing with amp_dtype none."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.amp_dtype == "bfloat16")

    def resolved(self) -> Self:
        """See BaseSettings."""
        if self.compile in ("reduce-overhead", "max-autotune"):
            raise ConfigError(  # which cannot be captured in a different graph
                f"--compile {self.compile} makes CUDA graphs: pass --compile default"
            )
        return super().resolved()


class GraphedStep:
    """Calls step(inputs, targets), which trains and returns (loss_sum, outputs); on a GPU, as a
    graph.

    The first WARMUP_STEPS calls run the step as it is, on a side stream, as capturing requires.
    They train on their batches, so that no weights have to be restored. The next call captures the
    step, which computes nothing, and from then on every call replays the graph. On a CPU, every
    call runs the step as it is.

    A replay repeats the same kernels on the same memory. So the batch is copied into the tensors
    that were captured, and the optimizer (a fused one) reads its learning rates from tensors, into
    which the rates of its param_groups are copied: these stay numbers for the scheduler and for
    checkpoints. Dropout draws other numbers in each replay, from the seed that is current then.
    """

    def __init__(
        self,
        step: Callable[[Any, Any], tuple[Tensor, Any]],
        optimizer: Optimizer,
        device: torch.device,
    ) -> None:
        self.step, self.optimizer = step, optimizer
        self.stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        parameters = [group["params"][0] for group in optimizer.param_groups]
        self.rates = [p.new_zeros((), dtype=torch.float32) for p in parameters]  # as kernels expect
        self.warmup_steps = WARMUP_STEPS
        self.graph: Any = None

    def __call__(self, inputs: Any, targets: Any) -> tuple[Tensor, Any]:
        """(loss_sum, outputs), which the next call may overwrite.

        Raises UserError if the shapes of the batch differ from those that were captured.
        """
        if self.stream is None:
            return self.step(inputs, targets)
        for rate, group in zip(self.rates, self.optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        if self.warmup_steps:
            self.warmup_steps -= 1
            return self._warm_up(inputs, targets)
        if self.graph is None:
            self._capture(inputs, targets)
        given, captured = tensors_of((inputs, targets)), tensors_of(self.batch)
        shapes = [tuple(tensor.shape) for tensor in given]
        expected = [tuple(tensor.shape) for tensor in captured]
        if shapes != expected:
            raise UserError(
                f"a CUDA graph needs batches of one shape, but {shapes} follows {expected}: pad "
                f"them to one size (--padding context, for text)"
            )
        torch._foreach_copy_(captured, given)
        self.graph.replay()
        return self.results

    def _warm_up(self, inputs, targets):
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            results = self._run(inputs, targets)
        torch.cuda.current_stream().wait_stream(self.stream)
        return results

    def _capture(self, inputs, targets):
        self.batch = map_tensors(torch.clone, (inputs, targets))
        self.optimizer.zero_grad()  # the graph allocates the gradients, in its own memory
        graph = torch.cuda.CUDAGraph()
        # thread_local: the thread that pins batches for the loader may allocate memory meanwhile.
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            self.results = self._run(*self.batch, capturable=True)
        self.graph = graph

    def _run(self, inputs, targets, capturable=False):
        with self._rates_as_tensors(capturable):
            return map_tensors(torch.detach, self.step(inputs, targets))

    @contextmanager
    def _rates_as_tensors(self, capturable):
        groups = self.optimizer.param_groups
        numbers = [dict(group) for group in groups]
        for group, rate in zip(groups, self.rates, strict=True):
            group["lr"] = rate
            if "capturable" in group:  # of Adam: captured only with it, and a warning otherwise
                group["capturable"] = capturable
        try:
            yield
        finally:
            for group, values in zip(groups, numbers, strict=True):
                group.update(values)
