"""--audit: which samples each epoch trained on."""

import json
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from tests.launch import run_ranks
from utils.audit import AuditedLoader, report
from utils.config import load_config
from utils.data import build_datasets, build_loader
from utils.distributed import dp_world_size
from utils.errors import UserError
from utils.sampler import EpochSampler


def rows(folder):
    return [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]


class FakeLoader(NamedTuple):
    """What report() asks of a loader."""

    output_dir: object
    epoch: int = 0
    dataset: object = range(2)
    resumed_at_step: int = 0


def test_epoch_is_reported_in_a_line_and_a_row(tmp_path, capsys):
    report(torch.tensor([4, 0, 2, 3]), FakeLoader(tmp_path, 2, range(7)))
    out = capsys.readouterr().out
    assert out == "audit: epoch 2 trained on 4 of 7 samples exactly once and dropped 3: 1, 5, 6\n"
    report(torch.arange(7), FakeLoader(tmp_path, 3, range(7), resumed_at_step=5))
    assert "trained on 7 of 7 samples exactly once and dropped 0\n" in capsys.readouterr().out
    assert rows(tmp_path) == [
        {"epoch": 2, "samples": 4, "resumed_at_step": 0, "dropped": 3, "repeated": 0},
        {"epoch": 3, "samples": 7, "resumed_at_step": 5, "dropped": 0, "repeated": 0},
    ]


def test_repeated_samples_are_an_error(tmp_path):
    with pytest.raises(UserError, match=r"on 24 samples more than once: 0, 1, .* and 4 more"):
        report(torch.tensor([*range(25), *range(24), 30]), FakeLoader(tmp_path, 0, range(50)))
    (row,) = rows(tmp_path)
    assert (row["samples"], row["dropped"], row["repeated"]) == (50, 24, 24)


def test_rows_of_an_earlier_attempt_are_replaced(tmp_path):
    for epoch in (0, 1, 2):
        report(torch.tensor([0]), FakeLoader(tmp_path, epoch))
    report(torch.tensor([0, 1]), FakeLoader(tmp_path, 1))
    assert [(row["epoch"], row["samples"]) for row in rows(tmp_path)] == [(0, 1), (1, 2)]
    (tmp_path / "audit.jsonl").write_text("not JSON\n")
    with pytest.raises(UserError, match=r"cannot write .*audit\.jsonl"):
        report(torch.tensor([0]), FakeLoader(tmp_path, 1))


def make_loader(folder, *flags, samples=50, global_batch=7):
    flags = [f"--synthetic-samples={samples}", f"--global-batch-size={global_batch}", *flags]
    flags += ["--dataset=synthetic", "--image-size=8", "--device=cpu", f"--output-dir={folder}"]
    cfg = load_config(argv=flags)
    dataset, _, _ = build_datasets(cfg)
    sampler = EpochSampler(dataset, seed=0)
    if dist.is_initialized():
        sampler = DistributedSampler(dataset, seed=0, drop_last=True)
    batch_size = global_batch // dp_world_size()
    return build_loader(dataset, sampler, batch_size, torch.device("cpu"), cfg, train=True)


def test_epoch_continues_at_another_world_size(tmp_path):
    """Two steps on two ranks, then the third on three."""

    def body(rank, state):
        loader = make_loader(tmp_path, "--audit", samples=20, global_batch=6)
        if state:
            loader.load_state_dict(state)
            return len(list(loader))
        batches = iter(loader)
        next(batches), next(batches)
        return loader.state_dict()

    (first, other) = run_ranks(body, 2, None)
    assert len(first["seen"].unique()) == 12 and first["seen"].equal(other["seen"])
    assert run_ranks(body, 3, first) == [1, 1, 1]
    row = {"epoch": 0, "samples": 18, "resumed_at_step": 2, "dropped": 2, "repeated": 0}
    assert rows(tmp_path) == [row]


def test_repeated_sample_ends_all_ranks(tmp_path):
    def body(rank):
        report(torch.tensor([7, 8, 7]), FakeLoader(tmp_path, 0, range(10)))

    for error in run_ranks(body, 2):
        assert isinstance(error, UserError) and "more than once: 7." in str(error)


def test_epoch_that_began_without_audit_is_reported_as_such(tmp_path, capsys):
    loader = make_loader(tmp_path, "--audit")
    loader.load_state_dict({"step": 3, "global_batch": 7})
    batches = iter(loader)
    next(batches)
    assert loader.state_dict()["seen"] is None
    assert len(list(batches)) == 3
    assert "epoch 0 was resumed from a checkpoint written without" in capsys.readouterr().out
    assert not (tmp_path / "audit.jsonl").exists()
    loader.sampler.set_epoch(1)  # the next epoch is complete
    assert len(list(loader)) == 7
    assert [(row["samples"], row["resumed_at_step"]) for row in rows(tmp_path)] == [(49, 0)]
    loader.load_state_dict({"step": 0, "global_batch": 7})  # written at the end of an epoch
    batches = iter(loader)
    next(batches)
    seen = loader.state_dict()["seen"]
    assert seen.equal(loader.indices) and seen.dtype == torch.int64


def test_loader_audits_what_it_yields(tmp_path, capsys):
    def make(*flags):
        return make_loader(tmp_path, *flags)

    loader, plain = make("--audit"), make()
    assert isinstance(loader, AuditedLoader) and not isinstance(plain, AuditedLoader)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    resumed = make("--audit", "--loader=workers")
    resumed.load_state_dict(state)
    assert len(list(resumed)) == 4
    assert "trained on 49 of 50 samples exactly once and dropped 1: " in capsys.readouterr().out
    assert rows(tmp_path)[0]["resumed_at_step"] == 3
    del state["seen"]  # by a run without --audit
    resumed.load_state_dict(state)
    list(resumed)
    assert "written without --audit" in capsys.readouterr().out
    loader = make("--audit")
    loader.reader.sampler.sampler = [*range(25), *range(25)]
    with pytest.raises(UserError, match="trained on 24 samples more than once"):
        list(loader)
