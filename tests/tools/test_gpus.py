"""tools.lib.gpus says what slows GPUs down, from what such machines have shown."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from tools.lib import gpus
from tools.lib.gpus import (
    Copy,
    check_compiler,
    check_copies,
    check_numa,
    copy_findings,
    finish_nccl_log,
    read_transports,
    start_nccl_log,
    transport_findings,
)

GB = 10**9
# Lines as NCCL 2.17 to 2.27 write them.
NVSWITCH = """\
node-1:22760:22776 [0] NCCL INFO Channel 04/0 : 0[0] -> 7[7] via P2P/CUMEM
node-1:22760:22776 [0] NCCL INFO Channel 05/0 : 0[0] -> 7[7] via P2P/CUMEM/read
node-1:22760:22776 [0] NCCL INFO Channel 07/0 : 0[0] -> 15[7] [send] via NET/IBext_v8/0(7)/GDRDMA
node-1:22760:22776 [0] NCCL INFO Channel 07/0 : 9[1] -> 0[0] [receive] via NET/IBext_v8/0/GDRDMA
node-1:22760:22776 [0] NCCL INFO NCCL_IB_GID_INDEX set by environment to 3.
"""
CONSUMER = """\
host:9822:9938 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct
host:9822:9938 [0] NCCL INFO Channel 01 : 0[0] -> 1[1] via SHM/direct/direct
"""
SOCKETS = """\
ubuntu:9621:9692 [7] NCCL INFO Channel 14/0 : 15[7] -> 0[0] [send] via NET/Socket/0
"""


def pair(**changes):
    """The copies between two sound GPUs, with changes to the first."""
    copies = [Copy(0, 1, True, 20.0 * GB, True), Copy(1, 0, True, 20.0 * GB, True)]
    return [copies[0]._replace(**changes), copies[1]]


def levels(findings):
    return [finding.level for finding in findings]


def test_pairs_without_a_direct_connection():
    (ok,) = copy_findings(pair())
    assert ok.level == "ok" and "2 of 2 pairs" in ok.text and "20.0 GB/s" in ok.text
    warning, ok = copy_findings(pair(is_direct=False, speed=4.5 * GB))
    assert (warning.level, ok.level) == ("warning", "ok")
    assert "1 of 2 pairs of GPUs, such as 0 to 1," in warning.text and "4.5 GB/s" in warning.text


def test_slow_and_damaged_copies():
    (slow,) = copy_findings(pair(speed=2.0 * GB))
    assert slow.level == "warning" and "from GPU 0 to 1 2.0 GB/s (slowest)" in slow.text
    damaged, _ = copy_findings(pair(is_intact=False))
    assert damaged.level == "FAILED" and "from GPU 0 to 1" in damaged.text
    assert "NCCL_P2P_DISABLE=1" in damaged.advice


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("import time; time.sleep(60)", "takes more than 0.5 s"),
        ("raise RuntimeError('an illegal memory access')", "an illegal memory access"),
    ],
)
def test_copies_that_hang_or_fail(program, text, monkeypatch):
    real = subprocess.run

    def run(command, **options):
        return real([sys.executable, "-S", "-c", program], **options)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(gpus, "SECONDS", 0.5 if "sleep" in program else 60)
    monkeypatch.setattr(subprocess, "run", run)
    (finding,) = check_copies()
    assert finding.level == "FAILED" and text in finding.text


def test_what_nccl_has_logged():
    assert read_transports(NVSWITCH) == {
        (0, 7, "P2P/CUMEM"): 2,
        (0, 15, "NET/IBext_v8/GDRDMA"): 1,
    }
    assert read_transports(CONSUMER) == {(0, 1, "SHM/direct"): 2}
    assert read_transports(SOCKETS) == {(15, 0, "NET/Socket"): 1}


def test_transports_that_are_slow():
    nodes = ["a"] * 8 + ["b"] * 8
    assert levels(transport_findings(read_transports(NVSWITCH), nodes, True)) == ["ok"]
    _, warning = transport_findings(read_transports(CONSUMER), ["a", "a"], False)
    assert warning.level == "warning" and "NCCL uses SHM/direct from rank 0 to" in warning.text
    _, warning = transport_findings(read_transports(SOCKETS), nodes, True)
    assert "although there is /dev/infiniband" in warning.text
    assert levels(transport_findings(read_transports(SOCKETS), nodes, False)) == ["ok"]
    assert levels(transport_findings(read_transports(""), nodes, True)) == ["ok"]


def test_log_of_nccl_is_read_and_removed(monkeypatch):
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    folder = start_nccl_log()
    (folder / "host.123").write_text(CONSUMER)
    assert finish_nccl_log(folder) == {(0, 1, "SHM/direct"): 2} and not folder.exists()
    assert start_nccl_log() is None  # what a user has set, stays


def test_numa_nodes(tmp_path, monkeypatch):
    files = {
        "devices/system/node/node0/cpulist": "0-1,8\n",
        "devices/system/node/node1/cpulist": "2-3\n",
        "bus/pci/devices/0000:0a:00.0/numa_node": "0\n",
        "bus/pci/devices/0000:0b:00.0/numa_node": "1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    place = {"pci_domain_id": 0, "pci_device_id": 0}
    places = [SimpleNamespace(pci_bus_id=bus, **place) for bus in (10, 11, 12)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", places.__getitem__)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {2, 8})
    (finding,) = check_numa(tmp_path)
    assert finding == ("ok", "2 NUMA nodes: GPU 0 on node 0; GPU 1 on node 1", "")
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {2, 3})
    (finding,) = check_numa(tmp_path)
    assert finding.level == "warning" and "core of node 0 " in finding.advice
    assert "--numa-binding=node" in finding.advice


def test_compiler_for_compile(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert levels(check_compiler()) == ["warning"]
    (tmp_path / "gcc").touch(0o755)
    assert levels(check_compiler()) == ["ok"]
