"""What random numbers by sample cost, as docs/random-numbers.md says."""

import json

import pytest
import torch

from lab.bench import draws
from tools.lib.ladder import RESULTS


def test_operations_are_those_of_the_page():
    if not hasattr(torch.ops.aten, "_philox_uniform_"):
        pytest.skip("before torch 2.14, a draw takes about 100")
    published = json.loads((RESULTS / "draws.json").read_text())["costs"]
    for what, functions in draws.pairs().items():
        counted = [draws.cost(function, with_time=False) for function in functions]
        untimed = [row | {"microseconds": None} for row in published[what]]
        assert counted == untimed


def test_sums_differ_with_the_precision():
    float32, bfloat16 = map(draws.sum_difference, (torch.float32, torch.bfloat16))
    assert 1e-9 < float32 < 1e-5 < 1e-4 < bfloat16 < 0.1
    assert draws.rank_difference(draws.attention()) > 0.1
