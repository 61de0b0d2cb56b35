"""one_file/*.py import nothing of ours, and are short. tests/test_verify.py compares their weights
with those of the ladder."""

import ast
import sys

import pytest
import torch

from tools.changes import changed
from tools.closure import size
from tools.runs import ROOT, finish_run, start_run
from tools.verify import one_file
from tools.verify.one_file_task import STOP

SCRIPTS = sorted((ROOT / "one_file").glob("*.py"))


def test_it_is_one_short_file():
    for script in SCRIPTS:
        assert size(script).lines <= 225
        modules = set()
        for node in ast.walk(ast.parse(script.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                modules.add(node.module.partition(".")[0])
        assert modules - sys.stdlib_module_names == {"torch", "torchvision"}


def run(script, folder, old="", new="", stops=False, **flags):
    """Run a copy of a script on two ranks, with one place changed. Returns its Run.

    stops: one rank and its loader processes receive SIGTERM, as from torchrun.
    """
    text = changed(one_file.with_task(script), [(old, new)] if old else [], script)
    copy = folder / script.name
    copy.write_text(text)
    environment = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ROOT, "READS": folder / "reads"}
    environment |= {"STOPS": "1"} if stops else {}
    flags = {"checkpoint": folder / "checkpoint.pt", "global_batch": 18} | flags
    return finish_run(start_run(copy, 2, flags, environment), folder)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_error_of_all_ranks_is_printed_once(script, tmp_path):
    failed = run(script, tmp_path, global_batch=3)
    error = "ValueError: --global-batch: too large, or no multiple of processes x"
    assert failed.code == 1 and failed.stderr.count(error) == 1, failed.stderr
    assert "[rank1]" not in failed.stderr


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_error_within_an_epoch_ends_loader_processes(script, tmp_path):
    """They do not end at SIGTERM, with which Python ends the processes that an exception leaves."""
    text = script.read_text().replace("signal.alarm(30)", "None")
    (tmp_path / "never").mkdir()
    script = tmp_path / "never" / script.name
    script.write_text(text)
    assert "lambda number, frame: None" in text
    failed = run(script, tmp_path, "    model.eval()", "    raise OSError(5)", workers=1)
    assert failed.code == 1 and failed.stderr.count("OSError: 5") == 1, failed.stderr


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_checkpoint_that_only_one_node_sees(script, tmp_path):
    """Otherwise, each rank would start at an epoch of its own."""
    failed = run(script, tmp_path, "path.exists())", "dist.get_rank() == 1)")
    assert failed.code == 1, failed.stderr
    assert failed.stderr.count("FileNotFoundError: only some ranks see") == 1, failed.stderr


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_sigterm_saves_although_loader_processes_receive_it(script, tmp_path):
    _, epoch, step = STOP
    folder = tmp_path / "made" / "by the script"
    options = {"epochs": 3, "workers": 1, "checkpoint": folder / "checkpoint.pt"}
    options["global_batch"] = 6  # so that batches are needed that have not been made
    later = step + 7
    looks = ("STEPS_BETWEEN_LOOKS = 1", f"STEPS_BETWEEN_LOOKS = {later}")
    stopped = run(script, tmp_path, *looks, stops=True, **options)
    assert "DataLoader" not in stopped.stderr, stopped.stderr
    found = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert (found["epoch"], found["step"]) == (epoch, later)

    refused = run(script, tmp_path, **options | {"lr": 0.2})
    assert refused.code == 1 and "'lr': 0.1" in refused.stderr and "'lr': 0.2" in refused.stderr
    resumed = run(script, tmp_path, **options)
    assert resumed.code == 0, resumed.stderr
    assert resumed.stdout.startswith(f"continues at epoch {epoch}, step {later}, of {folder}")
