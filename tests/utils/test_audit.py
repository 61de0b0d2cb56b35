"""--audit: which samples each epoch trained on."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

import tasks.images
from tests.processes import run_ranks
from utils.config import load_config
from utils.data import build_loader
from utils.distributed import dp_world_size
from utils.errors import UserError
from utils.options.audit import Audit, report
from utils.sampler import EpochSampler


def rows(folder):
    return [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]


def fake_loader(epoch=0, samples=2):
    """What report() asks of a loader."""
    return SimpleNamespace(epoch=epoch, dataset=range(samples))


def test_epoch_is_reported_in_a_line_and_a_row(tmp_path, capsys):
    report(torch.tensor([4, 0, 2, 3]), fake_loader(2, 7), tmp_path)
    out = capsys.readouterr().out
    assert "epoch 2 " in out and "4 of 7 samples" in out
    assert out.endswith(" 3: 1, 5, 6\n")
    assert out.count("\n") == 1
    report(torch.arange(7), fake_loader(3, 7), tmp_path, resumed_at_step=5)
    out = capsys.readouterr().out
    assert "epoch 3 " in out and "7 of 7 samples" in out
    assert out.endswith(" 0\n")
    assert out.count("\n") == 1
    first, second = rows(tmp_path)
    assert first == dict(epoch=2, samples=4, resumed_at_step=0, dropped=3, repeated=0)
    assert second == dict(epoch=3, samples=7, resumed_at_step=5, dropped=0, repeated=0)


def test_repeated_samples_are_an_error(tmp_path):
    with pytest.raises(UserError, match=r"epoch 0 .*24 samples.*: 0, 1, .* 4 more"):
        report(torch.tensor([*range(25), *range(24), 30]), fake_loader(0, 50), tmp_path)
    (row,) = rows(tmp_path)
    assert (row["samples"], row["dropped"], row["repeated"]) == (50, 24, 24)


def test_rows_of_an_earlier_attempt_are_replaced(tmp_path):
    for epoch in (0, 1, 2):
        report(torch.tensor([0]), fake_loader(epoch), tmp_path)
    report(torch.tensor([0, 1]), fake_loader(1), tmp_path)
    assert [(row["epoch"], row["samples"]) for row in rows(tmp_path)] == [(0, 1), (1, 2)]
    (tmp_path / "audit.jsonl").write_text("not JSON\n")
    with pytest.raises(UserError, match=r"cannot write .*audit\.jsonl"):
        report(torch.tensor([0]), fake_loader(1), tmp_path)


class Run:
    """A loader and its audit: what a Checkpointer with that hook does."""

    def __init__(self, folder, *flags, samples=50, global_batch=7):
        flags = [f"--synthetic-samples={samples}", f"--global-batch-size={global_batch}", *flags]
        flags += ["--dataset=synthetic", "--image-size=8", "--device=cpu", f"--output-dir={folder}"]
        cfg = load_config(tasks.images.Settings, argv=flags)
        dataset, _ = tasks.images.build_datasets(cfg)
        self.sampler = EpochSampler(dataset, seed=0)
        if dist.is_initialized():
            self.sampler = DistributedSampler(dataset, seed=0, drop_last=True)
        batch_size, device = global_batch // dp_world_size(), torch.device("cpu")
        self.loader = build_loader(dataset, self.sampler, batch_size, device, cfg, train=True)
        self.audit = Audit(cfg, {"loader": self.loader})

    def load(self, state):
        self.loader.load_state_dict(state[0])
        if state[1] is not None:
            self.audit.load_state_dict(state[1])
        self.audit.after_load(None)

    def steps(self, count=10**6):
        """Take up to `count` steps of an epoch. Returns how many, and the state after them."""
        taken = 0
        for _ in self.loader:
            self.audit.after_step(None)
            taken += 1
            if taken == count:
                break
        return taken, (self.loader.state_dict(), self.audit.state_dict())


def test_epoch_continues_at_another_world_size(tmp_path):
    """Two steps on two ranks, then the third on three."""

    def body(rank, state):
        run = Run(tmp_path, samples=20, global_batch=6)
        if state:
            run.load(state)
        return run.steps(2)

    (first, other) = run_ranks(body, 2, None)
    seen = first[1][1]["seen"]
    assert len(seen.unique()) == 12 and seen.equal(other[1][1]["seen"])
    assert [taken for taken, _ in run_ranks(body, 3, first[1])] == [1, 1, 1]
    row = {"epoch": 0, "samples": 18, "resumed_at_step": 2, "dropped": 2, "repeated": 0}
    assert rows(tmp_path) == [row]


def test_repeated_sample_ends_all_ranks(tmp_path):
    def body(rank):
        report(torch.tensor([7, 8, 7]), fake_loader(0, 10), tmp_path)

    for error in run_ranks(body, 2):
        assert isinstance(error, UserError) and "more than once: 7." in str(error)


def test_epoch_that_began_without_audit_is_reported_as_such(tmp_path, capsys):
    run = Run(tmp_path)
    run.load(({"step": 3, "global_batch": 7}, None))
    _, (position, state) = run.steps(1)
    assert state == {}  # so that the next part does not count as a whole, either
    run.load((position, state))
    assert run.steps()[0] == 3
    out = capsys.readouterr().out
    assert "epoch 0 " in out and "without --audit" in out
    assert not (tmp_path / "audit.jsonl").exists()
    run.sampler.set_epoch(1)  # the next epoch is complete
    assert run.steps()[0] == 7
    assert [(row["samples"], row["resumed_at_step"]) for row in rows(tmp_path)] == [(49, 0)]
    run = Run(tmp_path)
    run.load(({"step": 0, "global_batch": 7}, None))  # written at the end of an epoch
    _, (_, state) = run.steps(1)
    assert state["seen"].equal(run.loader.indices) and state["seen"].dtype == torch.int64


def test_epoch_is_audited_over_a_resume(tmp_path, capsys):
    run = Run(tmp_path)
    taken, state = run.steps(3)
    assert run.loader.name == "device" and taken == 3
    resumed = Run(tmp_path, "--loader=workers")
    resumed.load(state)
    assert resumed.steps()[0] == 4
    out = capsys.readouterr().out
    assert "49 of 50 samples" in out and " 1: " in out
    assert rows(tmp_path)[0]["resumed_at_step"] == 3


def test_sampler_that_repeats_samples_is_noticed(tmp_path):
    run = Run(tmp_path)
    run.loader.sampler = [*range(25), *range(25)]
    with pytest.raises(UserError, match=r"epoch 0 .*24 samples .*: 0, 1, .* 4 more"):
        run.steps()
