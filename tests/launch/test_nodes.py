"""Training on several nodes: network namespaces stand for the hosts of a cluster."""

import json
import re
import signal
import time

import pytest

from tests.forked import ROUNDING, fork_script, largest_difference, same_bits
from tests.namespaces import Gate, c10d, finish, hosts, needs_namespaces, static
from tools.lib.runs import ROOT
from utils.checkpoint import read_checkpoint

pytestmark = [needs_namespaces, pytest.mark.slow]
RUN = {"synthetic_samples": 48, "image_size": 8, "num_threads": 1}  # four steps per epoch


@pytest.fixture(scope="module")
def one_machine(tmp_path_factory):
    """The last checkpoint of two ranks on one machine."""
    folder = tmp_path_factory.mktemp("one")
    run = fork_script("train_ddp.py", 2, output_dir=folder, **RUN)
    assert run.code == 0, run.stderr
    return read_checkpoint(folder / "last.pt")


def assert_same_weights(folder, expected):
    checkpoint = read_checkpoint(folder / "last.pt")
    assert same_bits(checkpoint["model"], expected["model"])
    assert same_bits(checkpoint["optimizer"], expected["optimizer"])


def assert_no_error(runs):
    assert [run.code for run in runs] == [0] * len(runs), [run.stderr for run in runs]


def last_line(run):
    return run.stderr.strip().splitlines()[-1]


@pytest.mark.rare
def test_output_disk_of_its_own_on_every_node(one_machine, tmp_path):
    """Rank 0 writes the run, wherever it is: nothing is needed on the other nodes' disks."""
    out, *disks = tmp_path / "run", tmp_path / "disk0", tmp_path / "disk1"
    for folder in (out, *disks):
        folder.mkdir()
    with hosts(2) as machines:
        command = c10d("train_ddp.py", machines[0], output_dir=out, **RUN)

        def train(*flags):
            first = machines[0].start([*command, *flags], private=[(disks[0], out)])
            second = machines[1].start([*command, *flags], private=[(disks[1], out)])
            return finish([first, second])

        assert_no_error(train())
        (written,) = (disk for disk in disks if (disk / "last.pt").exists())
        assert_same_weights(written, one_machine)
        runs = train("--epochs=3", "--allow-config-change")
    assert all(run.code for run in runs)
    assert any(f"{out}" in run.stderr and "share" in run.stderr for run in runs)


# Faults


def test_node_dies_and_the_job_resumes(one_machine, tmp_path):
    gate, out = Gate(tmp_path, 3), tmp_path / "run"
    with hosts(2) as machines:
        flags = RUN | {"save_steps": 1, "output_dir": out}
        command = c10d(gate.script, machines[0], **flags)
        processes = [host.start(command) for host in machines]
        gate.wait(2, processes)
        machines[1].crash()
        gate.open(10**6)
        (survivor,) = finish(processes[:1], limit=60)
        assert survivor.code == 1
        runs = finish([host.start(command) for host in machines], out)
    assert_no_error(runs)
    assert re.search("from epoch 0, step [23], in", "".join(run.stdout for run in runs))
    assert_same_weights(out, one_machine)


def test_signal_to_one_node_stops_both_with_the_same_exit_code(tmp_path):
    """As when Kubernetes drains a node: job.yaml relies on it."""
    gate = Gate(tmp_path, 3)
    with hosts(2) as machines:
        command = c10d(gate.script, machines[0], output_dir=tmp_path / "run", **RUN)
        processes = [host.start(command) for host in machines]
        gate.wait(2, processes)
        processes[1].send_signal(signal.SIGTERM)
        time.sleep(3)  # for the signal to reach the rank
        gate.open(10**6)
        runs = finish(processes, tmp_path / "run", limit=60)
    assert [run.code for run in runs] == [75, 75], [run.stderr for run in runs]
    assert (tmp_path / "run" / "last.pt").exists()


@pytest.mark.rare
def test_node_with_the_rendezvous_dies(tmp_path):
    gate = Gate(tmp_path, 3)
    with hosts(2) as machines:
        command = c10d(gate.script, machines[0], output_dir=tmp_path / "run", **RUN)
        processes = [host.start(command) for host in machines]
        gate.wait(2, processes)
        machines[0].crash()
        gate.open(10**6)
        (survivor,) = finish(processes[1:], limit=60)
    assert survivor.code == 1 and last_line(survivor).startswith("error"), survivor.stderr


def test_both_sides_end_when_the_link_goes_down(tmp_path):
    """torchrun alone does not: with a c10d rendezvous, the other node's agent waits forever."""
    gate = Gate(tmp_path, 3)
    launcher = tmp_path / "impatient.py"
    launcher.write_text(
        "from tools import launch\nwatch = launch.watch_rendezvous\n"
        "launch.watch_rendezvous = lambda endpoint: watch(endpoint, patience=12)\nlaunch.main()\n"
    )
    with hosts(2) as machines:
        command = c10d(
            gate.script, machines[0], output_dir=tmp_path / "run", **RUN | {"timeout": 5}
        )
        command[1:3] = [str(launcher)]
        processes = [host.start(command, {"PYTHONPATH": str(ROOT)}) for host in machines]
        gate.wait(2, processes)
        machines[1].link("down")
        gate.open(10**6)
        runs = finish(processes, limit=100)
    assert [run.code for run in runs] == [1, 1]
    assert re.search("rendezvous at node0:29500 .* 12 seconds: ", runs[1].stderr)


@pytest.mark.rare
def test_elastic_job_keeps_the_global_batch_and_every_sample(tmp_path):
    """Two nodes, then one, then two: the same trajectory as one process, each sample once."""
    gate, out = Gate(tmp_path, 3), tmp_path / "run"
    flags = RUN | {"epochs": 4, "dtype": "float64", "save_steps": 1, "audit": True}
    with hosts(2) as machines:
        options = "--max_restarts=3", "--rdzv_conf=last_call_timeout=2"
        command = c10d(gate.script, machines[0], *options, nodes="1:2", output_dir=out, **flags)
        processes = [host.start(command) for host in machines]
        gate.wait(2, processes)
        machines[1].crash()
        gate.open(6)
        gate.wait(1, processes[:1])
        processes[1] = machines[1].start(command)
        gate.open(8)
        gate.wait(2, processes)
        gate.open(10**6)
        runs = finish(processes, out)
    assert_no_error(runs)
    text = "".join(run.stdout for run in runs)
    assert "batch: 12 = 2 replicas x 6" in text and "batch: 12 = 1 replicas x 12" in text
    audit = [json.loads(line) for line in (out / "audit.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in audit] == [0, 1, 2, 3]
    for row in audit:
        assert row["samples"] == 48
        assert row["repeated"] == 0
    single = fork_script("train_1gpu.py", output_dir=tmp_path / "one", **flags)
    assert single.code == 0, single.stderr
    model = read_checkpoint(out / "last.pt")["model"]
    expected = read_checkpoint(single.output_dir / "last.pt")["model"]
    assert largest_difference(model, expected) < ROUNDING
    losses = [row["train_loss"] for row in runs[0].rows]
    expected = [row["train_loss"] for row in single.rows]
    assert losses == pytest.approx(expected, abs=ROUNDING)


@pytest.mark.rare
def test_wrong_interface_is_named(tmp_path):
    with hosts(2) as machines:
        command = c10d("train_ddp.py", machines[0], output_dir=tmp_path, **RUN | {"timeout": 4})
        environment = {"GLOO_SOCKET_IFNAME": "eth9"}
        runs = finish([host.start(command, environment) for host in machines], limit=90)
    assert all(run.code == 1 for run in runs)
    assert any("address for: eth9" in last_line(run) for run in runs)


@pytest.mark.rare
def test_host_name_that_resolves_to_loopback(one_machine, tmp_path):
    """As Debian sets up 127.0.1.1: GLOO_SOCKET_IFNAME is enough."""
    with hosts(2, loopback_names=True) as machines:
        for timeout, environment, code in ((3, {}, 1), (20, {"GLOO_SOCKET_IFNAME": "eth0"}, 0)):
            flags = RUN | {"timeout": timeout, "output_dir": tmp_path}
            processes = [
                host.start(static("train_ddp.py", machines[0], rank, **flags), environment)
                for rank, host in enumerate(machines)
            ]
            runs = finish(processes)
            assert [run.code for run in runs] == [code, code], runs[0].stderr
    assert_same_weights(tmp_path, one_machine)
