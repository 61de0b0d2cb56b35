"""Check what a training job needs from a machine, and from the network between machines.

    python -m tools.doctor --rendezvous HOST:29500       on each machine, before the first job
    torchrun ... -m tools.doctor                         with the arguments of the job, on all nodes

Prints one line per check, and for each problem what to do. Under torchrun, it also compares the
nodes and measures the links between them. The exit code is 1 if a check failed; what is only slow
or unusual is a warning.
"""

import argparse
import errno
import fcntl
import ipaddress
import os
import platform
import resource
import shutil
import socket
import struct
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torchvision
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from tools.lib.findings import GB, Finding, check
from tools.lib.gpus import (
    check_compiler,
    check_copies,
    check_numa,
    finish_nccl_log,
    start_nccl_log,
    transport_findings,
)
from tools.lib.output import may_be_closed
from utils.distributed import all_gather_object, cores_per_rank, init_distributed
from utils.errors import UserError

SHM = 0.5 * GB  # loader workers pass batches through /dev/shm; Docker's default is 0.067 GB
FREE = 5 * GB  # a few checkpoints
CLOCKS = 2.0  # seconds; torchrun takes a node whose clock is off for dead
LARGEST = 64 << 20  # bytes in the largest all-reduce


def versions():
    """The versions that must be the same on all nodes."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    return (
        f"Python {platform.python_version()}, torch {torch.__version__}, torchvision "
        f"{torchvision.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}"
    )


def local_world_size():
    """The number of ranks on this machine; 1 without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def check_software():
    """Findings about Python, PyTorch and the GPUs."""
    new = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 11)
    yield check(new and sys.version_info >= (3, 11), versions(), "install torch 2.11, Python 3.11")
    driver = Path("/proc/driver/nvidia/version")
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        kernel = (
            driver.read_text(encoding="utf-8").splitlines()[0]
            if driver.exists()
            else "driver unknown"
        )
        yield Finding("ok", f"{len(names)} GPUs: {', '.join(sorted(set(names)))}; {kernel}")
        cores = cores_per_rank() * local_world_size()
        yield check(
            cores >= 2 * len(names),
            f"{cores} cores for {len(names)} GPUs",
            "each rank launches kernels and reads data: ask for more, such as --cpus-per-task or "
            "--exclusive of SLURM",
            "warning",
        )
    else:
        yield check(
            not driver.exists(),
            "no GPU that PyTorch can use",
            "the driver is loaded: check CUDA_VISIBLE_DEVICES, and that torch has CUDA",
        )
    debug = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF")
    advice = "DistributedDataParallel crashes on gloo with DETAIL: use INFO"
    yield check(debug != "DETAIL", f"TORCH_DISTRIBUTED_DEBUG={debug}", advice)


def check_limits(shm="/dev/shm"):
    """Findings about shared memory and the limits of a process."""
    if Path(shm).is_dir():
        size = shutil.disk_usage(shm).total
        advice = "loader workers need more: docker --shm-size=8g, or an emptyDir of medium Memory"
        yield check(size >= SHM, f"{shm} has {size / GB:.2f} GB", advice)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield check(files >= 1024, f"{files} open files allowed", "raise it: ulimit -n 65536")
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = memlock == resource.RLIM_INFINITY or not Path("/dev/infiniband").exists()
    text = f"{'unlimited' if memlock == resource.RLIM_INFINITY else memlock} bytes can be locked"
    yield check(unlimited, text, "InfiniBand needs more: ulimit -l unlimited")


def check_disk(folder):
    """Findings about the folder that checkpoints are written to."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    file = existing / f".doctor-{socket.gethostname()}-{os.getpid()}"
    try:
        start = time.perf_counter()
        with open(file, "wb") as opened:
            opened.write(bytes(16 << 20))
            opened.flush()
            os.fsync(opened.fileno())
        seconds = time.perf_counter() - start
    except OSError as error:
        yield Finding("FAILED", f"cannot write to {existing}", f"{error.strerror}; choose another")
        return
    finally:
        file.unlink(missing_ok=True)
    free = shutil.disk_usage(existing).free
    yield check(
        free >= FREE, f"{existing} has {free / GB:.1f} GB free", "free some space", "warning"
    )
    text = f"writing 16 MB to {existing}, with fsync, takes {seconds:.2f} s"
    yield check(seconds < 2, text, "checkpoints will be slow: choose another disk", "warning")


def interfaces():
    """{name: IPv4 address} of the network interfaces that have one."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                request = struct.pack("256s", name.encode())
                reply = fcntl.ioctl(sock, 0x8915, request)  # SIOCGIFADDR
            except OSError:  # without an address
                continue
            addresses[name] = socket.inet_ntoa(reply[20:24])
    return addresses


def resolve(host, port=None):
    """(family, address) of a host name, or of an IPv4 or IPv6 address. Raises OSError."""
    family, *_, place = socket.getaddrinfo(host, port, proto=socket.IPPROTO_TCP)[0]
    return family, place[0].partition("%")[0]


def is_of_this_machine(family, address):
    """Whether an address is one of this machine's: only those can be bound."""
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        try:
            sock.bind((address, 0))
        except OSError:
            return False
    return True


def check_names(several_nodes):
    """Findings about the host name, and the interface that gloo and NCCL will use."""
    addresses = interfaces() if sys.platform == "linux" else {}
    yield Finding("ok", f"interfaces: {', '.join(map(' '.join, addresses.items()))}")
    usable = [name for name, address in addresses.items() if not address.startswith("127.")]
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen:
        yield check(
            chosen in (usable if several_nodes else addresses),
            f"GLOO_SOCKET_IFNAME={chosen}",
            f"no such interface leads to other nodes: set it to one of {', '.join(usable)}",
        )
        return
    name = socket.gethostname()
    try:
        address = resolve(name)[1]
        can_be_reached = not ipaddress.ip_address(address).is_loopback
    except OSError:
        address, can_be_reached = "nothing", False
    yield check(
        can_be_reached,
        f"the host name {name} resolves to {address}",
        f"gloo on several nodes needs an address that the others can reach: set "
        f"GLOO_SOCKET_IFNAME to one of {', '.join(usable)}, or correct /etc/hosts",
        "FAILED" if several_nodes else "warning",
    )


def check_rendezvous(endpoint):
    """Findings about the rendezvous at HOST:PORT, which this machine may be."""
    host, port = parse_rendezvous_endpoint(endpoint, 29400)  # as torchrun does
    endpoint = f"{host}:{port}"
    try:
        family, address = resolve(host, port)
    except OSError:
        yield Finding("FAILED", f"{host} does not resolve", "use its address, or add it to DNS")
        return
    local = is_of_this_machine(family, address)
    try:
        if local:
            socket.create_server(("", port), family=family).close()
            yield Finding("ok", f"{endpoint} is this machine, and the port is free")
        else:
            socket.create_connection((address, port), timeout=5).close()
            yield Finding("ok", f"{endpoint} can be reached")
    except OSError as error:
        if error.errno == errno.ECONNREFUSED:
            text = f"{endpoint} can be reached, but nothing listens there"
            yield Finding("warning", text, "fine before the job starts on that machine")
        elif local:
            text = f"port {port} is in use on this machine"
            yield Finding("FAILED", text, f"end that process, or take another port ({error})")
        else:
            text = f"{endpoint} cannot be reached ({error})"
            yield Finding("FAILED", text, "check the network, and that no firewall blocks the port")


# Between the nodes


def place():
    """What names this rank in a finding."""
    return f"rank {dist.get_rank()} on {socket.gethostname()}"


def check_same_versions():
    """Whether all ranks have the same software, as Findings."""
    everyone = all_gather_object((place(), versions()))
    others = [f"{where} has {text}" for where, text in everyone if text != everyone[0][1]]
    advice = f"{everyone[0][0]} has {everyone[0][1]}, but {'; '.join(others[:3])}"
    yield check(not others, "the same versions everywhere", advice)


def check_clocks(rounds=5):
    """Whether the nodes' clocks agree, as Findings. The error is the time of a small gather."""
    spread = None
    for _ in range(rounds):
        all_gather_object(None)  # so that all take the time together
        times = all_gather_object(time.time())
        differences = [t - times[0] for t in times]
        if spread is None or max(map(abs, differences)) < max(map(abs, spread)):
            spread = differences
    worst = max(range(len(spread)), key=lambda rank: abs(spread[rank]))
    text = f"clocks differ by {abs(spread[worst]):.2f} s at most (rank {worst} from rank 0)"
    yield check(abs(spread[worst]) < CLOCKS, text, "synchronize them: chrony or ntpd")


def check_all_reduce(device):
    """All-reduce in growing sizes, as Findings with the bandwidth of each link (busbw)."""
    size, ranks = 1 << 10, dist.get_world_size()
    while size <= LARGEST:
        tensor = torch.ones(size // 4, device=device)
        seconds = min(_timed(lambda t=tensor: dist.all_reduce(t), device) for _ in range(5))
        busbw = 2 * (ranks - 1) / ranks * size / seconds
        text = f"all-reduce of {size >> 10:,} KB: {seconds * 1e3:.2f} ms, {busbw / GB:.2f} GB/s"
        yield Finding("ok", text)
        size *= 16


def _timed(function, device):
    dist.barrier()
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def check_transports(nccl_log):
    """What NCCL has sent the first all-reduces through, as Findings."""
    if dist.get_backend() != "nccl":
        return
    channels = Counter(finish_nccl_log(nccl_log)) if nccl_log else Counter()
    has_infiniband = Path("/dev/infiniband").exists()
    everyone = all_gather_object((channels, socket.gethostname(), has_infiniband))
    total, hosts = Counter(), []
    for own, host, has_devices in everyone:
        total += own
        hosts.append(host)
        has_infiniband &= has_devices
    yield from transport_findings(total, hosts, has_infiniband)


def check_links(device, size=8 << 20, rounds=15):
    """Each rank sends to its counterparts on the other nodes; Findings for the slow links.

    On one node, to the other ranks. All ranks send at the same time, as they do in training.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    step = local_world_size() if ranks > local_world_size() else 1
    outgoing = torch.ones(size // 4, device=device)
    incoming = torch.empty_like(outgoing)
    links = []
    for shift in range(step, ranks, step)[:rounds]:
        target, source = (rank + shift) % ranks, (rank - shift) % ranks

        def exchange(target=target, source=source):
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, outgoing, target),
                    dist.P2POp(dist.irecv, incoming, source),
                ]
            )
            for work in works:
                work.wait()

        seconds = min(_timed(exchange, device) for _ in range(3))
        links.append((source, size / seconds))
    everyone = all_gather_object((place(), links))
    yield from slow_links(everyone)


def slow_links(everyone):
    """Findings about links that have less than half of the median bandwidth.

    everyone: for each rank, its place() and a list of (sending rank, bytes per second).
    """
    speeds = [speed for _, links in everyone for _, speed in links]
    if not speeds:
        return
    usual = median(speeds)
    slow = [
        f"{everyone[source][0]} to {where}: {speed / GB:.2f} GB/s"
        for where, links in everyone
        for source, speed in links
        if speed < usual / 2
    ]
    text = f"{len(speeds)} links with {usual / GB:.2f} GB/s (median)"
    yield check(not slow, text, f"slower: {'; '.join(slow[:5])}", "warning")


def local_findings(args, several_nodes):
    """The Findings that need no other process."""
    yield from check_software()
    yield from check_compiler()
    if torch.cuda.is_available():
        yield from check_copies()
        yield from check_numa()
    yield from check_limits()
    yield from check_disk(Path(args.output_dir))
    yield from check_names(several_nodes)
    if args.rendezvous:
        yield from check_rendezvous(args.rendezvous)


def common_findings(device, nccl_log):
    """The Findings for which all ranks work together. nccl_log: what start_nccl_log() returned."""
    yield from check_same_versions()
    yield from check_clocks()
    yield from check_all_reduce(device)
    yield from check_transports(nccl_log)
    yield from check_links(device)


def show(findings, where=""):
    """Print findings. Returns whether one of them failed."""
    lines = "".join(f"{where}{finding}\n" for finding in findings)
    os.write(1, lines.encode())  # one write, so that processes do not interleave
    return any(finding.level == "FAILED" for finding in findings)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rendezvous", default="", help="HOST:PORT of torchrun's --rdzv_endpoint")
    parser.add_argument("--output-dir", default="runs", help="where checkpoints will be written")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:0, ...")
    parser.add_argument("--timeout", type=float, default=60, help="seconds to wait for a rank")
    args = parser.parse_args()
    launched = "RANK" in os.environ
    several_nodes = bool(args.rendezvous)
    if launched:
        several_nodes = os.environ["WORLD_SIZE"] != os.environ["LOCAL_WORLD_SIZE"]
    nccl_log = start_nccl_log() if launched and torch.cuda.is_available() else None
    failed = False
    if os.environ.get("LOCAL_RANK", "0") == "0":
        where = f"{socket.gethostname()}: " if several_nodes and launched else ""
        failed = show(list(local_findings(args, several_nodes)), where)
    if launched:
        try:
            device = init_distributed(args.device, args.timeout)
        except (UserError, RuntimeError) as error:  # the latter: of PyTorch
            reason = str(error).partition("\n")[0]
            show([Finding("FAILED", f"rank {os.environ['RANK']}: {reason}")])
            sys.exit(1)
        findings = list(common_findings(device, nccl_log))
        failed = any(all_gather_object(failed))
        if dist.get_rank() == 0:
            failed |= show(findings)
        failed = any(all_gather_object(failed))
        dist.destroy_process_group()
    sys.exit(int(failed))


if __name__ == "__main__":
    with may_be_closed():
        main()
