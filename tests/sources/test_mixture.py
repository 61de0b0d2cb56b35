"""sources/mixture.py: each source gives its share, in an order that (seed, epoch) alone decides."""

import copy
import random
import re
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, Subset

from sources.mixture import Mixture
from sources.samplers import ShardOrder
from sources.shards import Shards
from sources.streams import Streamed
from tests.forked import ROUNDING, fork_script, killed_at, largest_difference
from tests.recipes import TEXT, import_new, with_task
from tools.lib.edits import changed
from tools.lib.ladder import ROOT
from tools.shards import write_json_lines
from tools.verify.run import project_with_task
from utils.checkpoint import read_checkpoint
from utils.data import BatchDataset
from utils.errors import UserError

SEED = 5


def of(size):
    """The settings of a run."""
    return SimpleNamespace(global_batch_size=size)


class Named(Dataset):
    """Samples (number of the dataset, index, a random number of torch, one of Python)."""

    def __init__(self, number, size):
        self.number, self.size = number, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        drawn = [torch.rand(()).double(), random.random()]
        return torch.tensor([self.number, index, *drawn], dtype=torch.float64)


class Counted(IterableDataset):
    """Samples (3, index, number of the pass, 0) of a stream."""

    epoch = 0

    def __init__(self, first=0):
        self.first = first

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for index in range(self.first, 10):
            yield torch.tensor([3, index, self.epoch, 0], dtype=torch.float64)


def batches(mixture, epoch, ranks=1, first=0):
    """The global batches of an epoch, (batches, samples, 4), put together from those of ranks."""
    result = []
    for rank in range(ranks):
        copied = copy.deepcopy(mixture)  # as in a process of its own
        sampler = DistributedSampler(copied, ranks, rank, shuffle=False, drop_last=True)
        sampler.set_epoch(epoch)
        own = torch.tensor(list(sampler)).split(mixture.global_batch_size // ranks)
        made = [copied.get_batch(indices, epoch, SEED) for indices in own[first:]]
        result.append(torch.stack(made))
    return torch.stack(result, 2).flatten(1, 2)


def two(sizes=(40, 25), weights=(3, 1), batch_size=6, **options):
    sources = {f"source{n}": Named(n, size) for n, size in enumerate(sizes)}
    if weights is not None:
        weights = dict(zip(sources, weights, strict=True))
    return Mixture(sources, weights, cfg=of(batch_size), **options)


def assert_exact(counts, weights, batch_size):
    """After every step, each source has given its share, to less than a sample."""
    steps = numpy.arange(1, len(counts) + 1)
    expected = numpy.outer(steps * batch_size, numpy.array(weights) / sum(weights))
    assert abs(counts.cumsum(0) - expected).max() < 1


@pytest.mark.parametrize("weights", [(3, 1), (1, 0, 0.1), (50, 1, 1, 1, 0.3)], ids=str)
@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_shares_are_exact_after_every_step(weights, batch_size):
    counts = two([40] * len(weights), weights, batch_size, samples=700).counts(0)
    assert len(counts) == 700 // batch_size
    assert (counts.sum(1) == batch_size).all()
    assert counts.min() >= 0
    assert_exact(counts, weights, batch_size)


def test_shares_are_exact_over_epochs():
    """Since the last change of the weights, whichever epoch is planned first, as in a resumed run.
    A source whose share of an epoch is less than a sample gives one in some epochs."""
    sources = {name: Named(0, 40) for name in "abcd"}
    first = {"a": 0.996, "b": 0.004, "c": 0.002, "d": 0.31}
    later = {"a": 0.3, "b": 0.1, "c": 0.25, "d": 0.35}
    phases = [(0, first), (67.0, later)]
    mixture = Mixture(sources, phases, cfg=of(10), samples=70)
    counts = numpy.concatenate([mixture.counts(epoch) for epoch in range(20)])
    assert_exact(counts[:67], list(first.values()), 10)
    assert_exact(counts[67:], list(later.values()), 10)
    again = Mixture(sources, phases, cfg=of(10), samples=70)
    for epoch in (19, 4, 11):
        assert (again.counts(epoch) == counts[epoch * 7 : epoch * 7 + 7]).all()
        assert (again.starts(epoch) == counts[: epoch * 7].sum(0)).all()
    # Late epochs are planned without going through the epochs before.
    small = two((100, 50), (0.996, 0.004), 10, samples=100)
    assert small.starts(10**7).tolist() == [996 * 10**6, 4 * 10**6]


def test_any_number_of_ranks_has_the_same_global_batches():
    """And a run that begins in the middle of an epoch; a different epoch has others."""
    for epoch in (0, 2):
        one = batches(two(), epoch)
        assert len(one) == 65 // 6
        assert torch.equal(one, batches(two(), epoch, ranks=2))
        assert torch.equal(one, batches(two(), epoch, ranks=3))
        assert torch.equal(one[4:], batches(two(), epoch, first=4))
        other = batches(two(), epoch + 1)
        assert not torch.equal(one[0, :, :2], other[0, :, :2])


def test_repeated_source_is_passed_through_over_all_epochs():
    """Each sample once per pass, in a different order, with different random numbers."""
    mixture = two(weights=(1, 4))
    seen = torch.cat([batches(mixture, epoch).flatten(0, 1) for epoch in range(6)])
    for number, size, share in ((0, 40, 72), (1, 25, 288)):
        own = seen[seen[:, 0] == number]
        assert len(own) == share
        passes = own[: share // size * size, 1].view(-1, size)
        assert (passes.sort(1)[0] == torch.arange(size)).all()
        assert not torch.equal(own[: size // 2, 1], own[size : size + size // 2, 1])
    assert len(seen[:, 2].unique()) == len(seen)
    assert len(seen[:, 3].unique()) == len(seen)
    assert mixture.shares(3) == {"share_source0": 0.2, "share_source1": 0.8}


def test_stop_ends_with_the_first_source():
    mixture = two(weights=(1, 1), at_end="stop")
    assert len(mixture) == 48  # 24 of 25, as a step more would take 27
    for epoch in (0, 1):
        seen = batches(mixture, epoch).flatten(0, 1)
        assert len(seen[:, :2].unique(dim=0)) == 48
        assert (seen[:, 0] == 1).sum() == 24


def test_drop_ends_with_the_last_source():
    mixture = two(weights=(1, 3), at_end="drop")
    first, second = (batches(mixture, epoch).flatten(0, 1) for epoch in (0, 1))
    assert len(first[:, :2].unique(dim=0)) == len(first) == 60
    assert (first[:24, 0] == 1).sum() == 18
    assert (first[36:, 0] == 0).all()
    assert not torch.equal(first[:, 1], second[:, 1])


def test_with_drop_the_others_keep_their_shares():
    """Exact to less than one sample since the last source has ended."""
    counts = two((4, 900, 100), (1, 9, 1), 4, at_end="drop").counts(0)
    assert counts.sum(0).tolist() == [4, 900, 100]
    given = counts.cumsum(0)
    ended = int((given[:, 0] < 4).sum())
    since = given[ended + 1 : ended + 200] - given[ended]
    shares = numpy.outer(numpy.arange(1, 200) * 4, [0, 0.9, 0.1])
    assert abs(since - shares).max() < 2  # the difference of two numbers, each exact to one


def test_without_weights_sources_have_the_shares_of_their_sizes():
    seen = batches(two(weights=None, batch_size=5), 0).flatten(0, 1)
    assert len(seen[:, :2].unique(dim=0)) == 65


def test_weights_may_be_shares_of_tokens():
    """Samples of source1 are twice as long, so that it gives a third of the samples for a half."""
    mixture = two(weights=(1, 1), tokens={"source0": 40, "source1": 50})
    assert mixture.counts(0).sum(0).tolist() == [40, 20]


def test_streams_shards_and_mixtures_are_sources(tmp_path):
    write_json_lines(tmp_path, "train", [[2, index, 0, 0] for index in range(14)], per_shard=9)

    def build():
        files = sorted(tmp_path.glob("*.jsonl"))
        shards = Shards(files, lambda line: torch.tensor(line, dtype=torch.float64))
        sources = {
            "shards": shards,
            "stream": Streamed(Counted(), 10),
            "inner": two(sizes=(8, 5), weights=(1, 2), batch_size=3),
        }
        weights = {"shards": 0.5, "stream": 0.25, "inner": 0.25}
        orders = {"shards": ShardOrder(shards.shard_sizes, 1, 4)}
        return Mixture(sources, weights, cfg=of(12), samples=60, orders=orders)

    seen = []
    for epoch in range(3):
        one = batches(build(), epoch)
        assert torch.equal(one, batches(build(), epoch, ranks=3))
        assert torch.equal(one[2:], batches(build(), epoch, first=2))
        seen.append(one.flatten(0, 1))
    seen = torch.cat(seen)
    shards, stream, inner = seen[seen[:, 0] == 2], seen[seen[:, 0] == 3], seen[seen[:, 0] < 2]
    # Passes over 14 lines, in 90 samples, and over 10 samples, in 45.
    assert set(shards[:, 1].long().bincount().tolist()) == {6, 7}
    assert stream[:, 2].long().bincount().tolist() == [10, 10, 10, 10, 5]
    assert len(inner) == 45 == len(inner[:, 2].unique())
    assert (inner[:, 0] == 0).sum() in (14, 15, 16)  # a third


class Whole(BatchDataset):
    """Batches of {"row": (number of the dataset, index, pass)}, and the indices. On the device,
    each dataset adds its own number as the last column."""

    def __init__(self, number, size):
        self.number, self.size = number, size

    def __len__(self):
        return self.size

    def get_batch(self, indices, epoch, seed):
        row = torch.tensor([self.number, 0.0, epoch]).repeat(len(indices), 1)
        row[:, 1] = indices
        return {"row": row}, indices

    def on_device(self, batch, dtype):
        inputs, targets = batch
        added = torch.full((len(targets), 1), float(self.number))
        return {"row": torch.cat([inputs["row"], added], 1)}, targets


def test_sources_may_make_whole_batches():
    """Rows come in the order of the mixture, finished by their own source, also from map-style
    datasets and from mixtures among the sources, whatever the number of ranks."""

    class Samples(Named):
        def __getitem__(self, index):
            return {"row": torch.tensor([self.number, index, 0, self.number]).float()}, index

    def finished(rank, ranks):
        inner = Mixture({"c": Whole(2, 6), "d": Whole(3, 9)}, cfg=of(3))
        sources = {"a": Whole(0, 10), "b": Samples(1, 8), "inner": inner}
        mixture = Mixture(sources, {"a": 2, "b": 1, "inner": 3}, cfg=of(12), samples=60)
        rows = []
        for places in torch.arange(rank, 60, ranks).split(12 // ranks):
            batch = mixture.get_batch(places, 1, SEED)
            inputs, targets = mixture.on_device(batch, torch.float64)
            assert torch.equal(inputs["row"][:, 1].long(), targets)
            rows.append(inputs["row"])
        return torch.cat(rows)

    rows = finished(0, 1)
    assert torch.equal(rows[:, 3], rows[:, 0])
    assert rows[:, 0].long().bincount()[:2].tolist() == [20, 10]
    assert torch.equal(finished(0, 2), rows[0::2])
    assert torch.equal(finished(1, 2), rows[1::2])


def test_sources_that_share_a_dataset_are_told_their_own_pass():
    class Told(Named):
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __getitem__(self, index):
            return torch.tensor([self.number, index, self.epoch, 0.0])

    def build():
        base = Told(0, 40)
        sources = {"a": Subset(base, range(4)), "b": Subset(base, range(4, 40))}
        return Mixture(sources, {"a": 1, "b": 1}, cfg=of(4))

    seen = batches(build(), 0)
    assert torch.equal(seen, batches(build(), 0, ranks=2))
    is_a = seen[:, :, 1] < 4
    assert seen[is_a][:, 2].tolist() == [n // 4 for n in range(20)]
    assert not seen[~is_a][:, 2].any()


def test_random_numbers_of_collate_fn_depend_on_the_batch_alone():
    def masked(samples):
        return torch.tensor([torch.rand(()), random.random(), numpy.random.rand()])

    mixture = two(collate_fn=masked)
    first, second = torch.arange(6), torch.arange(6, 12)
    drawn = mixture.get_batch(first, 0, SEED)
    torch.manual_seed(1)  # whatever the process has drawn before
    assert torch.equal(mixture.get_batch(first, 0, SEED), drawn)
    others = mixture.get_batch(second, 0, SEED), mixture.get_batch(first, 1, SEED)
    assert len(torch.cat([drawn, *others]).unique()) == 9


def test_bad_mixtures_are_refused():
    a, b = Named(0, 9), Named(1, 9)
    other = Named(1, 9)
    other.collate_fn = list
    for sources, weights, options, named in (
        ({"a": a, "b": []}, None, {}, "b of a mixture is empty"),
        ({"a": a, "b": Subset(Whole(1, 9), [1])}, None, {}, "Subset of a Whole"),
        ({"a": a, "b": other}, None, {}, "collate_fn"),
        ({"a": Whole(1, 9)}, None, {"collate_fn": list}, "collate_fn"),
        ({"a": a}, {"a": 1, "web": 1}, {}, "unknown web"),
        ({"a": a, "b": b}, {"a": 1, "b": -1}, {}, "weight of b"),
        ({"a": a}, [(0, {"a": 1}), (9, {"a": 1}), (5, {"a": 1})], {}, "[0, 9, 5]"),
        ({"a": a}, None, {"at_end": "end"}, "'end'"),
        ({"a": a}, None, {"at_end": "stop", "samples": 8}, "at_end='stop'"),
        ({"a": a, "b": b}, {"a": 1, "b": 0}, {"at_end": "drop"}, "weight of b"),
        ({"a": a}, None, {"samples": 3}, "batch of 4"),
    ):
        with pytest.raises(UserError, match=re.escape(named)):
            Mixture(sources, weights, cfg=of(4), **options)


def test_batches_that_cannot_be_joined_are_refused():
    mixture = Mixture({"a": Named(0, 9), "b": Whole(1, 9)}, cfg=of(4))
    batch = mixture.get_batch(torch.arange(4), 0, 0)
    with pytest.raises(UserError, match="joined"):
        mixture.on_device(batch, torch.float64)


def test_orders_must_yield_as_many_indices_as_their_length():
    """More would put samples into the wrong pass."""

    class Longer(list):
        def __iter__(self):
            return iter(range(5))

    mixture = Mixture({"a": Named(0, 9)}, orders={"a": Longer("abc")}, cfg=of(3))
    with pytest.raises(UserError, match=r"order of a .* 5 indices"):
        mixture.get_batch(torch.arange(3), 0, 0)


def test_changed_mixtures_have_another_description(tmp_path):
    """By which a resumed run refuses them, and ranks notice that a source divides itself."""

    def facts(size=9, inner=(3, 1), line="2", first=0, **options):
        path = tmp_path / "a.jsonl"
        path.write_text(f"1\n{line}\n")
        sources = {
            "samples": Named(0, size),
            "shards": Shards([path]),
            "stream": Streamed(Counted(first), 4),
            "inner": two((4, 3), weights=inner, batch_size=3),
        }
        options = {"cfg": of(4), "samples": 12} | options
        return Mixture(sources, **options).describe()

    base = facts()
    assert facts() == base
    assert facts(size=10) != base
    assert facts(inner=(2, 1)) != base
    assert facts(line="22") != base
    assert facts(first=1) != base
    assert facts(cfg=of(6)) != base
    assert facts(samples=16) != base
    assert facts(weights={"samples": 1, "shards": 2, "stream": 1, "inner": 1}) != base


@pytest.mark.slow
def test_two_texts_with_weights_that_change(monkeypatch, tmp_path):
    """With the code of the page, but at a step that comes within an epoch."""
    folder = project_with_task("text", tmp_path / "copy")
    page = (ROOT / "docs" / "recipes" / "mixtures.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert code.count("10_000") == 1
    text = f"from tasks.text import *\n{code.replace('10_000', '7')}"
    (folder / "tasks" / "mixed_text.py").write_text(text)
    import_new("tasks.mixed_text", folder, monkeypatch)
    script = with_task(folder / "train_ddp.py", "tasks.mixed_text")
    old, new = "seed=cfg.seed, drop_last=True", "shuffle=False, drop_last=True"
    lines = [(old, new), ("train_result = train", "train_result = train_set.shares(epoch) | train")]
    script.write_text(changed(script.read_text(), lines, script))
    for name, count in (("chat", 70), ("code", 110)):
        (tmp_path / "texts" / name).mkdir(parents=True)
        for split, number in (("train", count), ("val", 9)):
            texts = [{"text": f"{name} {index} " * (index % 9)} for index in range(number)]
            write_json_lines(tmp_path / "texts" / name, split, texts)

    def run(nproc, name, before=None, **flags):
        flags |= {"text_file": tmp_path / "texts", "output_dir": tmp_path / name}
        ended = fork_script(script, nproc, before, settings=TEXT, **flags)
        assert ended.code in (0, -9), ended.stderr
        return ended.rows, read_checkpoint(tmp_path / name / "last.pt")["model"]

    rows, one = run(1, "one")
    steps = rows[0]["train_samples"] // 12
    expected = (7 * 0.2 + (steps - 7) * 0.7) / steps
    assert abs(rows[0]["train_share_chat"] - expected) * 12 * steps < 2
    run(2, "killed", killed_at(1, 3), save_steps=2)
    _, end = run(3, "killed")
    assert largest_difference(end, one) < ROUNDING
