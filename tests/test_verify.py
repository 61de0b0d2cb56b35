"""make verify: every script trains the same model, and a planted bug fails a case."""

import importlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import tasks.text
import tools.verify.__main__ as verify
from tools.copy import task_module
from tools.lessons import ROOT, RUNGS
from tools.runs import flag_list
from tools.verify import table
from tools.verify.cases import FLOAT32, IMAGES, SUITES, Case, matrix_cases
from tools.verify.judge import Evidence, Problem, Row, judge
from tools.verify.plants import BUGS, planted_copy
from tools.verify.run import Verifier, autocast_copy, run_matrix, write_text
from utils.config import load_config

# These cases and bugs are also part of `make test`; all others are slow.
FAST_CASES = ("images: ddp x2", "text: accum x2")
FAST_BUGS = ("set_epoch-forgotten", "mean-of-the-ranks-means")
CASES = {f"{suite.task}: {c.name}": (suite, c) for suite in SUITES.values() for c in suite.cases}


def test_gpus_that_a_case_must_not_use_are_hidden(tmp_path, monkeypatch):
    dp, ddp = (CASES[f"images: {name}"][1] for name in ("dp", "ddp x2"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    name = "CUDA_VISIBLE_DEVICES"
    assert Verifier(tmp_path)._device(dp) == ("cpu", {name: ""})
    assert Verifier(tmp_path)._device(ddp) == ("cpu", {name: ""})
    on_gpu = Verifier(tmp_path, device="cuda:1")
    assert on_gpu._device(ddp) == ("cuda:1", {})
    assert on_gpu._device(dp) == ("cuda", {name: "1"})
    monkeypatch.setenv(name, "4,6")
    assert on_gpu._device(dp) == ("cuda", {name: "6"})


def parametrize(names, fast):
    marks = {True: (), False: pytest.mark.slow}
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=marks[name in fast], id=name) for name in names]
    )


@pytest.fixture(scope="module", autouse=True)
def without_coverage():
    """The runs take long enough without counting the lines that they execute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
        yield


def selected(request, names):
    """Those of the cases or bugs whose tests are part of this pytest run."""
    tests = [test for test in request.session.items if test.path == request.path]
    chosen = {test.callspec.params.get("name") for test in tests if hasattr(test, "callspec")}
    return [name for name in names if name in chosen]


@pytest.fixture(scope="module")
def verifiers(tmp_path_factory):
    """A Verifier per task."""
    return {
        suite.task: Verifier(tmp_path_factory.mktemp(f"verify-{suite.task}"), suite)
        for suite in SUITES.values()
    }


@pytest.fixture(scope="module")
def rows(request, verifiers):
    """{task: {case: Row}} of the selected cases."""
    chosen = [CASES[name] for name in selected(request, CASES)]
    return {
        task: {row.case: row for row in verifier.run([c for s, c in chosen if s.task == task])}
        for task, verifier in verifiers.items()
    }


@parametrize(CASES, FAST_CASES)
def test_case_passes(name, rows):
    suite, case = CASES[name]
    row = rows[suite.task][case.name]
    assert row.problem is None, row
    is_sharded = case.flags.get("save_sharded")
    assert row.each_sample_once and (row.writers == (0,) or is_sharded)
    if case.reference:
        assert 0 <= row.loss_difference <= case.tolerance


@pytest.fixture(scope="module")
def planted(request, verifiers, tmp_path_factory):
    """{bug: the future of its row}. They run in parallel, on the same cores and with the same
    references as the unchanged cases."""
    folder = tmp_path_factory.mktemp("planted")
    names = selected(request, [bug.name for bug in BUGS])
    bugs = [bug for bug in BUGS if bug.name in names]

    def row_of(bug):
        suite, case = CASES[f"{bug.task}: {bug.row}"]
        root = planted_copy(bug, folder / bug.name / "copy")
        verifier = verifiers[bug.task]
        shared = {"cores": verifier.cores, "references": verifier.references}
        return Verifier(folder / bug.name, suite, root, **shared).run([case])[0]

    for task, verifier in verifiers.items():
        rows_of_task = [CASES[f"{task}: {bug.row}"][1] for bug in bugs if bug.task == task]
        verifier.run_references(rows_of_task)
    with ThreadPoolExecutor(len(bugs)) as pool:
        return {bug.name: pool.submit(row_of, bug) for bug in bugs}


@parametrize([bug.name for bug in BUGS], FAST_BUGS)
def test_planted_bug_fails_its_case(name, planted):
    """For the reason that it is about, not because of a crash that it happens to cause."""
    bug, row = next(bug for bug in BUGS if bug.name == name), planted[name].result()
    problem, details = bug.problem
    assert row.problem is problem and details in row.details, row


def test_planted_lines_occur_once(tmp_path):
    for bug in BUGS:
        copy = planted_copy(bug, tmp_path / bug.name) / bug.file
        compile(copy.read_text(), copy, "exec")
        assert bug.replacement in copy.read_text()
        assert f"{bug.task}: {bug.row}" in CASES


@pytest.mark.slow
def test_scripts_continue_each_other(tmp_path):
    """Two of the scripts, one with sharded checkpoints; --matrix runs all pairs."""
    rows = run_matrix(tmp_path, lambda row: None, ["train_1gpu.py", "train_fsdp.py"])
    assert len(rows) == 6
    assert [row.problem for row in rows] == [None] * 6


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_cases_have_settings_that_their_scripts_know(suite):
    task = importlib.import_module(f"tasks.{suite.task}")
    cases = [*suite.cases, *suite.references, suite.killed]
    if suite.task != "segmentation":
        cases += matrix_cases(suite)
    for case in cases:
        rung = RUNGS[case.script if case.script in RUNGS else "train_1gpu.py"]
        flags = suite.base | case.flags
        for name in ("weights", "freeze"):  # the Verifier writes the file
            flags.pop(name, None)
        assert load_config(task.Settings, rung.settings_class(), flag_list(flags)).epochs == 2


def test_every_task_has_a_suite_and_every_script_a_case_or_a_reason():
    assert set(SUITES) == {path.stem for path in (ROOT / "tasks").iterdir() if task_exists(path)}
    for suite in SUITES.values():
        named = " ".join(suite.left_out)
        without = RUNGS.keys() - {case.script for case in suite.cases} - {"train_1gpu.py"}
        for script in without:
            assert script.removeprefix("train_").removesuffix(".py") in named, (suite.task, script)


def task_exists(path):
    return not path.name.startswith("_") and task_module(path.stem).exists()


def test_number_of_targets_differs_between_ranks_and_micro_batches(tmp_path):
    """Otherwise, the means of means would be right."""
    text = tasks.text
    cfg = load_config(text.Settings, argv=[f"--text-file={write_text(tmp_path / 'text')}"])
    train_set, _ = text.build_datasets(replace(cfg, context=24, padding="longest"))
    lengths = torch.tensor([len(piece) - 1 for piece in train_set.pieces])
    assert len(lengths) == 150 and len(lengths.unique()) > 10
    order = torch.randperm(150, generator=torch.Generator().manual_seed(0))[:144].view(8, 9, 2)
    counts = lengths[order].sum(1)
    assert (counts[:, 0] != counts[:, 1]).sum() >= 7  # of 8 steps


# The command line


def run_main(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["verify", *map(str, arguments)])
    return verify.main()


@pytest.fixture
def own_copy(tmp_path):
    """A copy of a script with a name of its own, and the flags to verify it."""
    path = tmp_path / "my_training.py"
    shutil.copyfile(ROOT / "train_dp.py", path)
    return path, ["--script", path, "--like", "train_dp.py", "--write", tmp_path / "table.md"]


@pytest.mark.slow
def test_own_copy_of_a_script_passes(own_copy, monkeypatch, tmp_path, capsys):
    assert run_main(monkeypatch, *own_copy[1]) == 0
    assert "1 of 1 cases passed" in capsys.readouterr().out
    assert "| dp | " in (tmp_path / "table.md").read_text()


def test_own_copy_with_a_bug_fails(own_copy, monkeypatch, tmp_path, capsys):
    path, flags = own_copy
    path.write_text(path.read_text().replace("optimizer.step()", "pass"))
    assert run_main(monkeypatch, *flags) == 1
    (row,) = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert row["problem"] == "WEIGHTS" and row["details"].startswith("conv1.weight by")
    assert "FAIL: weights differ from the reference (conv1.weight by" in capsys.readouterr().out


def test_mistakes_on_the_command_line(monkeypatch, capsys):
    assert run_main(monkeypatch, "--plant", "list") == 0
    assert capsys.readouterr().out.split() == [bug.name for bug in BUGS]
    for arguments in (
        ["--plant", "no-such"],
        ["--script", "/no/such.py"],
        ["--only", "no such case"],
        ["--script", "train_ddp.py", "--plant", "seed-per-rank"],
    ):
        with pytest.raises(SystemExit):
            run_main(monkeypatch, *arguments)


# The judge


METRICS = [
    {"epoch": epoch, "train_samples": 144, "val_samples": 37}
    | {"train_loss": 2.0, "val_loss": 2.0, "train_accuracy": 0.5, "val_accuracy": 0.5}
    for epoch in (0, 1)
]
AUDIT = [
    {"epoch": epoch, "samples": 144, "dropped": 6, "repeated": 0, "resumed_at_step": 0}
    for epoch in (0, 1)
]
GOOD = Evidence(0, "", 1.0, METRICS, AUDIT, [0], {"fc.weight": torch.ones(2)}, best=1)
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
        (GOOD._replace(weights={}), Problem.TENSORS),
        (GOOD._replace(weights={"fc.weight": torch.tensor([1, 1.1])}), Problem.WEIGHTS),
        (GOOD._replace(metrics=changed(METRICS, val_loss=2.1)), Problem.LOSS),
        (GOOD._replace(metrics=changed(METRICS, train_loss=float("nan"))), Problem.LOSS),
        (GOOD._replace(metrics=changed(METRICS, train_accuracy=0.51)), Problem.METRIC),
        (GOOD._replace(metrics=changed(METRICS, val_accuracy=0.49)), Problem.METRIC),
        (GOOD._replace(best=2), Problem.BEST),
        (GOOD._replace(best=None), Problem.BEST),
    ],
)
def test_judge_names_the_problem(evidence, problem):
    assert judge(IMAGES, CASE, evidence, GOOD).problem is problem


def test_judge_requires_a_resumed_run_to_resume():
    case = CASE._replace(resumes=True)
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


def test_table_shows_problem_and_details():
    failed = judge(IMAGES, CASE, GOOD._replace(code=3, error="disk full"), GOOD)
    cells = dict(zip(table.HEAD, table.cells_of(failed.to_json()), strict=True))
    assert cells["result"] == "FAIL: the run failed (exit code 3: disk full)"
    assert cells["train loss"] == "" and cells["each sample once"] == ""
    passed = table.cells_of(judge(IMAGES, CASE, GOOD, GOOD).to_json())
    assert passed[1:-1] == ["2.000000", "0.500000", "0.0e+00", "0.0e+00", "yes", "rank 0", "pass"]
    assert table.cells_of(Row("y").to_json())[0] == "y"


def test_autocast_reference_differs_by_the_autocast_alone(tmp_path):
    ours = autocast_copy(tmp_path).read_text().splitlines()
    plain = (ROOT / "train_1gpu.py").read_text().splitlines()
    added = [line.strip() for line in ours if line not in plain]
    assert len(ours) == len(plain) + 2 and len(added) == 5  # three are only indented
    assert sum(line.startswith("with torch.autocast(") for line in added) == 2
