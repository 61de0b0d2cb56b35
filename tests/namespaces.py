"""Network namespaces as the hosts of a small cluster: own interfaces, host names and /etc/hosts."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.processes import SMALL, planted
from tools.lib.runs import ROOT, finish_run, flag_list, kill_family

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("nsenter"),
    reason="needs root, ip and nsenter, to make network namespaces",
)


class Host(NamedTuple):
    """A network namespace with the interface eth0."""

    name: str
    namespace: str
    address: str
    hosts_file: Path

    def link(self, state):
        """Connect (`up`) or disconnect (`down`) the host."""
        ip("-n", self.namespace, "link", "set", "eth0", state)

    def limit(self, rate):
        """Slow the host's link down, to "20mbit", for example."""
        shape = ["tbf", "rate", rate, "burst", "64kb", "latency", "1s"]
        command = ["tc", "-n", self.namespace, "qdisc", "add", "dev", "eth0", "root", *shape]
        subprocess.run(command, check=True, capture_output=True)

    def crash(self):
        """End all processes of the host at once, as a power failure would."""
        kill_all(self.namespace)

    def start(self, command, environment=None, private=()):
        """Popen of a command on this host.

        private: (folder, where) pairs: on this host, the folder `where` is `folder`.
        """
        private = [(self.hosts_file, "/etc/hosts"), *private]
        mounts = "".join(f"mount --bind '{folder}' '{where}' && " for folder, where in private)
        shell = f'{mounts}hostname "$0" && exec "$@"'
        tag = self.namespace.partition("-")[0]
        env = os.environ | {"RUN_TAG": run_tag(tag) + uuid.uuid4().hex}
        enter = ["nsenter", f"--net=/run/netns/{self.namespace}"]
        enter += ["unshare", "--uts", "--mount", "sh", "-c", shell]
        process = subprocess.Popen(
            [*enter, self.name, *map(str, command)],
            cwd=ROOT,
            env=env | {"OMP_NUM_THREADS": "1"} | (environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        process.run_tag, process.started = env["RUN_TAG"], time.monotonic()
        return process


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def kill_all(namespace):
    """End all processes in a network namespace."""
    listing = ["ip", "netns", "pids", namespace]
    while pids := subprocess.run(listing, capture_output=True, text=True).stdout.split():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), 9)
        time.sleep(0.05)


def run_tag(tag):
    """What the RUN_TAG of each process starts with that the hosts of `tag` have started."""
    return os.environ.get("RUN_TAG", "") + tag


def folder_of(tag):
    return Path(tempfile.gettempdir()) / tag


def remove(tag):
    """Remove the network namespaces whose names start with `tag`, with all their processes."""
    kill_family(run_tag(tag))  # one that was just started may not have entered its namespace yet
    for path in Path("/run/netns").glob(f"{tag}-*"):
        kill_all(path.name)
        subprocess.run(["ip", "netns", "del", path.name], capture_output=True)
    shutil.rmtree(folder_of(tag), ignore_errors=True)


def remove_leftovers():
    """Remove what tests have left that were killed. The tag contains the process id of its test."""
    tags = {path.name.partition("-")[0] for path in Path("/run/netns").glob("test*-*")}
    for tag in tags:
        owner = re.fullmatch("test([0-9]+)x[0-9a-f]+", tag)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            remove(tag)


@contextmanager
def hosts(count, names=("node0", "node1", "node2"), loopback_names=False):
    """Yield `count` Hosts that are connected by a switch; remove them, with all their processes.

    loopback_names: each host resolves its own name to 127.0.1.1, as Debian's installer sets it up.
    """
    remove_leftovers()
    tag = f"test{os.getpid()}x{uuid.uuid4().hex[:6]}"
    switch, folder = f"{tag}-switch", folder_of(tag)
    machines = [
        Host(names[i], f"{tag}-{i}", f"10.77.0.{i + 1}", folder / f"hosts{i}") for i in range(count)
    ]
    try:
        folder.mkdir()
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        for number, machine in enumerate(machines):
            port = f"port{number}"
            ip("netns", "add", machine.namespace)
            peer = ("peer", "name", port, "netns", switch)
            ip("-n", machine.namespace, "link", "add", "eth0", "type", "veth", *peer)
            ip("-n", switch, "link", "set", port, "master", "br0", "up")
            ip("-n", machine.namespace, "addr", "add", f"{machine.address}/24", "dev", "eth0")
            ip("-n", machine.namespace, "link", "set", "lo", "up")
            machine.link("up")
            lines = ["127.0.0.1 localhost"]
            for other in machines:
                is_loopback = loopback_names and other is machine
                lines.append(f"{'127.0.1.1' if is_loopback else other.address} {other.name}")
            machine.hosts_file.write_text("\n".join(lines) + "\n")
        yield machines
    finally:
        remove(tag)


def torchrun(script, *arguments, launcher="tools.launch", **flags):
    """The command that starts one process of a script with SMALL's settings on a host."""
    flags = SMALL | {"timeout": 20} | flags
    command = [sys.executable, "-m", launcher, "--nproc_per_node=1", "--monitor-interval=0.5"]
    return [*command, *arguments, str(script), *flag_list(flags)]


def c10d(script, head, *arguments, nodes=2, **flags):
    """torchrun() with the rendezvous on the host `head`, as in the README."""
    rendezvous = ["--rdzv_backend=c10d", f"--rdzv_endpoint={head.name}:29500", "--rdzv_id=my_run"]
    return torchrun(script, f"--nnodes={nodes}", *rendezvous, *arguments, **flags)


def static(script, head, rank, *arguments, nodes=2, **flags):
    """torchrun() with fixed node ranks."""
    place = [f"--nnodes={nodes}", f"--node_rank={rank}"]
    address = [f"--master_addr={head.address}", "--master_port=29500"]
    return torchrun(script, *place, *address, *arguments, **flags)


def finish(processes, output_dir="/nowhere", limit=240):
    """The Runs of hosts that should all end within `limit` seconds, and leave no process behind."""
    try:
        end = time.monotonic() + limit
        return [finish_run(p, output_dir, max(1, end - time.monotonic())) for p in processes]
    finally:
        for process in processes:
            kill_family(process.run_tag)


HELD = """checkpoint.step()
        from pathlib import Path
        import time
        step = checkpoint.epoch * len(loader) + loader.read
        from utils.guards.preemption import SaveOnSignal
        (on_signal,) = (guard for guard in checkpoint.guards if isinstance(guard, SaveOnSignal))
        while step >= int(Path({gate!r}).read_text()) and not on_signal.signalled_at:
            Path({gate!r} + f"-{{step}}-{{dist.get_world_size()}}").touch()
            time.sleep(0.02)
"""


class Gate:
    """Holds a run after a step, so that a fault comes at that step on every machine.

    A rank that receives SIGTERM continues: two steps later it saves and stops.
    """

    def __init__(self, folder, step):
        self.path = folder / "gate"
        self.open(step)
        folder.joinpath("script").mkdir()
        held = HELD.format(gate=str(self.path))
        self.script = planted(folder / "script", "train_ddp.py", "checkpoint.step()", held)

    def open(self, step):
        """Let the run continue up to this step (of all epochs)."""
        self.step = step
        self.path.with_suffix(".new").write_text(str(step))
        self.path.with_suffix(".new").replace(self.path)

    def wait(self, world_size, processes=(), limit=240):
        """Wait until `world_size` ranks are held; a resumed run may be three steps further."""
        end = time.monotonic() + limit
        marks = [Path(f"{self.path}-{self.step + more}-{world_size}") for more in range(4)]
        while not any(mark.exists() for mark in marks):
            ended = [p.communicate() for p in processes if p.poll() is not None]
            assert not ended and time.monotonic() < end, (marks[0], ended)
            time.sleep(0.05)
