"""Every rung and every world size trains the same weights; a classic bug makes the check red."""

import pytest

from tests.launch import ROOT, run_script
from utils.checkpoint import read_checkpoint

# 24 steps of a BatchNorm model with momentum, augmentation, clipping and a dropped rest.
CURVE = {"dtype": "float64", "synthetic_samples": 150, "clip_norm": 2.0}


def difference(run, reference):
    """The largest relative difference in any loss, and in the final weights."""
    assert run.code == 0, run.stderr
    assert len(run.rows) == len(reference.rows) == 2
    numbers = [0.0]
    for row, expected in zip(run.rows, reference.rows, strict=True):
        assert row["val_samples"] == expected["val_samples"] == 37
        assert row["train_samples"] == 144
        for name in ("train_loss", "val_loss"):
            numbers.append(abs(row[name] / expected[name] - 1))
        for name in ("train_accuracy", "val_accuracy"):
            numbers.append(abs(row[name] - expected[name]))
    ours = read_checkpoint(run.output_dir / "last.pt")["model"]
    theirs = read_checkpoint(reference.output_dir / "last.pt")["model"]
    for name, expected in theirs.items():
        scale = expected.double().abs().max().clamp_min(1e-12)
        numbers.append(float((ours[name] - expected).double().abs().max() / scale))
    return max(numbers)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    run = run_script("train_1gpu.py", output_dir=folder, **CURVE)
    assert run.code == 0, run.stderr
    return run


@pytest.mark.parametrize(
    ("script", "nproc", "flags"),
    [
        ("train_dp.py", None, {}),
        ("train_ddp.py", 1, {}),
        ("train_ddp.py", 2, {"loader": "workers", "num_workers": 1}),
        ("train_ddp.py", 3, {}),
        # Autocast leaves float64 alone and the scale is a power of two, so that scaling,
        # unscaling and clipping in the right order must change nothing.
        ("train_ddp_amp.py", 2, {"amp_dtype": "float16"}),
    ],
    ids=lambda value: str(value),
)
def test_one_curve(script, nproc, flags, reference, tmp_path):
    run = run_script(script, nproc, output_dir=tmp_path, **(CURVE | flags))
    assert difference(run, reference) < 1e-9


def planted(tmp_path, script, line, instead):
    """A copy of a script with a bug in it."""
    text = (ROOT / script).read_text()
    assert text.count(line) == 1
    copy = tmp_path / script
    copy.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n" + text.replace(line, instead)
    )
    return copy


@pytest.mark.parametrize(
    ("script", "line", "instead", "flags"),
    [
        ("train_ddp.py", "        train_sampler.set_epoch(epoch)", "        pass", {}),
        ("train_ddp.py", "    if cfg.sync_bn:", "    if False:", {}),
        (
            "train_ddp_amp.py",
            "        scaler.unscale_(optimizer)",
            "        pass",
            {"amp_dtype": "float16"},
        ),
    ],
    ids=["set_epoch forgotten", "BatchNorm of each rank alone", "scaled gradients clipped"],
)
def test_a_planted_bug_bends_the_curve(script, line, instead, flags, reference, tmp_path):
    copy = planted(tmp_path, script, line, instead)
    run = run_script(copy, 2, output_dir=tmp_path / "run", **(CURVE | flags))
    assert difference(run, reference) > 1e-6


def test_a_model_seeded_per_rank_is_refused(tmp_path):
    seeded = "    seed_everything(cfg.seed + __import__('os').getpid())"
    copy = planted(tmp_path, "train_ddp.py", "    seed_everything(cfg.seed)", seeded)
    run = run_script(copy, 2, output_dir=tmp_path / "run")
    assert run.code != 0
    assert "the ranks drew different weights" in run.stderr


def test_float32_stays_within_rounding_of_one_process(tmp_path):
    """One epoch, 12 steps: float32's rounding (6e-8) may grow by 10 a step and reach the loss.

    In float64 the same run shows a growth of 1e4 in 24 steps, so 1e-3 leaves room for luck; a
    run that sees other samples is off by more than 1e-2 (the planted bugs above).
    """
    flags = CURVE | {"dtype": "float32", "epochs": 1}
    one = run_script("train_1gpu.py", output_dir=tmp_path / "one", **flags)
    two = run_script("train_ddp.py", 2, output_dir=tmp_path / "two", **flags)
    assert (one.code, two.code) == (0, 0), two.stderr
    assert abs(two.rows[0]["train_loss"] / one.rows[0]["train_loss"] - 1) < 1e-3
