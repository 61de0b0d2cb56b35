"""make verify: every script trains the same model, and a planted bug fails a case."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import tools.verify.__main__ as verify
from tools.lessons import ROOT
from tools.runs import flag_list
from tools.verify import table
from tools.verify.cases import BASE, CASES, FLOAT32, KILLED, REFERENCES, Case, matrix_cases
from tools.verify.judge import Evidence, Problem, Row, judge
from tools.verify.plants import BUGS, planted_copy
from tools.verify.run import Verifier, autocast_copy, run_matrix
from utils.config import load_config

# These cases and bugs are also part of `make test`; all others are slow.
FAST_CASES = ("ddp x2", "fsdp x2", "killed, resumed x2")
FAST_BUGS = ("set_epoch-forgotten", "padding-counted", "seed-per-rank")


def test_gpus_that_a_case_must_not_use_are_hidden(tmp_path, monkeypatch):
    dp, ddp = (next(case for case in CASES if case.name == name) for name in ("dp", "ddp x2"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    name = "CUDA_VISIBLE_DEVICES"
    assert Verifier(tmp_path)._device(dp) == ("cpu", {name: ""})
    assert Verifier(tmp_path)._device(ddp) == ("cpu", {name: ""})
    on_gpu = Verifier(tmp_path, device="cuda:1")
    assert on_gpu._device(ddp) == ("cuda:1", {})
    assert on_gpu._device(dp) == ("cuda", {name: "1"})
    monkeypatch.setenv(name, "4,6")
    assert on_gpu._device(dp) == ("cuda", {name: "6"})


def parametrize(items, fast):
    marks = {True: (), False: pytest.mark.slow}
    return pytest.mark.parametrize(
        "name",
        [pytest.param(i.name, marks=marks[i.name in fast], id=i.name) for i in items],
    )


@pytest.fixture(scope="module", autouse=True)
def without_coverage():
    """The runs take long enough without counting the lines that they execute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
        yield


def selected(request, items):
    """Those of the cases or bugs whose tests are part of this pytest run."""
    tests = [test for test in request.session.items if test.path == request.path]
    names = {test.callspec.params.get("name") for test in tests if hasattr(test, "callspec")}
    return [item for item in items if item.name in names]


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    return Verifier(tmp_path_factory.mktemp("verify"))


@pytest.fixture(scope="module")
def rows(request, verifier):
    return {row.case: row for row in verifier.run(selected(request, CASES))}


@parametrize(CASES, FAST_CASES)
def test_case_passes(name, rows):
    row = rows[name]
    case = next(case for case in CASES if case.name == name)
    assert row.problem is None, row
    assert row.each_sample_once and (row.writers == (0,) or case.flags.get("save_sharded"))
    if case.reference:
        assert 0 <= row.loss_difference <= case.tolerance


@pytest.fixture(scope="module")
def planted(request, verifier, tmp_path_factory):
    """{bug: the future of its row}. They run in parallel, on the same cores and with the same
    references as the unchanged cases."""
    folder, cases = tmp_path_factory.mktemp("planted"), {case.name: case for case in CASES}

    def row_of(bug):
        root = planted_copy(bug, folder / bug.name / "copy")
        shared = {"cores": verifier.cores, "references": verifier.references}
        return Verifier(folder / bug.name, root, **shared).run([cases[bug.row]])[0]

    bugs = selected(request, BUGS)
    verifier.run_references([cases[bug.row] for bug in bugs])
    with ThreadPoolExecutor(len(bugs)) as pool:
        return {bug.name: pool.submit(row_of, bug) for bug in bugs}


@parametrize(BUGS, FAST_BUGS)
def test_planted_bug_fails_its_case(name, planted):
    """For the reason that it is about, not because of a crash that it happens to cause."""
    bug, row = next(bug for bug in BUGS if bug.name == name), planted[name].result()
    problem, details = bug.problem
    assert row.problem is problem and details in row.details, row


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_line_occurs_once(bug, tmp_path):
    copy = planted_copy(bug, tmp_path) / bug.file
    compile(copy.read_text(), copy, "exec")
    assert copy.read_text() != (ROOT / bug.file).read_text()
    assert bug.row in {case.name for case in CASES}


@pytest.mark.slow
def test_scripts_continue_each_other(tmp_path):
    """Two of the scripts, one with sharded checkpoints; --matrix runs all pairs."""
    rows = run_matrix(tmp_path, lambda row: None, ["train_1gpu.py", "train_fsdp.py"])
    assert len(rows) == 6
    assert [row.problem for row in rows] == [None] * 6


@pytest.mark.parametrize("case", [*CASES, *REFERENCES, KILLED, *matrix_cases()])
def test_cases_have_settings_that_their_scripts_know(case):
    from tools.lessons import RUNGS

    kind = RUNGS[case.script if case.script in RUNGS else "train_1gpu.py"].config_class()
    flags = {name: value for name, value in (BASE | case.flags).items() if name != "weights"}
    flags.pop("freeze", None)
    assert load_config(kind, flag_list(flags)).synthetic_samples == 150


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
        (GOOD._replace(metrics=changed(METRICS, train_accuracy=0.51)), Problem.ACCURACY),
        (GOOD._replace(metrics=changed(METRICS, val_accuracy=0.49)), Problem.ACCURACY),
        (GOOD._replace(best=2), Problem.BEST),
        (GOOD._replace(best=None), Problem.BEST),
    ],
)
def test_judge_names_the_problem(evidence, problem):
    assert judge(CASE, evidence, GOOD).problem is problem


def test_judge_requires_a_resumed_run_to_resume():
    case = CASE._replace(resumes=True)
    assert judge(case, GOOD, GOOD).problem is Problem.NOT_RESUMED
    resumed = [AUDIT[0] | {"resumed_at_step": 3}, AUDIT[1]]
    assert judge(case, GOOD._replace(audit=resumed), GOOD).problem is None


def test_weights_are_compared_in_float64_alone():
    rounded = GOOD._replace(weights={"fc.weight": torch.tensor([1, 1.1])})
    row = judge(CASE._replace(tolerance=FLOAT32), rounded, GOOD)
    assert row.problem is None and row.weight_difference == pytest.approx(0.1)


def test_sharded_checkpoints_are_written_by_all_ranks():
    case = CASE._replace(flags={"save_sharded": True})
    assert judge(case, GOOD._replace(writers=[0, 1]), GOOD).problem is None


def test_table_shows_problem_and_details():
    failed = judge(CASE, GOOD._replace(code=3, error="disk full"), GOOD)
    cells = dict(zip(table.HEAD, table.cells_of(failed.to_json()), strict=True))
    assert cells["result"] == "FAIL: the run failed (exit code 3: disk full)"
    assert cells["train loss"] == "" and cells["each sample once"] == ""
    passed = table.cells_of(judge(CASE, GOOD, GOOD).to_json())
    assert passed[1:-1] == ["2.000000", "50.00%", "0.0e+00", "0.0e+00", "yes", "rank 0", "pass"]
    assert table.cells_of(Row("y").to_json())[0] == "y"


def test_autocast_reference_differs_by_the_autocast_alone(tmp_path):
    ours = autocast_copy(tmp_path).read_text().splitlines()
    plain = (ROOT / "train_1gpu.py").read_text().splitlines()
    added = [line.strip() for line in ours if line not in plain]
    assert len(ours) == len(plain) + 2 and len(added) == 5  # three are only indented
    assert sum(line.startswith("with torch.autocast(") for line in added) == 2
