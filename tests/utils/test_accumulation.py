"""Gradient accumulation: the settings of train_ddp_accum.py, and what it communicates."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tasks.images
from tests.forked import ROUNDING, fork_script, largest_difference
from tests.processes import run_ranks
from utils.checkpoint import read_checkpoint
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


def test_cuda_graphs_are_refused(capfd):
    """The gradients of a micro-batch are in memory that the next one's graph overwrites."""
    assert settings("--compile=max-autotune").micro_batches == 1
    with pytest.raises(SystemExit, match="2"):
        settings("--compile=max-autotune", "--micro-batches=2")
    assert "--compile default" in capfd.readouterr().err


def test_last_part_may_be_shorter(tmp_path):
    """10 samples in parts of 4, 3 and 3: each is weighted by its number of samples."""
    flags = {"model": "resnet20_gn", "lr": 0.05, "dtype": "float64"}
    flags |= {"global_batch_size": 10, "synthetic_samples": 40, "epochs": 1}
    whole = fork_script("train_1gpu.py", output_dir=tmp_path / "whole", **flags)
    parts = fork_script(
        "train_ddp_accum.py", 1, output_dir=tmp_path / "parts", micro_batches=3, **flags
    )
    ours, theirs = (read_checkpoint(r.output_dir / "last.pt")["model"] for r in (parts, whole))
    assert largest_difference(ours, theirs) < ROUNDING
    assert parts.rows[0]["train_loss"] == pytest.approx(whole.rows[0]["train_loss"], rel=ROUNDING)
    assert parts.rows[0]["train_samples"] == 40


class Sentences(torch.utils.data.Dataset):
    """Samples of very different lengths: 1 to 13 tokens, each with a class."""

    def __init__(self, count):
        self.lengths = torch.randint(1, 14, (count,), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        tokens = torch.arange(self.lengths[index]) * (index + 1) % 7
        return tokens, (tokens + index) % 5

    def collate_fn(self, samples):
        inputs, targets = zip(*samples, strict=True)
        pad = nn.utils.rnn.pad_sequence
        return pad(inputs, batch_first=True), pad(targets, batch_first=True, padding_value=-100)


def train_on_sentences():
    """For fork_script(before=...): a task whose batches have different numbers of targets."""

    def build_model(cfg, train_set):
        return nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 5))

    def loss(outputs, targets):
        outputs, targets = outputs.flatten(0, 1), targets.flatten()
        return nn.functional.cross_entropy(outputs, targets, ignore_index=-100, reduction="sum")

    def measure(outputs, targets):
        return {"correct": (outputs.argmax(2) == targets).sum()}

    tasks.images.build_datasets = lambda cfg: (Sentences(48), Sentences(8))
    tasks.images.build_model, tasks.images.loss, tasks.images.measure = build_model, loss, measure
    tasks.images.count = lambda targets: (targets >= 0).sum()
    tasks.images.describe = lambda train_set, val_set: {"train_samples": 48}


def test_micro_batches_with_different_numbers_of_targets_equal_one_batch(tmp_path):
    """The loss is divided by the number of targets of all micro-batches on all ranks, where a mean
    of their means would weigh the targets of short sentences more."""
    flags = {"dtype": "float64", "lr": 0.5, "epochs": 2, "clip_norm": 1.0}
    whole, *others = (
        fork_script(script, nproc, train_on_sentences, output_dir=tmp_path / name, **flags | count)
        for name, script, nproc, count in (
            ("whole", "train_1gpu.py", None, {}),
            ("one", "train_ddp_accum.py", 1, {"micro_batches": 4}),
            ("two", "train_ddp_accum.py", 2, {"micro_batches": 4}),  # of 2, 2, 1 and 1 sentences
        )
    )
    expected = read_checkpoint(whole.output_dir / "last.pt")["model"]
    for run in others:
        assert (run.code, run.stderr) == (0, "")
        model = read_checkpoint(run.output_dir / "last.pt")["model"]
        assert largest_difference(model, expected) < ROUNDING
        for name in ("train_loss", "val_loss", "train_accuracy"):
            assert run.rows[1][name] == pytest.approx(whole.rows[1][name], rel=ROUNDING)


class Cached(nn.Linear):
    def forward(self, inputs):
        self.cache = inputs.detach()
        return super().forward(inputs)


class Taught(nn.Linear):
    """Its teacher, which nothing trains, follows it."""

    def __init__(self):
        super().__init__(3, 2)
        self.teacher = nn.Linear(3, 2).requires_grad_(False)

    def forward(self, inputs):
        self.teacher.weight.data.lerp_(self.weight.data, 0.1)
        return super().forward(inputs)


def test_modules_with_running_statistics_are_named(capsys):
    cached = Cached(3, 3)
    cached.register_buffer("cache", torch.zeros(1), persistent=False)
    model = nn.Sequential(nn.Conv1d(2, 4, 1), nn.BatchNorm1d(4), cached, Taught())
    checkpoint = SimpleNamespace(model=model, cfg=settings("--micro-batches=2"))
    guard = RunningStatistics()
    guard.at_start(checkpoint)
    for _ in range(2):
        model(torch.randn(2, 2, 3))
        guard.after_step(checkpoint)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith(": 1, 3.teacher")


def test_one_micro_batch_has_the_statistics_of_the_batch(capsys):
    model = nn.BatchNorm1d(4)
    checkpoint = SimpleNamespace(model=model, cfg=settings())
    guard = RunningStatistics()
    guard.at_start(checkpoint)
    model(torch.randn(2, 4))
    guard.after_step(checkpoint)
    assert capsys.readouterr().out == ""


def test_ranks_of_a_pipeline_compare_what_each_holds():
    """Some may hold no buffer at all."""

    def body(rank):
        model = nn.BatchNorm1d(4) if rank == 0 else nn.Linear(4, 2)
        checkpoint = SimpleNamespace(model=model, cfg=settings("--micro-batches=2"))
        guard = RunningStatistics()
        guard.at_start(checkpoint)
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
