"""One run at a time in an output folder."""

import fcntl
import os
import weakref
from typing import Any

from utils.distributed import fail_together, is_main_process
from utils.errors import UserError
from utils.guards import Guard


class LockFolder(Guard):
    """Raises UserError if a different run, which is still alive, writes to output_dir."""

    def at_start(self, checkpoint: Any) -> None:
        with fail_together():
            if is_main_process():
                file = os.open(checkpoint.folder / ".lock", os.O_CREAT | os.O_RDWR)
                weakref.finalize(self, os.close, file)  # for the next run in a notebook
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise UserError(f"a different run writes to {checkpoint.folder}") from None
                except OSError:  # a file system without locks
                    pass
