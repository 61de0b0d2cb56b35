"""one_file/*.py import nothing of ours, and are short. tests/test_verify.py compares their weights
with those of the ladder."""

import ast
import sys

import pytest

from tools.closure import size
from tools.runs import ROOT, finish_run, start_run
from tools.verify import one_file

SCRIPTS = sorted((ROOT / "one_file").glob("*.py"))


def test_it_is_one_short_file():
    for script in SCRIPTS:
        assert size(script).lines <= 220
        modules = set()
        for node in ast.walk(ast.parse(script.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                modules.add(node.module.partition(".")[0])
        assert modules - sys.stdlib_module_names == {"torch", "torchvision"}


def run(script, folder, old="", new="", **flags):
    """Run a copy of a script on two ranks, with one place changed. Returns its Run."""
    text = one_file.with_task(script)
    if old:
        assert text.count(old) == 1
        text = text.replace(old, new)
    copy = folder / script.name
    copy.write_text(text)
    environment = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ROOT, "READS": folder / "reads"}
    flags = {"checkpoint": folder / "checkpoint.pt", "global_batch": 18} | flags
    return finish_run(start_run(copy, 2, flags, environment), folder)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_error_of_all_ranks_is_printed_once(script, tmp_path):
    failed = run(script, tmp_path, global_batch=3)
    error = "ValueError: --global-batch must be a multiple of processes times --micro-batches"
    assert failed.code == 1 and failed.stderr.count(error) == 1, failed.stderr
    assert "[rank1]" not in failed.stderr


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_checkpoint_that_only_one_node_sees(script, tmp_path):
    """Otherwise, each rank would start at an epoch of its own."""
    failed = run(script, tmp_path, "path.exists())", "dist.get_rank() == 1)")
    assert failed.code == 1, failed.stderr
    assert failed.stderr.count("FileNotFoundError: only some ranks see") == 1, failed.stderr
