"""Network namespaces as the hosts of a small cluster: own interfaces, host names and /etc/hosts."""

import os
import shutil
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.launch import SMALL
from tools.runs import ROOT, family, finish_run, flag_list, kill_family

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"),
    reason="needs root, ip and unshare, to make network namespaces",
)


class Host(NamedTuple):
    """A network namespace with the interface eth0."""

    name: str
    namespace: str
    address: str

    def link(self, state):
        """Connect (`up`) or disconnect (`down`) the host."""
        ip("-n", self.namespace, "link", "set", "eth0", state)

    def start(self, command, environment=None, private=()):
        """Popen of a command on this host.

        private: (folder, where) pairs: on this host, the folder `where` is `folder`.
        """
        mounts = "".join(f"mount --bind '{folder}' '{where}' && " for folder, where in private)
        shell = f'{mounts}hostname "$0" && exec "$@"'
        env = os.environ | {"RUN_TAG": os.environ.get("RUN_TAG", "") + uuid.uuid4().hex}
        enter = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", shell]
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


@contextmanager
def hosts(count, loopback_names=False):
    """Yield `count` Hosts that are connected by a switch; remove them, with all their processes.

    loopback_names: each host resolves its own name to 127.0.1.1, as Debian's installer sets it up.
    """
    tag = f"t{uuid.uuid4().hex[:6]}"
    switch = f"{tag}-switch"
    machines = [Host(f"node{i}", f"{tag}-{i}", f"10.77.0.{i + 1}") for i in range(count)]
    etc = [Path("/etc/netns") / machine.namespace for machine in machines]
    had_etc = etc[0].parent.exists()
    try:
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
            etc[number].mkdir(parents=True)
            lines = ["127.0.0.1 localhost"]
            for other in machines:
                is_loopback = loopback_names and other is machine
                lines.append(f"{'127.0.1.1' if is_loopback else other.address} {other.name}")
            (etc[number] / "hosts").write_text("\n".join(lines) + "\n")
        yield machines
    finally:
        for machine in machines:
            _kill_all(machine.namespace)
            subprocess.run(["ip", "netns", "del", machine.namespace], capture_output=True)
        subprocess.run(["ip", "netns", "del", switch], capture_output=True)
        for folder in etc:
            shutil.rmtree(folder, ignore_errors=True)
        if not had_etc:
            etc[0].parent.rmdir()


def _kill_all(namespace):
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
    for pid in listed.stdout.split():
        os.kill(int(pid), 9)


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


def finish(processes, output_dir="/nowhere", limit=120):
    """The Runs of hosts that should all end within `limit` seconds, and leave no process behind."""
    try:
        end = time.monotonic() + limit
        return [finish_run(p, output_dir, max(1, end - time.monotonic())) for p in processes]
    finally:
        for process in processes:
            kill_family(process.run_tag)


def crash(process):
    """End all processes of a host at once, as a power failure would."""
    while family(process.run_tag):
        kill_family(process.run_tag)
        time.sleep(0.05)
    process.communicate()
