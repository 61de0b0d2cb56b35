"""--max-skipped-steps, --save-errors and --verify-saves: faults that a run may outlive."""

import errno
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch.nn.utils import get_total_norm

from utils import errors
from utils.checkpoint import read_checkpoint, save_atomically
from utils.config import ConfigError, free_setting
from utils.distributed import all_gather_object, dp_world_size, is_main_process
from utils.errors import UserError


@dataclass(frozen=True)
class Settings:
    """What these options add to the Config."""

    max_skipped_steps: int = free_setting(
        -1,
        "skip up to N steps, from a start to the next, whose gradients are not finite on any rank, "
        "then fail; -1: do not look",
        low=-1,
    )
    save_errors: str = free_setting(
        "stop",
        "warn: continue if a checkpoint cannot be written, and try again at the next one",
        choices=("stop", "warn"),
    )
    verify_saves: bool = free_setting(
        False, "read each checkpoint back before it replaces the last one"
    )

    def resolved(self):
        """The config. Raises ConfigError where an option cannot have an effect."""
        if self.save_sharded and (self.save_errors == "warn" or self.verify_saves):
            raise ConfigError(
                "--save-errors warn and --verify-saves need a checkpoint that rank 0 writes alone: "
                "not --save-sharded, nor train_pp.py"
            )
        if self.max_skipped_steps >= 0 and getattr(self, "amp_dtype", "") == "float16":
            raise ConfigError(
                "--max-skipped-steps does not work with --amp-dtype float16, where the GradScaler "
                "skips steps: use bfloat16"
            )
        return super().resolved()

    def tolerate(self, checkpoint):
        """Called with the Checkpointer, once it has loaded the run."""
        if self.max_skipped_steps >= 0:
            checkpoint.after_step = SkippedSteps(checkpoint, self.max_skipped_steps).after_step
        if self.save_errors == "warn":
            SaveErrors(checkpoint)
        if self.verify_saves:
            checkpoint.write_file = save_verified


class SaveErrors:
    """Turns errors of saves into warnings, except for the last save of a run."""

    def __init__(self, checkpoint):
        self.checkpoint, self.real_wait, self.stopping = checkpoint, checkpoint.wait, False
        checkpoint.wait = self.wait
        errors.save_failed = self.report

    def wait(self):
        """Instead of Checkpointer.wait(): the next save, if any, is that of the current step."""
        self.real_wait()
        cfg = self.checkpoint.cfg
        signaled = cfg.save_minutes > 0 and self.checkpoint.interrupts.agreed > 1
        self.stopping = signaled or self.checkpoint.epoch == cfg.epochs

    def report(self, text):
        """Instead of errors.save_failed()."""
        checkpoint, folder = self.checkpoint, self.checkpoint.folder
        if self.stopping:
            raise UserError(text)
        print(f"warning: {text}; the run continues", file=sys.stderr)
        if not folder.exists():  # it was deleted
            with suppress(OSError):
                folder.mkdir(parents=True)
                (folder / "config.yaml").write_text(checkpoint.cfg.dump())
            if find_spec("utils.run_folder"):
                from utils.run_folder import claim

                claim(folder, "auto")


def save_verified(checkpoint, path):
    """Like save_atomically(), but read the file back from the disk before it replaces another.

    Raises OSError if it differs.
    """
    unverified = path.with_name(f"{path.stem}.unverified.pt.tmp")
    try:
        save_atomically(checkpoint, unverified)
        if hasattr(os, "posix_fadvise"):  # the system's memory may hold what the disk does not
            with open(unverified, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            read_checkpoint(unverified)
        except UserError as error:
            raise OSError(errno.EIO, f"the file differs when it is read back: {error}") from None
        os.replace(unverified, path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)  # the rename itself
        os.close(folder)
    finally:
        unverified.unlink(missing_ok=True)


class SkippedSteps:
    """Skips the optimizer steps whose gradients are not finite on any rank.

    A fused optimizer skips on the device, as after a GradScaler's overflow, and the CPU reads the
    outcome one step later, so that it does not wait for the GPU; with others, it waits. A skipped
    step changes no parameter, optimizer state, buffer or metric; the learning rate moves on.
    """

    def __init__(self, checkpoint, limit):
        state = checkpoint.state
        self.loader, self.meter, self.limit = state["loader"], state["meter"], limit
        self.count, self.pending, self.buffers = 0, None, {}  # {(device, dtype): buffers}
        for buffer in checkpoint.model.buffers():
            self.buffers.setdefault((buffer.device, buffer.dtype), []).append(buffer)
        self.sums, self.samples = self.meter.sums.clone(), self.meter.samples
        self.flat = {key: _flatten(buffers) for key, buffers in self.buffers.items()}
        self.found = torch.zeros((), device=self.meter.device)  # 1: skip this step
        checkpoint.optimizer.register_step_pre_hook(self._before)
        checkpoint.optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer, args, kwargs):
        self.found = torch.zeros((), device=self.meter.device)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = get_total_norm([g.to_local() if hasattr(g, "to_local") else g for g in gradients])
        self.found.add_(~norm.isfinite().to(self.found.device))
        if dist.is_initialized():  # ranks may hold different shards or stages
            dist.all_reduce(self.found, dist.ReduceOp.MAX)
        if optimizer.defaults.get("fused"):
            optimizer.found_inf = self.found
        elif self.found:
            optimizer.zero_grad()  # without gradients, the step does nothing

    def _after(self, optimizer, args, kwargs):
        if hasattr(optimizer, "found_inf"):
            del optimizer.found_inf

    def after_step(self, wait):
        """Call after each step and its update of the Meter. All ranks call it together.

        wait: for the outcome of this step, not only of the one before. Raises UserError, on all
        ranks, if more steps than `limit` have been skipped.
        """
        meter, loader = self.meter, self.loader
        outcome = torch.stack([self.found, meter.sums.isfinite().all().float()])
        outcome, event = outcome.to("cpu", non_blocking=True), None
        if self.found.is_cuda:
            event = torch.cuda.Event()
            event.record()
        meter.sums = torch.where(self.found > 0, self.sums, meter.sums)
        for key, buffers in self.buffers.items():
            skipped = self.found.to(key[0]) > 0
            self.flat[key] = torch.where(skipped, self.flat[key], _flatten(buffers))
            parts = self.flat[key].split([buffer.numel() for buffer in buffers])
            pairs = zip(parts, buffers, strict=True)
            torch._foreach_copy_(buffers, [part.view_as(buffer) for part, buffer in pairs])
        place = f"step {loader.step} of epoch {loader.epoch}"
        samples = meter.samples - self.samples
        previous, self.pending = self.pending, (outcome, event, place, samples, loader.indices)
        self._check(previous)
        if wait:
            self._check(self.pending)
            self.pending = None
        ended = loader.step == len(loader)  # then the Meter starts again
        self.sums = torch.zeros_like(meter.sums) if ended else meter.sums.clone()
        self.samples = 0 if ended else meter.samples

    def _check(self, pending):
        if pending is None:
            return
        outcome, event, place, samples, indices = pending
        if event:
            event.synchronize()
        skipped, loss_is_finite = outcome.tolist()
        if not skipped:
            return
        self.count += 1
        self.meter.samples -= samples
        ranks = all_gather_object([] if loss_is_finite else indices.tolist())
        one_of_each_replica = range(0, len(ranks), len(ranks) // dp_world_size())
        losses = [
            f"the loss on rank {rank}, of samples {ranks[rank]}"
            for rank in one_of_each_replica
            if ranks[rank]
        ]
        text = f"{place} was skipped, as {' and '.join(losses) or 'a gradient'} is not finite"
        if self.count > self.limit:
            raise UserError(
                f"{text}. That makes {self.count} steps, and --max-skipped-steps is {self.limit}: "
                f"look at these samples, or try a smaller --lr or --clip-norm 1"
            )
        if is_main_process():
            print(f"warning: {text}", file=sys.stderr)


def _flatten(buffers):
    return torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
