"""The runs of tests/gpu on the null device, where their numbers are not compared."""

import subprocess
import sys

import pytest

from tests.gpu.test_gpu import RUNS
from tools.lib.ladder import ROOT
from tools.null.__main__ import environment


@pytest.mark.slow
@pytest.mark.rare
def test_every_script_of_the_tests_of_gpus_ends_well(null_device, tmp_path):
    test = "tests/gpu/test_gpu.py::test_every_script_matches_the_cpu"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", test],
        cwd=ROOT,
        env=environment(null_device.library, tmp_path),
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert run.returncode == 0, run.stdout
    assert run.stdout.split()[0] == "." * len(RUNS)  # all of them have run
