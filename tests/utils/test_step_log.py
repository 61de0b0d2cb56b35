"""--log-steps: rows within an epoch."""

import errno
import io
import json

import pytest
import torch

from tests.forked import FIVE_STEPS, ROUNDING, fork_script, killed_at
from utils.metrics import read_metrics
from utils.options import step_log

FLAGS = FIVE_STEPS | {"model": "vit_tiny", "image_size": 16, "log_steps": 2, "dtype": "float64"}
FLAGS |= {"clip_norm": 0.5}
MEASURED = ("samples_per_second", "data_seconds", "memory")


def log(folder):
    return read_metrics(folder / "steps.jsonl")


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
    every = fork_script("train_1gpu.py", output_dir=tmp_path, **FLAGS | {"log_steps": 1})
    singles = log(every.output_dir)
    assert len(singles) == 10
    for name in ("loss", "accuracy"):
        of_epoch = sum(row[name] for row in singles[:5]) / 5
        assert of_epoch == pytest.approx(straight.rows[0][f"train_{name}"], abs=ROUNDING)
        of_window = (singles[7][name] + singles[8][name]) / 2
        assert rows[3][name] == pytest.approx(of_window, abs=ROUNDING)
    for name in ("lr", "gradient_norm"):
        assert [row[name] for row in rows] == [singles[i][name] for i in (1, 3, 6, 8)]
    assert all(row["gradient_norm"] > 0.5 for row in rows)  # as it was before it was clipped
    assert singles[-1]["lr"] == straight.rows[-1]["lr"]


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("train_ddp.py", {}),
        ("train_ddp_accum.py", {"micro_batches": 3}),
        ("train_fsdp.py", {}),
        ("train_tp.py", {}),
        ("train_pp.py", {"micro_batches": 3}),
    ],
)
def test_rows_are_those_of_one_process(script, flags, straight, tmp_path):
    run = fork_script(script, 2, output_dir=tmp_path / "run", **FLAGS, **flags)
    assert (run.code, run.stderr) == (0, "")
    assert facts(log(run.output_dir)) == facts(log(straight.output_dir))


def test_norm_of_scaled_gradients(tmp_path):
    """The GradScaler skips steps whose gradients overflow: these have no norm."""

    def from_a_large_scale():
        real = torch.amp.GradScaler
        torch.amp.GradScaler = lambda *args, **kw: real(*args, init_scale=2.0**19, **kw)

    flags = FLAGS | {"log_steps": 1, "dtype": "float32", "clip_norm": 1e3, "lr": 0.0}
    norms = []
    for script, before, own in (
        ("train_ddp.py", None, {}),
        ("train_ddp_amp.py", from_a_large_scale, {"amp_dtype": "float16"}),
    ):
        run = fork_script(script, 2, before, output_dir=tmp_path / script, **flags, **own)
        assert (run.code, run.stderr) == (0, "")
        norms.append([row.get("gradient_norm") for row in log(run.output_dir)])
    both = [(ours, exact) for exact, ours in zip(*norms, strict=True) if ours is not None]
    assert 0 < len(both) < 10
    assert all(ours == pytest.approx(exact, rel=1e-2) for ours, exact in both)
    assert "NaN" not in (run.output_dir / "steps.jsonl").read_text()


def test_run_without_clipping_has_no_norm(tmp_path):
    run = fork_script("train_1gpu.py", output_dir=tmp_path, **FLAGS | {"clip_norm": 0, "epochs": 1})
    assert run.code == 0 and not any("gradient_norm" in row for row in log(tmp_path))


def test_resumed_run_neither_repeats_nor_loses_rows(straight, tmp_path):
    """Killed after step 4, resumed on two ranks from step 3, between two rows."""
    flags = FLAGS | {"output_dir": tmp_path / "run", "save_steps": 3}
    assert fork_script("train_1gpu.py", None, killed_at(1, 4), **flags).code == -9
    assert [row["step"] for row in log(tmp_path / "run")] == [2, 4, 2, 4]
    with open(tmp_path / "run" / "steps.jsonl", "a") as file:
        file.write('{"epoch": 1, "st')  # cut off by a crash
    run = fork_script("train_ddp.py", 2, **flags)
    assert run.code == 0, run.stderr
    assert facts(log(tmp_path / "run")) == facts(log(straight.output_dir))


def test_part_of_a_row_is_taken_back(tmp_path, monkeypatch):
    (tmp_path / "steps.jsonl").write_text("first\n")

    class Full(io.StringIO):
        def __init__(self, path, *_, **__):
            super().__init__()
            self.path = path

        def write(self, text):
            self.path.write_text(self.path.read_text() + text[:2])
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(step_log, "open", Full, raising=False)
    with pytest.raises(OSError, match="No space"):
        step_log._append(tmp_path / "steps.jsonl", "second\n")
    assert (tmp_path / "steps.jsonl").read_text() == "first\n"


def test_row_that_cannot_be_written(tmp_path):
    def before():
        def full(path, mode, **options):
            raise OSError(errno.ENOSPC, "No space left on device")

        step_log.open = full

    text = f"{tmp_path / 'run' / 'steps.jsonl'}: No space left"
    flags = FLAGS | {"output_dir": tmp_path / "run"}
    run = fork_script("train_1gpu.py", None, before, **flags)
    (line,) = run.stderr.splitlines()
    assert run.code == 1 and line.startswith("error: ") and text in line
    run = fork_script("train_1gpu.py", None, before, **flags, save_errors="warn")
    assert run.code == 0 and len(run.stderr.splitlines()) == 4
    for line in run.stderr.splitlines():
        assert line.startswith("warning: ") and text in line and line.endswith("run continues")
