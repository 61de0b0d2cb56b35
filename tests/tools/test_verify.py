"""make verify: every script trains the same model. test_verify_bugs.py is about planted bugs."""

import ast
import importlib
import json
import os
import shutil
from dataclasses import replace

import pytest
import torch

import tasks.text
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
from tools.lib.ladder import LADDER, ROOT, RUNGS
from tools.lib.runs import finish_run, flag_list
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
from tools.verify.run import (
    Verifier,
    autocast_copy,
    is_trained,
    project_with_task,
    run_matrix,
    write_text,
)
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
    dp, ddp, fsdp = (CASES[f"images: {name}"][1] for name in ("dp", "ddp x2", "fsdp x2"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    name = "CUDA_VISIBLE_DEVICES"
    assert Verifier(tmp_path)._device(dp) == ("cpu", {name: ""})
    assert Verifier(tmp_path)._device(ddp) == ("cpu", {name: ""})
    on_gpu = Verifier(tmp_path, device="cuda:1")
    assert on_gpu._device(ddp) == ("cuda:1", {})
    assert on_gpu._device(fsdp) == ("cpu", {name: ""})  # two ranks cannot share the GPU
    assert Verifier(tmp_path, device="cuda")._device(fsdp) == ("cuda", {})
    assert on_gpu._device(dp) == ("cuda", {name: "1"})
    monkeypatch.setenv(name, "4,6")
    assert on_gpu._device(dp) == ("cuda", {name: "6"})


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


def test_process_that_a_fork_leaves_behind_is_found(tmp_path, server, monkeypatch):
    monkeypatch.setattr("tests.verifying.PATIENCE", 0.1)
    script = tmp_path / "script.py"
    script.write_text("import subprocess; subprocess.Popen(['sleep', '60'])")
    cores = sorted(os.sched_getaffinity(0))
    run = server.start(script, None, {}, {}, tmp_path, cores, "a fork")
    with pytest.raises(AssertionError, match="left processes behind"):
        finish_run(run, tmp_path)


@pytest.fixture(scope="module")
def rows(request, tmp_path_factory, server):
    """{name: Row} of the selected cases. Forks are compared with the references of the real runs,
    which are real, too."""
    names, rows = selected(request, CASES), {}
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
        named = " ".join(suite.left_out)
        without = RUNGS.keys() - {case.script for case in suite.cases} - {"train_1gpu.py"}
        for script in without:
            assert script.removeprefix("train_").removesuffix(".py") in named, (suite.task, script)


@pytest.mark.parametrize("script", RUNGS)
def test_copy_of_a_script_must_save_and_resume_all_that_the_script_does(script):
    (state,) = (
        node.value
        for node in ast.walk(ast.parse((ROOT / script).read_text()))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "state"
    )
    assert {key.value for key in state.keys} == set(STATE_OF.get(script, STATE))
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
    text = tasks.text
    cfg = load_config(text.Settings, argv=[f"--text-file={write_text(tmp_path / 'text')}"])
    train_set, _ = text.build_datasets(replace(cfg, context=24, padding="longest"))
    lengths = torch.tensor([len(piece) - 1 for piece in train_set.pieces])
    assert len(lengths) == 125 and len(lengths.unique()) > 10
    order = torch.randperm(125, generator=torch.Generator().manual_seed(0))[:108].view(6, 9, 2)
    counts = lengths[order].sum(1)
    assert (counts[:, 0] != counts[:, 1]).sum() >= 5  # of 6 steps


# The command line


@pytest.fixture
def own_copy(tmp_path):
    """A copy of a script with a name of its own, and the flags to verify it."""
    path = tmp_path / "my_training.py"
    shutil.copyfile(ROOT / "train_dp.py", path)
    return path, ["--script", path, "--like", "train_dp.py", "--write", tmp_path / "table.md"]


@pytest.mark.slow
@pytest.mark.rare
def test_own_copy_of_a_script_passes(own_copy, monkeypatch, tmp_path, capsys):
    assert run_verify(monkeypatch, *own_copy[1]) == 0
    assert "2 of 2 cases passed" in capsys.readouterr().out
    assert "| dp | " in (tmp_path / "table.md").read_text()


@pytest.mark.slow
def test_own_copy_with_a_bug_fails(own_copy, monkeypatch, tmp_path, capsys, server):
    path, flags = own_copy
    path.write_text(path.read_text().replace("optimizer.step()", "pass"))
    assert run_verify(monkeypatch, *flags, start=server.start) == 1
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert [row["case"] for row in rows] == ["dp", "dp, resumed"]
    for row in rows:
        assert row["problem"] == "UNTRAINED"
    assert f"FAIL: {Problem.UNTRAINED.value}" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "line", "row"),
    [
        ("train_1gpu.py", '        "scheduler": scheduler,\n', "1gpu, resumed"),
        ("train_ddp_amp.py", '        "scaler": scaler,\n', "amp x2, float16"),
    ],
)
def test_own_copy_that_forgets_an_entry_of_its_state_fails(
    script, line, row, monkeypatch, tmp_path, capsys, server
):
    text = (ROOT / script).read_text()
    assert text.count(line) == 1
    (tmp_path / script).write_text(text.replace(line, ""))
    arguments = "--script", tmp_path / script, "--only", row
    assert run_verify(monkeypatch, *arguments, start=server.start) == 1
    lacking = f"FAIL: {Problem.STATE.value} ({line.split()[0].strip(':')[1:-1]})"
    assert lacking in capsys.readouterr().out


def test_scripts_of_the_user_beside_the_ladder(monkeypatch, tmp_path):
    """A script with a task of its own is left alone; one of the ladder must train the images."""
    root = tmp_path / "root"
    root.mkdir()
    for rung in LADDER:
        (root / rung.script).symlink_to(ROOT / rung.script)
    own = (ROOT / "train_ddp.py").read_text().replace("tasks.images as task", "my_task as task")
    (root / "train_mine.py").write_text(own)
    monkeypatch.setattr("tools.verify.run.ROOT", root)
    project = project_with_task("text", tmp_path / "project")
    assert {path.name for path in project.iterdir()} == {rung.script for rung in LADDER}
    (root / "train_ddp.py").unlink()
    (root / "train_ddp.py").write_text(own)
    with pytest.raises(SystemExit, match=r"train_ddp\.py .*  import tasks\.images"):
        project_with_task("text", tmp_path / "project")


def test_mistakes_on_the_command_line(monkeypatch):
    for arguments in (
        ["--plant", "no-such"],
        ["--script", "/no/such.py"],
        ["--only", "no such case"],
        ["--script", "train_ddp.py", "--plant", "seed-per-rank"],
    ):
        with pytest.raises(SystemExit):
            run_verify(monkeypatch, *arguments)


# The judge


METRICS = [
    {"epoch": epoch, "lr": 0.1, "train_samples": 108, "val_samples": 31}
    | {"train_loss": 2.0, "val_loss": 2.0, "train_accuracy": 0.5, "val_accuracy": 0.5}
    for epoch in (0, 1)
]
AUDIT = [
    {"epoch": epoch, "samples": 108, "dropped": 17, "repeated": 0, "resumed_at_step": 0}
    for epoch in (0, 1)
]
GOOD = Evidence(0, "", 1.0, METRICS, AUDIT, [0], STATE, {"fc.weight": torch.ones(2)}, best=1)
CASE = Case("x", "train_ddp.py", 2, {})


def changed(rows, **values):
    """The rows with other values in the last one."""
    return [rows[0], rows[1] | values]


@pytest.mark.parametrize(
    ("evidence", "problem"),
    [
        (GOOD, None),
        (GOOD._replace(code=1, error="out of memory"), Problem.FAILED),
        (GOOD._replace(metrics=METRICS[:1]), Problem.FAILED),
        (GOOD._replace(writers=[0, 1]), Problem.WRITERS),
        (GOOD._replace(metrics=changed(METRICS, val_samples=38)), Problem.SAMPLES),
        (GOOD._replace(audit=changed(AUDIT, repeated=1)), Problem.SAMPLES),
        (GOOD._replace(audit=AUDIT[:1]), Problem.SAMPLES),
        (GOOD._replace(audit=[AUDIT[1], *AUDIT]), None),  # the epoch was continued by another run
        *((GOOD._replace(state={*STATE} - {name}), Problem.STATE) for name in STATE),
        (GOOD._replace(is_trained=False), Problem.UNTRAINED),
        (GOOD._replace(weights={}), Problem.TENSORS),
        (GOOD._replace(weights={"fc.weight": torch.tensor([1, 1.1])}), Problem.WEIGHTS),
        (GOOD._replace(metrics=changed(METRICS, val_loss=2.1)), Problem.LOSS),
        (GOOD._replace(metrics=changed(METRICS, train_loss=float("nan"))), Problem.LOSS),
        (GOOD._replace(metrics=changed(METRICS, train_accuracy=0.51)), Problem.METRIC),
        (GOOD._replace(metrics=changed(METRICS, val_accuracy=0.49)), Problem.METRIC),
        (GOOD._replace(metrics=changed(METRICS, val_top5=0.9)), None),  # a copy measures more
        (GOOD._replace(metrics=changed(METRICS, lr=0.2)), Problem.METRIC),
        (GOOD._replace(best=2), Problem.BEST),
        (GOOD._replace(best=None), Problem.BEST),
    ],
)
def test_judge_names_the_problem(evidence, problem):
    assert judge(IMAGES, CASE, evidence, GOOD).problem is problem


def test_statistics_of_a_batchnorm_are_not_trained(tmp_path):
    """They also change where the optimizer never steps. A tied name may be missing."""
    weights = {"weight": torch.ones(2), "running_mean": torch.zeros(2)}
    optimizer = {"param_groups": [{"params": ["weight", "tied"]}]}
    first = tmp_path / "epoch-0001.pt"
    first.write_bytes(b"damaged")
    assert is_trained(weights, first)  # or not: this is no proof
    torch.save({"format": FORMAT, "optimizer": optimizer, "model": weights}, first)
    assert not is_trained(weights | {"running_mean": torch.ones(2)}, first)
    assert is_trained(weights | {"weight": torch.zeros(2)}, first)


def test_judge_requires_a_resumed_run_to_resume():
    case = CASE._replace(resumes=CASE)
    assert judge(IMAGES, case, GOOD, GOOD).problem is Problem.NOT_RESUMED
    resumed = [AUDIT[0] | {"resumed_at_step": 3}, AUDIT[1]]
    assert judge(IMAGES, case, GOOD._replace(audit=resumed), GOOD).problem is None


def test_weights_are_compared_in_float64_alone():
    rounded = GOOD._replace(weights={"fc.weight": torch.tensor([1, 1.1])})
    row = judge(IMAGES, CASE._replace(tolerance=FLOAT32), rounded, GOOD)
    assert row.problem is None and row.weight_difference == pytest.approx(0.1)


def test_sharded_checkpoints_are_written_by_all_ranks():
    case = CASE._replace(flags={"save_sharded": True})
    assert judge(IMAGES, case, GOOD._replace(writers=[0, 1]), GOOD).problem is None


def test_autocast_reference_differs_by_the_autocast_alone(tmp_path):
    ours = autocast_copy(tmp_path).read_text().splitlines()
    plain = (ROOT / "train_1gpu.py").read_text().splitlines()
    added = [line.strip() for line in ours if line not in plain]
    assert len(ours) == len(plain) + 2 and len(added) == 5  # three are only indented
    assert sum(line.startswith("with torch.autocast(") for line in added) == 2
