"""Gradient accumulation: the settings of train_ddp_accum.py, and what it communicates."""

import pytest
from torch.nn.parallel import DistributedDataParallel

from tests.forked import fork_script, largest_difference
from utils.accumulation import AccumulationConfig
from utils.checkpoint import read_checkpoint
from utils.config import load_config


def test_micro_batches_need_a_sample_each(monkeypatch, capfd):
    monkeypatch.setenv("WORLD_SIZE", "2")
    flags = ["--global-batch-size=12", "--micro-batches"]
    assert load_config(AccumulationConfig, [*flags, "6"]).micro_batches == 6
    for count, message in (
        ("7", "6 samples per step, too few for 7 micro-batches: pass a smaller --micro-batches"),
        ("0", "micro_batches must be at least 1"),
    ):
        with pytest.raises(SystemExit) as caught:
            load_config(AccumulationConfig, [*flags, count])
        assert caught.value.code == 2 and message in capfd.readouterr().err


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_are_refused(mode, capfd):
    """The gradients of a micro-batch are in memory that the next one's graph overwrites."""
    flags = [f"--compile={mode}", "--micro-batches"]
    assert load_config(AccumulationConfig, [*flags, "1"]).compile == mode
    with pytest.raises(SystemExit):
        load_config(AccumulationConfig, [*flags, "2"])
    assert "pass --compile default, or --micro-batches 1" in capfd.readouterr().err


def test_last_part_may_be_shorter(tmp_path):
    """10 samples in parts of 4, 4 and 2: each is weighted by its number of samples."""
    flags = {"model": "resnet20_gn", "lr": 0.05, "dtype": "float64"}
    flags |= {"global_batch_size": 10, "synthetic_samples": 40, "epochs": 1}
    whole = fork_script("train_1gpu.py", output_dir=tmp_path / "whole", **flags)
    parts = fork_script(
        "train_ddp_accum.py", 1, output_dir=tmp_path / "parts", micro_batches=3, **flags
    )
    ours, theirs = (read_checkpoint(r.output_dir / "last.pt")["model"] for r in (parts, whole))
    assert largest_difference(ours, theirs) < 1e-12
    assert parts.rows[0]["train_loss"] == pytest.approx(whole.rows[0]["train_loss"], rel=1e-9)
    assert parts.rows[0]["train_samples"] == 40


def test_gradients_are_reduced_once_per_step(tmp_path):
    """Only with the last part; the parts before it run under no_sync()."""

    def count_passes():
        real = DistributedDataParallel.forward

        def forward(model, *args):
            if model.training and args:
                with open(tmp_path / "synchronized", "a") as file:
                    file.write(str(int(model.require_backward_grad_sync)))
                assert model.gradient_as_bucket_view  # no copy after the all-reduce
            return real(model, *args)

        DistributedDataParallel.forward = forward

    flags = {"micro_batches": 3, "synthetic_samples": 24, "epochs": 1}
    run = fork_script("train_ddp_accum.py", 1, count_passes, output_dir=tmp_path / "run", **flags)
    assert (run.code, run.stderr) == (0, "")
    assert (tmp_path / "synchronized").read_text() == "001" * 2
