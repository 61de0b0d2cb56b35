"""Reads the events of a run, rank by rank, in order."""

import json
from array import array
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from pathlib import Path


@dataclass
class Rank:
    """What one rank did. Events are dicts; `of(kind)` lists the events of a kind, in order."""

    number: int
    pid: int
    events: list = field(default_factory=list)
    workers: list = field(default_factory=list)  # events of the processes of its loaders
    folder: Path | None = None

    def of(self, *kinds):
        return [event for event in self.events if event["kind"] in kinds]

    def first(self, kind):
        return next(iter(self.of(kind)), None)

    @cached_property
    def steps(self):
        """The steps, with the state of the optimizer that makes them."""
        steps = self.of("step")
        by_number = {step["step"]: step for step in steps}
        for event in self.of("inner_step"):
            if event["step"] in by_number:
                by_number[event["step"]]["state"] = event["state"]
        return steps

    def with_steps(self, *kinds):
        """The events of these kinds, each with the number of steps that were made before it."""
        steps = 0
        for event in self.events:
            if event["kind"] in kinds:
                yield event, steps
            steps += event["kind"] == "step"

    @cached_property
    def epochs(self):
        """The passes over loaders, each with `samples`, the indices in order."""
        epochs = self.of("epoch")
        for epoch in epochs:
            epoch["samples"] = self.numbers(epoch["indices"]) or epoch["fingerprints"]
            base = epoch.get("base_indices")
            epoch["base_samples"] = self.numbers(base) if base else epoch["samples"]
            epoch["contents"] = self._contents(epoch)
        return epochs

    def _contents(self, epoch):
        """{sample: a checksum of each of its tensors}, of the samples of the first batches."""
        contents = {}
        position = 0
        for event in self.of("batch"):
            if event["epoch"] == epoch["epoch"]:
                rows = zip(*event["leaves"], strict=True)
                contents |= dict(zip(epoch["base_samples"][position:], rows, strict=False))
                position += event["size"]
        return contents

    def numbers(self, name, typecode="q"):
        """The numbers in a file: integers, or float64 with the typecode "d"."""
        numbers = array(typecode)
        numbers.frombytes((self.folder / name).read_bytes())
        return numbers.tolist()

    @property
    def training(self):
        return [epoch for epoch in self.epochs if epoch["backwards"]]

    @property
    def evaluation(self):
        """The passes without a backward, with at least one forward of a model. If one is left and
        nothing follows, the script has failed, maybe before a backward."""
        last = max((e["number"] for e in self.of("batch", "step")), default=0)
        return [
            e
            for e in self.epochs
            if not e["backwards"] and e["forwards"] and e["batches"]
            if not e["left"] or e["number"] < last
        ]

    @property
    def fetches(self):
        return [e for e in self.events + self.workers if e["kind"] == "fetch"]


@dataclass
class Run:
    """A run of the script. code: the exit code of its first process that failed, or 0.

    timed_out: "" if it came to an end; else why the check has ended it: "idle" if nothing happened
    any more, "limit" if something did, but took longer than --timeout.
    """

    name: str
    folder: Path
    root: Path
    code: int
    output: str
    seconds: float
    timed_out: str = ""
    stacks: dict = field(default_factory=dict)
    codes: list = field(default_factory=list)  # of each process that the check has started

    @cached_property
    def ranks(self):
        return read_ranks(self.folder)

    @property
    def spawned(self):
        """Whether the script starts its own processes."""
        return bool(_starters(_by_process(self.folder)))

    @property
    def ended(self):
        """Whether it came to its end, or to the end that the check set: where one stage of a
        pipeline ends, the others fail."""
        is_pipeline = any(event["how"] == "pipeline" for event in self.any("parts"))
        is_cut = is_pipeline and bool(self.any("end"))
        return (self.code == 0 or is_cut) and not self.timed_out

    @cached_property
    def parts(self):
        """How ranks hold parts of one model, for which they read the same; None if they do not.
        Where those that hold parts, such as experts, also average the gradients of the rest, each
        has samples of its own."""
        for rank in self.ranks:
            averaging = [set(event.get("group", ())) for event in rank.of("wrap", "shard")]
            for event in rank.of("parts"):
                group = set(event["group"] or range(len(self.ranks)))
                if len(group) > 1 and not any(len(group & own) > 1 for own in averaging):
                    return event["how"]
        divides = any(_divide_outputs(a, b) for a, b in combinations(self.ranks, 2))
        return "parts of the outputs" if divides else None

    @property
    def world_size(self):
        return max((e["world"] for rank in self.ranks for e in rank.of("init")), default=1)

    def any(self, *kinds):
        return [event for rank in self.ranks for event in rank.of(*kinds)]


def _divide_outputs(first, second):
    """Whether two ranks with the same weights, inputs and random numbers compute different outputs
    in the first step, as with parts of the sequences (context parallelism)."""
    if not first.steps or not second.steps:
        return False
    steps = first.steps[0], second.steps[0]
    same = [(step["noise"], len(step["noise"])) for step in steps]
    if same[0] != same[1] or same[0][1] != 2:
        return False
    weights = [
        [event["checksums"] for event in rank.of("shard")] or rank.steps[0]["parameters"]
        for rank in (first, second)
    ]
    forwards = [[f for f in step["forwards"] if f.get("outputs")] for step in steps]
    inputs, outputs = (
        [[row for forward in own for row in forward[name]] for own in forwards]
        for name in ("inputs", "outputs")
    )
    is_same_work = weights[0] == weights[1] and inputs[0] == inputs[1] and bool(inputs[0])
    return is_same_work and not set(outputs[0]) & set(outputs[1])


def _by_process(folder):
    """The events of each process, by its id."""
    by_pid = {}
    for path in sorted(folder.glob("*.jsonl")):
        lines = path.read_text(errors="replace", encoding="utf-8").splitlines()
        events = [json.loads(line) for line in lines if line.endswith("}")]
        if events:
            by_pid[events[0]["pid"]] = events
    return by_pid


def _starters(by_pid):
    """The processes that start ranks: by mp.spawn, or by anything else, if one that a process has
    started joins a group, and it has not done so itself."""
    joining = {pid for pid, events in by_pid.items() if any(e["kind"] == "joins" for e in events)}
    starters = {by_pid[pid][0]["parent"] for pid in joining} - joining
    spawning = {pid for pid, events in by_pid.items() if any(e["kind"] == "spawn" for e in events)}
    return spawning | (starters & by_pid.keys())


def read_ranks(folder):
    """The Rank objects of a run, by rank. A process that only starts others is left out."""
    by_pid = _by_process(folder)
    spawners = {
        pid
        for pid in _starters(by_pid)
        if not any(event["kind"] == "step" for event in by_pid[pid])
    }
    workers = defaultdict(list)
    ranks = []
    for pid, events in by_pid.items():
        parent = events[0]["parent"]
        is_worker = any(e["kind"] == "fetch" and e["worker"] is not None for e in events)
        if is_worker or (parent in by_pid and parent not in spawners):
            workers[parent] += events
        elif pid not in spawners:
            numbers = [e["rank"] for e in events if e["rank"] is not None]
            inits = [e["rank"] for e in events if e["kind"] == "init"]
            number = (inits or numbers or [0])[0]
            ranks.append(Rank(number, pid, events, folder=folder))
    for rank in ranks:
        rank.workers = workers[rank.pid]
    return sorted(ranks, key=lambda rank: rank.number)
