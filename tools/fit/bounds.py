"""Lower bounds of a step's time, from what it computes, sends and launches, and assumed peaks."""

import re

# NVIDIA's data sheet of the H100 SXM: dense operations/s, and GB/s of NVLink in each direction. A
# network card of 400 Gb/s for each GPU, as in NVIDIA's DGX H100.
OPERATIONS = {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12, "float64": 67e12}
NVLINK, NETWORK = 450e9, 50e9
LAUNCH = 2e-6  # seconds of the host for each kernel: an assumption, for code that does nothing else
GROUP = re.compile(r"(.+), (\d+) ranks?(?:, (\d+) apart)?$")


def sent(kind, ranks, size):
    """The bytes that a rank sends in collectives, of which `size` are its own part."""
    if kind == "all-reduce":
        return 2 * (ranks - 1) / ranks * size
    if kind in ("all-gather", "reduce-scatter"):
        return (ranks - 1) * size
    if kind == "all-to-all":
        return (ranks - 1) / ranks * size
    return 0 if kind == "receive" else size if ranks > 1 else 0


def collectives(counts, node):
    """A step's collectives: (kind, ranks, how far apart, calls, bytes sent, least seconds)."""
    rows = []
    for name, (calls, size) in sorted(counts.get("collective", {}).items()):
        kind, ranks, apart = GROUP.match(name).groups()
        ranks, apart = int(ranks), int(apart or 1)
        amount = sent(kind, ranks, size)
        rows.append((kind, ranks, apart, calls, amount, amount / bandwidth(ranks, apart, node)))
    return rows


def bandwidth(ranks, apart, node):
    """Bytes/s that a rank sends at most in a group: rings through all network cards of a node."""
    if apart * (ranks - 1) < node:
        return NVLINK
    members = max(1, node // apart)  # of the group, in a node
    return min(NVLINK, members * NETWORK)


def seconds(operations, counts, kernels, node):
    """{part of a step: least seconds}. operations: {dtype: number}."""
    return {
        "compute": sum(n / OPERATIONS.get(dtype, 67e12) for dtype, n in operations.items()),
        "communicate": sum(row[-1] for row in collectives(counts, node)),
        "launch": kernels * LAUNCH,
    }
