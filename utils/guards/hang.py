"""Where each rank waits, when no step ends."""

import faulthandler
import math
import sys
import time
from typing import Any

from utils.guards import Guard


class ShowHang(Guard):
    """Prints the stack of each rank if no step ends for most of the timeout of a collective: the
    rank that waits in no collective is the one that hangs. The timeout itself ends the job.

    A thread of faulthandler prints, whatever the main thread does. A long evaluation, or a first
    step that compiles, is shown as well, and goes on.
    """

    def at_start(self, checkpoint: Any) -> None:
        self.armed_at = -math.inf
        self.after_step(checkpoint)  # a hang is likeliest in the first step

    def after_step(self, checkpoint: Any) -> None:
        now, timeout = time.monotonic(), checkpoint.cfg.timeout
        if now - self.armed_at > 0.05 * timeout:  # it starts a thread: milliseconds on busy cores
            # sys.stderr may have no file descriptor, as in a notebook.
            faulthandler.dump_traceback_later(0.8 * timeout, file=sys.__stderr__ or 2)
            self.armed_at = now

    def after_save(self, checkpoint: Any) -> None:
        if checkpoint.epoch == checkpoint.cfg.epochs:
            faulthandler.cancel_dump_traceback_later()
