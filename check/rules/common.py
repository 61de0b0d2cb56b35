"""What several rules ask of the runs."""

import re


def where(event):
    """The place of an event as a tuple, or None."""
    place = event and event.get("place")
    return tuple(place) if place else None


def failure(run):
    """(place, text) of what has made a run fail: the first exception of a rank; the last line that
    the first process that failed has printed, if none had one."""
    event = first_exception(run)
    if event:
        return where(event), event["error"]
    number = next((i for i, code in enumerate(run.codes) if code > 0), 0)
    log = run.folder / f"output-{number}.txt"
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    printed = [line.strip() for line in lines if re.search(r"\w", line)]  # torchrun draws lines
    return None, (printed or [f"exit code {run.code}"])[-1]


def first_exception(run):
    """The first one that ended a rank, or None. At a collective, a rank fails because a different
    one has: what was raised there comes last."""
    exceptions = run.any("exception")
    return min(exceptions, key=lambda event: (event["waits"], event["time"]), default=None)


def two_ranks(checked):
    """The ranks of the run on two processes, if they form a group that trains; else None."""
    two = checked["two"]
    if two is None or two.world_size < 2 or len(two.ranks) < 2:
        return None
    return two.ranks


def holds_parts(checked):
    """How the ranks hold parts of one model ("pipeline", "tensor parallel"), or None."""
    return checked["two"] and checked["two"].parts


def replicas(checked):
    """The ranks of the run on several processes, if each has a model for its own samples; None if
    several hold parts of one."""
    return None if holds_parts(checked) else two_ranks(checked)


def all_close(first, second):
    """Whether two lists of numbers are equal except for rounding."""
    return len(first) == len(second) and all(
        abs(a - b) <= 1e-9 + 1e-6 * abs(a) for a, b in zip(first, second, strict=True)
    )


def first_ranks(checked, *names):
    """Rank 0 of each of these runs that was made, in this order."""
    for run in filter(None, (checked[name] for name in names)):
        yield from run.ranks[:1]


def same_data(ranks, first, second):
    """Whether the epochs of two ranks read one dataset. Else an index is not the same sample on
    both: each rank has loaded different data."""
    if first["base"] == first["dataset"] and first["dataset_len"] != second["dataset_len"]:
        return False
    probes = probe_of(ranks[0], first), probe_of(ranks[1], second)
    if all(probes):
        return _same_probes(*probes)
    common = first["contents"].keys() & second["contents"].keys()
    if len(common) < 4:
        return True
    pairs = [zip(first["contents"][i], second["contents"][i], strict=False) for i in common]
    inputs, labels = [], []  # for each tensor, the share of samples in which it is equal
    for tensor in zip(*pairs, strict=False):
        share = sum(ours == theirs for ours, theirs in tensor) / len(tensor)
        is_label = len({ours for ours, _ in tensor}) < len(tensor) / 2
        (labels if is_label else inputs).append(share)
    if any(share > 0.9 for share in inputs) or not inputs + labels:
        return True
    # Augmentation changes the inputs of a sample, but not its label.
    fetches = [f for rank in ranks for f in rank.fetches if f["dataset"] == first["dataset"]]
    is_unknown = not inputs or any(fetch["drew"] for fetch in fetches)
    return is_unknown and bool(labels) and all(share > 0.9 for share in labels)


def probe_of(rank, epoch):
    """What a rank has found at some indices of the dataset of an epoch, or None."""
    return next((p for p in rank.of("probe") if p["dataset"] == epoch["base"]), None)


def _same_probes(ours, theirs):
    """Whether two ranks have the same samples under the same indices, as far as they were read."""
    other = dict(theirs["rows"])
    pairs = [(leaves, other[index]) for index, leaves in ours["rows"] if index in other]
    if len(pairs) < 4:
        return True
    if ours["repeats"] and theirs["repeats"]:
        return sum(a == b for a, b in pairs) > 0.5 * len(pairs)
    # A dataset that draws its own random numbers: its labels are what can be compared.
    for column in zip(*(zip(a, b, strict=False) for a, b in pairs), strict=False):
        equal = sum(a == b for a, b in column) > 0.9 * len(column)
        if equal and len({a for a, _ in column}) > 1:
            return True
    return False


def trains_nothing(step):
    """Whether no parameter of an optimizer is the model's, nor has a gradient."""
    gradients = [gradient for gradient in step["gradients"] if gradient is not None]
    return step["strangers"] == step["size"] > 0 and not gradients


def is_sharded(ranks):
    """Whether the ranks hold shards of the parameters."""
    return any(step["sharded"] for rank in ranks for step in rank.steps)
