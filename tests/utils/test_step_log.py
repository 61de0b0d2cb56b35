"""--log-steps: rows within an epoch."""

import json

import pytest

from tests.forked import FIVE_STEPS, ROUNDING, fork_script, killed_at

FLAGS = FIVE_STEPS | {"model": "vit_tiny", "image_size": 16, "log_steps": 2, "dtype": "float64"}
FLAGS |= {"clip_norm": 0.5}
MEASURED = ("samples_per_second", "data_seconds", "memory")


def log(folder):
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def facts(rows):
    """The rows without what differs from run to run; numbers to 12 digits."""
    kept = [{k: v for k, v in row.items() if k not in MEASURED} for row in rows]
    return json.loads(json.dumps(kept), parse_float=lambda text: float(f"{float(text):.12g}"))


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    run = fork_script("train_1gpu.py", output_dir=folder, **FLAGS)
    assert (run.code, run.stderr) == (0, "")
    return run


def test_rows_cover_the_steps_since_the_last_one(straight, tmp_path):
    rows = log(straight.output_dir)
    assert [(row["epoch"], row["step"]) for row in rows] == [(0, 2), (0, 4), (1, 2), (1, 4)]
    assert [row["samples"] for row in rows] == [24, 48, 24, 48]
    assert all(0 < row["data_seconds"] < 60 and row["samples_per_second"] > 0 for row in rows)
    assert all(2**26 < row["memory"] < 2**36 for row in rows)
    fork_script("train_1gpu.py", output_dir=tmp_path, **FLAGS | {"log_steps": 1})
    singles = log(tmp_path)
    assert len(singles) == 10
    for name in ("loss", "accuracy"):
        of_epoch = sum(row[name] for row in singles[:5]) / 5
        assert of_epoch == pytest.approx(straight.rows[0][f"train_{name}"], abs=ROUNDING)
        of_window = (singles[7][name] + singles[8][name]) / 2
        assert rows[3][name] == pytest.approx(of_window, abs=ROUNDING)
    assert [row["lr"] for row in rows] == [singles[i]["lr"] for i in (1, 3, 6, 8)]
    assert singles[-1]["lr"] == straight.rows[-1]["lr"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "flags"), [("train_tp.py", {}), ("train_pp.py", {"micro_batches": 3})]
)
def test_rows_are_those_of_one_process(script, flags, straight, tmp_path):
    run = fork_script(script, 2, output_dir=tmp_path / "run", **FLAGS, **flags)
    assert (run.code, run.stderr) == (0, "")
    assert facts(log(run.output_dir)) == facts(log(straight.output_dir))


def test_resumed_run_neither_repeats_nor_loses_rows(straight, tmp_path):
    """Killed after step 4, resumed on two ranks from step 3, between two rows."""
    flags = FLAGS | {"output_dir": tmp_path / "run", "save_steps": 3}
    assert fork_script("train_1gpu.py", None, killed_at(1, 4), **flags).code == -9
    with open(tmp_path / "run" / "steps.jsonl", "a") as file:
        file.write('{"epoch": 1, "st')  # cut off by a crash
    run = fork_script("train_ddp.py", 2, **flags)
    assert run.code == 0, run.stderr
    assert facts(log(tmp_path / "run")) == facts(log(straight.output_dir))
