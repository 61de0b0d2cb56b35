"""Running a script unchanged with a function around the batches of each epoch."""

import atexit
import runpy
import sys

from utils.data import Loader

# Where the time of a step goes; probe.py measures it.
PARTS = ["data", "forward", "backward", "optimizer", "rest"]


def run_script(script, flags, around, at_exit=None):
    """Run a script with around(loader, batches) in place of the batches of each training epoch.

    at_exit: called when the process ends: some scripts, such as train_fsdp.py, end it themselves.
    """
    if at_exit:
        atexit.register(at_exit)
    iterate = Loader.__iter__

    def iterate_around(loader):
        batches = iterate(loader)
        return around(loader, batches) if loader.train else batches

    Loader.__iter__ = iterate_around
    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")
