"""What random numbers by sample cost, and how much differs where there can be none.

    python -m lab.bench.draws --write lab/results/draws.json

Operations are counted in a forward pass in training on the CPU, without views and allocations, as
lab.bench.operations counts them. --time adds microseconds, for a machine that does nothing else.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torchvision.ops import StochasticDepth

from lab.bench.operations import Counting
from lab.bench.runner import machine
from tools.lib.markdown import markdown_table
from utils import sample_random
from utils.seeds import start_batch

SHAPE = (16, 64, 256)  # samples, tokens, features
CPU = torch.device("cpu")
HEAD = ["what", "PyTorch's generator", "by sample"]
REPEATS, BLOCK = 20, 20
RANKS = 8


def pairs() -> dict[str, tuple[Callable, Callable]]:
    """{what: (with PyTorch's generator, by sample)}: functions of a tensor of SHAPE."""
    return {
        "dropout": (nn.Dropout(0.1), sample_random.Dropout(0.1, "dropout")),
        "stochastic depth": (
            StochasticDepth(0.1, "row").train(),
            sample_random.StochasticDepth(0.1, "depth"),
        ),
        "uniform numbers": (
            lambda values: torch.rand(values.shape),
            lambda values: sample_random.uniform("uniform", values.shape, CPU),
        ),
        "normal numbers": (
            lambda values: torch.randn(values.shape),
            lambda values: sample_random.normal("normal", values.shape, CPU),
        ),
    }


def cost(function: Callable, with_time: bool) -> dict[str, float | None]:
    """{"operations", "microseconds" or None} of a call."""
    values = torch.randn(SHAPE)
    start_batch(0, 0, torch.arange(len(values)))
    function(values)  # copies the keys
    start_batch(0, 0, torch.arange(len(values)))
    with Counting() as counting:
        function(values)
    times = [_microseconds(function, values) for _ in range(REPEATS)] if with_time else []
    operations = sum(counting.counts.values())
    return {"operations": operations, "microseconds": min(times) if times else None}


def _microseconds(function, values):
    seconds = []
    for _ in range(BLOCK):
        start_batch(0, 0, torch.arange(len(values)))
        start = time.perf_counter()
        function(values)
        seconds.append(time.perf_counter() - start)
    return 1e6 * statistics.median(seconds)


def sum_difference(dtype: torch.dtype) -> float:
    """How much the sum of RANKS gradients differs from the sum in the opposite order: the root mean
    square of the difference, relative to the root mean square of the sum."""
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(RANKS, 10**6, generator=generator, dtype=torch.float64).to(dtype)

    def added(order):
        total = gradients[order[0]].clone()
        for number in order[1:]:
            total += gradients[number]
        return total.double()

    return _relative(added(range(RANKS)), added(range(RANKS - 1, -1, -1)))


def rank_difference(function: Callable) -> float:
    """How much the outputs for eight samples differ if two ranks compute half of them each, with
    different seeds, as the scripts do."""
    torch.manual_seed(0)
    whole, halves = function(slice(0, 8)), []
    for rank in range(2):
        torch.manual_seed(rank)
        halves.append(function(slice(4 * rank, 4 * rank + 4)))
    return _relative(whole, torch.cat(halves))


def _relative(one, other):
    return ((one - other).square().mean() / one.square().mean()).sqrt().item()


def attention() -> Callable[[slice], torch.Tensor]:
    """scaled_dot_product_attention() with dropout, of some of eight samples."""
    parts = torch.randn(3, 8, 4, 64, 16, generator=torch.Generator().manual_seed(1))
    return lambda rows: scaled_dot_product_attention(*parts[:, rows], dropout_p=0.1)


def lstm() -> Callable[[slice], torch.Tensor]:
    """nn.LSTM with dropout between its layers, of some of eight samples."""
    torch.manual_seed(1)
    model, inputs = nn.LSTM(16, 16, 2, dropout=0.1, batch_first=True), torch.randn(8, 64, 16)
    return lambda rows: model(inputs[rows])[0].detach()


def measure(with_time: bool) -> dict:
    """All numbers, as plain values."""
    return {
        "machine": machine(),
        "costs": {
            what: [cost(function, with_time) for function in functions]
            for what, functions in pairs().items()
        },
        "sums": {
            str(dtype).removeprefix("torch."): sum_difference(dtype)
            for dtype in (torch.float64, torch.float32, torch.bfloat16)
        },
        "ranks": {
            "scaled_dot_product_attention": rank_difference(attention()),
            "nn.LSTM": rank_difference(lstm()),
        },
    }


def unkeyed(result: dict) -> str:
    """Markdown: what no key can make the same, how much it differs, and what to do."""
    sums, ranks = result["sums"], result["ranks"]
    rows = [
        [
            "the order of a sum over ranks or micro-batches",
            ", ".join(f"{value:.0e} in {dtype}" for dtype, value in sums.items()),
            "compare runs in float64; reduce gradients in float32 (`reduce_dtype` of FSDP)",
        ],
        [
            "dropout inside of `scaled_dot_product_attention`, flash attention included",
            f"{ranks['scaled_dot_product_attention']:.0%}",
            "`softmax(scores)`, `Dropout`, and the product with the values",
        ],
        [
            "dropout inside of `nn.LSTM`",
            f"{ranks['nn.LSTM']:.0%}",
            "one `nn.LSTM` per layer, with `Dropout` between them",
        ],
        [
            "kernels whose atomic additions come in any order",
            "0 on a CPU",
            "on a GPU, `--deterministic`",
        ],
    ]
    return markdown_table(["what", "difference", "what to do"], rows)


def table(costs: dict) -> str:
    """Markdown: operations, and microseconds if they have been measured."""

    def cell(row):
        time = f", {row['microseconds']:.0f} us" if row["microseconds"] else ""
        return f"{row['operations']}{time}"

    return markdown_table(HEAD, [[what, *map(cell, rows)] for what, rows in costs.items()])


def main():
    parser = argparse.ArgumentParser(prog="python -m lab.bench.draws", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--time", action="store_true", help="also measure microseconds")
    parser.add_argument("--write", metavar="FILE", type=Path, help="a JSON file")
    args = parser.parse_args()
    result = measure(args.time)
    print(table(result["costs"]), json.dumps(result, indent=1), sep="\n\n")
    if args.write:
        args.write.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
