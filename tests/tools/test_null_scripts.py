"""Every script on the null device: trains, saves, is stopped and resumed, and no step waits."""

import json

import pytest
import torch

from lab.budgets import (
    BREAK,
    COMPILED,
    LEFT_OUT,
    OURS,
    RESULT,
    RUNS,
    counts_of,
    measure_peer,
    measure_task,
)
from tests.null_device import SETTINGS, stop_and_resume
from tests.processes import planted
from tests.verifying import parametrize
from tools.lib.ladder import ROOT, RUNGS
from tools.null import report
from tools.null.__main__ import INSIDE
from tools.verify import one_file

OFTEN = ("train_ddp.py", "train_fsdp.py")
IN_CI = {"train_1gpu_graph.py", "train_tp.py", "train_pp.py", "ddp, BatchNorm", "amp, bfloat16"}


def test_every_script_is_run_or_has_a_reason():
    assert RUNS.keys() | LEFT_OUT.keys() == set(RUNGS) and not RUNS.keys() & LEFT_OUT.keys()


@parametrize(RUNS, OFTEN, RUNS.keys() - IN_CI)
def test_script_is_stopped_and_resumed_and_no_step_waits(name, null_device, tmp_path):
    nproc, arguments, flags = RUNS[name]
    run = stop_and_resume(null_device, name, tmp_path, nproc, arguments, **flags)
    assert "wait" not in run.step, run.step["wait"]
    assert "pageable" not in " ".join(run.step["copy"])
    published = json.loads(RESULT.read_text())
    if published["torch"] == torch.__version__:
        assert counts_of(run.step) == published["scripts"][name], (
            "a step of the script launches, copies, waits or sends more or less than before: if it "
            "should, run  python -m lab.budgets  and say why in the commit"
        )


RESNET = {"model": "resnet20"}
OPTIONS = {
    "1gpu, options": (
        "train_1gpu.py",
        {"num_workers": 1, "loader": "workers", "log_steps": 5, "timing": True, "audit": True},
    ),
    "graph, bfloat16": ("train_1gpu_graph.py", {"amp_dtype": "bfloat16", "clip_norm": 1.0}),
    "ddp, BatchNorm": ("train_ddp.py", RESNET),
    "ddp, skipped steps": ("train_ddp.py", {"max_skipped_steps": 3}),
    "amp, bfloat16": ("train_ddp_amp.py", {"clip_norm": 1.0}),
    "fsdp, groups": ("train_fsdp.py", RESNET | {"fsdp_size": 2, "clip_norm": 1.0}),
    "tp, clipped": ("train_tp.py", {"clip_norm": 1.0}),
    "mp, clipped": ("train_mp.py", {"clip_norm": 1.0}),
}
WAITS_FOR = {"ddp, skipped steps": "options/skipped_steps.py"}  # the step before


@parametrize(OPTIONS, OFTEN, OPTIONS.keys() - IN_CI)
def test_options(name, null_device, tmp_path):
    script, flags = OPTIONS[name]
    nproc, arguments, own = RUNS[script]
    flags = SETTINGS | own | flags | {"output_dir": tmp_path}
    run = null_device.run(script, nproc, arguments=arguments, **flags)
    assert run.code == 0, run.stderr
    assert report.differences(run.reports) == []
    for wait in run.step.get("wait", ()):
        _, place = report.cause(wait)
        assert WAITS_FOR.get(name, "nobody") in place


@pytest.mark.slow
@pytest.mark.rare
def test_files_of_each_rank(null_device, tmp_path):
    flags = {"save_sharded": True, "optimizer": "adamw"}
    run = stop_and_resume(null_device, "train_fsdp.py", tmp_path, 2, **flags)
    assert "wait" not in run.step, run.step["wait"]


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("name", ["train_ddp.py", "train_fsdp.py"])
def test_one_file(name, null_device, tmp_path):
    copy = tmp_path / name
    text = one_file.with_task(ROOT / "one_file" / name)  # asks for signals in every step
    copy.write_text(text.replace("INTERVAL = 1 ", "INTERVAL = 99 "))
    variables = {"READS": str(tmp_path / "reads"), "PYTHONPATH": f"{INSIDE}:{ROOT}"}
    flags = {"checkpoint": tmp_path / "checkpoint.pt", "global_batch": 18, "workers": 0}
    run = null_device.run(copy, 2, variables=variables, epochs=3, **flags)
    assert report.differences(run.reports) == []
    assert "barrier()" not in run.stderr  # warns that no GPU has been named for it
    assert "wait" not in run.step, run.step["wait"]


# As TORCH_CUDA_SANITIZER=1 does when torch is imported, which it has been before the fork.
SANITIZE = "from torch.cuda import _sanitizer\n\n_sanitizer.enable_cuda_sanitizer()\n"
MAIN = "\n\n@report_errors\ndef main():\n"
# Each of the others does no more than one of these; the sanitizer takes kernels for run that are
# only captured, as in train_1gpu_graph.py.
STREAMS = ["train_ddp_amp.py", "train_ddp_accum.py", "train_ddp_mp.py"]
STREAMS += ["train_fsdp_tp.py", "train_pp.py"]


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("script", STREAMS)
def test_no_stream_uses_what_a_different_one_has_yet_to_write(script, null_device, tmp_path):
    nproc, arguments, flags = RUNS[script]
    flags = SETTINGS | flags | {"output_dir": tmp_path / "run"}
    copy = planted(tmp_path, script, MAIN, f"{SANITIZE}{MAIN}")
    run = null_device.run(copy, nproc, 400, arguments, **flags)
    assert run.code == 0, run.stderr
    assert "possible data race" not in run.stderr


@pytest.mark.slow
def test_stream_that_does_not_wait_is_found(null_device, tmp_path):
    copy = planted(tmp_path, "train_1gpu.py", MAIN, f"{SANITIZE}{MAIN}")
    line = "        loss.backward()\n"
    race = "        with torch.cuda.stream(torch.cuda.Stream()):\n            loss_sum.mul(2)\n"
    copy.write_text(copy.read_text().replace(line, race + line))
    run = null_device.run(copy, output_dir=tmp_path / "run", **SETTINGS)
    assert "possible data race" in run.stderr


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("task", COMPILED)
def test_compiled_task_has_no_break_and_as_many_kernels_as_published(task, null_device):
    found = measure_task(task, "default")
    assert found["breaks"] == []
    published = json.loads(RESULT.read_text())
    if published["torch"] == torch.__version__:
        assert found == published["compiled"][task]["default"]


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("name", ["tutorial", "tuned", OURS])  # which need no package of the peers
def test_loop_has_the_published_counts(name, null_device):
    counts, seconds = measure_peer(name)
    assert seconds > 0
    published = json.loads(RESULT.read_text())
    if published["torch"] == torch.__version__:
        assert published["peers"][name] == counts | {"host": published["peers"][name]["host"]}


def test_breaks_of_the_graph_are_named_with_their_line():
    log = "Graph break in user code at /a/task.py:12\nGraph Break Reason: print"
    assert BREAK.findall(log) == ["/a/task.py:12"]
