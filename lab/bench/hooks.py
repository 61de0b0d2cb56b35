"""Running a script unchanged with a function around the batches of each epoch."""

import runpy
import sys

import utils.runtime

# Where the time of a step goes; probe.py measures it.
PARTS = ["data", "forward", "backward", "optimizer", "rest"]


def run_script(script, flags, around):
    """Run a script with `around(loader, batches)` in place of the batches of each epoch.

    Every script loops over utils.runtime.progress(loader), which is replaced before it is imported.
    """
    progress = utils.runtime.progress
    utils.runtime.progress = lambda loader: around(loader, progress(loader))
    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")
