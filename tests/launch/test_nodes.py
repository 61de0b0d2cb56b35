"""Training on several nodes: network namespaces stand for the hosts of a cluster."""

import json
import os
import re
import shutil
import signal
import time

import pytest

from tests.forked import FORK, ROUNDING, fork_script, largest_difference, same_bits
from tests.namespaces import Gate, c10d, finish, hosts, needs_namespaces, static
from tools.lib.runs import ROOT, wait_for_family
from utils.checkpoint import read_checkpoint

pytestmark = needs_namespaces
SLOW = pytest.mark.slow
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


def last_lines(runs):
    return [run.stderr.strip().splitlines()[-1] for run in runs]


@SLOW
def test_three_nodes_agree_and_match_one_machine(tmp_path):
    with hosts(3) as machines:
        command = c10d("train_ddp.py", machines[0], nodes=3, output_dir=tmp_path / "three", **RUN)
        assert_no_error(finish([host.start(command) for host in machines], tmp_path))
    run = fork_script("train_ddp.py", 3, output_dir=tmp_path / "one", **RUN)
    assert run.code == 0, run.stderr
    assert_same_weights(tmp_path / "three", read_checkpoint(tmp_path / "one" / "last.pt"))


@SLOW
def test_output_disk_of_its_own_on_every_node(one_machine, tmp_path):
    """Rank 0 writes the run, wherever it is: nothing is needed on the other nodes' disks."""
    folders = [tmp_path / name for name in ("run", "disk0", "disk1")]
    for folder in folders:
        folder.mkdir()
    with hosts(2) as machines:
        command = c10d("train_ddp.py", machines[0], output_dir=folders[0], **RUN)
        processes = [
            host.start(command, private=[(disk, folders[0])])
            for host, disk in zip(machines, folders[1:], strict=True)
        ]
        assert_no_error(finish(processes))
        (written,) = (disk for disk in folders[1:] if (disk / "last.pt").exists())
        assert_same_weights(written, one_machine)

        resumed = [
            host.start([*command, "--epochs=3", "--allow-config-change"], private=[(disk, run)])
            for host, disk, run in zip(machines, folders[1:], [folders[0]] * 2, strict=True)
        ]
        runs = finish(resumed)
    assert all(run.code for run in runs)
    assert any(str(folders[0]) in run.stderr and "share" in run.stderr for run in runs)


# Faults


@SLOW
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


@SLOW
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


@SLOW
@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_node_with_the_rendezvous_dies(rendezvous, tmp_path):
    gate = Gate(tmp_path, 3)
    flags = RUN | {"output_dir": tmp_path / "run"}
    with hosts(2) as machines:
        if rendezvous == "c10d":
            commands = [c10d(gate.script, machines[0], **flags)] * 2
        else:
            commands = [static(gate.script, machines[0], rank, **flags) for rank in range(2)]
        pairs = zip(machines, commands, strict=True)
        processes = [host.start(command) for host, command in pairs]
        gate.wait(2, processes)
        machines[0].crash()
        gate.open(10**6)
        (survivor,) = finish(processes[1:], limit=60)
    (line,) = last_lines([survivor])
    assert survivor.code == 1 and line.startswith("error"), survivor.stderr


@SLOW
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


@SLOW
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
    counts = [(row["epoch"], row["samples"], row["repeated"]) for row in audit]
    assert counts == [(epoch, 48, 0) for epoch in range(4)]
    single = fork_script("train_1gpu.py", output_dir=tmp_path / "one", **flags)
    assert single.code == 0, single.stderr
    ours, theirs = (read_checkpoint(f / "last.pt")["model"] for f in (out, single.output_dir))
    assert largest_difference(ours, theirs) < ROUNDING
    losses = [[row["train_loss"] for row in rows] for rows in (runs[0].rows, single.rows)]
    assert losses[0] == pytest.approx(losses[1], abs=ROUNDING)


@SLOW
@pytest.mark.parametrize(
    ("interface", "reason"),
    [
        ("eth9", "address for: eth9"),
        # other words for the same mistake
        pytest.param("lo", "connectFullMesh failed", marks=pytest.mark.rare),
    ],
)
def test_wrong_interface_is_named(interface, reason, tmp_path):
    with hosts(2) as machines:
        command = c10d("train_ddp.py", machines[0], output_dir=tmp_path, **RUN | {"timeout": 4})
        environment = {"GLOO_SOCKET_IFNAME": interface}
        runs = finish([host.start(command, environment) for host in machines], limit=90)
    assert all(run.code == 1 for run in runs)
    lines = last_lines(runs)
    assert any(reason in line for line in lines), lines


@SLOW
def test_host_name_that_resolves_to_loopback(one_machine, tmp_path):
    """As Debian sets up 127.0.1.1: GLOO_SOCKET_IFNAME is enough."""
    with hosts(2, loopback_names=True) as machines:

        def run(timeout, environment):
            flags = RUN | {"timeout": timeout, "output_dir": tmp_path}
            return finish(
                [
                    host.start(static("train_ddp.py", machines[0], rank, **flags), environment)
                    for rank, host in enumerate(machines)
                ]
            )

        assert [refused.code for refused in run(3, {})] == [1, 1]
        assert_no_error(run(20, {"GLOO_SOCKET_IFNAME": "eth0"}))
    assert_same_weights(tmp_path, one_machine)


@SLOW
def test_missing_node_ends_the_job_within_the_join_timeout(tmp_path):
    with hosts(1) as (host,):
        limit = "--rdzv_conf=join_timeout=8"
        command = c10d("train_ddp.py", host, limit, nodes=2, output_dir=tmp_path, **RUN)
        (run,) = finish([host.start(command)], limit=60)
    assert run.code == 1
    assert not (tmp_path / "metrics.jsonl").exists()


# The hosts themselves


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_nothing_is_left_of_tests_that_are_ended(number, tmp_path, monkeypatch):
    """Not even by SIGKILL, once the next test has started; nor what is entering a namespace."""
    slow = tmp_path / "nsenter"
    slow.write_text(f'#!/bin/sh\nsleep 10\nexec {shutil.which("nsenter")} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    receiver, sender = FORK.Pipe()

    def test():
        with hosts(1) as (host,):
            daemon = host.start(["setsid", "sleep", "1000"])
            sender.send((host.namespace, daemon.run_tag))
            time.sleep(1000)

    process = FORK.Process(target=test)
    process.start()
    namespace, tag = receiver.recv()
    os.kill(process.pid, number)
    process.join(60)
    if number == signal.SIGKILL:
        assert namespace in os.listdir("/run/netns")
        with hosts(0):
            pass
    assert namespace not in os.listdir("/run/netns")
    assert wait_for_family(tag, limit=60) == []
