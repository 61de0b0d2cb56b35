"""A run survives random faults; and without one of its guards, the same faults are noticed."""

import ctypes
import json
import re
import sys
import time

import pytest
import torch

import utils.checkpoint
import utils.data
import utils.distributed
from lab.chaos.faults import BY_NAME, End, make_plan
from lab.chaos.run import ChaosRun, compare, flip_bit, largest_difference, sha256
from tests.processes import ROOT
from utils.checkpoint import FORMAT, read_checkpoint, save_atomically
from utils.errors import UserError

# Without workers, whose start takes time.
QUICK = {"loader": "device", "num_workers": 0}


def soak(tmp_path, *names, seed=0, real_share=0.0, patience=30, **flags):
    """The rows and the verdict of train_ddp.py on two ranks."""
    run = ChaosRun("train_ddp.py", 2, tmp_path, patience=patience, flags=QUICK | flags)
    return run.run(names, len(names), seed, real_share=real_share)


def problems(rows):
    return [problem for row in rows for problem in row.problems]


@pytest.mark.slow
def test_run_survives_faults(tmp_path):
    names = ["kill-save", "kill-rename", "eio-link", "usr1-rank", "leave", "flip", "leftover"]
    names += ["torn-row", "kill-launcher"]
    rows, verdict = soak(tmp_path, *names)
    assert problems(rows) == verdict == []
    assert {row.fault for row in rows} == {BY_NAME[name].title for name in names}


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("task", ["shards", "stream"])
def test_run_on_shards_and_streams_survives_faults(task, tmp_path):
    run = ChaosRun("train_ddp.py", 2, tmp_path, task=task)
    rows, verdict = run.run(["kill-worker", "term-rank"], 2, seed=2, real_share=0.0)
    assert problems(rows) == verdict == []
    assert "in epoch 2, after step 3" in rows[0].last_line  # the next run begins within an epoch


@pytest.mark.slow
@pytest.mark.rare
def test_run_on_a_mixture_survives_faults_on_two_and_on_three_ranks(monkeypatch, tmp_path):
    """And a lost position of the loader is noticed there, too."""
    run = ChaosRun("train_ddp.py", [2, 3], tmp_path / "run", task="mixture")
    rows, verdict = run.run(["term-rank", "term-all"], 2, seed=2, real_share=0.0)
    assert problems(rows) == verdict == []
    monkeypatch.setattr(utils.data.Loader, "load_state_dict", lambda self, state: None)
    run = ChaosRun(
        "train_ddp.py", [2, 3], tmp_path / "lost", task="mixture", flags={"audit": False}
    )
    rows, verdict = run.run(["kill-launcher"], 1, seed=0, real_share=0.0)
    assert any(problem.startswith("model differs by 0.") for problem in verdict), verdict


@pytest.mark.slow
@pytest.mark.rare
def test_run_survives_a_signal_to_torchrun(tmp_path):
    rows, verdict = soak(tmp_path, "term-launcher", real_share=1)
    assert problems(rows) == verdict == []
    assert (rows[0].launcher, rows[0].code) == ("tools.launch", 75)


# Negative controls


@pytest.mark.slow
@pytest.mark.rare
def test_file_that_is_written_in_place_is_torn(monkeypatch, tmp_path):
    def save(obj, path, check=False):
        with open(path, "wb") as file:
            torch.save(obj, file)

    monkeypatch.setattr(utils.checkpoint, "save_atomically", save)
    rows, _ = soak(tmp_path, "kill-save", seed=1)  # in the middle of the file
    assert any(problem.startswith("torn file: ") for problem in problems(rows)), rows


@pytest.mark.slow
@pytest.mark.rare
def test_rank_that_outlives_its_launcher_is_noticed(monkeypatch, tmp_path):
    # torch.multiprocessing lets ranks get a SIGINT when their launcher dies.
    monkeypatch.setattr(utils.distributed, "die_with_parent", lambda: ctypes.CDLL(None).prctl(1, 0))
    rows, _ = soak(tmp_path, "kill-launcher", patience=3)
    assert " still there 3 s later" in rows[0].problems[0]


def test_run_that_hangs_is_noticed(monkeypatch, tmp_path):
    run = ChaosRun("train_1gpu.py", None, tmp_path, limit=5)
    is_straight = f"--output-dir={tmp_path / 'straight'}"
    monkeypatch.setattr(run.module, "main", lambda: is_straight in sys.argv or time.sleep(600))
    rows, verdict = run.run(["kill-rank"], 1, seed=0)
    (problem,) = verdict
    assert problem.endswith(" 5 s")
    assert problem in rows[0].problems and "that far" in rows[0].problems[-1]


# The plan, and what the verdict rests on


def test_seed_decides_the_faults():
    def plan(seed):
        return make_plan(list(BY_NAME), 40, 2, True, seed, warm_up=10)

    assert plan(0) == plan(0) != plan(1)
    attempts = plan(0)
    faults = [fault for attempt in attempts for fault in attempt.faults]
    assert [fault.number for fault in faults] == list(range(1, 41))
    assert {fault.kind for fault in faults} == set(BY_NAME)
    goes_on = (End.CONTINUES, End.RESUMES)
    for attempt in attempts[:-1]:
        *others, last = [BY_NAME[fault.kind].end in goes_on for fault in attempt.faults]
        assert all(others)
        assert not last
    for seed in range(50):
        first = plan(seed)[0]
        assert all(fault.step > 10 for fault in first.faults)  # there are no files to damage yet


def test_faults_that_a_run_cannot_have_are_left_out():
    kinds = set()
    for attempt in make_plan(list(BY_NAME), 30, 1, False, 0, warm_up=10):
        kinds |= {fault.kind for fault in attempt.faults}
    assert kinds.isdisjoint({"stop", "leave", "kill-launcher", "term-launcher"})


@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.999])
def test_flipped_bit_is_in_a_tensor(fraction, tmp_path):
    path = tmp_path / "last.pt"
    save_atomically({"format": FORMAT, "model": torch.arange(1000.0)}, path)
    assert len(read_checkpoint(path)["model"]) == 1000
    flip_bit(path, fraction)
    with pytest.raises(UserError, match="fails its checksum"):
        read_checkpoint(path)


def write_result(folder, weight=0.0, best=0.0, **changed):
    """What compare() reads, of a run that has reached these weights."""
    folder.mkdir(exist_ok=True)
    row = {"epoch": 0, "step": 3, "loss": 0.5, "samples_per_second": 7.0, "memory": 1}
    (folder / "metrics.jsonl").write_text(json.dumps(row))
    (folder / "steps.jsonl").write_text(json.dumps(row | changed))
    for name, value in (("last", weight), ("best", best)):
        contents = {"format": FORMAT, "model": {"w": torch.tensor(value)}, "epoch": 1}
        contents |= {"optimizer": {}, "scheduler": {}}
        save_atomically(contents, folder / f"{name}.pt")


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"samples_per_second": 8.0, "memory": 2, "train_seconds": 5.0}, []),
        ({"loss": 0.25}, ["steps"]),
        ({"weight": 1.0}, ["model"]),
        ({"best": 1.0}, ["best"]),
    ],
)
def test_result_is_compared_as_a_whole_but_for_times(changed, found, tmp_path):
    write_result(tmp_path / "a", **changed)
    write_result(tmp_path / "b")
    assert [text.split()[0] for text in compare(tmp_path / "a", tmp_path / "b")] == found


VALUE = {"a": torch.tensor([1.0, 2.0]), "b": [1, None, "x", 0.5]}
DIFFERENT = [
    VALUE | {"a": torch.tensor([1.0, 2.5])},
    VALUE | {"a": torch.tensor([[1.0, 2.0, 3.0]])},
    VALUE | {"b": [2, None, "x", 0.5]},
    VALUE | {"b": [1, None]},
    {"a": VALUE["a"], "c": VALUE["b"]},
]


def test_results_of_different_numbers_of_ranks_are_compared_to_rounding():
    near = VALUE | {"b": (1, None, "x", 0.5 + 1e-12)}
    assert 0 < largest_difference(VALUE, near) < 1e-9
    assert all(largest_difference(VALUE, other) >= 0.5 for other in DIFFERENT)


def test_checksum_changes_with_every_part():
    assert sha256(VALUE) == sha256({"b": (1, None, "x", 0.5), "a": torch.tensor([1.0, 2.0])})
    others = [*DIFFERENT, VALUE | {"a": VALUE["a"].double()}, VALUE | {"a": VALUE["a"][None]}]
    assert all(sha256(other) != sha256(VALUE) for other in others)


def test_cited_tests_exist():
    text = (ROOT / "docs" / "reliability.md").read_text()
    file, cited = None, []
    for path, name in re.findall(r"`([\w/]*test_\w+\.py)?::(\w+)`", text):
        file = path or file  # `::test_name` follows a test of the same file
        cited.append((file, name))
    assert len(cited) > 30
    for file, name in cited:
        path = ROOT / file if file.startswith("check/") else ROOT / "tests" / file
        assert f"def {name}(" in path.read_text(), (file, name)
