"""tools.fit: what a run takes on the null device, what fits, and what stops it, in a line."""

import json
import os
import signal
import subprocess
import sys

import pytest

from lab.budgets import FLAGS
from tests.recipes import applied
from tools.fit import bounds, candidates, search
from tools.fit import run as fit_run
from tools.fit.candidates import Candidate
from tools.fit.run import FITS, OUT_OF_MEMORY, STOPPED, Result
from tools.lib.ladder import ROOT, RUNGS

# A script of somebody who has never heard of this project.
OWN = """
import argparse, torch
import torch.distributed as dist
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=4)
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--steps", type=int, default=9)
args = parser.parse_args()
dist.init_process_group("nccl")
if dist.get_world_size() == 3:
    raise ValueError("three ranks are too many")
first, last = nn.Linear(args.width, 4 * args.width), nn.Linear(4 * args.width, 1)
model = nn.Sequential(first, nn.ReLU(), last)
model = nn.parallel.DistributedDataParallel(model.cuda())
optimizer = torch.optim.Adam(model.parameters())
for step in range(args.steps):
    inputs = torch.randn(args.batch_size, args.width).cuda()
    optimizer.zero_grad()
    model(inputs).sum().backward()
    optimizer.step()
"""
PARAMETERS = 4 * 1024 * 1024 + 4 * 1024 + 4 * 1024 + 1


@pytest.fixture
def own_script(tmp_path, null_device):
    """The script; skips where there is no null device."""
    script = tmp_path / "their_train.py"
    script.write_text(OWN)
    return script


def fit(*words, **variables):
    """Run the command. Returns (exit code, what it has printed, its errors)."""
    command = [sys.executable, "-m", "tools.fit", *map(str, words)]
    env = os.environ | variables
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, env=env)
    return run.returncode, run.stdout, run.stderr


@pytest.mark.slow
@pytest.mark.rare
def test_project_with_packages_and_classes_of_the_same_names(own_script, tmp_path):
    for package in ("utils", "utils/guards", "tasks", "tools"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "theirs.py").touch()
    classes = {"checkpoint": "Checkpointer", "metrics": "Meter", "guards/finite": "RefuseNonFinite"}
    for module, name in classes.items():
        (tmp_path / "utils" / f"{module}.py").write_text(f"class {name}:\n    pass\n")
    own_script.write_text(
        "import tasks.theirs, tools.theirs\n"
        "import utils.checkpoint, utils.metrics, utils.guards.finite  # before torch\n" + OWN
    )
    command = [sys.executable, ROOT / "tools" / "fit", "--no-search", "--gpus=2", own_script.name]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert run.returncode == 0 and "on 2 x 80 GiB: fits" in run.stdout, run.stdout + run.stderr


@pytest.mark.slow
@pytest.mark.rare
def test_script_of_a_stranger(own_script, tmp_path):
    result = tmp_path / "fit.json"
    options = "--gpus", 2, "--memory", 1, "--allowance", 0.1, "--json", result, "--jobs", 1
    code, text, errors = fit(*options, "--", own_script, "--batch_size", 64)
    assert code == 0 and {line.split()[0] for line in errors.splitlines()} == {"running"}
    (answer,) = json.loads(result.read_text())["answers"]
    held = {kind: size for kind, size in answer["held"].items() if kind != "optimizer"}
    assert held == {"parameters": 4 * PARAMETERS, "gradients": 4 * PARAMETERS}
    assert answer["held"]["optimizer"] == pytest.approx(8 * PARAMETERS, abs=100)
    assert sum(answer["parts"].values()) == answer["peak"]
    assert answer["parts"]["parameters"] == pytest.approx(4 * PARAMETERS, rel=0.001)
    reduced = [row for row in answer["collectives"] if row["kind"] == "all-reduce"]
    assert sum(row["sent"] for row in reduced) == 4 * PARAMETERS  # 2 * (2 - 1) / 2 of it
    assert answer["largest"]["per_replica"] > 1000
    assert "batch_size 64: fits" in text and "batch of 64 x 1024\n" in text


@pytest.mark.slow
@pytest.mark.rare
def test_what_the_allowance_decides_is_said(own_script):
    options = "--gpus", 2, "--memory", 1, "--allowance", 0.95, "--no-search"
    code, text, _ = fit(*options, "--", own_script)
    assert code == 1 and "on 2 x 1 GiB: within the allowance" in text
    assert "MiB more than the allowance" in text


@pytest.mark.slow
@pytest.mark.rare
def test_what_stops_it_is_said(own_script):
    options = "--gpus", 3, "--no-search"
    code, text, errors = fit(*options, "--", own_script)
    assert code == 1 and errors.count("\n") == 1
    assert "three ranks are too many" in text and "Traceback" not in text


@pytest.mark.slow
@pytest.mark.rare
def test_memory_that_is_not_enough_is_said(own_script):
    options = "--gpus", 2, "--memory", 20, "--no-search"
    code, text, errors = fit(*options, "--", own_script, "--width", 30000)
    assert code == 1 and errors.count("running ") == 2  # once more, with the whole memory
    assert "out of memory" in text.partition("Not known:")[0]


@pytest.mark.slow
def test_machine_without_a_compiler_is_refused_in_a_line():
    code, _, errors = fit("train_ddp.py", CXX="no-such-compiler")
    assert code == 1 and "no-such-compiler" in errors and errors.count("\n") == 1


def ended(code, error, reports=()):
    return fit_run._result(code, "", ["", error], list(reports), 1.0)


def test_reason_is_what_the_script_has_said_last():
    late = "[rank0]:[W1127 15:53:49.97 ProcessGroupNCCL.cpp:1641] Warning: WARNING: destroy_process"
    assert ended(1, f"ValueError: why\n{late}_group() was not called").reason == "ValueError: why"
    one_step = {"steps": [{}], "end": {}}
    assert "after step 1" in ended(0, "", [one_step]).reason
    assert "without using CUDA" in ended(0, "").reason


def test_lack_of_this_machines_memory_is_not_that_of_the_gpu():
    report = {"steps": [], "end": {"memory": {"no address space": [1, 2**40]}}}
    out = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1024.00 GiB."
    assert ended(1, out).outcome == OUT_OF_MEMORY
    result = ended(1, out, [report])
    assert result.outcome == STOPPED and "ulimit -v" in result.reason
    result = ended(1, "RuntimeError: DefaultCPUAllocator: can't allocate memory")
    assert result.outcome == STOPPED and "this machine's memory" in result.reason
    assert "this machine's memory" in ended(-signal.SIGKILL, "").reason


def test_run_that_fills_the_hosts_memory_is_ended(monkeypatch):
    process = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True
    )
    with process:
        monkeypatch.setattr(fit_run, "_host_memory", lambda: (1, 0))
        reason = fit_run._watch(process, float("inf"))
    assert process.returncode == -signal.SIGKILL
    assert "this machine's memory" in reason


def searched(fits, first, stop=None):
    """Search where up to `fits` samples fit. Returns the result and the numbers tried."""
    tried = []

    def result(number):
        outcome = OUT_OF_MEMORY if number > fits else FITS
        outcome = STOPPED if stop and number > stop else outcome
        steps = [{"peak": 100 + 10 * number}] * 2
        return Result(outcome, "reason", {}, {"steps": steps, "end": steps[0]}, None, 0.0)

    def run(number):
        tried.append(number)
        return result(number)

    found = search.largest(run, first, result(first or 1), 100 + 10 * fits + 5)
    return found, tried


@pytest.mark.parametrize("fits", [1, 2, 3, 7, 12, 100, 1000])
@pytest.mark.parametrize("first", [1, 4, 64, None])
def test_search_ends_at_the_largest_batch(fits, first):
    found, tried = searched(fits, first)
    best, following = found["per_replica"], found["next"]
    assert best <= fits < following
    assert following - best <= max(1, best // search.EXACT)
    assert len(tried) == len(set(tried)) == found["runs"] <= search.RUNS


def test_search_ends_where_the_script_refuses():
    found, _ = searched(1000, 1, stop=20)
    assert found["per_replica"] <= 20 and found["next"] is None and found["reason"] == "reason"
    assert searched(0, 1)[0]["per_replica"] == 0


def test_checkpointing_is_that_of_the_recipe(tmp_path):
    """Which names these two scripts; the others have the lines that it changes, too."""
    folder = applied("activation-checkpointing", tmp_path / "copy")
    for script in ("train_ddp.py", "train_fsdp.py"):
        assert candidates.text_of(ROOT / script, "", True) == (folder / script).read_text()
    for script in ("train_1gpu.py", "train_ddp_amp.py"):
        assert "use_reentrant=False" in candidates.text_of(ROOT / script, "", True)


def test_every_script_can_be_given_a_task():
    for script in RUNGS:
        text = candidates.text_of(ROOT / script, "my_task", False)
        assert "import my_task as task" in text, script


def test_settings_of_a_script_are_not_passed_to_a_different_one():
    given = ["--fsdp-size", "4", "--no-fsdp-offload", "--lr=0.1", "--fsdp-dtype=bfloat16"]
    ddp = Candidate("", "train_ddp.py", {})
    assert candidates.arguments_for(ddp, "train_fsdp.py", given) == ["--lr=0.1"]
    tp = Candidate("", "train_fsdp_tp.py", {"fsdp_size": "2"})
    expected = ["--no-fsdp-offload", "--lr=0.1", "--fsdp-dtype=bfloat16", "--fsdp-size", "2"]
    assert candidates.arguments_for(tp, "train_fsdp.py", given) == expected
    assert candidates.value_of(given, "fsdp_dtype") == "bfloat16"
    assert candidates.value_of(given, "fsdp_size") == "4"


def test_bytes_sent_are_those_of_a_ring():
    assert bounds.sent("all-reduce", 4, 8) == 12
    assert bounds.sent("all-gather", 4, 8) == bounds.sent("reduce-scatter", 4, 8) == 24
    assert bounds.sent("all-reduce", 1, 8) == bounds.sent("send", 1, 8) == 0
    assert bounds.bandwidth(8, 1, 8) == bounds.NVLINK
    assert bounds.bandwidth(8, 8, 8) == bounds.NETWORK
    assert bounds.bandwidth(64, 1, 8) == 8 * bounds.NETWORK


# What a rank holds, in the scripts that divide it, is compared in tests/lab/test_fit_memory.py.
KINDS = {
    "train_1gpu.py": {"parameters", "optimizer", "activations"},
    "train_fsdp.py": {"parameters", "optimizer", "activations", "gathered"},
}


@pytest.mark.parametrize("script", KINDS)
def test_memory_is_told_by_kind_and_module(script, null_device, tmp_path):
    arguments = {"ranks": 4 * (script != "train_1gpu.py"), "steps": 2}
    flags = FLAGS | {"optimizer": "adamw", "image_size": 32, "output_dir": tmp_path / "run"}
    run = null_device.run(script, arguments=arguments, variables={"NULL_FIT": "1"}, **flags)
    assert run.code == 0, run.stderr
    _, last = run.reports[0]["memory"]["steps"]
    assert KINDS[script] <= last["parts"].keys()
    assert sum(last["parts"].values()) == pytest.approx(last["peak"], abs=2**20)  # unsplit blocks
    assert last["module"] and last["phase"] in ("forward", "backward")
    assert last["operations"]["float32"] > last["of_convolutions"] > 0  # a layer cuts patches
