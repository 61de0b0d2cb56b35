"""Rules about losses, gradients, clipping and learning rates."""

import itertools
import math

from check.findings import Finding, NotChecked
from check.rules.common import (
    all_close,
    failure,
    first_ranks,
    is_sharded,
    replicas,
    two_ranks,
    where,
)

LOOKED_AT = 16  # steps, as inside/check_inside/own.py does


def scale(checked):
    """The gradient of two ranks against the gradient of one process, for the same samples."""
    ranks = two_ranks(checked)
    two, one = checked["exact-two"], checked["exact-one"]
    what = "the gradient of two ranks against one process"
    if ranks is None:
        return
    if two is None or one is None or not one.ended:
        why = checked.not_run.get("exact-two") or checked.not_run.get("exact-one")
        why = why or "the script failed on the batches of both ranks"
        if checked["one"].code:
            why += f" (on one: {failure(checked['one'])[1][:200]})"
        yield NotChecked(what, why)
        return
    for event in two.any("not_exact") + one.any("not_exact"):
        yield NotChecked(what, event["why"])
        return
    if _start_differently(two.ranks):
        yield NotChecked(what, "the ranks start with different models")
        return
    if _inputs_differ(one, two):
        yield NotChecked(
            what, "the model gets other inputs on one process: of random numbers, maybe"
        )
        return
    rates = {}
    for event in one.any("gradients"):
        optimizer = event["optimizer"]
        events = [
            next((e for e in rank.of("gradients") if e["optimizer"] == optimizer), None)
            for rank in two.ranks
        ]
        if None in events:
            continue
        ours = one.ranks[0].numbers(event["file"], "d")
        pairs = zip(two.ranks, events, strict=True)
        theirs, *others = (rank.numbers(each["file"], "d") for rank, each in pairs)
        if event["sizes"] != events[0]["sizes"]:
            yield NotChecked(what, "the optimizer has different parameters on one process")
            return
        step = next(s for s in one.ranks[0].steps if s["optimizer"] == optimizer)
        if event["initial"] != events[0]["initial"]:
            yield NotChecked(
                what,
                "the models start differently: the script sets no seed, or one "
                "that depends on the number of processes",
            )
            return
        if not step["sharded"] and not all(
            _equal(theirs, other, event["sizes"]) for other in others
        ):
            yield NotChecked(what, "the ranks do not average their gradients")
            return
        rates[optimizer] = (*_compare(theirs, ours), step)
    for optimizer, (ratio, rest, step) in rates.items():
        backwards = len(step["backwards"])
        whole = next(s for s in two.ranks[0].steps if s["optimizer"] == optimizer)
        times = len(two.ranks)
        is_cut = backwards == times * len(whole["backwards"])
        if is_cut and abs(ratio * times - 1) < 0.04 and rest < 0.02:
            # A batch that is larger is cut into more parts, whose losses are added up.
            if not list(undivided(checked)):
                text = f"a batch that is cut into {backwards} parts has as many undivided backwards"
                yield Finding("loss-not-divided", _backward_of(step), text)
            continue
        if math.isnan(ratio):
            yield NotChecked(what, "all gradients of one process are zero")
            continue
        if rest > 0.02:
            yield Finding(
                "mean-of-means",
                where(step),
                f"for the same samples the gradient of {len(ranks)} ranks differs from that of one "
                f"process by {100 * rest:.0f} % of its norm, in other ways than by a factor",
            )
        elif abs(ratio - 1) > 0.02:
            yield Finding(
                "gradient-scale",
                _backward_of(step),
                f"for the same samples the gradient of {len(ranks)} ranks is {ratio:.3g} times "
                "that of one process",
            )


def _inputs_differ(one, two):
    """Whether the first step of one process has different inputs than all ranks together."""
    rows = [
        {
            row
            for rank in run.ranks
            for step in rank.steps[:1]
            for forward in step["forwards"]
            for row in forward.get("inputs", [])
        }
        for run in (one, two)
    ]
    return all(rows) and len(rows[0] & rows[1]) < 0.9 * len(rows[0])


def _backward_of(step):
    """The place where a step first calls backward(), close to which its loss is scaled."""
    place = step["backwards"][0][0] if step["backwards"] else None
    return tuple(place) if place else where(step)


def _start_differently(ranks):
    shards = [[event["checksums"] for event in rank.of("shard")] for rank in ranks[:2]]
    if any(shards):
        return shards[0] != shards[1]
    return ranks[0].steps[0]["parameters"] != ranks[1].steps[0]["parameters"]


def _equal(first, second, sizes):
    """Whether two gradients are the same but for rounding, in each parameter of these sizes."""
    ends = list(itertools.accumulate(sizes, initial=0))
    for start, end in itertools.pairwise(ends):
        ours, theirs = first[start:end], second[start:end]
        limit = 1e-6 * (1 + max(map(abs, ours), default=0.0))
        if not all(abs(a - b) <= limit for a, b in zip(ours, theirs, strict=True)):
            return False
    return True


def _compare(ours, reference):
    """The factor between two gradients, and what remains besides it, as a share of the norm."""
    square = sum(b * b for b in reference)
    if square == 0:
        return math.nan, 0.0
    ratio = sum(a * b for a, b in zip(ours, reference, strict=True)) / square
    rest = math.dist(ours, [ratio * b for b in reference])
    return ratio, rest / max(math.hypot(*ours), 1e-30)


def undivided(checked):
    """Accumulation of losses that are means, without a division by their number."""
    for rank in first_ranks(checked, "one", "two"):
        for step in rank.steps:
            times = len(step["backwards"])
            most = max(step["batches"].values(), default=0)
            if sum(step["batches"].values()) < 2:
                most = _inputs(step, rank)
            are_means = all(is_mean for _, is_mean in step["backwards"])
            if times >= 2 and most == times and not step["rescaled"] and are_means:
                place = step["backwards"][0][0]
                yield Finding(
                    "loss-not-divided",
                    place and tuple(place),
                    f"{times} backwards of losses that are means are added up for one step",
                )
                return


def _inputs(step, rank):
    """How many batches a step has put into its model: of a script without a DataLoader, or the
    parts into which one batch was cut."""
    name = "inputs" if step["batches"] else "rows"
    forwards = [forward for forward in step["forwards"] if forward.get(name)]
    if len({where(forward) for forward in forwards}) != 1:
        return 0
    rows = [row for forward in forwards for row in forward[name]]
    if step["batches"]:
        read = [e for e in rank.of("batch") if e["number"] < step["number"]]
        if not read or len(rows) != read[-1]["size"] or len(set(rows)) < len(rows):
            return 0
    return len({tuple(forward[name]) for forward in forwards})


def averaged(checked):
    """Gradients that the ranks do not average; replicas that drift apart."""
    ranks = replicas(checked)
    if ranks is None or is_sharded(ranks):
        return
    count = None
    if ranks[0].of("join") and all(rank.training for rank in ranks):
        # When a rank has joined, the steps of the ranks no longer have the same numbers.
        count = min(rank.training[0]["steps"] for rank in ranks)
    for other in ranks[1:]:
        found = list(_drift(ranks[0], other, count))
        if found:
            yield from found
            return


def _drift(first, second, count):
    """The first difference between two replicas."""
    pair_of = f"rank 0 and rank {second.number}"
    for ours, theirs in zip(first.steps[:count], second.steps[:count], strict=False):
        if ours["optimizer"] != theirs["optimizer"] or ours["size"] != theirs["size"]:
            return
        differing = _settings_differ(ours, theirs, second.number)
        if differing:
            yield Finding("rates-differ", where(ours), f"at step {ours['step'] + 1} {differing}")
            return
        if ours["parameters"] != theirs["parameters"]:
            differ = _names(first, ours, theirs, "parameters", "all_names")
            if ours["step"] == 0:
                yield Finding(
                    "models-start-differently",
                    where(ours),
                    f"before the first step {differ} differ between {pair_of}",
                )
            else:
                yield Finding(
                    "replicas-drift",
                    where(ours),
                    f"after {ours['step']} steps {differ} differ between {pair_of}",
                )
            return
        if ours["gradients"] != theirs["gradients"]:
            differ = _names(first, ours, theirs, "gradients", "names")
            wrapped = first.first("wrap")
            pairs = zip(ours["gradients"], theirs["gradients"], strict=False)
            if {i for i, pair in enumerate(pairs) if len(set(pair)) > 1} <= set(ours["unwrapped"]):
                text = f"no DistributedDataParallel holds {differ}, whose gradients differ"
                yield Finding("gradients-not-averaged", where(ours), f"{text} between {pair_of}")
                return
            rule = "ddp-bypassed" if wrapped else "gradients-not-averaged"
            forwards = ours["forwards"]
            place = where(ours)
            if wrapped and forwards:
                place = tuple(forwards[-1].get("caller") or ()) or where(forwards[-1])
            syncs = [f["syncs"] for f in forwards if "syncs" in f and f["grad"]]
            if syncs and not syncs[-1] and len(syncs) == len(forwards):
                rule, place = "never-synchronized", _backward_of(ours)
            yield Finding(
                rule,
                place,
                f"at step {ours['step'] + 1} the gradients of {differ} differ between {pair_of}",
            )
            return


def _settings_differ(ours, theirs, number_of_other):
    """What the ranks have set differently: the rate, something else of a group, or a schedule."""
    if not all_close(ours["rates"], theirs["rates"]):
        rates = [f"{step['rates'][0]:.4g}" for step in (ours, theirs)]
        return f"the rate is {rates[0]} on rank 0 and {rates[1]} on rank {number_of_other}"
    for number, (own, other) in enumerate(zip(ours["settings"], theirs["settings"], strict=False)):
        for name in own.keys() & other.keys():
            if not all_close(own[name], other[name]):
                values = f"{own[name]} on rank 0 and {other[name]} on rank {number_of_other}"
                return f"{name} of group {number} is {values}"
    counts = [[count for _, count in step["schedulers"]] for step in (ours, theirs)]
    if len(counts[0]) == len(counts[1]) and counts[0] != counts[1]:
        ends = f"{counts[0]} on rank 0 and to {counts[1]} on rank {number_of_other}"
        return f"the schedules have come to {ends}"
    return None


def skipped(checked):
    """Parameters that one rank uses in each step, and another one in none."""
    ranks = replicas(checked)
    if ranks is None or is_sharded(ranks):
        return
    by_rank = []  # for each rank: optimizer -> [positions of parameters that a step has skipped]
    for rank in ranks:
        by_rank.append({})
        for step in rank.steps[:LOOKED_AT]:
            by_rank[-1].setdefault(step["optimizer"], []).append(set(step["skipped"]))
    for optimizer, ours in by_rank[0].items():
        others = [own.get(optimizer, []) for own in by_rank[1:]]
        if min(map(len, [ours, *others])) < 4:
            continue
        never = [set.intersection(*own) for own in [ours, *others]]
        some = [set.union(*own) for own in [ours, *others]]
        for number, positions in enumerate(never):
            only = {i for i in positions if not all(i in skipped for skipped in some)}
            if only:
                step = next(s for s in ranks[0].steps if s["optimizer"] == optimizer)
                names = [step["names"][i] for i in sorted(only) if i < len(step["names"])]
                name = next(filter(None, names), f"parameter {min(only)}")
                yield Finding(
                    "skipped-by-a-rank",
                    where(step),
                    f"rank {number} never computes the gradients of {len(only)} parameters "
                    f"({name}{', …' if len(only) > 1 else ''}), which other ranks compute in each "
                    "step",
                )
                return


def plateaus(checked):
    """A schedule that each rank steers by a different value."""
    ranks = replicas(checked)
    for ours, theirs in zip(*(rank.of("plateau") for rank in (ranks or [])[:2]), strict=False):
        if not all_close([ours["value"]], [theirs["value"]]):
            values = f"{ours['value']:.4g} on rank 0 and {theirs['value']:.4g} on rank 1"
            text = f"ReduceLROnPlateau gets {values}: sooner or later the rates differ"
            yield Finding("rates-differ", where(ours), text)
            return


def own_gradients(checked):
    """The gradient of a step against the mean of those that the ranks have computed themselves."""
    ranks = replicas(checked)
    if ranks is None or is_sharded(ranks):
        return
    is_exact = checked["exact-one"] is not None and checked["exact-one"].ended
    for events in zip(*(rank.of("own_gradients") for rank in ranks), strict=False):
        ours = events[0]
        if len({event["name"] for event in events}) > 1:
            return
        numbers = [
            rank.numbers(event["file"], "d") for rank, event in zip(ranks, events, strict=True)
        ]
        if len({len(each) for each in numbers}) > 1:
            return
        half = len(numbers[0]) // 2  # its own, and those of the step
        step = numbers[0][half:]
        step_of = next(s for s in ranks[0].steps if s["step"] == ours["step"])
        if not all(_equal(step, each[half:], [half]) for each in numbers[1:]):
            return
        order = _clips_before_averaging(ranks[0], step_of)
        means = [sum(own) / len(numbers) for own in zip(*numbers, strict=True)][:half]
        ratio, rest = _compare(step, means)
        if order and rest > 0.02:
            text = f"step {ours['step'] + 1}: the ranks average what each of them has clipped"
            yield Finding("clip-before-average", order, text)
            return
        all_means = all(
            is_mean for rank in ranks for s in rank.steps[:2] for _, is_mean in s["backwards"]
        )
        is_single = len(step_of["backwards"]) == 1 and not step_of["clips"]
        if (
            rest < 0.02
            and abs(ratio / len(ranks) - 1) < 0.02
            and all_means
            and is_single
            and not is_exact
        ):
            yield Finding(
                "gradient-scale",
                where(step_of),
                "the gradient of a step is the sum over the ranks, whose losses are means",
            )
            return


def _clips_before_averaging(rank, step):
    """The place of a clip after which gradients are all-reduced in the same step, or None."""
    start = max((s["number"] for s in rank.steps if s["number"] < step["number"]), default=0)
    own = [event for event in rank.of("clip", "collective") if start < event["number"]]
    own = [event for event in own if event["number"] < step["number"]]
    clips = [event for event in own if event["kind"] == "clip"]
    for event in own if clips else []:
        if event["kind"] == "collective" and event["number"] > clips[-1]["number"]:
            sizes = [math.prod(size) for size in event["sizes"]]
            if "REDUCE" in event["name"] and max(sizes, default=0) > 1:
                return where(clips[-1])
    return None


def same_noise(checked):
    """Noise that the ranks draw for their batches, from generators with the same seed."""
    ranks = replicas(checked)
    if ranks is None or any(len(rank.steps) < 3 for rank in ranks):
        return
    noise = [[step["noise"] for step in rank.steps[:3]] for rank in ranks[:2]]
    if any(len(states) != 2 for own in noise for states in own):
        return
    # The states of each generator, for each step, at the batch and at the forward.
    generators = [
        list(zip(*(zip(*states, strict=False) for states in own), strict=False)) for own in noise
    ]
    drawn = [all(a != b for a, b in states) for states in generators[0]]
    same = [ours == theirs for ours, theirs in zip(*generators, strict=False)]
    if any(map(all, zip(drawn, same, strict=False))):
        forward = next(iter(ranks[0].steps[0]["forwards"]), None)
        text = "before the forwards of the first 3 steps both ranks draw the same random numbers"
        yield Finding("same-noise", where(forward), text)


def _names(rank, ours, theirs, what, names):
    differ = [
        i
        for i, pair in enumerate(zip(ours[what], theirs[what], strict=False))
        if pair[0] != pair[1]
    ]
    known = rank.steps[0][names] if rank.steps else []
    first = next((known[i] for i in differ if i < len(known) and known[i]), None)
    text = f"{len(differ)} of {len(ours[what])} tensors"
    return text + (f" ({first}{', …' if len(differ) > 1 else ''})" if first else "")


def zeroed(checked):
    """Gradients of the step before that are still there."""
    for rank in first_ranks(checked, "one", "two"):
        steps = [step for step in rank.steps if step["accumulated"]]
        if steps:
            yield Finding(
                "no-zero-grad",
                where(steps[0]),
                f"{len(steps)} of {len(rank.steps)} steps add to the gradients of the last one",
            )
            return
        moved = next((step for step in rank.steps if step["moved"]), None)
        if moved:
            yield Finding(
                "no-zero-grad",
                tuple(moved["moved"]),
                f"step {moved['step'] + 1} adds this gradient to one of other weights: the "
                "parameters have changed between the two backwards",
            )
            return
        yield from left_over(rank)


def left_over(rank):
    """Gradients of the last batches of an epoch, too few for a step, which the first step of the
    next epoch adds to its own."""
    for before, after in itertools.pairwise(rank.training):
        if before["cut"]:  # by the check: a loader that looks ahead gives one batch more
            continue
        steps = rank.steps[before["steps_before"] : after["steps_before"]]
        counts = {step["added"] for step in steps}
        if len(counts) != 1 or len(rank.steps) <= after["steps_before"]:
            continue
        first, usual = rank.steps[after["steps_before"]], counts.pop()
        more = first["added"] - usual
        if 0 < more < usual and more == before["batches"] - usual * len(steps):
            yield Finding(
                "no-zero-grad",
                where(first),
                f"step {first['step'] + 1}, the first one of an epoch, adds up {first['added']} "
                f"gradients, others {usual}: {more} are left over from the epoch before",
            )
            return


def zero(checked):
    """Gradients that are all zero, or that never come, in all steps."""
    for rank in first_ranks(checked, "one", "two"):
        by_optimizer = {}
        for step in rank.steps:
            by_optimizer.setdefault(step["optimizer"], []).append(step)
        for steps in by_optimizer.values():
            got = sum(gradient is not None for gradient in steps[0]["gradients"])
            if len(steps) > 2 and got and all(step["zero"] for step in steps):
                yield Finding(
                    "zero-gradients",
                    where(steps[0]),
                    f"the gradients of all {got} parameters are zero in all {len(steps)} steps",
                )
                return
            if len(steps) > 2 and not any(map(_may_train, steps)):
                yield Finding(
                    "zero-gradients",
                    where(steps[0]),
                    f"none of the {steps[0]['size']} parameters of {steps[0]['type']} has a "
                    f"gradient in any of {len(steps)} steps",
                )
                return


def _may_train(step):
    """Whether a step has gradients, or is one of an optimizer that needs none of `grad`, and so has
    a state all the same."""
    return (
        any(gradient is not None for gradient in step["gradients"])
        or step["state"][0] > 0
        or step["size"] == 0
    )


def clipped(checked):
    """Gradients of a scaled loss are clipped."""
    for rank in first_ranks(checked, "one", "two"):
        for step in rank.of("scaler_step"):
            for clip in step["clips"]:
                if clip["scaled"]:
                    yield Finding(
                        "clip-before-unscale",
                        where(clip),
                        "gradients are clipped while they are still scaled",
                    )
                    return


def rates(checked):
    """A schedule by steps, of which there are fewer on more processes."""
    ranks = replicas(checked)
    one = checked["one"]
    if ranks is None or not one.ranks:
        return
    ours = [s["rates"] for s in one.ranks[0].steps if s["optimizer"] == 0]
    theirs = [s["rates"] for s in ranks[0].steps if s["optimizer"] == 0]
    several = len(ranks)
    count = min(len(ours) // several, len(theirs))
    if count < 3 or not one.ranks[0].training or not ranks[0].training:
        return
    epochs = [rank.training[0]["sizes"][0] for rank in (one.ranks[0], ranks[0])]
    varies = len({tuple(rate) for rate in ours[: several * count]}) > count // 2 + 1
    if epochs[0] > 1.5 * epochs[1] > 0 and varies and ours[:count] == theirs[:count]:
        yield Finding(
            "rate-by-step",
            where(ranks[0].steps[0]),
            f"the rates of the first {count} steps are the same on one process ({epochs[0]} steps "
            f"per epoch) and on {several} ({epochs[1]})",
        )


RULES = [
    scale,
    undivided,
    averaged,
    skipped,
    plateaus,
    own_gradients,
    same_noise,
    zeroed,
    zero,
    clipped,
    rates,
]
