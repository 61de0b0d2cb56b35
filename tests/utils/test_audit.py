"""--audit: which samples each epoch trained on."""

import json
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from tests.processes import run_ranks
from utils.config import Config
from utils.data import build_loader
from utils.distributed import dp_world_size
from utils.errors import UserError
from utils.options.audit import Audit
from utils.sampler import EpochSampler


def rows(folder):
    return [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]


class Run:
    """A loader and its audit, as with a Checkpointer."""

    def __init__(self, folder, samples=50, global_batch=7, state=None, step=0):
        cfg = Config(global_batch_size=global_batch, num_workers=0)
        dataset = range(samples)
        self.sampler = EpochSampler(dataset, seed=0)
        if dist.is_initialized():
            self.sampler = DistributedSampler(dataset, seed=0, drop_last=True)
        batch_size, device = global_batch // dp_world_size(), torch.device("cpu")
        self.loader = build_loader(dataset, self.sampler, batch_size, device, cfg, train=True)
        self.loader.step, self.audit = step, Audit()
        self.checkpoint = SimpleNamespace(state={"loader": self.loader}, folder=folder, epoch=0)
        if state:
            self.audit.load_state_dict(state)
        self.audit.at_start(self.checkpoint)

    def steps(self, count=10**6):
        """Take up to `count` steps of an epoch. Returns how many."""
        first = self.loader.step
        for _ in self.loader:
            self.loader.advance()
            self.audit.after_step(self.checkpoint)
            if self.loader.step == first + count:
                break
        return self.loader.step - first


def test_epoch_is_reported_in_a_line_and_a_row(tmp_path, capsys):
    run = Run(tmp_path)
    assert run.steps() == 7
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and "epoch 0" in out and "49 of 50" in out
    run.loader.step = 0
    run.sampler.set_epoch(1)
    run.steps()
    row = {"samples": 49, "resumed_at_step": 0, "dropped": 1, "repeated": 0}
    assert rows(tmp_path) == [{"epoch": 0, **row}, {"epoch": 1, **row}]


def test_epoch_that_a_break_ends_is_reported_when_it_is_saved(tmp_path):
    run = Run(tmp_path)
    run.steps(2)
    run.checkpoint.epoch = 1  # the first one was not saved
    run.steps(3)
    run.audit.before_save(run.checkpoint, between_steps=True)
    assert not (tmp_path / "audit.jsonl").exists()
    run.audit.before_save(run.checkpoint, between_steps=False)
    run.audit.before_save(run.checkpoint, between_steps=False)
    (row,) = rows(tmp_path)
    assert (row["samples"], row["dropped"]) == (21, 29)


def test_epoch_continues_at_another_world_size(tmp_path):
    """Two steps on two ranks, then the third on three."""

    def first(rank):
        run = Run(tmp_path, samples=20, global_batch=6)
        run.steps(2)
        return run.audit.state_dict()

    def second(rank):
        return Run(tmp_path, samples=20, global_batch=6, state=state, step=2).steps()

    state, same = run_ranks(first, 2)
    assert len(state["seen"].unique()) == 12 and state["seen"].equal(same["seen"])
    assert run_ranks(second, 3) == [1, 1, 1]
    row = {"epoch": 0, "samples": 18, "resumed_at_step": 2, "dropped": 2, "repeated": 0}
    assert rows(tmp_path) == [row]


def test_sampler_that_repeats_samples_ends_all_ranks(tmp_path):
    def body(rank):
        run = Run(tmp_path, global_batch=6)
        run.loader.sampler = [7, 8, 9] * 3  # the same for both ranks
        run.steps()

    for error in run_ranks(body, 2):
        assert isinstance(error, UserError) and "7, 8, 9" in str(error)
    assert rows(tmp_path)[0]["repeated"] == 3


def test_epoch_that_began_without_audit_is_reported_as_such(tmp_path, capsys):
    run = Run(tmp_path, step=3)
    run.steps(1)
    state = run.audit.state_dict()
    assert state["seen"] is None
    run = Run(tmp_path, state=state, step=4)  # does not count as a whole, either
    assert run.steps() == 3
    assert "without --audit" in capsys.readouterr().out
    run.loader.step = 0
    run.sampler.set_epoch(1)  # the next epoch is complete
    run.steps()
    assert [row["epoch"] for row in rows(tmp_path)] == [1]
