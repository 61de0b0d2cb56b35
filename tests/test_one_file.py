"""one_file/*.py import nothing of ours, in plain lines. tests/tools/test_verify.py compares their
weights with those of the ladder."""

import ast
import os
import sys

import pytest
import torch

from one_file import train_ddp, train_fsdp
from tools.lib.closure import size
from tools.lib.edits import changed
from tools.lib.runs import ROOT, finish_run, kill_family, start_run
from tools.verify import one_file
from tools.verify.one_file_task import STOP, TRAIN

GLOBAL_BATCH = 18
SCRIPTS = sorted((ROOT / "one_file").glob("*.py"))
ALIKE = [  # for what both scripts do with the same lines
    pytest.param(
        script, id=script.name, marks=[pytest.mark.rare] * (script.name != SCRIPTS[0].name)
    )
    for script in SCRIPTS
]


def test_it_is_one_file_in_plain_lines():
    for script in SCRIPTS:
        lines, tokens = size(script)
        assert tokens / lines <= 8  # so that golf costs; there is no limit on the lines
        modules = set()
        for node in ast.walk(ast.parse(script.read_text())):
            assert getattr(node, "id", "") != "print", "use print_rank0(), which ends no run"
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                modules.add(node.module.partition(".")[0])
        assert modules - sys.stdlib_module_names == {"torch", "torchvision"}


@pytest.mark.parametrize("script", [train_ddp, train_fsdp])
def test_seeds_of_samples_are_fixed(script):
    """By definition, not by an implementation of Python: a resumed run draws the same numbers."""
    numbers = [(0, 0, 0), (0, 1, 2), (0, 2, 1), (1, 0, 2), (0, 12, 3), (0, 1, 23), (-1, 0, 0)]
    seeds = [script.seed_of_sample(*each) for each in numbers]
    assert seeds[:2] == [5346321772774276043, 12902962169770512945]
    assert len({seed % 2**32 for seed in seeds}) == len(seeds)  # PyTorch uses these bits


@pytest.mark.parametrize("script", [train_ddp, train_fsdp])
def test_line_that_cannot_be_written_ends_nothing(script, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    stdout, full = os.dup(1), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 1)
    try:
        script.print_rank0("epoch 0")
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(full)


def start(script, folder, old="", new="", stops="", **flags):
    """Popen of a copy of a script on two ranks, with one place changed.

    stops: the signal that one rank and its loader processes receive, as from torchrun.
    """
    text = changed(one_file.with_task(script), [(old, new)] if old else [], script)
    copy = folder / script.name
    copy.write_text(text)
    environment = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ROOT, "READS": folder / "reads"}
    environment |= {"STOPS": stops} if stops else {}
    flags = {"checkpoint": folder / "checkpoint.pt", "global_batch": GLOBAL_BATCH} | flags
    return start_run(copy, 2, flags, environment)


def run(script, folder, *change, **options):
    """The Run of what start() starts."""
    return finish_run(start(script, folder, *change, **options), folder)


@pytest.mark.slow
@pytest.mark.parametrize("script", ALIKE)
def test_error_of_all_ranks_is_printed_once(script, tmp_path):
    failed = run(script, tmp_path, global_batch=3)
    assert failed.code == 1, failed.stderr
    assert failed.stderr.count("ValueError: --global-batch ") == 1, failed.stderr
    assert "[rank1]" not in failed.stderr


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("script", ALIKE)
def test_error_within_an_epoch_ends_loader_processes(script, tmp_path):
    """They do not end at SIGTERM, with which Python ends the processes that an exception leaves."""
    text = script.read_text().replace("signal.alarm(30)", "pass")
    (tmp_path / "never").mkdir()
    script = tmp_path / "never" / script.name
    script.write_text(text)
    assert "signal.alarm" not in text
    options = {"workers": 1, "epochs": 1}
    failed = run(script, tmp_path, "    model.eval()", "    raise OSError(5)", **options)
    assert failed.code == 1 and failed.stderr.count("OSError: 5") == 1, failed.stderr
    # It came from the evaluation: the epoch's steps are saved, and the same command evaluates them.
    found = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert (found["epoch"], found["step"]) == (0, TRAIN // GLOBAL_BATCH)
    resumed = run(script, tmp_path, **options)
    assert f"at epoch 0, step {found['step']}, of" in resumed.stdout, resumed.stderr
    assert "epoch 0: train loss" in resumed.stdout and resumed.code == 0


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("script", ALIKE)
def test_checkpoint_that_only_one_node_sees(script, tmp_path):
    """Otherwise, each rank would start at an epoch of its own."""
    failed = run(script, tmp_path, "path.exists())", "dist.get_rank() == 1)")
    assert failed.code == 1, failed.stderr
    assert failed.stderr.count("FileNotFoundError: only some ranks") == 1, failed.stderr


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("script", ALIKE)
def test_signal_saves_although_loader_processes_receive_it(script, tmp_path):
    number = "SIGTERM" if "ddp" in script.name else "SIGHUP"
    _, epoch, step = STOP
    folder = tmp_path / "made" / "by the script"
    options = {"epochs": 3, "workers": 1, "checkpoint": folder / "checkpoint.pt"}
    options["global_batch"] = 6  # so that batches are needed that have not been made
    later = step + 7
    interval = ("SIGNAL_CHECK_INTERVAL = 1", f"SIGNAL_CHECK_INTERVAL = {later}")
    stopped = run(script, tmp_path, *interval, stops=number, **options)
    assert "DataLoader" not in stopped.stderr, stopped.stderr
    found = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert (found["epoch"], found["step"]) == (epoch, later)

    refused = run(script, tmp_path, **options | {"lr": 0.2})
    assert refused.code == 1 and "'lr': 0.1" in refused.stderr and "'lr': 0.2" in refused.stderr
    resumed = run(script, tmp_path, **options)
    assert resumed.code == 0, resumed.stderr
    assert resumed.stdout.startswith(f"continues at epoch {epoch}, step {later}, of {folder}")


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("script", ALIKE)
def test_killed_launcher_ends_the_ranks(script, tmp_path):
    process = start(script, tmp_path, epochs=10**6)
    try:
        assert process.stdout.readline().startswith("epoch 0: ")
        process.kill()
        process.communicate(timeout=120)  # until no process has its output any more
    finally:
        kill_family(process.run_tag)


@pytest.mark.slow
@pytest.mark.rare
def test_fsdp_refuses_a_parameter_without_a_gradient(tmp_path):
    """FSDP would mix up the gradients of parameters that only some ranks use."""
    line = "    model = build_model()"
    unused = f"{line}\n    model[0].extra = nn.Linear(2, 2).double()"
    failed = run(ROOT / "one_file" / "train_fsdp.py", tmp_path, line, unused)
    assert failed.code == 1, failed.stderr
    assert "ValueError: 0.extra.weight " in failed.stderr and "no gradient" in failed.stderr
