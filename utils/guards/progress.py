"""How far the run is."""

import sys
import time
from typing import Any

from utils.distributed import is_main_process
from utils.errors import say
from utils.guards import Guard

SECONDS_BETWEEN_LINES = 15.0


class Progress(Guard):
    """A line every 15 seconds: the loss in the epoch so far, over the samples of rank 0, samples
    per second over all ranks, and the time left in the epoch."""

    def at_start(self, checkpoint: Any) -> None:
        self.shown_at, self.epoch = time.monotonic(), -1

    def after_step(self, checkpoint: Any) -> None:
        loader, now = checkpoint.state["loader"], time.monotonic()
        if self.epoch != loader.epoch:
            self.epoch, self.first_step, self.started = loader.epoch, loader.step, now
        steps = loader.step - self.first_step
        if now - self.shown_at < SECONDS_BETWEEN_LINES or not steps or not is_main_process():
            return
        self.shown_at, per_second = now, steps / (now - self.started)
        loss = checkpoint.state["meter"].summarize()["loss"]  # waits for the device
        say(
            f"epoch {loader.epoch}: step {loader.step} of {len(loader)}, loss {loss:.4f}, "
            f"{per_second * loader.global_batch:,.0f} samples/s, "
            f"{(len(loader) - loader.step) / per_second:.0f} s left in the epoch",
            sys.stderr,
        )
