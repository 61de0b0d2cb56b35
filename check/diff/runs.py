"""What the ranks of a run had in each step, joined."""

from collections import Counter
from functools import cached_property

import torch

from check.diff.factors import EQUAL, relative


class Step:
    """One step of a run. ranks: what inside/check_inside/compare.py wrote, by rank."""

    def __init__(self, ranks, samples, per_epoch=None):
        self.ranks = ranks
        self.samples = samples  # of each rank: what its loaders gave it
        self.per_epoch = per_epoch  # the number of steps
        self.has_stages = any(rank.get("is_stage") for rank in ranks)
        if self.has_stages:
            self._give_rows_of_first_stage()

    def _give_rows_of_first_stage(self):
        """Give all stages of a pipeline the rows that the first stage got in a micro-batch."""
        stages = {}
        for number, rank in enumerate(self.ranks):
            for forward in rank["forwards"]:
                stages.setdefault((forward["part"], number), []).append(forward)
                forward["model"] = 0
        first = min(stages, default=None)
        for stage, forwards in stages.items():
            for forward, other in zip(forwards, stages[first], strict=False):
                if stage != first:
                    forward["rows"], forward["tokens"] = other["rows"], other["tokens"]

    def joined(self, key):
        """{name: tensor} of all ranks together; each name from the first rank that has it."""
        found = {}
        for rank in self.ranks:
            for name, value in rank[key].items():
                if found.get(name) is None:
                    found[name] = value
        return found

    def draws(self, name):
        """The states of the generators of the ranks before a module has drawn from them."""
        forwards = [forward for rank in self.ranks for forward in rank["forwards"]]
        return [forward["draws"][name] for forward in forwards if name in forward["draws"]]

    def disagreements(self, key):
        """{name: the first rank whose tensor differs from the tensor of the first rank that has
        it}."""
        found, joined = {}, self.joined(key)
        for number, rank in enumerate(self.ranks):
            for name, value in rank[key].items():
                other = joined[name]
                if name in found or (value is None) != (other is None) or value is None:
                    continue
                if value.shape != other.shape or relative(value, other) > EQUAL:
                    found[name] = number
        return found

    @cached_property
    def rows(self):
        """A Counter per rank, of the checksums of the rows that its models were given."""
        found = []
        for rank in self.ranks:
            # Of the stages of a pipeline that one rank holds, all are given the same rows.
            first = min((f["part"] for f in rank["forwards"]), default=None)
            used = [f for f in rank["forwards"] if not self.has_stages or f["part"] == first]
            found.append(Counter((f["model"], row) for f in used for row in f["rows"] or ()))
        return found

    def without(self, padding):
        """This step with rows that are told apart by their tokens before the padding."""
        ranks = []
        for rank in self.ranks:
            forwards = [forward | _without(forward, padding) for forward in rank["forwards"]]
            ranks.append(rank | {"forwards": forwards, "is_stage": False})
        step = Step(ranks, self.samples, self.per_epoch)
        step.has_stages = self.has_stages
        return step

    def of_sequences(self, length):
        """This step with the rows of whole sequences of a length, of which each of some successive
        ranks has a part; None if that cannot be."""
        parts = [[f for f in rank["forwards"] if f["tokens"] is not None] for rank in self.ranks]
        shapes = {f["tokens"].shape[1] for own in parts for f in own}
        count = length // max(shapes, default=length + 1)
        if len(shapes) > 1 or count < 2 or len(parts) % count:
            return None
        ranks = []
        for start in range(0, len(parts), count):
            group = parts[start : start + count]
            if len({tuple(len(f["rows"]) for f in own) for own in group}) > 1:
                return None
            whole = [torch.cat([f["tokens"] for f in same], 1) for same in zip(*group, strict=True)]
            rows = [[hash(tuple(row)) for row in tokens.tolist()] for tokens in whole]
            for rank, own in zip(self.ranks[start:], group, strict=False):
                forwards = [f | {"rows": r} for f, r in zip(own, rows, strict=True)]
                ranks.append(rank | {"forwards": forwards, "is_stage": False})
        return Step(ranks, self.samples, self.per_epoch)

    @property
    def paddings(self):
        """The tokens with which rows end, the most frequent first."""
        tokens = [f["tokens"] for r in self.ranks for f in r["forwards"] if f["tokens"] is not None]
        ends = Counter(t for part in tokens if part.numel() for t in part[:, -1].tolist())
        return [token for token, _ in ends.most_common(2)]

    def shares(self, total):
        """The numbers of ranks that have different rows, if these are `total` together. Ranks that
        divide a model, and not its batch, have the same rows."""
        used = [number for number, rows in enumerate(self.rows) if rows]
        different = []
        for number in used:
            if self.rows[number] not in [self.rows[other] for other in different]:
                different.append(number)
        is_whole = sum((self.rows[number] for number in different), Counter()) == total
        return different if is_whole and not self.has_stages else used

    @cached_property
    def all_rows(self):
        """A Counter of the rows of all ranks together. Ranks that divide a model count once."""
        return sum(distinct(self.rows), Counter())

    def outputs(self, ranks):
        """{(model, name, number, call): (type of the module, tensor)} of the outputs of modules, in
        the order of execution. Rows are in the order of the checksums of the inputs' rows; the
        tensor is None if it is not clear which row is which."""
        found, kinds, owners = {}, {}, {}
        for number in ranks:
            for forward in self.ranks[number]["forwards"]:
                for (name, kind, output), tensors in forward["outputs"].items():
                    tensors = _of_micro_batches(tensors, forward["rows"] or ())
                    for call, tensor in enumerate(tensors):
                        place = (forward["model"], name, output, call)
                        if self.has_stages and owners.setdefault(place, number) != number:
                            place = (number, f"rank {number}: {name}", output, call)
                        kinds.setdefault(place, kind)
                        found.setdefault(place, []).append((forward, tensor))
        return {place: (kinds[place], _in_order(parts)) for place, parts in found.items()}

    @cached_property
    def losses(self):
        """What the loss may be: the mean, over the ranks that have one, of the sum over their
        backward passes; or, in a pipeline, whose schedule may divide the gradients by the number of
        micro-batches, of the mean over these."""
        losses = [rank["losses"] for rank in self.ranks if rank["losses"]]
        divisors = [1, len(losses[0])] if losses and self.has_stages else [1] * bool(losses)
        sums = torch.tensor([sum(part) for part in losses], dtype=torch.float64)
        return [sums.mean() / divisor for divisor in divisors]


def distinct(values):
    """These values, without repetitions."""
    found = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _of_micro_batches(tensors, rows):
    """The outputs of a module that is called for some of the rows at a time, as one."""
    is_divided = len(tensors) > 1 and all(tensor.dim() for tensor in tensors)
    if (
        is_divided
        and sum(map(len, tensors)) == len(rows)
        and len({t.shape[1:] for t in tensors}) == 1
    ):
        return [torch.cat(tensors)]
    return tensors


def _in_order(parts):
    if any(not t.dim() or len(t) != len(f["rows"] or ()) for f, t in parts):
        return parts[0][1] if len(parts) == 1 else None
    rows = [row for forward, _ in parts for row in forward["rows"]]
    order = sorted(range(len(rows)), key=rows.__getitem__)
    if all("lengths" in f and t.shape[:2] == f["tokens"].shape for f, t in parts):
        cut = [t[i, :length] for f, t in parts for i, length in enumerate(f["lengths"])]
        return torch.cat([cut[number] for number in order])
    if len({t.shape[1:] for _, t in parts}) > 1:
        return None
    return torch.cat([tensor for _, tensor in parts])[order]


def _without(forward, padding):
    """What replaces the rows of a forward pass, if it has tokens."""
    if forward["tokens"] is None:
        return {}
    cut = [_cut(row, padding) for row in forward["tokens"].tolist()]
    return {"rows": [hash(tuple(row)) for row in cut], "lengths": [*map(len, cut)]}


def _cut(row, padding):
    length = len(row)
    while length and row[length - 1] == padding:
        length -= 1
    return row[:length]


def read_steps(run, folder, count):
    """The first `count` Steps of a Run. folder: where its ranks have written their tensors."""
    samples = {rank.number: list(_samples(rank)) for rank in run.ranks}
    steps = []
    for number in range(count):
        paths = sorted(folder.glob(f"step-{number}-rank-*.pt"), key=_rank_of)
        if not paths:
            break
        ranks = [torch.load(path, weights_only=False) for path in paths]
        own = [samples.get(_rank_of(path), [])[number : number + 1] for path in paths]
        steps.append(Step(ranks, [part[0] if part else [] for part in own], _per_epoch(run)))
    return steps


def _per_epoch(run):
    """The number of steps in an epoch, or None."""
    for epoch in run.ranks[0].training if run.ranks else ():
        if epoch["steps"] and not epoch["iterable"]:
            return epoch["sizes"][0] * epoch["steps"] // epoch["batches"]
    return None


def _rank_of(path):
    return int(path.stem.rpartition("-")[2])


def _samples(rank):
    """Yields, per step of a rank, the samples that its training loaders have handed out since the
    last step."""
    training = {epoch["epoch"] for epoch in rank.training}
    samples = []
    for event in rank.events:
        if event["kind"] == "batch" and event["epoch"] in training:
            samples += event["samples"]
        elif event["kind"] == "step":
            yield samples
            samples = []
