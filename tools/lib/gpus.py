"""How the GPUs of a machine reach each other, the machine's cores, and other nodes' GPUs.

    python -m tools.lib.gpus          copy between all pairs of GPUs, and print the speeds as JSON

tools.doctor prints the Findings, and runs this command with a time limit: where the firmware breaks
direct copies, they may hang.
"""

import atexit
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from itertools import permutations
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from tools.lib.findings import GB, Finding, check

SIZE = 64 << 20  # bytes in a copy from one GPU to another
SLOW = 5 * GB  # bytes per second; PCIe 3.0 with 16 lanes has 12
SECONDS = 40  # in which all pairs must have copied
BROKEN = (
    "set NCCL_P2P_DISABLE=1, or repair it: disable ACS in the BIOS, boot Linux with iommu=pt, and "
    "install a newer driver (NVIDIA/nccl-tests#117)"
)
LESS = (
    "communicate less: larger batches, train_ddp_accum.py, bf16_compress_hook of PyTorch, or "
    "train_pp.py (docs/choosing.md)"
)
NCCL_LOG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "P2P,SHM,NET"}
CHANNEL = re.compile(r"Channel \d+(?:/\d+)? : (\d+)\[\w+\] -> (\d+)\[\w+\](.*) via (\S+)")


class Copy(NamedTuple):
    """A copy from one GPU to another. speed: bytes per second."""

    source: int
    target: int
    is_direct: bool  # without a detour through the host's memory (P2P)
    speed: float
    is_intact: bool


def check_compiler():
    """Whether torch.compile finds a compiler, as Findings: Triton needs one for C on GPUs, and
    Inductor one for C++ on CPUs."""
    variable, language, names = "CXX", "C++", ("g++" if sys.platform == "linux" else "clang++",)
    if torch.cuda.is_available():
        variable, language, names = "CC", "C", ("gcc", "clang")
    chosen = shlex.split(os.environ.get(variable, ""))
    found = [name for name in chosen[:1] or names if shutil.which(name)]
    if found:
        yield Finding("ok", f"--compile can use {found[0]}")
    else:
        advice = f"install gcc (apt-get install build-essential), or set {variable}"
        yield Finding("warning", f"no {language} compiler for --compile", advice)


# GPUs of one machine


def measure_copies():
    """A Copy between each pair of GPUs, in both directions, the best of three."""
    copies = []
    for source, target in permutations(range(torch.cuda.device_count()), 2):
        sent = torch.randint(256, (SIZE,), dtype=torch.uint8, device=f"cuda:{source}")
        received = torch.zeros(SIZE, dtype=torch.uint8, device=f"cuda:{target}")
        seconds = min(_time_of_copy(sent, received) for _ in range(3))
        is_direct = torch.cuda.can_device_access_peer(source, target)
        is_intact = torch.equal(sent.cpu(), received.cpu())
        copies.append(Copy(source, target, is_direct, SIZE / seconds, is_intact))
    return copies


def _time_of_copy(sent, received):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(received.device)
    with torch.cuda.device(sent.device):
        start.record()
        received.copy_(sent, non_blocking=True)
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / 1e3


def check_copies():
    """How the GPUs of this machine reach each other, as Findings."""
    if torch.cuda.device_count() < 2:
        return
    command = [sys.executable, "-m", "tools.lib.gpus"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        yield Finding("FAILED", f"copying between the GPUs takes more than {SECONDS} s", BROKEN)
        return
    if run.returncode:
        error = (run.stderr.strip().splitlines() or ["no message"])[-1]
        yield Finding("FAILED", f"copying between the GPUs fails ({error})", BROKEN)
        return
    yield from copy_findings([Copy(*values) for values in json.loads(run.stdout)])
    yield from nvlink_findings(_topology())


def copy_findings(copies):
    """Findings about a Copy of each pair of GPUs."""
    damaged = [_pair(copy) for copy in copies if not copy.is_intact]
    if damaged:
        yield Finding("FAILED", f"data is damaged on its way from GPU {damaged[0]}", BROKEN)
    detours = [copy for copy in copies if not copy.is_direct]
    if detours:
        speed = median(copy.speed for copy in detours)
        yield Finding(
            "warning",
            f"{len(detours)} of {len(copies)} pairs of GPUs, such as {_pair(detours[0])}, have no "
            f"direct connection (P2P), and copy {speed / GB:.1f} GB/s through the host's memory",
            f"consumer GPUs have none, virtual machines and ACS prevent it; {LESS}",
        )
    direct = [copy for copy in copies if copy.is_direct]
    if direct:
        speed, slow = median(copy.speed for copy in direct), min(direct, key=lambda c: c.speed)
        yield check(
            slow.speed >= SLOW,
            f"{len(direct)} of {len(copies)} pairs of GPUs copy directly (P2P), {speed / GB:.1f} "
            f"GB/s (median), from GPU {_pair(slow)} {slow.speed / GB:.1f} GB/s (slowest)",
            "a slot has few PCIe lanes, or ACS sends copies via the CPU: see nvidia-smi topo -m"
            ", and disable ACS in the BIOS",
            "warning",
        )


def _pair(copy):
    return f"{copy.source} to {copy.target}"


def _topology():
    """What `nvidia-smi topo -m` prints; empty if it cannot."""
    try:
        command = ["nvidia-smi", "topo", "-m"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def nvlink_findings(topology):
    """Findings about the NVLinks that `nvidia-smi topo -m` lists, for all GPUs of the machine."""
    rows = [line.split() for line in topology.splitlines()]
    rows = [row for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    links = [cells for row in rows for cells in row[1 : len(rows) + 1] if cells != "X"]
    if links:
        linked = sum(bool(re.fullmatch(r"NV\d+", link)) for link in links)
        yield Finding("ok", f"NVLink between {linked} of {len(links)} pairs of GPUs")


# NUMA nodes


def check_numa(sysfs=Path("/sys")):
    """Whether this process may use the cores next to each GPU, as Findings."""
    cores = {}
    for folder in sysfs.glob("devices/system/node/node[0-9]*"):
        cores[int(folder.name.removeprefix("node"))] = read_cpulist(folder / "cpulist")
    nodes = [_node_of(gpu, sysfs) for gpu in range(torch.cuda.device_count())]
    if nodes and hasattr(os, "sched_getaffinity"):
        yield from numa_findings(nodes, cores, os.sched_getaffinity(0))


def read_cpulist(path):
    """The numbers in a file such as "0-3,8"."""
    numbers = set()
    for part in path.read_text(encoding="utf-8").strip().split(","):
        if part:
            first, _, last = part.partition("-")
            numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def _node_of(gpu, sysfs):
    """The NUMA node of a GPU; -1 if it is unknown."""
    known = torch.cuda.get_device_properties(gpu)
    place = f"{known.pci_domain_id:04x}:{known.pci_bus_id:02x}:{known.pci_device_id:02x}.0"
    try:
        return int((sysfs / "bus/pci/devices" / place / "numa_node").read_text(encoding="utf-8"))
    except OSError:
        return -1


def numa_findings(nodes, cores, allowed):
    """nodes: of each GPU. cores: {node: its cores}. allowed: the cores of this process."""
    if len(cores) < 2:
        return
    gpus = {}
    for gpu, node in enumerate(nodes):
        gpus.setdefault(node, []).append(str(gpu))
    places = [f"GPU {', '.join(gpus[node])} on node {node}" for node in sorted(gpus) if node >= 0]
    text = f"{len(cores)} NUMA nodes: {'; '.join(places) or 'the node of each GPU is unknown'}"
    far = [node for node in sorted(gpus) if node >= 0 and allowed.isdisjoint(cores[node])]
    yield check(
        not far,
        text,
        f"no core of node {', '.join(map(str, far))} may be used here, so that data takes a detour "
        f"to its GPUs: ask for more cores, or bind each rank to those next to its GPU (torchrun "
        f"--numa-binding=node)",
        "warning",
    )


# What NCCL chooses


def start_nccl_log():
    """Let NCCL write to a file what it chooses, unless it already logs. Call it before anything
    uses NCCL. Returns the folder of the file, or None."""
    if any(name.startswith("NCCL_DEBUG") for name in os.environ):
        return None
    folder = Path(tempfile.mkdtemp(prefix="doctor-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ.update(NCCL_LOG, NCCL_DEBUG_FILE=str(folder / "%h.%p"))
    return folder


def finish_nccl_log(folder):
    """{(source rank, target rank, transport): channels} of this rank; removes the folder."""
    text = "".join(path.read_text(errors="replace", encoding="utf-8") for path in folder.iterdir())
    shutil.rmtree(folder, ignore_errors=True)
    return read_transports(text)


def read_transports(text):
    """{(source rank, target rank, transport): channels} of what NCCL has logged. A transport is
    P2P/CUMEM, SHM/direct, NET/Socket, NET/IB/GDRDMA or similar."""
    channels = Counter()
    for source, target, direction, path in CHANNEL.findall(text):
        if "receive" not in direction:  # the sender has logged it, too
            parts = path.split("/")
            names = parts[:2] + [part for part in parts[2:] if part.startswith("GDRDMA")]
            channels[int(source), int(target), "/".join(names)] += 1
    return channels


def transport_findings(channels, hosts, has_infiniband):
    """channels: see read_transports(), of all ranks. hosts: the name of each rank's node."""
    if not channels:
        yield Finding(
            "ok", "NCCL has logged nothing here (NCCL_DEBUG=INFO logs what it sends through)"
        )
        return
    total = Counter()
    for (_, _, transport), count in channels.items():
        total[transport] += count
    listed = ", ".join(f"{name} (channels: {count})" for name, count in total.most_common())
    yield Finding("ok", f"NCCL sends through {listed}")
    within = [link for link in channels if hosts[link[0]] == hosts[link[1]]]
    detours = [link for link in within if not link[2].startswith("P2P")]
    if detours:
        source, target, transport = detours[0]
        yield Finding(
            "warning",
            f"NCCL uses {transport} from rank {source} to rank {target}, which are on one node",
            f"without P2P, data goes through the host's memory: unset NCCL_P2P_DISABLE unless P2P "
            f"is broken, try NCCL_P2P_LEVEL=SYS if the GPUs copy directly, or {LESS}",
        )
    sockets = [link for link in channels if link not in within and link[2].startswith("NET/Socket")]
    if sockets and has_infiniband:
        source, target, transport = sockets[0]
        yield Finding(
            "warning",
            f"NCCL uses {transport} from rank {source} to rank {target}, although there is "
            f"/dev/infiniband",
            "unset NCCL_IB_DISABLE, install libibverbs (rdma-core) in the container, raise "
            "ulimit -l, and check NCCL_IB_HCA",
        )


if __name__ == "__main__":
    print(json.dumps(measure_copies()))
