"""tools.launch: torchrun, but the last line on the terminal is the error."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from tests.forked import FORK
from tests.processes import SMALL
from tools import launch as launch_module
from tools.launch import (
    error_files,
    refuse_missing,
    reports,
    root_cause,
    stop_by_signals,
    watch_rendezvous,
)
from tools.lib.ladder import ROOT
from tools.lib.runs import end_runs_on_sigterm, family, finish_run, flag_list, start_run

signals_of_torchrun = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
SCRIPT = """
import os, signal, sys, time
mode, rank = sys.argv[1], os.environ["RANK"]
if mode == "sleep" or rank == "1":
    print("rank", rank, flush=True)
    time.sleep(60)
sys.path.insert(0, {root!r})
from utils.errors import UserError
from utils.reports import report_errors, write_error_file

def cannot_save(*_):
    raise UserError("stopped by a full disk: interrupted")

@report_errors
def main():
    if mode == "user":
        raise UserError("the folder data/ is empty: pass --data-dir")
    if mode == "abort":
        write_error_file("stopped by SIGTERM after epoch 1, and saved", "stopped")
        os.abort()
    if mode == "unsaved":
        signal.signal(signal.SIGTERM, cannot_save)
        print("rank", rank, flush=True)
        time.sleep(60)

main()
"""


@pytest.fixture(autouse=True)
def handlers():
    """main() leaves signals ignored, for a process that is about to end."""
    numbers = (*signals_of_torchrun, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for pair in zip(numbers, before, strict=True):
        signal.signal(*pair)


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launch")
    (folder / "script.py").write_text(SCRIPT.format(root=str(ROOT)))

    def start(*arguments, nproc=2, hangup=signal.SIG_DFL):
        command = [sys.executable, "-m", "tools.launch", "--standalone"]
        command += [f"--nproc_per_node={nproc}", str(folder / "script.py"), *arguments]
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, hangup),
        )

    return start


def test_error_of_a_rank_is_the_last_line(launch):
    process = launch("user")
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    last = error.strip().splitlines()[-1]
    assert last == "error (rank 0): the folder data/ is empty: pass --data-dir"
    assert "Traceback" not in error


def test_exit_code_of_a_rank_that_cannot_report():
    """Of which torchrun's message is a text, and the code of a signal negative."""
    failure = SimpleNamespace(message="Signal 9 (SIGKILL) received by PID 5", exitcode=-9)
    error = SimpleNamespace(get_first_failure=lambda: (3, failure))
    code, text = root_cause(error)
    assert code == 1
    assert text.startswith("error (rank 3): Signal 9") and "memory was exhausted" in text
    failure.exitcode = 7
    code, text = root_cause(error)
    assert code == 7
    assert text.startswith("error (rank 3): exit code 7; ")


@pytest.mark.slow
def test_run_that_is_saved_may_abort_in_its_teardown(launch):
    process = launch("abort", nproc=1)
    process.communicate(timeout=60)
    assert process.returncode == 75


def test_launcher_passes_a_signal_on_and_waits_for_the_save(tmp_path):
    """Although more signals follow. The exit code says that the run is saved."""
    flags = SMALL | {"epochs": 10**6, "output_dir": tmp_path / "run"}
    flags |= {"image_size": 8, "synthetic_samples": 24, "save_steps": 1}
    command = [sys.executable, "-m", "tools.launch", "--standalone", "--nproc_per_node=1"]
    command += ["train_ddp.py", *flag_list(flags)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "run" / "last.pt").exists():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGUSR1)
    for _ in range(5):
        time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 75
    assert error.count("stopped by a signal in epoch") == 1 and "Traceback" not in error


def children_of(process):
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in path.read_text().split()]


def stopped(process, number):
    """Exit code and stderr of a launcher that receives a signal once its rank runs."""
    assert process.stdout.readline().startswith("rank 0")
    time.sleep(0.2)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    return process.returncode, error


@pytest.mark.slow
@pytest.mark.rare
def test_save_that_fails_after_a_signal_is_reported(launch):
    """It looks like the report of a run that is saved and stopped, or interrupted: neither is."""
    code, error = stopped(launch("unsaved", nproc=1), signal.SIGTERM)
    assert code == 1
    last = error.strip().splitlines()[-1]
    assert last == "error (rank 0): stopped by a full disk: interrupted"


@pytest.mark.slow
@pytest.mark.rare
def test_hangup_does_nothing_under_nohup(launch):
    process = launch("sleep", nproc=1, hangup=signal.SIG_IGN)
    assert process.stdout.readline().startswith("rank 0")
    for pid in [process.pid, *children_of(process)]:
        os.kill(pid, signal.SIGHUP)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM


def test_launcher_heeds_a_second_request_and_no_more(monkeypatch):
    """Signals that follow at once are the same request."""
    monkeypatch.setattr(launch_module, "SECONDS_OF_ONE_REQUEST", 0.1)
    raised = 0
    with stop_by_signals([signal.SIGUSR1]):
        for _ in range(3):
            for _ in range(3):
                try:
                    signal.raise_signal(signal.SIGUSR1)
                except SignalException as error:
                    assert error.sigval == signal.SIGUSR1
                    raised += 1
            time.sleep(0.11)
    assert raised == 2
    signal.raise_signal(signal.SIGUSR1)  # ignored: the exit code is known


def test_reports_are_those_of_this_run(tmp_path):
    """Also in a --log-dir with the reports of earlier ones."""
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "error.json").touch()
    old = error_files(tmp_path)
    (tmp_path / "new").mkdir()
    report = {"message": {"message": "saved\n", "extraInfo": {"outcome": "stopped"}}}
    (tmp_path / "new" / "error.json").write_text(json.dumps(report))
    assert reports(tmp_path, old) == {"stopped": "saved"}


def test_missing_script_or_task_is_one_line(tmp_path, capfd):
    script = tmp_path / "train.py"
    for missing in ("train.py", "my_task.py"):
        with pytest.raises(SystemExit, match="2"):
            refuse_missing(script)
        error = capfd.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
        assert str(script) in error and missing in error
        script.write_text("import torch\nimport my_task as task  # your own\n")
    (tmp_path / "my_task").mkdir()  # a package
    refuse_missing(script)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]
)
def test_signal_before_the_first_step_ends_the_job(number, launch):
    """While the data are built, for example: there is nothing to save, so the code is not 75."""
    code, error = stopped(launch("sleep", nproc=1), number)
    assert code == 128 + number
    assert "Traceback" not in error


def test_sigterm_to_a_command_ends_the_run_that_it_has_started(tmp_path):
    """make bench and make verify start runs in sessions of their own."""
    (tmp_path / "script.py").write_text("import time\ntime.sleep(60)")
    receiver, sender = FORK.Pipe()

    def measure():
        end_runs_on_sigterm()
        fork = FORK.Process(target=lambda: os.kill(os.getpid(), signal.SIGTERM))
        fork.start()
        fork.join(30)
        process = start_run(tmp_path / "script.py", None, {})
        sender.send((process.run_tag, fork.exitcode))
        finish_run(process, tmp_path)

    command = FORK.Process(target=measure)
    command.start()
    tag, fork_code = receiver.recv()
    time.sleep(0.5)
    assert len(family(tag)) == 1 and fork_code == -signal.SIGTERM
    os.kill(command.pid, signal.SIGTERM)
    command.join(30)
    assert command.exitcode == 128 + signal.SIGTERM and family(tag) == []


@pytest.mark.parametrize(
    ("error", "pattern"),
    [
        (RendezvousTimeoutError("timed out"), "not all nodes .* host:1 .* --nnodes=2 "),
        (dist.DistNetworkError("EADDRINUSE\nat"), r" host:1 .*failed \(EADDRINUSE\): .*output"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_rendezvous_that_fails_is_one_line(error, pattern, monkeypatch, capfd):
    def run(args):
        raise error

    arguments = ["--nnodes=2", "--master_addr=host", "--master_port=1", "train_ddp.py"]
    monkeypatch.setattr(sys, "argv", ["launch", *arguments])
    monkeypatch.setattr(launch_module, "run", run)
    with pytest.raises(SystemExit, match="1"):
        launch_module.main()
    output = capfd.readouterr().err
    assert output.startswith("error: ") and output.count("\n") == 1
    assert re.search(pattern, output)


def test_lost_rendezvous_ends_the_process(monkeypatch, capfd):
    monkeypatch.setattr(os, "_exit", sys.exit)
    server = socket.create_server(("127.0.0.1", 0))
    threading.Timer(0.5, server.close).start()
    endpoint = f"127.0.0.1:{server.getsockname()[1]}"
    start = time.monotonic()
    with pytest.raises(SystemExit, match="1"):
        watch_rendezvous(endpoint, patience=0.6)
    assert time.monotonic() - start > 1  # not while it was reachable
    assert f"the rendezvous at {endpoint} has been unreachable" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "watched"),
    [
        (["--nnodes=1:4", "--rdzv_backend=c10d", "--rdzv_endpoint=host:1"], True),
        (["--nnodes=2", "--master_addr=host"], False),
    ],
)
def test_rendezvous_over_several_nodes_is_watched(arguments, watched, monkeypatch):
    name, endpoints = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", []
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", ["launch", *arguments, "train_ddp.py"])
    monkeypatch.setattr(launch_module, "watch_rendezvous", endpoints.append)
    monkeypatch.setattr(launch_module, "run", lambda args: None)
    launch_module.main()
    assert endpoints == ["host:1"] * watched
    assert os.environ.get(name) == ("1" if watched else None)
