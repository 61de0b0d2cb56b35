"""Runs scripts on the null device (tools/null), in forks of one process that has imported torch."""

import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

from lab.budgets import FLAGS
from tests.verifying import ForkServer
from tools.lib.ladder import ROOT
from tools.lib.runs import finish_run
from tools.null import report
from tools.null.__main__ import INSIDE, environment
from tools.null.build import Unsupported, build

# Saved after every second of its 14 steps.
SETTINGS = FLAGS | {"save_steps": 2}


class NullRun(NamedTuple):
    """A run that has ended, and the reports of its processes, by rank."""

    code: int
    stdout: str
    stderr: str
    reports: list

    @property
    def step(self):
        """The counts of an ordinary step of the first rank."""
        return report.ordinary_step(self.reports[0])


class NullDevice:
    """A fork server on the null device."""

    def __init__(self):
        try:
            self.library = build()
        except Unsupported as error:
            pytest.skip(str(error))
        self.server = ForkServer(environment(self.library, ""))

    def run(self, script, nproc=None, limit=120, arguments=(), variables=(), **flags):
        """Run a script. nproc: its processes. arguments: those of environment(), by name.
        variables: more of its environment."""
        with tempfile.TemporaryDirectory(prefix="null-device-") as folder:
            everything = environment(self.library, folder, **dict(arguments))
            names = [n for n in everything if n.startswith("NULL_") or n not in os.environ]
            changed = {name: everything[name] for name in names} | {"PYTHONPATH": str(INSIDE)}
            changed |= dict(variables)
            cores = sorted(os.sched_getaffinity(0))[: nproc or 1]
            process = self.server.start(script, nproc, flags, changed, ROOT, cores, None)
            run = finish_run(process, flags.get("output_dir", "/nowhere"), limit)
            return NullRun(run.code, run.stdout, run.stderr, report.read(Path(folder)))


@pytest.fixture(scope="session")
def null_device():
    """A NullDevice, for all tests of this process; skips where it cannot be built."""
    device = NullDevice()
    with device.server:
        yield device


def stop_and_resume(device, script, folder, nproc=None, arguments=(), **flags):
    """Run a script, end its processes after three steps, and run it again. Returns the last run."""
    flags = SETTINGS | {"output_dir": folder} | flags
    limited = dict(arguments) | {"steps": 3}
    first = device.run(script, nproc, arguments=limited, **flags)
    assert first.code == 0, first.stderr
    assert [len(one["steps"]) for one in first.reports] == [3] * (nproc or 1)
    second = device.run(script, nproc, arguments=arguments, resume="always", **flags)
    assert second.code == 0, second.stderr
    assert "from epoch 0, step 2" in second.stdout
    assert [len(one["steps"]) for one in second.reports] == [12] * (nproc or 1)
    assert report.differences(first.reports) == report.differences(second.reports) == []
    return second
