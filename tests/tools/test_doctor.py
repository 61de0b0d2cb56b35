"""tools.doctor finds faults that were made on purpose, and says what to do."""

import os
import re
import shutil
import socket
import subprocess
import sys

import pytest
import torch

import tools.doctor
from tests.namespaces import finish, hosts, needs_namespaces
from tools.doctor import check_names, check_rendezvous, slow_links
from tools.doctor import main as doctor
from tools.lib.runs import ROOT

GB = 10**9
needs_mounts = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root, to mount a tmpfs"
)


def failures(text):
    return [line for line in text.splitlines() if "FAILED" in line]


def test_sound_machine_passes(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["doctor", "--output-dir", str(tmp_path / "new" / "folder")])
    with pytest.raises(SystemExit) as caught:
        doctor()
    out = capfd.readouterr().out
    assert caught.value.code == 0 and not failures(out)
    assert "ok       Python" in out and "with fsync, takes" in out
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.rare
@needs_mounts
def test_small_file_systems(tmp_path):
    command = "mount -t tmpfs -o size=64m none /dev/shm && "
    command += f"mount -t tmpfs -o size=1m none {tmp_path} && "
    command += f"exec $0 -m tools.doctor --output-dir {tmp_path}"
    run = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command, sys.executable],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 1, run.stderr
    shm, disk = failures(run.stdout)
    assert shm.startswith("FAILED   /dev/shm has 0.07 GB: ") and "--shm-size" in shm
    assert disk.startswith("FAILED   ") and f"{tmp_path}: No space left" in disk


def test_cores_that_the_ranks_of_a_node_share(monkeypatch):
    """SLURM gives a task one core unless it is told otherwise."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    for cores, level in ((15, "warning"), (16, "ok")):
        monkeypatch.setattr(tools.doctor, "cores_per_rank", lambda cores=cores: cores)
        (finding,) = [f for f in tools.doctor.check_software() if "cores for 8 GPUs" in f.text]
        assert finding.level == level


def test_debug_level_that_crashes_is_reported(monkeypatch, capfd):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    monkeypatch.setattr(sys, "argv", ["doctor"])
    with pytest.raises(SystemExit, match="1"):
        doctor()
    assert "use INFO" in failures(capfd.readouterr().out)[0]


def test_rendezvous_on_this_machine():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        (finding,) = check_rendezvous(f"127.0.0.1:{port}")
        assert finding.level == "FAILED" and f"port {port} is in use" in finding.text
    (finding,) = check_rendezvous(f"127.0.0.1:{port}")
    assert finding.level == "ok" and "port is free" in finding.text
    if socket.has_dualstack_ipv6():
        (finding,) = check_rendezvous(f"[::1]:{port}")
        assert finding.level == "ok"


def test_rendezvous_whose_name_does_not_resolve():
    (finding,) = check_rendezvous("no-such-host.invalid")  # as for torchrun, without a port
    assert finding.level == "FAILED" and "no-such-host.invalid does not resolve" in finding.text


def test_host_name_that_other_nodes_cannot_use(monkeypatch):
    """As Debian sets it up. On one node it does no harm, but `make doctor` knows of no others."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(tools.doctor, "resolve", lambda *_: (socket.AF_INET, "127.0.1.1"))
    for several_nodes, level in ((False, "warning"), (True, "FAILED")):
        *_, finding = check_names(several_nodes)
        assert finding.level == level and "resolves to 127.0.1.1" in finding.text
        assert "set GLOO_SOCKET_IFNAME to one of" in finding.advice
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    *_, finding = check_names(False)
    assert finding.level == "ok"


def test_slow_link_is_named():
    places, fast, slow = ("rank 0 on node0", "rank 1 on node1"), 4.0 * GB, 0.5 * GB
    (finding,) = slow_links([(places[0], [(1, fast)]), (places[1], [(0, fast)])])
    assert finding.level == "ok"
    links = [(0, slow), (0, fast)]
    (finding,) = slow_links([(places[0], [(1, fast)]), (places[1], links)])
    assert finding.level == "warning"
    assert "rank 0 on node0 to rank 1 on node1: 0.50 GB/s" in finding.advice
    assert finding.advice.count("GB/s") == 1


@needs_namespaces
@pytest.mark.slow
@pytest.mark.rare
def test_two_nodes(tmp_path):
    """Sound; then names that resolve to loopback; then a lost link. All nodes run the command."""

    def run(machines, *options):
        command = [sys.executable, "-m", "tools.launch", "--nnodes=2", "--nproc_per_node=1"]
        command += [f"--master_addr={machines[0].address}", "--master_port=29500"]
        what = ["-m", "tools.doctor", "--output-dir", tmp_path, "--device=cpu", *options]
        processes = []
        for rank, machine in enumerate(machines):
            processes.append(machine.start([*command, f"--node_rank={rank}", *what]))
        return finish(processes)

    with hosts(2) as machines:
        runs = run(machines)
        text = "".join(run.stdout for run in runs)
        assert [run.code for run in runs] == [0, 0], text
        assert re.search(r"node1: ok  .*node1 resolves to 10\.77\.0\.2", text)

        command = [sys.executable, "-m", "tools.doctor", "--rendezvous=node0:29500"]
        (refused,) = finish([machines[1].start(command)])
        assert refused.code == 0 and "nothing listens there" in refused.stdout
        machines[0].link("down")
        (lost,) = finish([machines[1].start(command)])
        assert lost.code == 1 and "node0:29500 cannot be reached" in failures(lost.stdout)[0]

    with hosts(2, loopback_names=True) as machines:
        runs = run(machines, "--timeout=3")
        text = "".join(run.stdout for run in runs)
        assert all(run.code == 1 for run in runs)
        assert "FAILED   the host name node0 resolves to 127.0.1.1" in text
        assert "set GLOO_SOCKET_IFNAME to one of eth0" in text
