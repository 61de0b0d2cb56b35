"""Mixed precision: bfloat16 under autocast, float16 with a GradScaler."""

import pytest
import torch

import tasks.images
from tests.forked import assert_resumes, fork_script
from utils.checkpoint import read_checkpoint
from utils.config import Config, load_config
from utils.rungs.amp import AmpSettings

SETTINGS = {"synthetic_samples": 60, "image_size": 8, "clip_norm": 0.5}


def start_from_scale(scale):
    """For fork_script(before=...): the GradScaler's first scale."""

    def before():
        real = torch.amp.GradScaler
        torch.amp.GradScaler = lambda *args, **kw: real(*args, init_scale=scale, **kw)

    return before


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """The losses of the second epoch, by precision; a gradient scale matters to clip_norm. From
    PyTorch's first scale, float16 would skip the first step, in which a gradient overflows."""
    result = {}
    for name, script, flags in (
        ("float32", "train_ddp.py", SETTINGS),
        ("bfloat16", "train_ddp_amp.py", SETTINGS),
        ("float16", "train_ddp_amp.py", SETTINGS | {"amp_dtype": "float16"}),
    ):
        folder = tmp_path_factory.mktemp(name) / "run"
        run = fork_script(script, 2, start_from_scale(2.0**10), output_dir=folder, **flags)
        assert (run.code, run.stderr) == (0, "")
        result[name] = run.rows[1]["train_loss"], run.rows[1]["val_loss"]
        dtypes = {t.dtype for t in read_checkpoint(folder / "last.pt")["model"].values()}
        assert dtypes == {torch.float32, torch.int64}
    return result


@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", 8), ("float16", 11)])
def test_losses_differ_from_float32_by_rounding(dtype, bits, losses):
    for ours, exact in zip(losses[dtype], losses["float32"], strict=True):
        assert 0 < abs(ours / exact - 1) < 2.0 ** (3 - bits)


def test_evaluation_runs_in_the_precision_of_training(tmp_path):
    def record_dtypes():
        real = tasks.images.loss

        def spy(outputs, labels):
            training = "training" if outputs.requires_grad else "evaluation"
            with open(tmp_path / "dtypes", "a") as file:
                print(training, outputs.dtype, file=file)
            return real(outputs, labels)

        tasks.images.loss = spy

    flags = SETTINGS | {"epochs": 1}
    run = fork_script("train_ddp_amp.py", 1, record_dtypes, output_dir=tmp_path / "run", **flags)
    assert (run.code, run.stderr) == (0, "")
    lines = (tmp_path / "dtypes").read_text().splitlines()
    first = lines.index("training torch.bfloat16")
    assert set(lines[:first]) == {"evaluation torch.float32"}  # of check_task()
    assert set(lines[first:]) == {"training torch.bfloat16", "evaluation torch.bfloat16"}


def test_settings(capfd):
    assert load_config(Config, AmpSettings, []).autocast_dtype is torch.bfloat16
    flags = ["--amp-dtype=float16"]
    assert load_config(Config, AmpSettings, flags).autocast_dtype is torch.float16
    with pytest.raises(SystemExit, match="2"):
        load_config(Config, AmpSettings, [*flags, "--max-skipped-steps=1"])
    error = capfd.readouterr().err
    assert "--max-skipped-steps" in error and "bfloat16" in error


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_killed_and_resumed_run_matches_an_uninterrupted_one(dtype, tmp_path):
    """With float16, the GradScaler's state continues as well."""
    flags = {"amp_dtype": dtype, "clip_norm": 1.0, "epochs": 2 if dtype == "float16" else 1}
    checkpoint, _ = assert_resumes(tmp_path, "train_ddp_amp.py", 2, **flags)
    if dtype == "float16":
        assert checkpoint["scaler"]["scale"] > 0 and checkpoint["scaler"]["_growth_tracker"] > 5
    else:
        assert checkpoint["scaler"] == {}


def test_overflow_skips_the_update(tmp_path):
    """From a scale that is far too large, the first steps only lower it."""
    flags = SETTINGS | {"amp_dtype": "float16", "epochs": 1, "global_batch_size": 2, "lr": 0.001}
    before = start_from_scale(2.0**40)
    run = fork_script("train_ddp_amp.py", 2, before, output_dir=tmp_path / "run", **flags)
    assert run.code == 0, run.stderr
    checkpoint = read_checkpoint(tmp_path / "run" / "last.pt")
    assert checkpoint["scaler"]["scale"] < 2.0**40
    assert all(t.isfinite().all() for t in checkpoint["model"].values())
    assert run.stderr == ""
