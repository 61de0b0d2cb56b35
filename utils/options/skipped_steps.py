"""--max-skipped-steps: continue after steps in which a gradient is inf or NaN."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from utils.batches import on_device_of
from utils.distributed import all_gather_object, dp_world_size, is_main_process
from utils.errors import UserError, warn
from utils.hooks import AsyncCopy, Checkpoint, Hook


class SkippedSteps(Hook):
    """Skips the optimizer steps in which some rank has a gradient that is inf or NaN.

    A fused optimizer skips on the device, as after a GradScaler's overflow, and the CPU reads the
    outcome one step later, so that it does not wait for the GPU; with others, it waits. A skipped
    step changes no parameter, optimizer state, buffer or metric; the learning rate moves on.
    """

    def __init__(self, cfg: Any, state: Mapping[str, Any]) -> None:
        self.loader = state["loader"]
        self.meter = state["meter"]
        self.limit = cfg.max_skipped_steps
        self.optimizer = state["optimizer"]
        self.model = state["model"]
        self.count = 0
        self.pending: tuple[Any, ...] | None = None
        self.skipped = []  # steps of this epoch
        self.samples = 0  # this rank's in them
        self.found = torch.zeros(())  # 1: skip this step

    def after_load(self, checkpoint: Checkpoint) -> None:
        """Start to look at gradients; the state to go back to is that which has been loaded."""
        self.flat = {key: _flatten(buffers) for key, buffers in self._buffers().items()}
        self._remember()
        self.optimizer.register_step_pre_hook(self._before)
        self.optimizer.register_step_post_hook(self._after)

    def _remember(self):
        self.sums = self.meter.sums
        self.targets = self.meter.count

    def _before(self, optimizer, args, kwargs):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = get_total_norm([g.to_local() if isinstance(g, DTensor) else g for g in gradients])
        self.found = 1.0 - norm.isfinite().float()
        if dist.is_initialized():  # ranks may hold different shards or stages
            self.found = self.found.to(self.loader.device)  # offloaded gradients are on the CPU
            dist.all_reduce(self.found, dist.ReduceOp.MAX)
        if optimizer.defaults.get("fused"):
            optimizer.found_inf = self.found  # as torch.amp.GradScaler does
        elif self.found:
            optimizer.zero_grad()  # without gradients, the step does nothing

    def _after(self, optimizer, args, kwargs):
        if hasattr(optimizer, "found_inf"):
            del optimizer.found_inf

    def after_step(self, checkpoint: Checkpoint) -> None:
        """Undo what a skipped step has changed in buffers and metrics.

        Raises UserError, on all ranks, if more steps than the limit have been skipped.
        """
        meter, loader = self.meter, self.loader
        is_finite = meter.sums.isfinite().all().float()
        found = self.found.to(meter.sums.device)
        outcome = AsyncCopy(torch.stack([found, is_finite]))
        meter.restore_where(found > 0, on_device_of(found, self.sums))  # a checkpoint's: on the CPU
        self._restore_buffers()
        place, targets = (loader.epoch, loader.step), meter.count - self.targets
        previous, self.pending = self.pending, (outcome, place, targets, loader.indices)
        self._check(previous)
        if checkpoint.is_due():
            self._check(self.pending)
            self.pending = None
        self._remember()
        if loader.step == len(loader):  # the next epoch starts from 0
            self.sums, self.targets = 0.0, 0

    def before_row(self, row: dict[str, Any]) -> None:
        row["train_samples"] -= self.samples * dp_world_size()
        row["skipped_steps"], self.skipped, self.samples = self.skipped, [], 0

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped, "samples": self.samples * dp_world_size()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped = state.get("skipped", [])  # not in older checkpoints
        self.samples = state.get("samples", 0) // dp_world_size()

    def _buffers(self):
        """{(device, dtype): buffers}, as they are now: a forward pass may assign new ones."""
        buffers = {}
        for buffer in self.model.buffers():
            buffers.setdefault((buffer.device, buffer.dtype), []).append(buffer)
        return buffers

    @torch.no_grad()
    def _restore_buffers(self):
        for key, buffers in self._buffers().items():
            is_skipped, now = self.found.to(key[0]) > 0, _flatten(buffers)
            before = self.flat.get(key, now)
            if before.shape != now.shape:  # a buffer is new, or has a new size
                before = now
            self.flat[key] = torch.where(is_skipped, before, now)
            parts = self.flat[key].split([buffer.numel() for buffer in buffers])
            shaped = [part.view_as(buffer) for part, buffer in zip(parts, buffers, strict=True)]
            torch._foreach_copy_(buffers, shaped)

    def _check(self, pending):
        if pending is None:
            return
        outcome, (epoch, step), targets, indices = pending
        is_skipped, loss_is_finite = outcome.wait().tolist()
        if not is_skipped:
            return
        self.count += 1
        self.skipped.append(step)
        self.samples += len(indices)
        self.meter.discount(targets)
        ranks = all_gather_object([] if loss_is_finite else indices.tolist())
        one_of_each_replica = range(0, len(ranks), len(ranks) // dp_world_size())
        losses = [
            f"the loss on rank {rank}, of samples {ranks[rank]}"
            for rank in one_of_each_replica
            if ranks[rank]
        ]
        cause = " and ".join(losses) or "a gradient"
        text = f"step {step} of epoch {epoch} was skipped, as {cause} is not finite"
        if self.count > self.limit:
            raise UserError(
                f"{text}. That makes {self.count} steps, and --max-skipped-steps is {self.limit}: "
                f"look at these samples, or try a smaller --lr or --clip-norm 1"
            )
        if is_main_process():
            warn(text)


def _flatten(buffers):
    return torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
