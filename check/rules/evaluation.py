"""Rules about evaluation."""

import ast
import math
from collections import Counter

from check.findings import Finding, NotChecked
from check.rules.common import first_ranks, replicas, same_data, where


def mode(checked):
    """Evaluation in training mode, with gradients; training in evaluation mode."""
    ranks = list(first_ranks(checked, "one", "two"))
    for rank in ranks:
        found = list(_mode(rank))
        yield from found
        if not any(finding.rule == "no-train-mode" for finding in found):
            yield from _mode_of_steps(rank)
    if any(rank.steps for rank in ranks) and not any(rank.evaluation for rank in ranks):
        yield NotChecked(
            "evaluation: its mode, its shares, and whether the ranks join its results",
            f"none by a DataLoader was seen in {checked.options.epochs} epochs; one that follows "
            "the last epoch of the script needs a larger --epochs",
        )


def _mode_of_steps(rank):
    """A model that is in training mode in a step, and in none of the next two: an evaluation within
    the epoch, or one without a DataLoader, has left it in its own mode."""
    by_model = {}
    for step in rank.steps:
        modes = {}
        for forward in step["forwards"]:
            if forward["grad"] and (forward["dropouts"] or forward["norms"]):
                modes.setdefault(forward["model"], []).append(forward)
        for model, forwards in modes.items():
            by_model.setdefault(model, []).append(forwards)
    for steps in by_model.values():
        trains = [any(forward["training"] for forward in forwards) for forwards in steps]
        changes = zip(trains, trains[1:], trains[2:], strict=False)
        if (True, False, False) in changes:
            last = steps[-1][-1]
            text = f"{last['type']} trains in evaluation mode after it was in training mode"
            yield Finding("no-train-mode", where(last), text)


def _mode(rank):
    for epoch in rank.evaluation:
        for forward in epoch["forwards"]:
            if forward["dropout"] or forward["norm"]:
                layers = "dropout" if forward["dropout"] else "BatchNorm"
                yield Finding(
                    "no-eval-mode",
                    where(forward),
                    f"{forward['type']} evaluates with its {layers} in training mode",
                )
                break
        for forward in epoch["forwards"]:
            if forward["grad"]:
                yield Finding(
                    "no-no-grad",
                    where(forward),
                    f"{forward['type']} evaluates while gradients are recorded",
                )
                break
    trained = {}
    for epoch in rank.training:
        for forward in epoch["forwards"]:
            if forward["dropouts"] or forward["norms"]:
                trained.setdefault(forward["model"], []).append((epoch["epoch"], forward))
    for forwards in trained.values():
        by_epoch = {}
        for number, forward in forwards:
            by_epoch.setdefault(number, []).append(forward)
        epochs = list(by_epoch.values())
        if any(f["training"] for f in epochs[0]):
            for later in epochs[1:]:
                if not any(f["training"] for f in later):
                    yield Finding(
                        "no-train-mode",
                        where(later[0]),
                        f"{later[0]['type']} trains in evaluation mode after the first evaluation",
                    )
                    break


def division(checked):
    """Validation that is padded, on one rank only, or repeated on each; a metric of one rank."""
    ranks = replicas(checked)
    if ranks is None or not checked["two"].ended:
        return
    evaluating = [rank for rank in ranks if rank.evaluation]
    if not evaluating:
        return
    first = evaluating[0].evaluation[0]
    if len(evaluating) == 1:
        yield Finding(
            "evaluation-on-one-rank",
            where(first),
            f"only rank {evaluating[0].number} evaluates; the others wait",
        )
        return
    # What is read before the training alone, such as a few samples to try, does not evaluate it.
    start = min((epoch["epoch"] for epoch in evaluating[0].training), default=-1)
    loaders = {e["loader"] for e in evaluating[0].evaluation if e["epoch"] > start}
    for loader in sorted(loaders):
        shares = [
            next((e for e in rank.evaluation if e["loader"] == loader), None) for rank in evaluating
        ]
        if None in shares or any(share["iterable"] for share in shares):
            continue
        yield from _division(checked, ranks, shares)


def _division(checked, ranks, shares):
    read = [share["base_samples"] for share in shares]
    if not all(read):
        return
    events = [list(_during(rank, shares[0]["loader"])) for rank in ranks]
    calls = [[event for event in own if event["kind"] == "collective"] for own in events]
    if not same_data(ranks, *shares[:2]):
        yield from _one_rank_metric(ranks, shares, events)
        return
    if all(set(samples) == set(read[0]) for samples in read[1:]):
        yield Finding(
            "evaluation-repeated",
            where(shares[0]),
            f"each of the {len(ranks)} ranks evaluates the same {len(set(read[0]))} samples",
        )
        return
    yield from _one_rank_metric(ranks, shares, events)
    if not _have_one_set(shares):
        return  # samples are in two shares because the ranks split the dataset differently
    counts = Counter(sample for samples in read for sample in samples)
    extra = sum(counts.values()) - len(counts)
    if not extra or extra > 0.5 * len(counts):
        return
    is_one_set = len({share["dataset"] for share in shares}) == 1
    if is_one_set and len(counts) < (shares[0]["dataset_len"] or 0):
        return  # nobody fills anything up: each rank evaluates samples that it chooses
    total, distinct = sum(counts.values()), len(counts)
    values = [[value for call in own for value in call["values"] or []] for own in calls]
    sums = [sum(pair) for pair in zip(*values, strict=False)]
    if distinct in sum(values, sums) or any(rank.of("drops_padding") for rank in ranks):
        return
    if _may_leave_out(checked["two"], events[0], total // len(ranks)):
        why = "the ranks gather the results of samples, and may leave out the repeated ones later"
        yield NotChecked("padding in the evaluation", why)
        return
    yield Finding(
        "padding-counted",
        where(shares[0]),
        f"the ranks evaluate {total} samples, but there are {distinct}: the others are repeated",
    )


def _may_leave_out(two, events, count):
    """Whether results of so many samples are gathered, and become lists or arrays, or the code has
    a slice with an end that is not a number, as in results[: len(val_set)]."""
    calls = [event for event in events if event["kind"] == "collective"]
    gathers = [call for call in calls if "GATHER" in call["name"].upper()]
    kinds = {event["kind"] for event in events}
    if not gathers or "gathers_objects" in kinds:
        return bool(gathers)
    if sum(math.prod(size) for call in gathers for size in call["sizes"]) < count:
        return False
    files = {where(event)[0] for event in gathers if where(event)}
    return "converted" in kinds or any(_has_slice(two.root / file) for file in files)


def _has_slice(path):
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return True
    slices = (node.slice for node in ast.walk(tree) if isinstance(node, ast.Subscript))
    ends = (part.upper for part in slices if isinstance(part, ast.Slice) and part.lower is None)
    return any(end is not None and not isinstance(end, ast.Constant | ast.UnaryOp) for end in ends)


def _have_one_set(shares):
    """Whether an index of one rank stands for the same sample as on the others, or for none."""
    samples = {}
    return all(
        samples.setdefault(index, sample) == sample
        for share in shares
        for index, sample in zip(share["samples"], share["base_samples"], strict=False)
    )


def _during(rank, loader):
    """The collectives, and what is written, from the first batch of an evaluation to the next one
    of training: there may be one collective for the results of several loaders."""
    inside = False
    evaluated = {e["epoch"] for e in rank.evaluation if e["loader"] == loader}
    training = {e["epoch"] for e in rank.training}
    for event in rank.events:
        if event["kind"] == "batch" and event["epoch"] in evaluated:
            inside = True
        elif event["kind"] == "batch" and event["epoch"] in training:
            inside = False
        elif event["kind"] in WATCHED and inside:
            yield event


WATCHED = ("collective", "converted", "gathers_objects", "save", "dump", "write")
JOINING = ("REDUCE", "GATHER", "SEND", "RECV", "ALLTOALL")


def _one_rank_metric(ranks, shares, events):
    if any(rank.of("no_hooks") for rank in ranks):
        return
    joined = any(
        any(name in event["name"].upper() for name in JOINING)
        for own in events
        for event in own
        if event["kind"] == "collective"
    )
    if not joined and not _joined_by_files(ranks, events):
        yield Finding(
            "metric-of-one-rank",
            where(shares[0]),
            f"each rank evaluates its {len(shares[0]['samples'])} samples, and nothing joins the "
            "results",
        )
    else:
        yield NotChecked("metrics of one rank", "the ranks join results, but maybe not all of them")


def _joined_by_files(ranks, events):
    """Whether a rank reads what each of the others has written during the evaluation, which is not
    a checkpoint."""
    written = [
        {event["path"] for event in own if event["kind"] != "collective" and "path" in event}
        - {event["path"] for event in own if event.get("model")}
        for own in events
    ]
    for reader, rank in enumerate(ranks):
        read = {event["path"] for event in rank.of("load", "read")}
        if all(read & paths for writer, paths in enumerate(written) if writer != reader):
            return True
    return False


def augmented(checked):
    """Evaluation that draws random numbers."""
    for rank in first_ranks(checked, "one", "two"):
        trained = {epoch["dataset"] for epoch in rank.training}
        for epoch in rank.evaluation:
            for fetch in rank.fetches:
                if (
                    fetch["dataset"] == epoch["dataset"]
                    and fetch["dataset"] not in trained
                    and fetch["drew"]
                    and not fetch["reseeded"]
                ):
                    yield Finding(
                        "evaluation-augmented",
                        where(epoch),
                        "reading a validation sample draws random numbers from "
                        + " and ".join(fetch["drew"]),
                    )
                    return


RULES = [mode, division, augmented]
