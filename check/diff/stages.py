"""Compares two runs step by step, in the order of causes: data, forward, backward, update."""

import math
import re
from collections import Counter
from dataclasses import dataclass, field

import torch

from check.diff.factors import EQUAL, HALF, common, compare, largest_of, order_of, relative
from check.diff.runs import distinct

ORDER = """\
`shuffle=True` and DistributedSampler put a dataset in different orders. If that is the difference,
use this sampler in a copy of the script for one process, call its set_epoch(), and compare it:
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0)"""

BATCHNORM = """\
Each rank normalizes by the statistics of its share of the batch; SyncBatchNorm joins them. To see
what else is different, compare B on one process."""

SETTINGS = "settings of the optimizer"  # which are computed from numbers of steps, without rounding


@dataclass
class Result:
    """One stage of one step."""

    step: int
    stage: str
    compared: int = 0
    largest: float = 0.0
    comparisons: list = field(default_factory=list)
    text: str = ""  # what is different, in a sentence
    skipped: str = ""  # why it was not compared, or not all of it
    advice: str = ""  # how to make the runs comparable, where they may be right

    @property
    def is_equal(self):
        return not self.text

    def drop(self, reason):
        """Let a difference count as not compared."""
        if self.text:
            self.text, self.skipped = "", f"{self.text}, {reason}"

    @property
    def different(self):
        """The comparisons that found a difference."""
        return [comparison for comparison in self.comparisons if comparison.how]

    @property
    def most_different(self):
        """The largest of their differences; inf if what is different is no number."""
        return max((comparison.difference for comparison in self.different), default=math.inf)


@dataclass
class Outcome:
    """What a comparison has found. steps: of both runs; worlds: their numbers of ranks."""

    results: list
    steps: list
    worlds: tuple
    resumed_after: int | None = None  # the step after which B has been resumed

    @property
    def first(self):
        """The Result with the first difference, or None."""
        return next((result for result in self.results if not result.is_equal), None)

    @property
    def left_out(self):
        """The number of outputs of modules that were too many to compare."""
        return sum(rank["left_out"] for found in self.steps for s in found for rank in s.ranks)

    @property
    def per_epoch(self):
        """The numbers of steps in an epoch of A and of B; None where that is not known."""
        return tuple(found[0].per_epoch for found in self.steps)


class Comparer:
    """Compares the steps of runs A and B. limit: the relative difference that counts as rounding.
    renames: [(regular expression, replacement)] for names in B. joins: {name in A: names in B, to
    be joined along the first dimension}, and {name in B: names in A}. is_same_command: B is A, run
    again."""

    def __init__(self, worlds, limit=EQUAL, renames=(), joins=(), is_same_command=False):
        self.worlds, self.limit = worlds, limit
        self.renames, self.joins = renames, joins
        self.is_same_command = is_same_command
        self.resumed_after = None  # the step after which B has been resumed
        self.orders = {}  # name of a parameter -> the rows of B in the order of A
        self.divided = {"A": set(), "B": set()}  # names of parameters of which ranks have slices
        self.repeated = {"A": set(), "B": set()}  # of these, those whose slices are all the same

    def results(self, steps_a, steps_b):
        """The Results of all steps, up to the last stage of the first step with a difference."""
        found = []
        for number, (a, b) in enumerate(zip(steps_a, steps_b, strict=False)):
            stages = self.step(number, a, b)
            if any(EQUAL < result.largest <= self.limit for result in found):
                for stage in stages:
                    if stage.stage != SETTINGS and stage.most_different <= HALF:
                        stage.drop("which may be rounding that grows from step to step")
            found += stages
            if not all(result.is_equal for result in found):
                break
        return found

    def step(self, number, a, b):
        """The Results of one step, in the order of causes."""
        samples = self._samples(a, b)
        inputs, a, b = self._inputs(a, b)
        if samples.is_equal and not inputs.is_equal:
            inputs.text += ": random transforms, or padding, depend on more than the sample"
        stages = [samples, inputs]
        stages.append(
            self._weights(a, b) if number == 0 else self._named("weights", a, b, "before")
        )
        if number == self.resumed_after:
            stages.append(self._loaded(a, b))
        stages.append(self._outputs(a, b))
        loss = self._loss(a, b)
        stages.append(loss)
        if any(rank["unclipped"] for step in (a, b) for rank in step.ranks):
            stages.append(self._gradients("gradients before clipping", a, b, "unclipped"))
            stages.append(self._norms(a, b))
        gradients = self._gradients("gradients", a, b, "gradients")
        if all(stage.compared and stage.is_equal for stage in (loss, gradients)):
            inputs.drop("without an effect on the loss and the gradients")
        stages.append(gradients)
        stages.append(self._settings(a, b))
        stages.append(self._named("update", a, b, "after"))
        stages.append(self._named("optimizer state", a, b, "state"))
        stages.append(self._named("buffers", a, b, "buffers"))
        for stage in stages:
            stage.step = number + 1
        return stages

    def _samples(self, a, b):
        result = Result(0, "samples")
        ours, theirs = (Counter(s for rank in step.samples for s in rank) for step in (a, b))
        if not ours or not theirs:
            result.skipped = "a run reads no DataLoader"
            return result
        once = Counter(_flat(distinct(b.samples)))
        if ours in (theirs, once) or Counter(_flat(distinct(a.samples))) == once:
            result.compared = sum(ours.values())
            return result
        shared = sum((ours & theirs).values())
        counts = sum(ours.values()), sum(theirs.values())
        result.text = (
            f"{_number(counts[0], 'sample')} in A, {counts[1]} in B, of which "
            f"{shared} are the same (A: {_some(ours - theirs)}; B: {_some(theirs - ours)})"
        )
        one, two = self.worlds
        if one != two and counts[1] * one == counts[0] * two:
            result.text += f". Each rank takes as many in B as in A, {two / one:g} times as many"
        for letter, samples in (("A", a.samples), ("B", b.samples)):
            if len(samples) > 1 and all(other == samples[0] for other in samples):
                result.text += f". All ranks of {letter} train on the same samples"
                return result
        if sum(ours.values()) == sum(theirs.values()) and self.worlds[0] != self.worlds[1]:
            result.advice = ORDER
        return result

    def _inputs(self, a, b):
        """The Result, and both steps, whose padding is left out if it is what differs."""
        result = Result(0, "inputs")
        ours, theirs = a.all_rows, b.all_rows
        if not ours or not theirs:
            result.skipped = "the models get no tensors"
            return result, a, b
        for padding in dict.fromkeys(a.paddings + b.paddings) if ours != theirs else ():
            one, two = a.without(padding), b.without(padding)
            if one.all_rows == two.all_rows:
                result.skipped = f"padding, of {padding}, which is longer in one of the runs"
                a, b, ours, theirs = one, two, one.all_rows, two.all_rows
                break
        if ours != theirs:
            for letter, one, two in (("A", a, b), ("B", b, a)):
                parts, whole = one.of_sequences(_length(two)), two.without(None)
                if parts and parts.all_rows == whole.all_rows:
                    result.skipped = f"each rank of {letter} has a part of the sequences"
                    a, b = (parts, whole) if letter == "A" else (whole, parts)
                    ours = theirs = whole.all_rows
                    break
        if ours == theirs:
            result.compared = sum(ours.values())
        else:
            shared = sum((ours & theirs).values())
            result.text = (
                f"of {sum(ours.values())} rows in A and {sum(theirs.values())} in B, {shared} are "
                f"the same"
            )
        return result, a, b

    def _weights(self, a, b):
        result = self._named("initial weights", a, b, "before")
        ours, theirs = a.joined("before"), {self._renamed(n) for n in b.joined("before")}
        for letter, only in (("A", ours.keys() - theirs), ("B", theirs - ours.keys())):
            if only and result.compared and not (self.joins or a.has_stages or b.has_stages):
                result.text += f". Only in {letter}: {_some(only)}"
        for letter, step in (("A", a), ("B", b)):
            ranks = self._disagreements(letter, step, "before")
            if ranks:
                name, rank = next(iter(ranks.items()))
                result.text += f". Rank {rank} of {letter} has a different {name} than the others"
            repeated = sorted(self.repeated[letter])
            if repeated:
                result.text += (
                    f". The ranks of {letter} have the same slice of {repeated[0]}, and of "
                    f"{len(repeated) - 1} more"
                )
        result.text = result.text.removeprefix(". ")
        moved = sum(order is not None for order in self.orders.values())
        if moved:
            result.skipped += f"{', ' * bool(result.skipped)}the order of the rows of {moved}"
        if result.different and all(c.difference < math.inf for c in result.different):
            result.text += ". Are they seeded alike"
        return result

    def _loaded(self, a, b):
        """The state of the optimizer before the first step after a resume."""
        result = self._named("optimizer state", a, b, "loaded")
        if a.joined("loaded") and not b.joined("loaded"):
            result.text = "there is none in B, whose optimizer has not been restored"
            result.skipped = ""
        return result

    def _outputs(self, a, b):
        result = Result(0, "outputs of modules")
        total = a.all_rows
        ours = a.outputs(a.shares(total))
        theirs = {self._renamed(k): v for k, v in b.outputs(b.shares(total)).items()}
        left_out = 0
        for key, (kind, tensor) in ours.items():
            _, other = theirs.get(key, (None, None))
            if tensor is None or other is None or tensor.shape != other.shape:
                left_out += 1
                continue
            found = compare(key[1], tensor, other, self.limit, self.worlds)
            found.kind = kind
            self._add(result, found)
        if left_out:
            result.skipped = f"{left_out} outputs that are divided among ranks, or only in A"
        if result.different:
            first = result.different[0]
            result.text = (
                f"the first is of {first.name or 'the model'}, a {first.kind}: {first.how}"
            )
            result.text += _of_draws(a.draws(first.name), b.draws(self._origin(first.name, b)))
            if first.kind.startswith("BatchNorm") and self.worlds[0] != self.worlds[1]:
                result.advice = BATCHNORM
        return result

    def _disagreements(self, letter, step, key):
        """{name: rank} of the tensors that should be the same on all ranks of a run, and are not.
        Where a run is compared with itself, none counts."""
        if self.is_same_command or step.has_stages:
            return {}
        found = step.disagreements(key)
        return {n: rank for n, rank in found.items() if n not in self.divided[letter]}

    def _origin(self, name, step):
        """The name in B of what has this name in A."""
        names = {n for r in step.ranks for f in r["forwards"] for n, _, _ in f["outputs"]}
        return next((n for n in names if self._renamed(n) == name), name)

    def _loss(self, a, b):
        result = Result(0, "loss")
        if not a.losses or not b.losses:
            result.skipped = "no backward pass begins with one number"
            return result
        pairs = [(one, two) for one in a.losses for two in b.losses]
        one, two = min(pairs, key=lambda pair: relative(*pair))
        self._add(result, compare("the loss", one, two, self.limit, self.worlds))
        if result.different:
            result.text = _two(one, two, result.different[0].how)
        return result

    def _gradients(self, stage, a, b, key):
        result = self._named(stage, a, b, key)
        if not result.compared and key == "unclipped":
            result.skipped = "the runs do not both clip by PyTorch's function"
        clips = [any(rank["unclipped"] for rank in step.ranks) for step in (a, b)]
        if not result.is_equal and clips[0] != clips[1]:
            result.text += f". Only {'A' if clips[0] else 'B'} clips them by a function of PyTorch"
        for letter, step in (("A", a), ("B", b)):
            ranks = self._disagreements(letter, step, key)
            if ranks and not result.is_equal:
                name, rank = next(iter(ranks.items()))
                result.text += (
                    f". The ranks of {letter} have different ones (rank {rank}: {name}, and "
                    f"{len(ranks) - 1} more): not all are averaged over the ranks"
                )
        return result

    def _norms(self, a, b):
        result = Result(0, "norm of the gradients")
        ours, theirs = ([r["norms"] for r in step.ranks if r["norms"]] for step in (a, b))
        if not ours or not theirs or len(ours[0]) != len(theirs[0]):
            result.skipped = "only one of the runs has it"
            return result
        for one, two in zip(ours[0], theirs[0], strict=True):
            found = compare("norm", torch.tensor(one), torch.tensor(two), self.limit, self.worlds)
            self._add(result, found)
        if result.different:
            result.text = _two(ours[0][0], theirs[0][0], result.different[0].how)
        for letter, norms in (("A", ours), ("B", theirs)):
            if any(abs(n[0] - norms[0][0]) > self.limit * abs(n[0]) for n in norms):
                values = ", ".join(f"{norm[0]:.6g}" for norm in norms)
                result.text += f". The ranks of {letter} clip by different norms: {values}"
        result.text = result.text.removeprefix(". ")
        return result

    def _settings(self, a, b):
        result = Result(0, SETTINGS)
        for letter, step in (("A", a), ("B", b)):
            for rank, theirs in enumerate(step.ranks):
                if letter == "B" or rank:
                    where = f"on rank {rank} of {letter}" if rank else "in B"
                    self._compare_settings(
                        result, a.ranks[0]["settings"], theirs["settings"], where
                    )
        return result

    def _compare_settings(self, result, ours, theirs, where):
        for group, (one, two) in enumerate(zip(ours, theirs, strict=False)):
            for name in one.keys() & two.keys():
                x, y = (torch.tensor(float(v), dtype=torch.float64) for v in (one[name], two[name]))
                found = compare(f"{name} of group {group}", x, y, self.limit, self.worlds)
                self._add(result, found)
                if found.how and not result.text:
                    result.text = f"{name} is {two[name]:.6g} {where}, {one[name]:.6g} in A"

    def _named(self, stage, a, b, key):
        """Compare tensors by their names."""
        result = Result(0, stage)
        ours = a.joined(key)
        theirs = {self._renamed(name): value for name, value in b.joined(key).items()}
        ours, theirs = self._joined(ours, theirs)
        for name in [n for n in ours if ours[n] is not None and theirs.get(n) is not None]:
            one, two = ours[name], theirs[name]
            ours[name] = self._whole(one, two.shape, "A", a, key, name)
            theirs[name] = self._whole(two, one.shape, "B", b, key, name)
        if stage == "initial weights":
            self.orders |= {name: order_of(ours[name], theirs.get(name)) for name in ours}
        theirs = {name: self._in_order(name, value) for name, value in theirs.items()}
        names = [name for name in ours if name in theirs]
        if ours and theirs and not names:
            result.skipped = "the runs have no name in common: --rename"
            return result
        only = [*(ours.keys() ^ theirs.keys())]
        if only:
            result.skipped = f"only in one of the runs: {_some(only)}"
        scales = Counter()
        for name in names:
            scales[_kind(name)] = max(scales[_kind(name)], largest_of(ours[name]))
        for name in names:
            found = compare(
                name, ours[name], theirs[name], self.limit, self.worlds, scales[_kind(name)]
            )
            if stage == "initial weights" and found.how:
                found.how = self._of_some_ranks(ours[name], theirs[name]) or found.how
            self._add(result, found)
        if result.different:
            result.text = self._text(result, names)
        elif self.worlds[0] == self.worlds[1]:
            result.text = self._of_ranks(a, b, key, names)
        return result

    def _whole(self, tensor, shape, letter, step, key, name):
        """A tensor; or the slices of it that the first ranks have, side by side, if that makes one
        of this shape. So scripts divide layers without DTensor."""
        different = [d for d, (x, y) in enumerate(zip(tensor.shape, shape, strict=False)) if x != y]
        if len(different) != 1 or tensor.dim() != len(shape) or not tensor.numel():
            return tensor
        dimension = different[0]
        count, rest = divmod(shape[dimension], tensor.shape[dimension])
        if letter == "B":
            name = next((n for n in step.joined(key) if self._renamed(n) == name), name)
        slices = [rank[key].get(name) for rank in step.ranks[:count]]
        if rest or count < 2 or len(slices) < count:
            return tensor
        if any(part is None or part.shape != tensor.shape for part in slices):
            return tensor
        self.divided[letter].add(name)
        if (tensor != tensor.flatten()[0]).any() and all(part.equal(tensor) for part in slices):
            self.repeated[letter].add(name)
        return torch.cat(slices, dimension)

    def _of_some_ranks(self, a, b):
        """Which ranks of B have the rows that differ, if FSDP divides a tensor by rows; or ""."""
        count = self.worlds[1]
        if count < 2 or a is None or b is None or a.shape != b.shape or not a.dim():
            return ""
        shards = [*zip(a.chunk(count), b.chunk(count), strict=True)]
        ranks = [rank for rank, pair in enumerate(shards) if relative(*pair) > self.limit]
        if len(shards) < count or not 0 < len(ranks) < count:
            return ""
        return f"in the rows of rank {', '.join(map(str, ranks))} of B alone"

    def _in_order(self, name, value):
        """A tensor of B with its rows in the order of A: tensor parallelism divides a layer that is
        queries, keys and values into slices that have some of each."""
        owner = name.split(" (")[0]
        order = self.orders.get(owner)
        if order is None and owner.endswith("bias"):
            order = self.orders.get(f"{owner.removesuffix('bias')}weight")
        is_divided = order is not None and value is not None and value.dim()
        return value[order] if is_divided and len(value) == len(order) else value

    def _of_ranks(self, a, b, key, names):
        """What differs on one rank alone, of runs that have as many, in words."""
        for rank, (one, two) in enumerate(zip(a.ranks, b.ranks, strict=True)):
            theirs = {self._renamed(name): value for name, value in two[key].items()}
            for name in names:
                if name in one[key] and name in theirs:
                    found = compare(name, one[key][name], theirs[name], self.limit, self.worlds)
                    if found.how:
                        return f"on rank {rank} alone, {name}: {found.how}"
        return ""

    def _text(self, result, names):
        different = [c.name for c in result.different]
        how = common(result.different)
        prefix = _prefix(different, names)
        if len(different) == len(names) > 1:
            which = f"all {len(names)}"
        elif len(different) == 1:
            which = different[0]
        elif prefix:
            which = f"{len(different)} of {len(names)}, all of {prefix}"
        else:
            which = f"{len(different)} of {len(names)}: {_some(different)}"
        if how:
            return f"{which}: {how}"
        largest = max(result.different, key=lambda c: c.difference)
        first = result.different[0]
        return f"{which}: {first.how} ({first.name}); most of all {largest.name}, {largest.how}"

    def _add(self, result, comparison):
        result.compared += 1
        result.comparisons.append(comparison)
        if not comparison.how:
            result.largest = max(result.largest, comparison.difference)

    def _renamed(self, key):
        name = key if isinstance(key, str) else key[1]
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name if isinstance(key, str) else (key[0], name, *key[2:])

    def _joined(self, ours, theirs):
        for whole, parts in self.joins:
            for tensors in (ours, theirs):
                for name in [n for n in tensors if parts[0] in n]:
                    names = [name.replace(parts[0], part) for part in parts]
                    if all(tensors.get(n) is not None for n in names):
                        joined = torch.cat([tensors.pop(n) for n in names])
                        tensors[name.replace(parts[0], whole)] = joined
        return ours, theirs


def _length(step):
    """The length of the longest sequence that a model was given."""
    tokens = [f["tokens"] for rank in step.ranks for f in rank["forwards"]]
    return max((part.shape[1] for part in tokens if part is not None), default=0)


def _kind(name):
    """What a tensor is, of those that are compared together: "exp_avg" of "weight (exp_avg)"."""
    return name.partition(" (")[2]


def _of_draws(ours, theirs):
    """What is to be said of the random numbers that a module has drawn in A and in B."""
    if not ours and not theirs:
        return ""
    if bool(ours) != bool(theirs):
        return f". It draws random numbers in {'A' if ours else 'B'} alone"
    if len({*ours, *theirs}) == 1:
        return ". It draws random numbers, from a generator in the same state, for different rows"
    if len({*theirs}) == 1 < len(theirs):
        return ". It draws random numbers, which are the same on all ranks of B"
    return ". It draws random numbers, from a generator that is not in the same state"


def _two(a, b, how):
    text = f"{b:.6g} in B, {a:.6g} in A"
    return text if " in A" in how else f"{text}: {how}"


def _flat(lists):
    return [x for part in lists for x in part]


def _prefix(different, names):
    """The module that has all of these names and no others, or ""."""
    parts = different[0].split(".")
    for length in range(1, len(parts)):
        prefix = ".".join(parts[:length]) + "."
        if {n for n in names if n.startswith(prefix)} == {*different}:
            return f"{prefix}*"
    return ""


def _some(names):
    names = sorted(map(str, names))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _number(count, noun):
    return f"{count} {noun}{'s' * (count != 1)}"
