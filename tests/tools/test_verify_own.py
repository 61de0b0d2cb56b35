"""tools.verify with somebody's own script and task, as docs/copy.md says."""

import os
import subprocess
import sys

import pytest

from lab.edits import FUNCTION, IMPORT, LOOP, before
from tests.copies import contents_of, write
from tests.docs.test_own_task import blocks
from tools.copy import texts
from tools.lib.edits import changed
from tools.lib.ladder import ROOT
from tools.lib.prune import GUARDS, without
from tools.lib.runs import family
from tools.verify.own import ACCUMULATED, CannotVerify, merge, own_task, parse_flags, verify_own

SETTINGS = ["--optimizer", "adamw", "--lr=3e-3"]
FROZEN = """
def evaluate(model, *rest):
    result = evaluated(model, *rest)
    model.eval()
    return result


"""


@pytest.fixture(params=["train_ddp.py"])
def own(tmp_path, request):
    """A copy of a script in a folder of its own, which trains the task of docs/own-task.md."""
    folder = tmp_path / "own"
    write(texts({request.param: "own"}, []), folder)
    (code,) = [block for block in blocks("python") if "class BrightSpot" in block]
    (folder / "my_task.py").write_text(code)
    return folder / request.param


def verify(script, *arguments):
    """The exit code of tools.verify, and what it prints."""
    command = [sys.executable, "-m", "tools.verify", "--script", str(script), *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    return run.returncode, run.stdout + run.stderr


@pytest.mark.slow
@pytest.mark.rare
def test_own_task_trains_the_same_weights(own):
    before = contents_of(own.parent)
    code, text = verify(own, "--", *SETTINGS)
    assert code == 0 and "7 of 7 cases passed" in text and "no rows" not in text, text
    assert contents_of(own.parent) == before


@pytest.mark.slow
@pytest.mark.rare
def test_run_of_few_samples_is_killed_within_its_epoch(own):
    """Of three steps, each of a few milliseconds."""
    task = own.with_name("my_task.py")
    assert task.read_text().count("BrightSpot(1000") == 1
    task.write_text(task.read_text().replace("BrightSpot(1000", "BrightSpot(54"))
    code, text = verify(own, "--only", "killed", "--", *SETTINGS)
    assert code == 0 and "2 of 2 cases passed" in text, text


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("own", ["train_1gpu.py"], indirect=True)
def test_edits_that_break_the_promise_are_found(own):
    """A limit of steps that forgets those before a restart, and an evaluation that leaves a
    BatchNorm in evaluation mode."""
    edits = [
        before(IMPORT, "from itertools import islice\n\n"),
        (LOOP, LOOP.replace("in loader", "in islice(loader, 3)")),
        ("evaluate, mean_loss", "evaluate as evaluated, mean_loss"),
        before(FUNCTION, FROZEN.lstrip()),
    ]
    own.write_text(changed(own.read_text(), edits, own))
    task, activation = own.with_name("my_task.py"), "nn.ReLU()"
    task.write_text(task.read_text().replace(activation, "nn.BatchNorm1d(64)"))
    code, text = verify(own, "--", *SETTINGS)
    assert code == 1 and "1 of 4 cases passed" in text, text
    rows = dict(line.split(" x1 ", 1) for line in text.splitlines() if " x1 " in line)
    assert "samples were missed or counted twice" in rows["killed, resumed"]
    assert "samples were missed or counted twice" in rows["killed before a save"]
    assert "weights differ" in rows["evaluating in between"]


@pytest.mark.slow
@pytest.mark.rare
def test_mistake_in_a_task_is_found(own):
    task, activation = own.with_name("my_task.py"), "nn.ReLU()"
    assert activation in task.read_text()
    task.write_text(task.read_text().replace(activation, f"{activation}, nn.Dropout()"))
    code, text = verify(own, "--only", "ddp x2", "--", *SETTINGS)
    assert code == 1 and "FAIL: weights differ" in text and "nn.Dropout" in text, text


@pytest.mark.slow
def test_task_that_cannot_be_imported_is_one_line(own, tmp_path):
    own.with_name("my_task.py").write_text("import nowhere")
    with pytest.raises(CannotVerify, match=r"^the task .*import.*nowhere"):
        verify_own(own, own.name, "my_task", {}, tmp_path / "runs", print)


def test_task_of_a_script(own):
    assert own_task(own) == "my_task"
    assert own_task(ROOT / "train_ddp.py") is None


def test_flags_of_a_script():
    assert parse_flags([]) == {}
    given = ["--lr=0.1", "--text-file", "a b", "--no-sync-bn", "--audit", "--config=c.yaml"]
    assert parse_flags(given) == {
        "lr": "0.1",
        "text_file": "a b",
        "sync_bn": False,
        "audit": True,
        "config": "c.yaml",
    }


@pytest.mark.parametrize("guards", [[], [*GUARDS]])
def test_accumulation_is_merged_into_an_edited_script(guards):
    """Also into one of a plain copy."""
    names = "train_ddp.py", ACCUMULATED
    files = without({name: (ROOT / name).read_bytes() for name in names}, guards)
    base, accumulated = (files[name].decode() for name in names)
    edit = "build_optimizer(model, cfg)", "torch.optim.SGD(model.parameters(), cfg.lr)"
    merged = merge(base.replace(*edit), files, *names)
    assert merged == accumulated.replace(*edit) != accumulated
    rewritten = base.replace("        loss.backward()\n", "        (2 * loss).backward()\n")
    assert merge(rewritten, files, *names) is None


@pytest.mark.slow
@pytest.mark.rare
def test_interrupted_command_ends_its_runs_and_shows_no_rows_of_them(tmp_path):
    tag = f"interrupted {tmp_path}"
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.verify", "--script", "train_ddp.py", "--only", "ddp x"],
        cwd=ROOT,
        env=os.environ | {"RUN_TAG": tag},
        stdout=subprocess.PIPE,
        text=True,
    )
    head, row = process.stdout.readline(), process.stdout.readline()
    assert head.startswith("case") and row.startswith("ddp x")
    process.terminate()
    text, _ = process.communicate(timeout=100)
    assert process.returncode == 143
    assert "FAIL" not in text and len(text.splitlines()) < 2  # a row may have ended meanwhile
    assert family(tag) == []
