"""tools.lib.gpus and tools.doctor on real GPUs: most of it needs two."""

import subprocess
import sys

import pytest
import torch

from tests.gpu.test_gpu import needs_values
from tools.lib.gpus import check_copies, check_numa, measure_copies
from tools.lib.runs import ROOT

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: make test-gpu"
)
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@needs_two
@needs_values
def test_every_pair_copies_intact():
    copies, count = measure_copies(), torch.cuda.device_count()
    assert len(copies) == count * (count - 1)
    assert all(copy.is_intact and 1e8 < copy.speed < 1e13 for copy in copies)
    assert "FAILED" not in [finding.level for finding in check_copies()]


def test_place_of_each_gpu_can_be_read():
    list(check_numa())  # a GPU of a virtual machine may have none


@needs_two
@needs_values
def test_doctor_names_what_nccl_sends_through():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "tools.doctor"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert "NCCL sends through" in run.stdout, run.stdout + run.stderr
