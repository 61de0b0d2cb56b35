"""Every script, world size and restart trains the same weights; a classic bug turns a row red."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from tools import verify
from tools.plants import BUGS, planted_copy
from tools.runs import ROOT
from tools.verify import BASE, CASES, Row, Verifier, matrix, reason


@pytest.fixture(scope="module", autouse=True)
def uncovered():
    """The runs of the table are long enough without a count of the lines they run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
        yield


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    verifier = Verifier(tmp_path_factory.mktemp("verify"))
    rows = verifier.run(CASES)
    return {row.case: row for row in rows}, verifier.references


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_row_is_green(case, table):
    row = table[0][case.name]
    assert row.verdict == "green"
    assert row.once and row.savers == "0"
    if case.reference:
        assert 0 <= row.off <= case.tolerance


@pytest.fixture(scope="module")
def planted(table, tmp_path_factory):
    """The row of each bug, all of them side by side on the same cores."""
    folder = tmp_path_factory.mktemp("planted")
    first = Verifier(folder)

    def row_of(bug):
        verifier = Verifier(folder / bug.name, planted_copy(bug, folder / bug.name / "planted"))
        verifier.free, verifier.freed, verifier.references = first.free, first.freed, table[1]
        (row,) = verifier.run([case for case in CASES if case.name == bug.row])
        return row

    with ThreadPoolExecutor(len(BUGS)) as pool:
        return dict(zip([bug.name for bug in BUGS], pool.map(row_of, BUGS), strict=True))


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_turns_a_row_red(bug, planted):
    assert planted[bug.name].verdict != "green"


def test_every_bug_has_its_entry_in_the_docs():
    text = (ROOT / "docs" / "traps.md").read_text()
    for bug in BUGS:
        entry = text.split(f"## {bug.name}\n")[1].split("\n## ")[0]
        assert bug.row in entry and bug.file in entry


def test_scripts_continue_each_other_also_from_parts(tmp_path):
    """Two of the nine scripts; `python -m tools.verify --matrix` has all pairs."""
    rows = matrix(tmp_path, lambda row: None, ["train_1gpu.py", "train_fsdp.py"])
    assert len(rows) == 6
    assert [row.verdict for row in rows] == ["green"] * 6


def run_main(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["verify", *arguments])
    return verify.main()


def test_a_teams_own_copy_is_judged_like_the_original(monkeypatch, tmp_path, capsys):
    mine = tmp_path / "my_training.py"
    shutil.copyfile(ROOT / "train_dp.py", mine)
    table = tmp_path / "table.md"
    flags = ["--script", str(mine), "--like", "train_dp.py", "--write", str(table)]
    assert run_main(monkeypatch, *flags) == 0
    assert "1 of 1 green" in capsys.readouterr().out
    assert "| dp | " in table.read_text()
    mine.write_text(mine.read_text().replace("optimizer.step()", "pass"))
    assert run_main(monkeypatch, *flags) == 1
    assert "RED: conv1.weight differs by" in capsys.readouterr().out


def test_mistakes_on_the_command_line(monkeypatch, capsys):
    assert run_main(monkeypatch, "--plant", "list") == 0
    assert capsys.readouterr().out.split() == [bug.name for bug in BUGS]
    for arguments in (
        ["--plant", "no-such"],
        ["--script", "/no/such.py"],
        ["--script", "train_ddp.py", "--plant", "seed-per-rank"],
    ):
        with pytest.raises(SystemExit):
            run_main(monkeypatch, *arguments)


def test_the_verdict_is_taken_from_what_a_run_left(tmp_path):
    """What no planted bug shows alone: more than one writer, samples counted twice, a new start."""
    hooks = tmp_path / "hooks-x"
    hooks.mkdir()
    (hooks / "writes").write_text("0\n1\n0\n")
    good = {"train_samples": 144, "train_dropped": 6, "train_repeated": 0, "val_samples": 37}
    good |= {"train_loss": 1.0, "val_accuracy": 0.5}
    row = Row("x", None, None, None, None, None, "", "", 0.0)
    case = CASES[0]._replace(reference=None)
    verifier = Verifier(tmp_path)

    def judge(rows, case=case, code=0):
        run = verify.finish_run.__globals__["Run"](code, "", "", 1.0, rows, tmp_path / "x")
        return verifier._judge(case, run, row).verdict

    assert judge([good, good]) == "ranks 0, 1 wrote files"
    (hooks / "writes").write_text("0\n")
    assert judge([good, good]) == "green"
    assert judge([good, good | {"val_samples": 38}]) == "samples were missed or counted twice"
    assert "middle of the epoch" in judge([good, good], case._replace(killed=True))
    assert judge([good]).startswith("exit code 0: nothing was said")
    assert reason("x\n  ValueError: no\nerror_file: y") == "ValueError: no"
    assert BASE["epochs"] == 2
