"""How fast would it be on more machines? A model of DistributedDataParallel's step.

The backward pass makes gradients, last layer first; whenever 25 MiB are complete (the first time 1
MiB) their all-reduce starts, one after another, while the rest is still being computed. The step
ends when both are done (Li et al. 2020, arXiv 2006.15704). An all-reduce of S bytes over N ranks
with bandwidth B and latency L takes the shorter of
    ring   2 (N - 1) L + 2 (N - 1) / N * S / B
    tree   2 log2(N) L + 2 S / B
and over nodes of G GPUs first within the nodes, then 1/G of it between them.
(https://docs.nvidia.com/deeplearning/nccl/)
"""

import math
import re
import statistics
import types
from typing import NamedTuple

from tools.bench_report import mean_parts
from utils.models import build_model

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20
PUBLISHED = {1: 13.2, 2: 9.8, 4: 6.1}  # s an epoch, ResNet-50, 256 a GPU, A100, DDP


class Link(NamedTuple):
    bandwidth: float  # bytes/s
    latency: float  # s


class Step(NamedTuple):
    """Of one rank, without communication: seconds, and bytes of the gradients in model order."""

    forward: float
    backward: float
    optimizer: float
    gradients: list


def all_reduce_seconds(size, ranks, link):
    """Of `size` bytes over `ranks` ranks that are joined by equal links."""
    if ranks == 1:
        return 0.0
    ring = 2 * (ranks - 1) * link.latency + 2 * (ranks - 1) / ranks * size / link.bandwidth
    tree = 2 * math.log2(ranks) * link.latency + 2 * size / link.bandwidth
    return min(ring, tree)


def cluster_seconds(size, nodes, gpus, within, between):
    """The same over nodes of several GPUs."""
    return all_reduce_seconds(size, gpus, within) + all_reduce_seconds(size / gpus, nodes, between)


def buckets(gradients):
    """Bytes of each bucket in the order in which they are complete."""
    sizes, size, limit = [], 0, FIRST_BUCKET
    for gradient in reversed(gradients):
        size += gradient
        if size >= limit:
            sizes.append(size)
            size, limit = 0, BUCKET
    return sizes + [size] * bool(size)


def step_seconds(step, all_reduce):
    """Of a step whose buckets take all_reduce(bytes), as far as computing does not hide them.

    Gradients are taken to come evenly over the backward pass, by layers: bucket i of n is complete
    when (i + 1) / n of it is done.
    """
    sizes, done = buckets(step.gradients), 0.0
    for i, size in enumerate(sizes):
        ready = step.backward * (i + 1) / len(sizes)
        done = max(done, ready) + all_reduce(size)
    return step.forward + max(step.backward, done) + step.optimizer


def parse_rate(text):
    """ "400Gb/s" (bits) or "50GB/s" (bytes) -> bytes/s."""
    match = re.fullmatch(r"([\d.]+)\s*([KMGT]?)([bB])/s", text)
    if not match:
        raise ValueError(f"{text!r} is no bandwidth such as 400Gb/s or 50GB/s")
    number, prefix, unit = match.groups()
    return float(number) * 1000 ** " KMGT".index(prefix or " ") / (8 if unit == "b" else 1)


def parse_time(text):
    """ "5us" or "1ms" -> s."""
    match = re.fullmatch(r"([\d.]+)\s*(us|ms|s)", text)
    if not match:
        raise ValueError(f"{text!r} is no time such as 5us or 1ms")
    return float(match.group(1)) * {"us": 1e-6, "ms": 1e-3, "s": 1}[match.group(2)]


def measured(result, gradients):
    """(row, predicted s, measured s) of a step of each DDP row of a bench.json.

    Predicted from the row's limits, computing alone and all-reducing alone; a step's shares of
    forward, backward and optimizer are those of one process.
    """
    shares = _forward_backward_optimizer(result)
    for name, key, _ in result["order"]:
        if name not in result["rows"] or not re.fullmatch(r"DDP x\d+", name):
            continue
        samples, limits = result["rows"][name], result["limits"][key]
        batch = samples[0]["global_batch_size"]
        seconds = {n: statistics.median(batch / run[n] for run in limits) for n in limits[0]}
        step = Step(*(seconds["compute"] * s / sum(shares) for s in shares), gradients)
        alone = seconds.get("communication", 0.0) / sum(gradients)
        predicted = step_seconds(step, lambda size, alone=alone: size * alone)
        yield name, predicted, statistics.median(s["step_seconds"] for s in samples)


def on_a_cluster(result, gradients, nodes, gpus, within, between):
    """Speed-up over one process with nodes x gpus of them, each with the batch that one had."""
    step = Step(*_forward_backward_optimizer(result), gradients)
    many = step_seconds(step, lambda s: cluster_seconds(s, nodes, gpus, within, between))
    return nodes * gpus * step_seconds(step, lambda s: 0.0) / many


def _forward_backward_optimizer(result):
    return mean_parts(result["rows"]["DDP x1"])[1:4]


def report(result, cluster, within, between):
    """What the model says, beside what was measured, as text."""
    cfg = types.SimpleNamespace(**result["config"] | {"weights": ""})
    gradients = [p.nbytes for p in build_model(cfg, 10).parameters()]
    lines = ["seconds of a step, predicted and measured here:"]
    for name, predicted, found in measured(result, gradients):
        lines.append(f"  {name}: {predicted:.4f} and {found:.4f} ({predicted / found - 1:+.0%})")
    lines.append("seconds of the tutorial's epoch (A100, ResNet-50), predicted and published:")
    for gpus, predicted, found in published():
        lines.append(f"  {gpus} GPUs: {predicted:.1f} and {found} ({predicted / found - 1:+.0%})")
    nodes, gpus = map(int, cluster.split("x"))
    speed_up = on_a_cluster(result, gradients, nodes, gpus, within, between)
    lines.append(
        f"{nodes} nodes x {gpus} GPUs as fast as this device, each with its batch: "
        f"{speed_up:.1f} times one ({speed_up / nodes / gpus:.0%} efficiency)"
    )
    return "\n".join(lines)


def published():
    """(GPUs, predicted s, published s) of the tutorial's epoch: its one-GPU step, and an NVLink
    that carries ResNet-50's 102 MB."""
    step = Step(13.2 / 196 / 3, 13.2 / 196 * 2 / 3, 0.0, [102_000_000 // 161] * 161)
    link = Link(300e9, 5e-6)
    for gpus, seconds in PUBLISHED.items():
        steps = math.ceil(50_000 / 256 / gpus)
        yield (
            gpus,
            steps * step_seconds(step, lambda s, n=gpus: all_reduce_seconds(s, n, link)),
            seconds,
        )
