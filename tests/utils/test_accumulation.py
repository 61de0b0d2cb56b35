"""Gradient accumulation: the settings of train_ddp_accum.py, and what it communicates."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.forked import fork_script
from tests.processes import run_ranks
from utils.config import Config, load_config
from utils.rungs.accumulation import AccumulationSettings, RunningStatistics


def settings(*flags):
    return load_config(Config, AccumulationSettings, ["--global-batch-size=12", *flags])


def test_each_micro_batch_has_a_sample(monkeypatch, capfd):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert settings("--micro-batches=6").micro_batches == 6
    with pytest.raises(SystemExit, match="2"):
        settings("--micro-batches=7")
    assert "7 micro-batches" in capfd.readouterr().err


class Taught(nn.Linear):
    """Its teacher, which nothing trains, follows it."""

    def __init__(self):
        super().__init__(3, 2)
        self.teacher = nn.Linear(3, 2).requires_grad_(False)

    def forward(self, inputs):
        self.teacher.weight.data.lerp_(self.weight.data, 0.1)
        return super().forward(inputs)


def start_guard(model, *flags):
    checkpoint = SimpleNamespace(model=model, cfg=settings(*flags))
    guard = RunningStatistics()
    guard.at_start(checkpoint)
    return guard, checkpoint


def test_modules_with_running_statistics_are_named(capsys):
    model = nn.Sequential(nn.Conv1d(2, 4, 1), nn.BatchNorm1d(4), nn.Linear(3, 3), Taught())
    guard, checkpoint = start_guard(model, "--micro-batches=2")
    for _ in range(2):
        model(torch.randn(2, 2, 3))
        guard.after_step(checkpoint)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith(": 1, 3.teacher")


def test_ranks_of_a_pipeline_compare_what_each_holds():
    """Some may hold no buffer at all."""

    def body(rank):
        model = nn.BatchNorm1d(4) if rank == 0 else nn.Linear(4, 2)
        guard, checkpoint = start_guard(model, "--micro-batches=2")
        model(torch.randn(2, 4))
        guard.after_step(checkpoint)

    assert run_ranks(body, 2) == [None, None]


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
