"""--audit: which samples each epoch has trained."""

import json

import pytest
import torch

from tests.launch import run_ranks
from utils.audit import Audit, AuditedLoader
from utils.config import load_config
from utils.data import build_datasets, build_loader
from utils.errors import UserError
from utils.sampler import EpochSampler


def rows(folder):
    return [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]


def audited(*batches):
    audit = Audit()
    for batch in batches:
        audit.add(torch.tensor(batch))
    return audit


def test_epoch_is_reported_in_a_line_and_a_row(tmp_path, capsys):
    audit = audited([4, 0], [2, 3])
    audit.finish(2, 7, tmp_path)
    out = capsys.readouterr().out
    assert out == "audit: epoch 2 trained 4 of 7 samples exactly once and dropped 3: 1, 5, 6\n"
    audit.add(torch.arange(7))
    audit.finish(3, 7, tmp_path)
    assert "trained 7 of 7 samples exactly once and dropped 0\n" in capsys.readouterr().out
    assert rows(tmp_path) == [
        {"epoch": 2, "samples": 4, "resumed_at_step": 0, "dropped": 3, "repeated": 0},
        {"epoch": 3, "samples": 7, "resumed_at_step": 0, "dropped": 0, "repeated": 0},
    ]


def test_repeated_samples_are_an_error(tmp_path):
    audit = audited([*range(25)], [*range(24), 30])
    with pytest.raises(UserError, match=r"trained 24 samples more than once: 0, 1, .* and 4 more"):
        audit.finish(0, 50, tmp_path)
    (row,) = rows(tmp_path)
    assert (row["samples"], row["dropped"], row["repeated"]) == (50, 24, 24)


def test_rows_of_an_earlier_attempt_are_replaced(tmp_path):
    for epoch in (0, 1, 2):
        audited([0]).finish(epoch, 2, tmp_path)
    audited([0, 1]).finish(1, 2, tmp_path)
    assert [(row["epoch"], row["samples"]) for row in rows(tmp_path)] == [(0, 1), (1, 2)]
    (tmp_path / "audit.jsonl").write_text("not JSON\n")
    with pytest.raises(UserError, match=r"cannot write .*audit\.jsonl"):
        audited([0]).finish(1, 2, tmp_path)


def test_epoch_continues_at_another_world_size(tmp_path):
    """Two batches on two ranks, then two on three, of 12 samples in all."""

    def body(rank, world_size, first, saved):
        audit = Audit()
        if saved is not None:
            audit.load(saved, step=2)
        for step in range(2):
            start = first + 2 * world_size * step
            audit.add(torch.arange(start + rank, start + 2 * world_size, world_size))
        state = audit.state()
        if first:
            audit.finish(0, 21, tmp_path)
        return sorted(state.tolist())

    (first, other) = run_ranks(body, 2, 2, 0, None)
    assert first == other == list(range(8))
    assert run_ranks(body, 3, 3, 8, torch.tensor(first)) == [list(range(20))] * 3
    row = {"epoch": 0, "samples": 20, "resumed_at_step": 2, "dropped": 1, "repeated": 0}
    assert rows(tmp_path) == [row]


def test_repeated_sample_ends_all_ranks(tmp_path):
    def body(rank):
        audited([7, 8 + rank]).finish(0, 10, tmp_path)

    for error in run_ranks(body, 2):
        assert isinstance(error, UserError) and "more than once: 7." in str(error)


def test_epoch_that_began_without_audit_is_reported_as_such(tmp_path, capsys):
    audit = Audit()
    audit.load(None, step=3)
    audit.add(torch.tensor([1]))
    assert audit.state() is None
    audit.finish(4, 2, tmp_path)
    assert (
        "epoch 4 was resumed from a checkpoint written without --audit" in capsys.readouterr().out
    )
    assert not (tmp_path / "audit.jsonl").exists()
    audit.add(torch.tensor([0, 1]))  # the next epoch is complete
    audit.finish(5, 2, tmp_path)
    assert [(row["samples"], row["resumed_at_step"]) for row in rows(tmp_path)] == [(2, 0)]
    audit.load([])  # a checkpoint written at the end of an epoch
    audit.add(torch.tensor([1]))
    assert audit.state().tolist() == [1] and audit.state().dtype == torch.int64


def test_loader_audits_what_it_yields(tmp_path, capsys):
    flags = ["--dataset=synthetic", "--synthetic-samples=50", "--image-size=8", "--device=cpu"]
    flags += ["--global-batch-size=7", f"--output-dir={tmp_path}"]

    def make(*more):
        cfg = load_config(argv=[*flags, *more])
        dataset, _, _ = build_datasets(cfg)
        sampler = EpochSampler(dataset, seed=0)
        return build_loader(dataset, sampler, 7, torch.device("cpu"), cfg, train=True)

    loader, plain = make("--audit"), make()
    assert isinstance(loader, AuditedLoader) and not isinstance(plain, AuditedLoader)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    resumed = make("--audit", "--loader=workers")
    resumed.load_state_dict(state)
    assert len(list(resumed)) == 4
    assert "trained 49 of 50 samples exactly once and dropped 1: " in capsys.readouterr().out
    assert rows(tmp_path)[0]["resumed_at_step"] == 3
    del state["seen"]  # by a run without --audit
    resumed.load_state_dict(state)
    list(resumed)
    assert "written without --audit" in capsys.readouterr().out
    loader = make("--audit")
    loader.reader.sampler.sampler = [*range(25), *range(25)]
    with pytest.raises(UserError, match="trained 24 samples more than once"):
        list(loader)
