"""make verify: every script trains the same model. test_verify_bugs.py is about planted bugs."""

import importlib
import json
import re

import pytest
import torch

import tasks.text
from tests.processes import planted
from tests.verifying import (
    CASES,
    ROWS_OF_CI,
    ForkServer,
    parametrize,
    related,
    rows_of,
    run_verify,
    selected,
)
from tools.lib.ladder import ROOT, RUNGS
from tools.lib.runs import flag_list
from tools.verify.cases import (
    COPIES,
    FLOAT32,
    IMAGES,
    ONE_FILE,
    RECIPES,
    STATE,
    STATE_OF,
    SUITES,
    Case,
    cases_of,
    matrix_cases,
)
from tools.verify.judge import Evidence, Problem, judge
from tools.verify.plants import PLANTS
from tools.verify.run import Verifier, is_trained, run_matrix, write_text
from utils.checkpoint import FORMAT
from utils.config import load_config

# These cases are also part of `make test`; all others are slow.
FAST_CASES = ("images: ddp x2", "images: one_file ddp x1", "text: accum x2")
# These cases run as a user's do: as processes of their own, under tools.launch.
REAL_CASES = (
    "images: ddp x2",
    "images: killed, resumed x2",
    "images: one_file ddp, resumed x3",
    *(f"{task}: spawn x2" for task in SUITES),  # whose ranks are such processes in any case
)


def test_gpus_that_a_case_must_not_use_are_hidden(tmp_path, monkeypatch):
    name = "CUDA_VISIBLE_DEVICES"
    monkeypatch.setenv(name, "4,6")
    ddp, fsdp, dp = (CASES[f"images: {each}"][1] for each in ("ddp x2", "fsdp x2", "dp"))
    assert Verifier(tmp_path)._device(ddp) == ("cpu", {name: ""})
    assert Verifier(tmp_path, device="cuda")._device(fsdp) == ("cuda", {})
    on_gpu = Verifier(tmp_path, device="cuda:1")
    assert on_gpu._device(ddp) == ("cuda:1", {})
    assert on_gpu._device(fsdp) == ("cpu", {name: ""})  # two ranks cannot share the GPU
    assert on_gpu._device(dp) == ("cuda", {name: "6"})  # it would use all that it sees


@pytest.fixture(scope="module", autouse=True)
def without_coverage():
    """The runs take long enough without counting the lines that they execute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
        yield


@pytest.fixture(scope="module")
def server():
    with ForkServer() as server:
        yield server


@pytest.fixture(scope="module")
def rows(request, tmp_path_factory, server):
    """{name: Row} of the selected cases. Forks are compared with the references of the real runs,
    which are real, too."""
    rows, names = {}, selected(request, CASES)
    for suite in SUITES.values():
        own = [name for name in names if CASES[name][0] is suite]
        real = [name for name in own if name in REAL_CASES]
        verifier = Verifier(tmp_path_factory.mktemp(suite.task), suite)
        rows |= rows_of(verifier, real)
        forks = related(verifier, verifier.folder / "forks", start=server.start)
        rows |= rows_of(forks, [name for name in own if name not in real])
    return rows


@parametrize(CASES, FAST_CASES, CASES.keys() - ROWS_OF_CI)
def test_case_passes(name, rows):
    case, row = CASES[name][1], rows[name]
    assert row.problem is None, row
    is_sharded = case.flags.get("save_sharded")
    assert row.each_sample_once and (row.writers == (0,) or is_sharded)
    if case.reference:
        assert 0 <= row.loss_difference <= case.tolerance


@pytest.mark.slow
@pytest.mark.rare
def test_scripts_continue_each_other(tmp_path, server):
    """Two of the scripts, one with sharded checkpoints; --matrix runs all pairs."""
    scripts = ["train_1gpu.py", "train_fsdp.py"]
    rows = run_matrix(tmp_path, lambda row: None, scripts, start=server.start)
    assert len(rows) == 6
    assert [row.problem for row in rows] == [None] * 6, str(rows)


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_cases_have_settings_that_their_scripts_know(suite):
    task = importlib.import_module(f"tasks.{suite.task}")
    cases = [*suite.cases, *suite.references]
    cases += [case.resumes for case in cases if case.resumes]
    cases += matrix_cases(suite)
    for case in [case for case in cases if case.script not in (*ONE_FILE, *RECIPES)]:
        script = COPIES.get(case.script, (case.script,))[0]
        rung = RUNGS.get(script, RUNGS["train_1gpu.py"])
        flags = suite.base | case.flags
        for name in ("weights", "freeze"):  # the Verifier writes the file
            flags.pop(name, None)
        assert load_config(task.Settings, rung.settings_class(), flag_list(flags)).epochs == 2


def test_every_task_has_a_suite_and_every_script_a_case_or_a_reason():
    assert set(SUITES) == {path.stem for path in (ROOT / "tasks").iterdir() if is_task(path)}
    for suite in SUITES.values():
        scripts = {case.script for case in suite.cases}
        missing = RUNGS.keys() - scripts - {"train_1gpu.py"}
        names = {script.removeprefix("train_").removesuffix(".py") for script in missing}
        reasons = set(re.split(r"\W+", " ".join(suite.left_out)))
        assert names <= reasons, (suite.task, names - reasons)


@pytest.mark.parametrize("script", RUNGS)
def test_copy_of_a_script_must_save_and_resume_all_that_the_script_does(script):
    text = (ROOT / script).read_text()
    entries = text.partition("    state = {\n")[2].partition("    }\n")[0]
    names = re.findall(r'^ +"(\w+)": ', entries, re.MULTILINE)
    assert set(names) == set(STATE_OF.get(script, STATE))
    for suite in SUITES.values():
        cases = cases_of(suite, script)
        if cases:
            assert script in [case.resumes.script for case in cases if case.resumes]
        taken = [case.name for case in suite.references]
        taken += [case.resumes.name for case in cases if case.resumes]
        assert not {case.name for case in cases}.intersection(taken)  # each has a folder


def is_task(path):
    """Whether a module in tasks/ is a task, not a part of one."""
    is_module = not path.name.startswith("_")
    return is_module and hasattr(importlib.import_module(f"tasks.{path.stem}"), "build_model")


def test_number_of_targets_differs_between_ranks_and_micro_batches(tmp_path):
    """Otherwise, the means of means would be right."""
    flags = [f"--text-file={write_text(tmp_path / 'text')}", "--context=24", "--padding=longest"]
    train_set, _ = tasks.text.build_datasets(load_config(tasks.text.Settings, argv=flags))
    lengths = torch.tensor([len(piece) - 1 for piece in train_set.pieces])
    assert len(lengths) == 125
    order = torch.randperm(125, generator=torch.Generator().manual_seed(0))[:108].view(6, 9, 2)
    counts = lengths[order].sum(1)
    assert (counts[:, 0] != counts[:, 1]).sum() >= 5  # of 6 steps


# The command line


@pytest.mark.slow
def test_own_copy_with_a_bug_and_a_name_of_its_own_fails(monkeypatch, tmp_path, capsys, server):
    path, table = tmp_path / "my_training.py", tmp_path / "table.md"
    path.write_text((ROOT / "train_dp.py").read_text().replace("optimizer.step()", "pass"))
    flags = ["--script", path, "--like", "train_dp.py", "--write", table]
    assert run_verify(monkeypatch, *flags, start=server.start) == 1
    rows = json.loads(table.with_suffix(".json").read_text())["rows"]
    assert [row["case"] for row in rows] == ["dp", "dp, resumed"]
    assert [row["problem"] for row in rows] == ["UNTRAINED", "UNTRAINED"]
    assert "| dp | " in table.read_text()
    assert f"FAIL: {Problem.UNTRAINED.value}" in capsys.readouterr().out


@pytest.mark.slow
def test_own_copy_that_forgets_an_entry_of_its_state_fails(monkeypatch, tmp_path, capsys, server):
    script = planted(tmp_path, "train_1gpu.py", '        "scheduler": scheduler,\n', "")
    arguments = "--script", script, "--only", "1gpu, resumed"
    assert run_verify(monkeypatch, *arguments, start=server.start) == 1
    assert f"FAIL: {Problem.STATE.value} (scheduler)" in capsys.readouterr().out


def test_mistakes_on_the_command_line(monkeypatch, capsys):
    for arguments, named in (
        (["--script", "/no/such/train_ddp.py"], "/no/such/train_ddp.py"),
        (["--only", "no such case"], "no such case"),
        (["--matrix", "--plant", PLANTS[0].name], "--matrix"),
        (["--script", ROOT / "train_ddp.py", "--plant", PLANTS[0].name], "--script"),
        (["--matrix", "--only", "ddp"], "--only"),
        (["--", "--lr", "0.1"], "--script"),  # of a script of one's own, which is not named
    ):
        with pytest.raises(SystemExit):
            run_verify(monkeypatch, *arguments)
        assert named in capsys.readouterr().err


# The judge


def metrics(epoch, **changes):
    """A row of metrics.jsonl."""
    return {
        "epoch": epoch,
        "lr": 0.1,
        "train_samples": 108,
        "val_samples": 31,
        "train_loss": 2.0,
        "val_loss": 2.0,
        "train_accuracy": 0.5,
        "val_accuracy": 0.5,
    } | changes


def audit(epoch, **changes):
    """A row of audit.jsonl."""
    row = {"epoch": epoch, "samples": 108, "dropped": 17, "repeated": 0, "resumed_at_step": 0}
    return row | changes


GOOD = Evidence(
    code=0,
    metrics=[metrics(0), metrics(1)],
    audit=[audit(0), audit(1)],
    writers=[0],
    state=STATE,
    weights={"fc.weight": torch.ones(2)},
    best=1,
)
CASE = Case("x", "train_ddp.py", 2, {})
UNEVALUATED = {name: value for name, value in metrics(1).items() if not name.startswith("val")}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"code": 1}, Problem.FAILED),
        ({"metrics": [metrics(0)]}, Problem.FAILED),
        ({"writers": [0, 1]}, Problem.WRITERS),
        ({"metrics": [metrics(0), metrics(1, val_samples=38)]}, Problem.SAMPLES),
        ({"audit": [audit(0), audit(1, repeated=1)]}, Problem.SAMPLES),
        ({"audit": [audit(0)]}, Problem.SAMPLES),
        ({"audit": [audit(1), audit(0), audit(1)]}, None),  # continued by another run
        ({"state": ["model"]}, Problem.STATE),
        ({"is_trained": False}, Problem.UNTRAINED),
        ({"weights": {}}, Problem.TENSORS),
        ({"weights": {"fc.weight": torch.tensor([1, 1.1])}}, Problem.WEIGHTS),
        ({"metrics": [metrics(0), metrics(1, val_loss=2.1)]}, Problem.LOSS),
        ({"metrics": [metrics(0), metrics(1, train_loss=float("nan"))]}, Problem.LOSS),
        ({"metrics": [metrics(0), metrics(1, val_accuracy=0.49)]}, Problem.METRIC),
        ({"metrics": [metrics(0), metrics(1, val_top5=0.9)]}, None),  # a copy measures more
        ({"metrics": [metrics(0), UNEVALUATED]}, Problem.METRIC),
        ({"best": 2}, Problem.BEST),
    ],
)
def test_judge_names_the_problem(changes, problem):
    assert judge(IMAGES, CASE, GOOD._replace(**changes), GOOD).problem is problem


def test_statistics_of_a_batchnorm_are_not_trained(tmp_path):
    """They also change where the optimizer never steps. A tied name may be missing."""
    weights = {"weight": torch.ones(2), "running_mean": torch.zeros(2)}
    optimizer = {"param_groups": [{"params": ["weight", "tied"]}]}
    first = tmp_path / "epoch-0001.pt"
    assert is_trained(weights, first)  # or not: a loop may save no such file
    torch.save({"format": FORMAT, "optimizer": optimizer, "model": weights}, first)
    assert not is_trained(weights | {"running_mean": torch.ones(2)}, first)
    assert is_trained(weights | {"weight": torch.zeros(2)}, first)


def test_judge_requires_a_resumed_run_to_resume():
    case = CASE._replace(resumes=CASE)
    assert judge(IMAGES, case, GOOD, GOOD).problem is Problem.NOT_RESUMED
    resumed = GOOD._replace(audit=[audit(0, resumed_at_step=3), audit(1)])
    assert judge(IMAGES, case, resumed, GOOD).problem is None
    started_over = resumed._replace(continues=False)
    assert judge(IMAGES, case, started_over, GOOD).problem is Problem.NOT_RESUMED


def test_weights_are_compared_in_float64_alone():
    rounded = GOOD._replace(weights={"fc.weight": torch.tensor([1, 1.1])})
    row = judge(IMAGES, CASE._replace(tolerance=FLOAT32), rounded, GOOD)
    assert row.problem is None and row.weight_difference == pytest.approx(0.1)


def test_sharded_checkpoints_are_written_by_all_ranks():
    case = CASE._replace(flags={"save_sharded": True})
    assert judge(IMAGES, case, GOOD._replace(writers=[0, 1]), GOOD).problem is None
