"""What the ranks of a run had in each step, joined."""

from collections import Counter
from functools import cached_property

import torch

from check.diff.factors import EQUAL, relative


class Step:
    """One step of a run. ranks: what inside/check_inside/compare.py wrote, by rank."""

    def __init__(self, ranks, samples):
        self.ranks = ranks
        self.samples = samples  # of each rank: what its loaders gave it
        self.has_stages = any(rank.get("is_stage") for rank in ranks)
        if self.has_stages:
            self._give_rows_of_first_stage()

    def _give_rows_of_first_stage(self):
        """In a pipeline, the rows of a micro-batch are those that its first stage was given."""
        stages = {}
        for number, rank in enumerate(self.ranks):
            for forward in rank["forwards"]:
                stages.setdefault((forward["model"], number), []).append(forward)
                forward["model"] = 0
        first = min(stages, default=None)
        for stage, forwards in stages.items():
            for forward, other in zip(forwards, stages[first], strict=False):
                if stage != first:
                    forward["rows"] = other["rows"]

    def joined(self, key):
        """{name: tensor} of all ranks together; each name from the first rank that has it."""
        found = {}
        for rank in self.ranks:
            for name, value in rank[key].items():
                if found.get(name) is None:
                    found[name] = value
        return found

    def disagreements(self, key):
        """{name: the first rank whose tensor is not that of the first rank that has it}."""
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
        """Of each rank, a Counter of the checksums of the rows that its models were given."""
        return [
            Counter((f["model"], row) for f in rank["forwards"] for row in f["rows"] or ())
            for rank in self.ranks
        ]

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
        """A Counter of the rows of all ranks together, those of ranks that divide a model once."""
        return sum(distinct(self.rows), Counter())

    def outputs(self, ranks):
        """{(model, name, number, call): (type of the module, tensor)} of the outputs of modules, in
        the order of execution. Rows are in the order of the checksums of those of the inputs; the
        tensor is None if it is not clear which row is which."""
        found, kinds = {}, {}
        for number in ranks:
            for forward in self.ranks[number]["forwards"]:
                for (name, kind, output), tensors in forward["outputs"].items():
                    for call, tensor in enumerate(tensors):
                        place = (forward["model"], name, output, call)
                        kinds.setdefault(place, kind)
                        found.setdefault(place, []).append((forward["rows"] or [], tensor))
        return {place: (kinds[place], _in_order(parts)) for place, parts in found.items()}

    @cached_property
    def loss(self):
        """The mean, over the ranks that have one, of the sum over their backward passes; of the
        mean in a pipeline, whose schedule divides the gradients by the number of micro-batches."""
        losses = [rank["losses"] for rank in self.ranks if rank["losses"]]
        sums = [sum(part) / (len(part) if self.has_stages else 1) for part in losses]
        return torch.tensor(sums, dtype=torch.float64).mean() if sums else None


def distinct(values):
    """These values, without repetitions."""
    found = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _in_order(parts):
    if any(not t.dim() or len(t) != len(rows) for rows, t in parts):
        return parts[0][1] if len(parts) == 1 else None
    if len({t.shape[1:] for _, t in parts}) > 1:
        return None
    rows = [row for part, _ in parts for row in part]
    joined = torch.cat([tensor for _, tensor in parts])
    return joined[sorted(range(len(rows)), key=rows.__getitem__)]


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
        steps.append(Step(ranks, [part[0] if part else [] for part in own]))
    return steps


def _rank_of(path):
    return int(path.stem.rpartition("-")[2])


def _samples(rank):
    """For each step of a rank, the samples that its training loaders have handed out since the one
    before."""
    training = {epoch["epoch"] for epoch in rank.training}
    samples = []
    for event in rank.events:
        if event["kind"] == "batch" and event["epoch"] in training:
            samples += event["samples"]
        elif event["kind"] == "step":
            yield samples
            samples = []
