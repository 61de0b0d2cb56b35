"""sources/samplers.py: samplers that are divided among the ranks, as the recipes promise it."""

import re

import pytest
import torch
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from sources import samplers
from sources.samplers import DistributedSamplerWrapper, LengthBuckets
from tasks import text
from tests.forked import ROUNDING, killed_at, largest_difference
from tests.recipes import applied, apply, run_text_to_end, run_to_end
from tools.lib.ladder import ROOT
from tools.verify.run import project_with_task
from utils.config import load_config
from utils.errors import UserError

WEIGHTS = torch.arange(1.0, 41.0)
SAMPLERS = [
    WeightedRandomSampler(WEIGHTS, 50),
    WeightedRandomSampler(WEIGHTS, 30, replacement=False),
    SubsetRandomSampler(range(10, 35)),
    RandomSampler(range(40)),
    LengthBuckets(WEIGHTS % 7, 6, batches=3),
]


def shares_of(sampler, ranks, epoch, monkeypatch):
    """What each of the ranks gets, as lists."""
    monkeypatch.setattr(samplers, "dp_world_size", lambda: ranks)
    result = []
    for rank in range(ranks):
        monkeypatch.setattr(samplers, "dp_rank", lambda rank=rank: rank)
        share = DistributedSamplerWrapper(sampler, seed=5)
        share.set_epoch(epoch)
        result.append(list(share))
        assert len(share) == len(result[-1]) == len(sampler) // ranks
    return result


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: type(sampler).__name__)
def test_ranks_divide_one_order(sampler, monkeypatch):
    """That of one process, dealt in turns; it changes with the epoch and the seed alone."""
    torch.manual_seed(0)
    state = torch.get_rng_state()
    [whole] = shares_of(sampler, 1, 2, monkeypatch)
    assert len(whole) == len(sampler)
    end = len(whole) // 3 * 3  # what cannot be divided is left out
    for rank, share in enumerate(shares_of(sampler, 3, 2, monkeypatch)):
        assert share == whole[rank:end:3]
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert shares_of(sampler, 1, 2, monkeypatch) == [whole]
    assert shares_of(sampler, 1, 3, monkeypatch) != [whole]


def test_set_epoch_reaches_the_sampler(monkeypatch):
    inner = DistributedSampler(range(40), 1, 0, seed=5)
    [first] = shares_of(inner, 1, 7, monkeypatch)
    generator = torch.Generator().manual_seed(5 + 7)
    assert first == torch.randperm(40, generator=generator).tolist()


def test_sampler_that_cannot_be_resumed_is_refused():
    generator = torch.Generator().manual_seed(0)
    sampler = WeightedRandomSampler(WEIGHTS, 50, generator=generator)
    share = DistributedSamplerWrapper(sampler, seed=0)
    with pytest.raises(UserError, match=r"WeightedRandomSampler .*different indices .* generator$"):
        share.describe()


def test_wrong_length_is_refused():
    class Short(RandomSampler):
        def __iter__(self):
            return iter([1, 2, 3])

    with pytest.raises(UserError, match=r"Short has yielded 3 .* 40: "):
        list(DistributedSamplerWrapper(Short(range(40)), seed=0))


def test_other_weights_have_another_checksum():
    def checksum(weights):
        share = DistributedSamplerWrapper(WeightedRandomSampler(weights, 50), seed=0)
        return share.describe()["train_order"]

    assert checksum(WEIGHTS) == checksum(WEIGHTS.clone())
    assert checksum(WEIGHTS) != checksum(WEIGHTS.flip(0))


def test_samples_of_a_global_batch_have_similar_lengths(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 1000, (1007,), generator=generator)
    buckets = LengthBuckets(lengths, batch_size=20, batches=25)
    [order] = shares_of(buckets, 1, 0, monkeypatch)
    assert sorted(order) == list(range(1007))
    batches = lengths[order][:1000].view(50, 20)
    spread = batches.amax(1) - batches.amin(1)
    assert spread.float().mean() < 60  # of 1000; by chance 900
    assert not torch.equal(batches[:, 0].sort()[0], batches[:, 0])  # the batches are mixed
    # Two ranks take every other sample: their longest ones have about the same length.
    of_ranks = batches.view(50, 10, 2).amax(1)
    assert of_ranks.diff().abs().float().mean() < 10
    [again] = shares_of(buckets, 1, 1, monkeypatch)
    assert set(again[1000:]) != set(order[1000:])  # those that fill no batch


@pytest.mark.slow
def test_weighted_runs_train_the_same_weights(tmp_path):
    folder = applied("samplers", tmp_path / "copy")
    _, one = run_to_end(folder / "train_ddp.py", 1, tmp_path / "one")
    _, plain = run_to_end("train_ddp.py", 1, tmp_path / "plain")
    assert largest_difference(one["model"], plain["model"]) > 1e-3
    _, two = run_to_end(folder / "train_ddp.py", 2, tmp_path / "two")
    assert largest_difference(two["model"], one["model"]) < ROUNDING


@pytest.mark.slow
def test_length_buckets_train_the_same_weights(tmp_path):
    folder = project_with_task("text", tmp_path / "copy")
    assert not apply("length-buckets", folder)
    script = folder / "train_ddp.py"
    _, one = run_text_to_end(script, 1, tmp_path / "one")
    run_text_to_end(script, 2, tmp_path / "killed", killed_at(1, 3), save_steps=2)
    _, end = run_text_to_end(script, 3, tmp_path / "killed")
    assert largest_difference(end["model"], one["model"]) < ROUNDING


def test_padding_of_the_page():
    """The numbers of docs/recipes/length-buckets.md, of a text that grows with this project."""
    cfg = load_config(text.Settings, argv=["--padding=longest", "--context=512"])
    size = cfg.global_batch_size
    lengths = torch.tensor([len(piece) - 1 for piece in text.build_datasets(cfg)[0].pieces])

    def padded(order):
        batches = lengths[order[: len(order) // size * size]].view(-1, size)
        return float(batches.amax(1).sum() * size / batches.sum())

    page = (ROOT / "docs" / "recipes" / "length-buckets.md").read_text()
    stated = re.search(r"hold ([\d.]+) times\s.*?these ([\d.]+) times", page, re.DOTALL)
    buckets = DistributedSamplerWrapper(LengthBuckets(lengths, size), seed=0)
    assert padded(torch.randperm(len(lengths))) == pytest.approx(float(stated[1]), abs=0.1)
    assert padded(buckets.draw()) == pytest.approx(float(stated[2]), abs=0.1)
