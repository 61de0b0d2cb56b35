"""Mixed precision: bfloat16 under autocast, float16 with a GradScaler."""

import torch

import tasks.images
from tests.forked import assert_resumes, fork_script
from utils.checkpoint import read_checkpoint

# Trains enough in five steps that the loss shows whether clipping saw a scaled gradient.
SETTINGS = {"synthetic_samples": 60, "image_size": 8, "epochs": 1}
SETTINGS |= {"clip_norm": 0.5, "lr": 0.05, "warmup_epochs": 0}


def start_from_scale(scale):
    """For fork_script(before=...): the GradScaler's first scale."""

    def before():
        real = torch.amp.GradScaler
        torch.amp.GradScaler = lambda *args, **kw: real(*args, init_scale=scale, **kw)

    return before


def test_losses_differ_from_float32_by_rounding(tmp_path):
    """Also where the scale of the gradients matters to clip_norm. From PyTorch's first scale,
    float16 would skip the first step, in which a gradient overflows."""
    losses = {}
    for dtype in ("float32", "bfloat16", "float16"):
        flags = SETTINGS | {"output_dir": tmp_path / dtype}
        if dtype == "float32":
            run = fork_script("train_ddp.py", 1, **flags)
        else:
            before = start_from_scale(2.0**10)
            run = fork_script("train_ddp_amp.py", 1, before, amp_dtype=dtype, **flags)
        assert (run.code, run.stderr) == (0, "")
        model = read_checkpoint(tmp_path / dtype / "last.pt")["model"]
        assert {tensor.dtype for tensor in model.values()} == {torch.float32, torch.int64}
        losses[dtype] = run.rows[0]
    for dtype, bits in (("bfloat16", 8), ("float16", 11)):
        for name in ("train_loss", "val_loss"):
            assert 0 < abs(losses[dtype][name] / losses["float32"][name] - 1) < 2.0 ** (3 - bits)


def test_evaluation_runs_in_the_precision_of_training(tmp_path):
    def record_dtypes():
        real = tasks.images.loss

        def spy(outputs, labels):
            training = "training" if outputs.requires_grad else "evaluation"
            with open(tmp_path / "dtypes", "a") as file:
                print(training, outputs.dtype, file=file)
            return real(outputs, labels)

        tasks.images.loss = spy

    run = fork_script("train_ddp_amp.py", 1, record_dtypes, output_dir=tmp_path / "run", **SETTINGS)
    assert (run.code, run.stderr) == (0, "")
    lines = (tmp_path / "dtypes").read_text().splitlines()
    first = lines.index("training torch.bfloat16")
    assert set(lines[:first]) == {"evaluation torch.float32"}  # of check_task()
    assert set(lines[first:]) == {"training torch.bfloat16", "evaluation torch.bfloat16"}


def test_killed_and_resumed_run_matches_an_uninterrupted_one(tmp_path):
    """The GradScaler's state continues as well."""
    flags = {"amp_dtype": "float16", "clip_norm": 1.0, "epochs": 1}
    checkpoint, _ = assert_resumes(tmp_path, "train_ddp_amp.py", 1, **flags)
    assert checkpoint["scaler"]["scale"] > 0
    assert checkpoint["scaler"]["_growth_tracker"] > 3  # more than after the resume alone


def test_overflow_skips_the_update(tmp_path):
    """From a scale that is far too large, the first steps only lower it."""
    flags = SETTINGS | {"amp_dtype": "float16", "output_dir": tmp_path / "run"}
    run = fork_script("train_ddp_amp.py", 2, start_from_scale(2.0**40), **flags)
    assert (run.code, run.stderr) == (0, "")
    checkpoint = read_checkpoint(tmp_path / "run" / "last.pt")
    assert checkpoint["scaler"]["scale"] == 2.0**35
    assert all(tensor.isfinite().all() for tensor in checkpoint["model"].values())
