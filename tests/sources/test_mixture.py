"""sources/mixture.py: each source gives its share, in an order that (seed, epoch) alone decides."""

import copy
import math
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
from utils.seeds import derive_seed

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
    """The same, as a stream, which may begin with a different sample in each pass."""

    def __init__(self, number, size):
        self.number, self.size, self.epoch = number, size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for index in range(self.size):
            yield torch.tensor([self.number, index, self.epoch, 0], dtype=torch.float64)


def batches(mixture, epoch, ranks=1, first=0):
    """The global batches of an epoch, (samples, 4), put together from those of the ranks."""
    result = []
    for rank in range(ranks):
        copied = copy.deepcopy(mixture)  # as in a process of its own
        sampler = DistributedSampler(copied, ranks, rank, shuffle=False, drop_last=True)
        sampler.set_epoch(epoch)
        own = torch.tensor(list(sampler)).split(mixture.global_batch_size // ranks)[first:]
        result.append([copied.get_batch(indices, epoch, SEED) for indices in own])
    return [torch.stack(parts, 1).flatten(0, 1) for parts in zip(*result, strict=True)]


def two(sizes=(40, 25), weights=(3, 1), batch_size=6, **options):
    sources = {f"source{n}": Named(n, size) for n, size in enumerate(sizes)}
    given = weights and {name: w for name, w in zip(sources, weights, strict=True)}
    return Mixture(sources, given, cfg=of(batch_size), **options)


def assert_exact(counts, weights, batch_size):
    """After every step, each source has given its share, to less than a sample."""
    steps = numpy.arange(1, len(counts) + 1)
    expected = numpy.outer(steps * batch_size, numpy.array(weights) / sum(weights))
    assert abs(counts.cumsum(0) - expected).max() < 1


@pytest.mark.parametrize("weights", [(1,), (3, 1), (1, 0, 0.1), (50, 1, 1, 1, 0.3)], ids=str)
@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_shares_are_exact_after_every_step(weights, batch_size):
    counts = two([40] * len(weights), weights, batch_size, samples=700).counts(0)
    assert len(counts) == 700 // batch_size
    assert (counts.sum(1) == batch_size).all() and counts.min() >= 0
    assert_exact(counts, weights, batch_size)


def test_shares_are_exact_over_epochs():
    """Since the last change of the weights, whichever epoch is planned first, as in a resumed run.
    A source whose share of an epoch is less than a sample gives one in some epochs."""
    sources = {name: Named(0, 40) for name in "abcd"}
    first = {"a": 0.996, "b": 0.004, "c": 0.002, "d": 0.31}
    later = {"a": 0.3, "b": 0.1, "c": 0.25, "d": 0.35}
    phases = [(0, first), (67, later)]
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
    """And a run that begins in the middle of an epoch; a different seed or epoch has others."""
    for epoch in (0, 2):
        one = batches(two(), epoch)
        assert len(one) == 65 // 6
        for ranks in (2, 3):
            assert all(map(torch.equal, one, batches(two(), epoch, ranks)))
        assert all(map(torch.equal, one[4:], batches(two(), epoch, first=4)))
        assert not torch.equal(one[0][:, :2], batches(two(), epoch + 1)[0][:, :2])


def test_repeated_source_is_passed_through_over_all_epochs():
    """Each sample once per pass, in a different order, with different random numbers."""
    mixture = two(weights=(1, 4))
    seen = torch.cat([batch for epoch in range(6) for batch in batches(mixture, epoch)])
    for number, size in ((0, 40), (1, 25)):
        own = seen[seen[:, 0] == number]
        assert len(own) == 6 * 60 * (1, 4)[number] // 5
        passes = own[: len(own) // size * size].view(-1, size, 4)
        assert all(sorted(one[:, 1].tolist()) == list(range(size)) for one in passes)
        assert not torch.equal(own[: size // 2, 1], own[size : size + size // 2, 1])
    assert len(seen[:, 2].unique()) == len(seen) == len(seen[:, 3].unique())
    assert mixture.shares(3) == {"share_source0": 0.2, "share_source1": 0.8}


def test_stop_ends_with_the_first_source_and_drop_with_the_last():
    stop = two(weights=(1, 1), at_end="stop")
    assert len(stop) == 48  # 24 of 25, as a step more would take 27
    for epoch in (0, 1):
        seen = torch.cat(batches(stop, epoch))
        assert len(seen[:, :2].unique(dim=0)) == 48 and (seen[:, 0] == 1).sum() == 24
    drop = two(weights=(1, 3), at_end="drop")
    first, second = torch.cat(batches(drop, 0)), torch.cat(batches(drop, 1))
    assert len(first[:, :2].unique(dim=0)) == len(first) == 60
    assert (first[:24, 0] == 1).sum() == 18 and (first[36:, 0] == 0).all()
    assert not torch.equal(first[:, 1], second[:, 1])


def test_with_drop_the_others_keep_their_shares():
    """Exact to less than one sample since the last source has ended."""
    counts = two((4, 900, 100), (1, 9, 1), 4, at_end="drop").counts(0)
    ended = int((counts.cumsum(0)[:, 0] < 4).sum()) + 1
    steps = numpy.arange(1, 200)
    shares = numpy.outer(steps * 4, [0.9, 0.1])
    given = counts[ended : ended + 199, 1:].cumsum(0)
    assert abs(given - shares).max() < 2  # the difference of two numbers, each exact to one
    assert counts.sum(0).tolist() == [4, 900, 100]


def test_without_weights_sources_have_the_shares_of_their_sizes():
    seen = torch.cat(batches(two(weights=None, batch_size=5), 0))
    assert len(seen[:, :2].unique(dim=0)) == 65


def test_weights_may_be_shares_of_tokens():
    """Samples of source1 are twice as long, so that it gives a third of the samples for a half."""
    mixture = two(weights=(1, 1), tokens={"source0": 40, "source1": 50})
    assert mixture.counts(0).sum(0).tolist() == [40, 20]


def test_weights_change_at_a_step():
    sources = {"a": Named(0, 40), "b": Named(1, 25)}
    phases = [(0, {"a": 1, "b": 0}), (13, {"a": 1, "b": 2})]
    mixture = Mixture(sources, phases, cfg=of(6))
    shares = []
    for epoch in (0, 1, 2):
        last = batches(mixture, epoch)
        shares.append([(batch[:, 0] == 1).sum().item() for batch in last])
    assert shares == [[0] * 10, [0] * 3 + [4] * 7, [4] * 10]
    # A different object has not planned the epochs before: as in a resumed run.
    again = batches(Mixture(sources, phases, cfg=of(6)), 2)
    assert torch.equal(torch.cat(again), torch.cat(last))


def test_streams_shards_and_mixtures_are_sources(tmp_path):
    lines = [f'{{"values": [2, {i}, 0, 0]}}\n' for i in range(14)]
    (tmp_path / "train-a.jsonl").write_text("".join(lines[:9]))
    (tmp_path / "train-b.jsonl").write_text("".join(lines[9:]))

    def build():
        shards = Shards(
            sorted(tmp_path.glob("*.jsonl")),
            transform=lambda line: torch.tensor(line["values"], dtype=torch.float64),
        )
        sources = {
            "shards": shards,
            "stream": Streamed(Counted(3, 10), 10),
            "inner": two(sizes=(8, 5), weights=(1, 2), batch_size=3),
        }
        weights = {"shards": 0.5, "stream": 0.25, "inner": 0.25}
        orders = {"shards": ShardOrder(shards.shard_sizes, 1, 4)}
        return Mixture(sources, weights, cfg=of(12), samples=60, orders=orders)

    seen = []
    for epoch in range(3):
        one = batches(build(), epoch)
        assert all(map(torch.equal, one, batches(build(), epoch, ranks=3)))
        assert all(map(torch.equal, one[2:], batches(build(), epoch, first=2)))
        seen += one
    seen = torch.cat(seen)
    passes = seen[seen[:, 0] == 3][:, 2].long()
    assert passes.bincount().tolist() == [10, 10, 10, 10, 5]
    rows = seen[seen[:, 0] == 2][:, 1].long()
    assert set(rows.bincount().tolist()) == {6, 7}  # 90 of 14 lines
    inner = seen[seen[:, 0] < 2]
    assert len(inner) == 45 == len(inner[:, 2].unique())
    assert (inner[:, 0] == 0).sum() in (14, 15, 16)  # a third


class Whole(BatchDataset):
    """Samples (number of the dataset, index, random number), made in whole batches, which are
    finished on the device: each dataset adds its own number to the last column."""

    def __init__(self, number, size):
        self.number, self.size = number, size

    def __len__(self):
        return self.size

    def get_batch(self, indices, epoch, seed):
        assert indices.dtype == torch.int64
        drawn = [derive_seed(seed, epoch, index) % 999 for index in indices.tolist()]
        columns = [torch.full_like(indices, self.number), indices, torch.tensor(drawn)]
        return {"row": torch.stack(columns, 1).double()}, indices % 2

    def on_device(self, batch, dtype):
        inputs, targets = batch
        added = torch.full_like(inputs["row"][:, :1], self.number + 0.5)
        return {"row": torch.cat([inputs["row"], added], 1)}, targets


class Told(Named):
    """A map-style dataset with set_epoch(), which a Loader would call."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return torch.tensor([self.number, index, self.epoch, 0.0])


def finished(mixture, rank, ranks):
    """The batches of an epoch on a rank, as (samples, 4), and the targets."""
    rows, targets = [], []
    for places in torch.arange(rank, len(mixture), ranks).split(12 // ranks):
        batch = mixture.get_batch(places, 1, SEED)
        inputs, numbers = mixture.on_device(batch, torch.float64)
        rows.append(inputs["row"])
        targets.append(numbers)
    return torch.cat(rows), torch.cat(targets)


def test_sources_may_make_whole_batches():
    """Rows come in the order of the mixture, finished by their own source, also from map-style
    datasets and from mixtures among the sources, whatever the number of ranks."""

    class Samples(Named):
        def __getitem__(self, index):
            row = torch.cat([super().__getitem__(index)[:3], torch.tensor([self.number + 0.5])])
            return {"row": row}, index % 2

    def build():
        inner = Mixture({"c": Whole(2, 6), "d": Whole(3, 9)}, cfg=of(3))
        sources = {"a": Whole(0, 10), "b": Samples(1, 8), "inner": inner}
        return Mixture(sources, {"a": 2, "b": 1, "inner": 3}, cfg=of(12), samples=60)

    rows, targets = finished(build(), 0, 1)
    assert torch.equal(targets, rows[:, 1].long() % 2)
    assert torch.equal(rows[:, 3], rows[:, 0] + 0.5)
    assert [(rows[:, 0] == number).sum() for number in (0, 1)] == [20, 10]
    for rank in range(2):
        share, _ = finished(build(), rank, 2)
        assert torch.equal(share, rows[rank::2])


def test_sources_that_share_a_dataset_are_told_their_own_pass():
    def build():
        base = Told(0, 40)
        sources = {"a": Subset(base, range(4)), "b": Subset(base, range(4, 40))}
        return Mixture(sources, {"a": 1, "b": 1}, cfg=of(4))

    seen = torch.cat(batches(build(), 0))
    assert seen[seen[:, 1] < 4][:, 2].tolist() == [n // 4 for n in range(20)]
    assert not seen[seen[:, 1] >= 4][:, 2].any()
    assert torch.equal(seen, torch.cat(batches(build(), 0, ranks=2)))


def test_random_numbers_of_collate_fn_depend_on_the_batch_alone():
    def masked(samples):
        return torch.tensor([torch.rand(()), random.random(), numpy.random.rand()])

    mixture = two(collate_fn=masked)
    drawn = []
    for start in (0, 6, 6):
        torch.manual_seed(0 if start else 1)  # whatever the process has drawn before
        for epoch in (0, 1):
            drawn.append(mixture.get_batch(torch.arange(start, start + 6), epoch, SEED))
    assert torch.equal(torch.stack(drawn[2:4]), torch.stack(drawn[4:]))
    assert len(torch.stack(drawn).unique()) == 12


def test_bad_mixtures_are_refused():
    a, b = Named(0, 9), Named(1, 9)
    two_phases = [(0, {"a": 1}), (9, {"a": 1})]
    for sources, weights, options, named in (
        ({}, None, {}, "no sources"),
        ([a], None, {}, "{name: dataset}"),
        ({"a": a, "b": []}, None, {}, "b of a mixture is empty"),
        ({"a": a, "b": None}, None, {}, "b of a mixture has no length"),
        ({"a": a, "b": "b.jsonl"}, None, {}, "'b.jsonl'"),
        ({"a": a, "b": Subset(Whole(1, 9), [1])}, None, {}, "Subset of a Whole"),
        ({"a": a, "b": b}, {"a": 1}, {}, "none for b"),
        ({"a": a}, {"a": 1, "web": 1}, {}, "unknown web"),
        ({"a": a}, {"a": math.nan}, {}, "weight of a"),
        ({"a": a}, {"a": "half"}, {}, "weight of a"),
        ({"a": a}, {"a": 0}, {}, "all 0"),
        ({"a": a, "b": b}, {"a": 1, "b": 1e-300}, {}, "differ too much"),
        ({"a": a}, [0.5, 0.5], {}, "{name: weight}"),
        ({"a": a}, [*two_phases, (5, {"a": 1})], {}, "[0, 9, 5]"),
        ({"a": a}, two_phases, {"at_end": "stop"}, "at_end='stop'"),
        ({"a": a, "b": b}, {"a": 1, "b": 0}, {"at_end": "drop"}, "weight of b"),
        ({"a": a}, None, {"at_end": "end"}, "'end'"),
        ({"a": a}, None, {"orders": {"b": a}}, "unknown b"),
        ({"a": a}, None, {"orders": {"a": iter([0])}}, "order of a"),
        ({"a": a}, None, {"tokens": {"a": 0}}, "0 tokens"),
        ({"a": a}, None, {"samples": 3}, "batch of 4"),
        ({"a": a}, None, {"samples": 1e2}, "100.0"),
        ({"a": Whole(1, 9)}, None, {"collate_fn": list}, "collate_fn"),
    ):
        with pytest.raises(UserError, match=re.escape(named)):
            Mixture(sources, weights, cfg=of(4), **options)
    b.collate_fn = list
    with pytest.raises(UserError, match="collate_fn"):
        Mixture({"a": a, "b": b}, cfg=of(4))


def test_batches_that_cannot_be_joined_are_refused():
    mixture = Mixture({"a": Named(0, 9), "b": Whole(1, 9)}, cfg=of(4))
    with pytest.raises(UserError, match="joined"):
        mixture.on_device(mixture.get_batch(torch.arange(4), 0, 0), torch.float64)


def test_orders_must_yield_as_many_indices_as_their_length():
    class Uneven(list):
        def __iter__(self):
            return iter(range(self[0]))

    for count in (2, 5):
        order = Uneven([count, 0, 0])
        mixture = Mixture({"a": Named(0, 9)}, orders={"a": order}, cfg=of(3))
        with pytest.raises(UserError, match=f"order of a .* {count} indices"):
            mixture.get_batch(torch.arange(3), 0, 0)


def test_changed_mixtures_have_another_description(tmp_path):
    """By which a resumed run refuses them, and ranks notice that a source divides itself."""

    def facts(size=9, inner=(3, 1), line="2", stream=5, **options):
        path = tmp_path / "a.jsonl"
        path.write_text(f"1\n{line}\n")
        sources = {
            "samples": Named(0, size),
            "shards": Shards([path]),
            "stream": Streamed(Counted(stream, 4), 4),
            "inner": two((4, 3), weights=inner, batch_size=3),
        }
        return Mixture(sources, **{"cfg": of(4), "samples": 12} | options).describe()

    base = facts()
    assert facts() == base
    weights = {"samples": 1, "shards": 2, "stream": 1, "inner": 1}
    for other in (
        facts(size=10),
        facts(inner=(2, 1)),
        facts(line="22"),
        facts(stream=6),
        facts(cfg=of(6)),
        facts(samples=16),
        facts(weights=weights),
    ):
        assert other != base


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
