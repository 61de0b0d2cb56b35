"""Weighted mixtures: several datasets, each of which gives its share of every global batch.

For build_datasets() of a task: docs/recipes/mixtures.md.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import RandomSampler, SequentialSampler

from sources.reading import SmallSamples, passed_on
from utils.batches import collate
from utils.data import BatchDataset, fetch_samples, inner_dataset
from utils.errors import UserError
from utils.seeds import SampleSeeds, derive_seed

Weights = Mapping[str, float]
AT_END = ("repeat", "stop", "drop")
LARGEST = 2**30  # sum of the weights as integers: a smaller share gives nothing


class Mixture(BatchDataset):
    """Datasets of which each gives its share of every global batch.

    Its order is part of it, so train with DistributedSampler(mixture, shuffle=False,
    drop_last=True). Which sample comes when is a function of (seed, epoch): each source is
    permuted, passed through, and permuted anew; a stream comes in its own order; the samples of a
    global batch are mixed. After each step, every source has given its share of the samples of all
    epochs so far, exact to less than one sample.

    sources: {name: a map-style dataset, a Streamed, or a Mixture}. If one is a BatchDataset that
    makes whole batches, such as the images task's, each source makes a batch of its share.
    weights: {name: its share of the samples}, in any unit, by default the numbers of samples. With
    `tokens`, shares of these. To change them within a run: [(step, weights), ...], of which the
    first step is 0, counted over all epochs; a share is then exact since the last change.
    cfg: the settings of the run, whose global_batch_size the shares are for; of a mixture within a
    mixture, too.
    samples: per epoch, by default as many as all sources have; less what fills no global batch.
    at_end: what happens when the samples of a source have been used. "repeat": its next pass
    begins, and epochs continue in the pass that the previous one has left. "stop": the epoch ends.
    "drop": the others share its place. With "stop" and "drop", each epoch begins all sources anew,
    and shares are exact since its start, or since a source has ended.
    tokens: {name: the number of tokens, or of whatever the loss counts, in a pass}.
    orders: {name: a sampler in place of the permutation}, such as a ShardOrder. It draws from the
    global generators.
    collate_fn: makes a batch of a list of samples, by default the sources' collate_fn. Its random
    numbers depend on (seed, epoch, last index). Not for sources that make whole batches.

    Raises UserError if a source is empty, or if the arguments contradict each other.
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Weights | Sequence[tuple[int, Weights]] | None = None,
        *,
        cfg: Any,
        samples: int | None = None,
        at_end: str = "repeat",
        tokens: Mapping[str, int] | None = None,
        orders: Mapping[str, Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.names, self.sources = list(sources), list(sources.values())
        self.at_end = at_end
        self.in_order = any(getattr(source, "in_order", False) for source in self.sources)
        self.global_batch_size = batch_size = int(cfg.global_batch_size)
        _check_names(self.names, orders, "orders")
        self.samplers = [
            _sampler(name, source, (orders or {}).get(name)) for name, source in sources.items()
        ]
        self.sizes = [len(sampler) for sampler in self.samplers]  # in a pass
        self.by_batches = not all(map(_gives_samples, self.sources))
        if self.by_batches and collate_fn:
            raise UserError("leave collate_fn out: a source of the mixture makes whole batches")
        if not self.by_batches:
            self.collate_fn = collate_fn or _collate_fn_of(self.sources)
        self.phases = self._phases(weights, tokens)
        self.shared = [_Shares(weights, batch_size) for _, weights in self.phases]
        self.known_counts: dict[int, numpy.ndarray] = {}  # of one epoch, by its first step
        if at_end not in AT_END:
            raise UserError(f"at_end is {at_end!r}: choose {', '.join(AT_END)}")
        if at_end != "repeat" and (samples is not None or len(self.phases) > 1):
            raise UserError(
                f"with at_end={at_end!r}, the sources decide where an epoch ends: leave samples "
                f"out, and give one set of weights"
            )
        if at_end == "drop" and not all(self.phases[0][1]):
            name = self.names[self.phases[0][1].index(0)]
            raise UserError(
                f"the weight of {name} in a mixture is 0, but at_end='drop' uses each sample: "
                f"leave this source out"
            )
        self.steps = (sum(self.sizes) if samples is None else int(samples)) // batch_size
        if at_end == "stop":
            given = self.shared[0].counts(0, self.steps).cumsum(0)
            self.steps = int((given <= self.sizes).all(1).sum())
        if not self.steps:
            raise UserError(f"a mixture has fewer samples than a global batch of {batch_size}")
        self.samples = self.steps * batch_size
        self.order: tuple[Any, ...] = ()  # of the current epoch: see _draw_order()
        self.current: dict[int, int] = {}  # {id of what has set_epoch: the pass that it is in}

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        raise UserError(
            "a mixture makes whole batches, because a sample alone knows neither the epoch nor the "
            "seed: pass the Mixture to build_loader() itself"
        )

    def get_batch(self, indices: Tensor, epoch: int, seed: int) -> Any:
        """The batch of the samples at these places of the epoch, int64 (n,). If the sources make
        whole batches: what on_device() makes a batch of."""
        if self.by_batches:
            return passed_on(self._get_parts(indices.tolist(), epoch, seed))
        with SampleSeeds(seed, epoch) as seeds:
            samples = self.get_samples(indices.tolist(), epoch, seed)
            seeds.seed(-2 - int(indices[-1]))  # not the seed of any sample
            return passed_on(self.collate_fn(samples))

    def get_samples(self, indices: list[int], epoch: int, seed: int) -> list[Any]:
        """The samples at these places of the epoch. Samples of a stream must be asked for in
        ascending order."""
        samples: list[Any] = [None] * len(indices)
        for number, places, own, passed, own_seed in self._groups(indices, epoch, seed):
            source = self.sources[number]
            if hasattr(source, "get_samples"):
                found = source.get_samples(own.tolist(), passed, own_seed)
            else:
                found = _read(source, own.tolist(), passed, own_seed)
            for place, sample in zip(places, found, strict=True):
                samples[place] = sample
        return samples

    def on_device(self, batch: Any, dtype: torch.dtype) -> Any:
        """Join the batches of the sources, each of which its source finishes."""
        if not self.by_batches:
            return batch
        parts, order = batch
        sources = ((self.sources[number], part) for number, part in parts)
        finished = [
            source.on_device(part, dtype) if isinstance(source, BatchDataset) else part
            for source, part in sources
        ]
        return _join(finished, order)

    def _get_parts(self, indices, epoch, seed):
        """([(number of a source, its batch)], where each sample is in these, one after another)."""
        parts, order = [], []
        for number, places, *where in self._groups(indices, epoch, seed):
            source = self.sources[number]
            made = source.get_batch if isinstance(source, BatchDataset) else None
            parts.append((number, made(*where) if made else fetch_samples(source, *where)))
            order += places.tolist()
        return parts, torch.tensor(order).argsort()

    def _groups(self, indices, epoch, seed):
        """Group samples of the epoch by source and pass. Yields the number of the source, where its
        samples are in `indices`, their indices in the source, the pass, and the seed of the
        source."""
        if self.order[:2] != (epoch, seed):
            self.order = (epoch, seed, *self._draw_order(epoch, seed))
        owners, passes, inner = (values[indices] for values in self.order[2:])
        for number, number_of_pass in sorted({*zip(owners.tolist(), passes.tolist(), strict=True)}):
            places = ((owners == number) & (passes == number_of_pass)).nonzero()[0]
            own = torch.from_numpy(inner[places])
            shared = inner_dataset(self.sources[number])  # which sources may share
            if hasattr(shared, "set_epoch") and self.current.get(id(shared)) != number_of_pass:
                shared.set_epoch(number_of_pass)
                self.current[id(shared)] = number_of_pass
            yield number, places, own, number_of_pass, derive_seed(seed, number)

    def __getstate__(self) -> dict[str, Any]:
        """What a spawned process gets: it draws the order itself, and its ids differ."""
        return vars(self) | {"order": (), "current": {}}

    def shares(self, epoch: int) -> dict[str, float]:
        """{"share_NAME": the part of an epoch's samples that a source gives}, for metrics.jsonl."""
        totals = self.counts(epoch).sum(0) / self.samples
        return {f"share_{name}": float(s) for name, s in zip(self.names, totals, strict=True)}

    def describe(self, name: str = "mixture") -> dict[str, Any]:
        """What a checkpoint stores about the data: a resumed run refuses a different mixture. With
        what the describe(name) of a source says, if it has one, as Shards and streams do."""
        size = f"{self.samples} samples in batches of {self.global_batch_size}"
        facts: dict[str, Any] = {name: f"{', '.join(self.names)}; {size}, {self.at_end}"}
        for number, own in enumerate(self.names):
            weights = ", ".join(f"{w[number]}/{sum(w)} from step {s}" for s, w in self.phases)
            facts[f"{name}_{own}"] = f"{self.sizes[number]} samples, weight {weights}"
            if hasattr(source := self.sources[number], "describe"):
                facts |= source.describe(f"{name}_{own}_{type(source).__name__.lower()}")
        return facts

    def counts(self, epoch: int) -> numpy.ndarray:
        """How many samples each source gives to each global batch: int64 (steps, sources)."""
        first = epoch * self.steps if self.at_end == "repeat" else 0
        if first not in self.known_counts:
            self.known_counts = {first: self._counts(first, first + self.steps)}
        return self.known_counts[first]

    def _counts(self, first, stop):
        if self.at_end == "drop":
            size = self.global_batch_size
            return _until_all_end(self.phases[0][1], self.sizes, self.steps, size)
        parts = [
            shares.counts(max(first - start, 0), min(stop, end) - start)
            for shares, start, end in self._spans(stop)
            if end > first
        ]
        return numpy.concatenate(parts)

    def _spans(self, stop):
        """(shares, first step, the step after the last) of each phase that begins before a step."""
        starts = [min(start, stop) for start, _ in self.phases] + [stop]
        spans = zip(self.shared, starts, starts[1:], strict=False)
        return [span for span in spans if span[1] < span[2]]

    def starts(self, epoch: int) -> numpy.ndarray:
        """How many samples each source has given before an epoch, or how many it has in the passes
        before: int64 (sources,)."""
        if self.at_end != "repeat":
            return epoch * numpy.asarray(self.sizes)
        given = [
            shares.given(end - start) for shares, start, end in self._spans(epoch * self.steps)
        ]
        return sum(given, numpy.zeros(len(self.names), numpy.int64))

    def _draw_order(self, epoch, seed):
        """(number of the source, pass through it, index in it) of each sample, as arrays."""
        counts = self.counts(epoch)
        owners = numpy.tile(numpy.arange(counts.shape[1]), len(counts)).repeat(counts.flat)
        with SampleSeeds(seed, epoch) as seeds:
            seeds.seed(-1)  # not the seed of any sample
            mixed = torch.rand(counts.shape[0], self.global_batch_size).argsort(1)
        owners = torch.from_numpy(owners).view_as(mixed).gather(1, mixed).flatten().numpy()
        passes, inner = numpy.empty_like(owners), numpy.empty_like(owners)
        starts = self.starts(epoch).tolist()
        for number, size in enumerate(self.sizes):
            places = (owners == number).nonzero()[0]
            first, start = divmod(starts[number], size)
            ends = range(-(-(start + len(places)) // size))
            parts = [self._draw_pass(number, derive_seed(seed, number), first + n) for n in ends]
            inner[places] = numpy.concatenate([*parts, owners[:0]])[start : start + len(places)]
            passes[places] = first + numpy.arange(start, start + len(places)) // size
        return owners, passes, inner

    def _draw_pass(self, number, seed, number_of_pass):
        """The indices in a source, in the order of a pass."""
        sampler = self.samplers[number]
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(number_of_pass)
        with SampleSeeds(seed, number_of_pass) as seeds:
            seeds.seed(0)
            indices = numpy.fromiter(sampler, numpy.int64)
        if len(indices) != self.sizes[number]:
            raise UserError(
                f"the order of {self.names[number]} in a mixture, a {type(sampler).__name__}, "
                f"yields {len(indices)} indices, but its length is {self.sizes[number]}: correct "
                f"its __len__"
            )
        return indices

    def _phases(self, weights, tokens):
        """[(first step, [the weight of each source, an int])]."""
        _check_names(self.names, tokens, "tokens")
        if weights is None:
            weights = tokens or dict(zip(self.names, self.sizes, strict=True))
        given = [(0, weights)] if isinstance(weights, Mapping) else weights
        phases = [(int(step), each) for step, each in given]  # 1e4 is a step, too
        steps = [step for step, _ in phases]
        if steps[:1] != [0] or any(b <= a for a, b in pairwise(steps)):
            raise UserError(
                f"the weights of a mixture change at steps {steps}: begin with 0, and ascend"
            )
        return [(step, self._integers(each, tokens)) for step, each in phases]

    def _integers(self, weights, tokens):
        _check_names(self.names, weights, "weights")
        exact = []
        for name, size in zip(self.names, self.sizes, strict=True):
            weight = Fraction(repr(float(weights[name])))  # as it is written: 0.1 means a tenth
            if weight < 0:
                raise UserError(f"the weight of {name} in a mixture is {weights[name]}")
            exact.append(weight * size / int(tokens[name]) if tokens else weight)
        scale = math.lcm(*(weight.denominator for weight in exact))
        whole = [int(weight * scale) for weight in exact]
        whole = [weight // math.gcd(*whole) for weight in whole]
        if sum(whole) > LARGEST:
            whole = [round(weight * LARGEST / sum(exact)) for weight in exact]
        return whole


class _Shares:
    """How many samples each source gives in each step, as long as the weights are the same.

    After each step, the number of samples of a source differs by less than one from its share.
    """

    def __init__(self, weights, batch_size):
        self.weights, self.batch_size = numpy.asarray(weights, numpy.int64), batch_size
        self.sum = int(self.weights.sum())
        self.period = self.sum // math.gcd(self.sum, batch_size)  # in steps: all shares are whole
        self.behind = {0: numpy.zeros_like(self.weights)}  # by step in the period: see _take()

    def counts(self, first, stop):
        """The samples in each step from `first` to before `stop`: int64 (steps, sources)."""
        behind, steps = self._behind_at(first).copy(), min(stop - first, self.period)
        rows = [_take(self.weights, behind, self.batch_size) for _ in range(steps)]
        self.behind[(first + steps) % self.period] = behind
        return numpy.resize(rows, (stop - first, len(self.weights)))  # which repeats them

    def given(self, step):
        """How many samples each source has given before a step: int64 (sources,)."""
        samples = step * self.batch_size
        pairs = zip(self.weights.tolist(), self._behind_at(step).tolist(), strict=True)
        return numpy.array([(samples * w - behind) // self.sum for w, behind in pairs])

    def _behind_at(self, step):
        step %= self.period
        if step not in self.behind:
            known = max(other for other in self.behind if other < step)
            behind = self.behind[known].copy()
            for _ in range(known, step):
                _take(self.weights, behind, self.batch_size)
            self.behind[step] = behind
        return self.behind[step]


def _take(weights, behind, count):
    """How many of the next `count` samples each source gives.

    Of the sources that may give one more sample, the one whose next must come soonest does
    (Tijdeman 1980, "The chairman assignment problem", doi 10.1016/0012-365X(80)90269-1).
    behind: by how much each source is behind its share, in units of 1 / weights.sum(); updated.
    """
    whole = weights.sum()
    behind += count * weights
    take = numpy.maximum(behind // whole, 0)
    behind -= take * whole
    wait = (whole - behind) / weights.clip(1)  # until a sample more is due
    wait[behind <= 0] = numpy.inf
    soonest = wait.argsort(kind="stable")[: count - take.sum()]
    take[soonest] += 1
    behind[soonest] -= whole
    return take


def _until_all_end(weights, sizes, steps, batch_size):
    """How many samples each source gives in each step, if it is left out once it has given as many
    as its size: int64 (steps, sources). The shares of the others then begin anew."""
    weights, left = numpy.array(weights, numpy.int64), numpy.array(sizes)
    behind, counts = numpy.zeros_like(weights), []
    for _ in range(steps):
        before, missing = left, batch_size
        while missing:
            take = numpy.minimum(_take(weights, behind, missing), left)
            left, missing = left - take, missing - take.sum()
            if weights[left == 0].any():
                weights, behind = numpy.where(left, weights, 0), numpy.zeros_like(behind)
        counts.append(before - left)
    return numpy.array(counts)


def _sampler(name, source, order):
    """What a pass through a source is drawn by."""
    if not len(source):
        raise UserError(f"the source {name} of a mixture is empty")
    if order is not None:
        return order
    inner = inner_dataset(source)
    if inner is not source and isinstance(inner, BatchDataset) and not _gives_samples(inner):
        raise UserError(
            f"the source {name} of a mixture is a Subset of a {type(inner).__name__}, which makes "
            f"whole batches: choose the samples in the {type(inner).__name__} itself"
        )
    has_order = hasattr(source, "get_samples")  # as streams and mixtures have
    return SequentialSampler(source) if has_order else RandomSampler(source)


def _gives_samples(source):
    """Whether the samples of a source are collated with those of the others."""
    if isinstance(source, Mixture):
        return not source.by_batches
    return (
        hasattr(source, "get_samples")
        or not isinstance(source, BatchDataset)
        or isinstance(source, SmallSamples)
    )


def _collate_fn_of(sources):
    found = [getattr(inner_dataset(source), "collate_fn", collate) for source in sources]
    if len({getattr(function, "__func__", function) for function in found}) > 1:
        raise UserError("the sources of a mixture have different methods collate_fn: pass one")
    return found[0]


def _read(source, indices, epoch, seed):
    """The samples of a map-style dataset, each with its own random numbers."""
    with SampleSeeds(seed, epoch) as seeds:
        samples = []
        for index in indices:
            seeds.seed(index)
            samples.append(source[index])
        return samples


def _join(parts, order):
    """A batch with the rows of the parts, one after another, in this order."""
    first = parts[0]
    try:
        if isinstance(first, Mapping):
            return {name: _join([part[name] for part in parts], order) for name in first}
        if isinstance(first, tuple | list):
            return tuple(_join(columns, order) for columns in zip(*parts, strict=True))
        if sum(map(len, parts)) == len(order):
            return torch.cat(parts)[order]
    except (KeyError, RuntimeError, TypeError, ValueError):
        pass
    raise UserError(
        "the sources of a mixture make batches that cannot be joined: only tensors of the same "
        "shape, in dicts and tuples, can"
    )


def _check_names(names, given, what):
    """Raise UserError if a dict, if any, has a name that no source has."""
    for name in given or ():
        if name not in names:
            raise UserError(f"{what} of a mixture of {', '.join(names)}: unknown {name}")
