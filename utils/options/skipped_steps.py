"""--max-skipped-steps: continue after steps in which a gradient is inf or NaN."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from utils.distributed import all_gather_object, dp_world_size, is_main_process
from utils.errors import UserError, warn
from utils.guards import Guard


class SkippedSteps(Guard):
    """Skips the optimizer steps in which some rank has a gradient that is inf or NaN.

    A skipped step changes no parameter, optimizer state, buffer or metric; the learning rate moves
    on. After each step, the CPU waits for the device to know.

    skipped: the steps of this epoch; samples: this rank's in them.
    """

    def __init__(self) -> None:
        self.skipped: list[int] = []
        self.samples = self.count = 0  # count: of skipped steps since the start

    def at_start(self, checkpoint: Any) -> None:
        self.device = checkpoint.state["loader"].device
        self.found = torch.zeros(())  # 1: skip this step
        checkpoint.optimizer.register_step_pre_hook(self._before_step)
        checkpoint.optimizer.register_step_post_hook(self._after_optimizer)
        checkpoint.state["metrics"].columns.append(self._add_columns)
        self._remember(checkpoint)

    def _before_step(self, optimizer, args, kwargs):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = get_total_norm([g.to_local() if isinstance(g, DTensor) else g for g in gradients])
        self.found = 1.0 - norm.isfinite().float()
        if dist.is_initialized():  # ranks may hold different shards or stages
            self.found = self.found.to(self.device)  # offloaded gradients are on the CPU
            dist.all_reduce(self.found, dist.ReduceOp.MAX)
        if optimizer.defaults.get("fused"):  # skips on the device, and so in a CUDA graph, too
            optimizer.found_inf = self.found  # as torch.amp.GradScaler does
        elif self.found:
            optimizer.zero_grad()  # without gradients, the step does nothing

    def _after_optimizer(self, optimizer, args, kwargs):
        if hasattr(optimizer, "found_inf"):
            del optimizer.found_inf

    def after_step(self, checkpoint: Any) -> None:
        """Undo what a skipped step has changed in buffers and metrics.

        Raises UserError, on all ranks, if more steps than the limit have been skipped.
        """
        if self.found:
            self._undo(checkpoint)
        self._remember(checkpoint)

    def _remember(self, checkpoint):
        meter = checkpoint.state["meter"]
        self.place = checkpoint.epoch, meter.vector, meter.shapes, meter.count
        self.buffers = {name: b.clone() for name, b in checkpoint.model.named_buffers()}

    @torch.no_grad()
    def _undo(self, checkpoint):
        meter, loader = checkpoint.state["meter"], checkpoint.state["loader"]
        is_finite = bool(meter.vector.isfinite().all())
        epoch, vector, shapes, count = self.place
        if epoch != checkpoint.epoch:  # this is the first step of a new one
            vector, shapes, count = vector[:0], {}, 0.0
        meter.vector, meter.shapes, meter.count = vector, shapes, count
        for name, buffer in checkpoint.model.named_buffers():
            before = self.buffers.get(name)
            if before is not None and before.shape == buffer.shape:
                buffer.copy_(before)
        self.count += 1
        self.skipped.append(loader.step)
        self.samples += len(loader.indices)
        ranks = all_gather_object([] if is_finite else loader.indices.tolist())
        losses = [f"the loss on rank {r}, of samples {ranks[r]}" for r in _replicas() if ranks[r]]
        text = f"step {loader.step} of epoch {loader.epoch} was skipped, as "
        text += f"{' and '.join(losses) or 'a gradient'} is not finite"
        if self.count > checkpoint.cfg.max_skipped_steps:
            raise UserError(f"{text}. That makes {self.count}, more than --max-skipped-steps")
        if is_main_process():
            warn(text)

    def _add_columns(self, row):
        row["train_samples"] -= self.samples * dp_world_size()
        row["skipped_steps"], self.skipped, self.samples = self.skipped, [], 0

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": list(self.skipped), "samples": self.samples * dp_world_size()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped, self.samples = state["skipped"], state["samples"] // dp_world_size()


def _replicas():
    """The first rank of each replica of the model."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    return range(0, world_size, world_size // dp_world_size())
