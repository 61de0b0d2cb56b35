"""Rules about models, optimizers and the calls that cost time."""

import ast
import signal
from collections import Counter

from check.findings import Finding, NotChecked
from check.rules.common import (
    failure,
    first_ranks,
    replicas,
    trains_nothing,
    two_ranks,
    where,
)
from check.scenarios import UNUSED, own_lines


def start(checked):
    """Models that differ between ranks before they are sharded: nothing broadcasts them."""
    ranks = replicas(checked)
    if ranks is None:
        return
    for ours, theirs in zip(ranks[0].of("shard"), ranks[1].of("shard"), strict=False):
        if ours["checksums"] != theirs["checksums"]:
            count = sum(
                a != b for a, b in zip(ours["checksums"], theirs["checksums"], strict=False)
            )
            yield Finding(
                "shards-start-differently" if ours["one_model"] else "models-start-differently",
                where(ours),
                f"{count} of {len(ours['checksums'])} parameters differ between rank 0 and rank 1 "
                "before they are sharded",
            )
            return


def wrapped_twice(checked):
    """A DistributedDataParallel in a DistributedDataParallel."""
    for event in (wrap for rank in replicas(checked) or [] for wrap in rank.of("wrap")):
        if event.get("nested"):
            text = "the module that DistributedDataParallel gets holds one already"
            yield Finding("wrapped-twice", where(event), text)
            return


def batch_norm(checked):
    """BatchNorm with the statistics of one rank's share; frozen BatchNorm that learns."""
    ranks = replicas(checked)
    for rank in first_ranks(checked, "one", "two"):
        by_model = {}  # which has as many BatchNorm layers in training mode
        for epoch in rank.training:
            for forward in epoch["forwards"]:
                by_model.setdefault((forward["model"], forward["norm"]), []).append(forward)
        for forwards in by_model.values():
            frozen = min(forward["frozen_norm"] for forward in forwards)
            if frozen:
                yield Finding(
                    "frozen-batchnorm-learns",
                    where(forwards[0]),
                    f"{frozen} BatchNorm layers have frozen weights, but their running statistics "
                    "change",
                )
    if ranks is None:
        return
    # A SyncBatchNorm of somebody's own joins the statistics in its forward.
    if any(
        event["in_forward"] and ("REDUCE" in event["name"] or "GATHER" in event["name"])
        for event in ranks[0].of("collective")
    ):
        return
    for epoch in ranks[0].training:
        for forward in epoch["forwards"]:
            plain = forward["norm"] - forward["synced"]
            if plain > 0 and not forward["frozen_norm"]:
                yield Finding(
                    "batchnorm-per-rank",
                    where(forward),
                    f"{plain} BatchNorm layers use the samples of one rank",
                )
                return


def buffers(checked):
    """Buffers with which the ranks evaluate, such as the statistics of BatchNorm."""
    ranks = replicas(checked)
    for ours, theirs in zip(*(rank.of("buffers") for rank in (ranks or [])[:2]), strict=False):
        if ours["model"] != theirs["model"] or ours["buffers"].keys() != theirs["buffers"].keys():
            return
        differ = [n for n, crc in ours["buffers"].items() if theirs["buffers"][n] != crc]
        if differ:
            yield Finding(
                "buffers-differ",
                where(ours),
                f"{len(differ)} of {len(ours['buffers'])} buffers ({differ[0]}, …) differ between "
                "rank 0 and rank 1 in an evaluation",
            )
            return


def parameters(checked):
    """Optimizers of parameters that are not the model's; parameters without a gradient."""
    for rank in first_ranks(checked, "two", "one", "resumed"):
        for step in rank.steps[:2]:
            if trains_nothing(step):
                yield Finding(
                    "wrong-parameters",
                    where(step),
                    f"none of the {step['size']} parameters of {step['type']} belongs to the "
                    "model that is trained",
                )
                return
    ranks = two_ranks(checked)
    if ranks is None or not ranks[0].steps:
        return
    wrapped = ranks[0].first("wrap")
    if wrapped and wrapped.get("find_unused"):
        steps = ranks[0].steps
        if all(gradient is not None for step in steps for gradient in step["gradients"]):
            yield Finding(
                "needless-find-unused",
                where(wrapped),
                f"all {steps[0]['size']} parameters got a gradient in all {len(steps)} steps",
            )


def synchronizations(checked):
    """Reads of tensors by the host in each step, one finding for each file. Those under a condition
    such as `step % interval == 0` are as rare as the arguments of the script make them."""
    run = checked["one"]
    for rank in run.ranks[:1]:
        steps = rank.steps
        if len(steps) < 4:
            continue
        counts, names = Counter(), {}
        for step in steps:
            for place, name, _ in step["syncs"]:
                if place:
                    counts[tuple(place)] += 1
                    names[tuple(place)] = name
        by_file = {}
        for place, count in counts.items():
            if count >= 0.9 * len(steps) - 1 and not _has_interval(run.root / place[0], place[1]):
                by_file.setdefault(place[0], []).append(place)
        for places in by_file.values():
            first, *others = sorted(places)
            name = {"__float__": "float()", "__int__": "int()", "__bool__": "bool()"}
            read = names[first]
            more = ", ".join(str(line) for _, line in others)
            yield Finding(
                "host-synchronization",
                first,
                f"{name.get(read, '.' + read + '()')} of a tensor in each step"
                + (f", also in line {more}" if more else ""),
            )


def _has_interval(path, line):
    """Whether this line is in the body of an `if` whose condition has a remainder."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return False
    return any(
        isinstance(part, ast.Mod)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and node.body[0].lineno <= line <= node.body[-1].end_lineno
        for part in ast.walk(node.test)
    )


def failures(checked):
    """Two processes that fail or hang where one does not; collectives that differ."""
    two = checked["two"]
    for run in filter(None, (checked["one"], two)):
        if UNUSED in run.output:
            missing = [
                name
                for name, crc in zip(
                    run.ranks[0].steps[0]["names"], run.ranks[0].steps[0]["gradients"], strict=True
                )
                if crc is None
            ]
            yield Finding(
                "unused-parameters",
                where(run.ranks[0].first("wrap")),
                f"no gradient came for {', '.join(filter(None, missing[:5])) or 'some parameters'}",
            )
            return
    if two is not None and two.world_size < 2 and not two.ended:
        yield _fails_alone(two, checked.options)
        return
    if two is None or two.world_size < 2 or (two.ended and not _lengths_differ(two)):
        if two is not None and two.any("no_hooks"):
            yield NotChecked("collectives", "this version of PyTorch has no hooks for them")
        return
    ranks = two.ranks
    if len(ranks) == 2:
        sequences = [list(_collectives(rank)) for rank in ranks]
        for number, (ours, theirs) in enumerate(zip(*sequences, strict=False)):
            if ours["name"] != theirs["name"] or ours["sizes"] != theirs["sizes"]:
                if "GATHER" in ours["name"] or "SCATTER" in ours["name"]:
                    continue
                yield Finding(
                    "collectives-differ",
                    where(ours) or where(theirs),
                    f"collective {number + 1}: {_call(ours)} on rank 0, {_call(theirs)} on rank 1",
                )
                return
        lengths = [len(sequence) for sequence in sequences]
        is_slow = two.timed_out == "limit"  # one of them is at the next call already
        more = 0 if lengths[0] > lengths[1] else 1
        if lengths[0] != lengths[1] and not is_slow and not _has_failed(two, 1 - more):
            extra = sequences[more][min(lengths)]
            yield Finding(
                "collectives-differ",
                where(extra),
                f"rank {more} calls {_call(extra)}, and rank {1 - more} does not: it calls "
                f"{min(lengths)} collectives in all",
            )
            return
    if two.timed_out == "limit":
        yield _too_slow(two, checked.options)
    elif two.timed_out:
        tops = [next(iter(own_lines(text)), None) for text in two.stacks.values()]
        text = "; ".join(filter(None, tops)) or "no stacks"
        yield Finding("hangs-on-two", None, f"{_several(two)} processes hang: {text}"[:600])
    else:
        yield _failure(two)


def _failure(two):
    place, text = failure(two)
    return Finding("fails-on-two", place, f"one process trains, {_several(two)} fail: {text}"[:600])


def _has_failed(two, number):
    """Whether it was not a collective that another rank does not call that made this run fail."""
    own = two.codes[number] if len(two.codes) == len(two.ranks) else 0
    exceptions = two.any("exception")
    return (
        own > 0
        or bool(two.ranks[number].of("exception"))
        or not all(event["waits"] for event in exceptions)
    )


def _several(two):
    number = max(two.world_size, len(two.codes))
    return {2: "two", 3: "three", 4: "four"}.get(number, str(number))


def _too_slow(two, options):
    steps = min(len(rank.steps) for rank in two.ranks) if two.ranks else 0
    why = f"they needed more than --timeout {options.timeout:.0f} s, and had made {steps} steps"
    return NotChecked("two processes", why)


def _fails_alone(two, options):
    """Processes that do not end, and have joined no group: where all of them fail, or one waits for
    the other to join, that is a bug. One of two may have met the other in a script that is for one
    process."""
    if two.timed_out == "limit":
        return _too_slow(two, options)
    fails = all(code not in (0, -signal.SIGKILL) for code in two.codes) or two.any("joins")
    if fails and not two.timed_out:
        return _failure(two)
    if two.timed_out and two.any("joins"):
        place = where(two.any("joins")[0])
        return Finding(
            "hangs-on-two",
            place,
            f"{_several(two)} processes wait for each other to join the group",
        )
    why = "it hangs" if two.timed_out else _failure(two).observed
    return NotChecked("two processes", f"the script joins no process group, and {why}")


def _lengths_differ(run):
    if len(run.ranks) < 2 or run.world_size < 2:
        return False
    if any(rank.of("parts") for rank in run.ranks):
        return False
    counts = {len(list(_collectives(rank))) for rank in run.ranks}
    return len(counts) > 1 and not run.ended


def _collectives(rank):
    """The collectives of a rank, without what is sent to a single rank."""
    for event in rank.of("collective"):
        if "SEND" not in event["name"] and "RECV" not in event["name"]:
            yield event


def _call(event):
    place = where(event)
    return event["name"] + (f" (line {place[1]})" if place else "")


RULES = [start, wrapped_twice, batch_norm, buffers, parameters, synchronizations, failures]
