"""The tests of tests/gpu on the null device, but for those that need what a GPU computes."""

import subprocess
import sys

import pytest

from tools.lib.ladder import ROOT
from tools.null.__main__ import environment


@pytest.mark.slow
@pytest.mark.rare
def test_tests_of_gpus_pass_where_they_do_not_need_values(null_device, tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rs", "tests/gpu"],
        cwd=ROOT,
        env=environment(null_device.library, tmp_path),
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert run.returncode == 0, run.stdout
    skipped = [line for line in run.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all("needs what a GPU computes" in line for line in skipped), skipped
