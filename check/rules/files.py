"""Rules about checkpoints: who writes them, how, and what a run that is started again continues."""

import os
import re
from collections import Counter
from itertools import pairwise

from check.findings import Finding, NotChecked
from check.rules.common import (
    all_close,
    failure,
    first_exception,
    trains_nothing,
    two_ranks,
    where,
)


def writers(checked):
    """Files that each rank writes, and checkpoints that are overwritten in place."""
    two = checked["two"]
    ranks = two_ranks(checked)
    if ranks is not None:
        by_path = {}
        saved = {event["path"] for rank in ranks for event in _saves(rank, checked)}
        read = _names_read(checked["resumed"])
        for rank in ranks:
            others = [e for e in rank.of("save") if e["model"] is False]
            saved |= {e["path"] for e in others if os.path.basename(e["path"]) in read}
            events = [*_saves(rank, checked), *others, *rank.of("write", "dump")]
            for event in events:
                by_path.setdefault(event["path"], {}).setdefault(rank.number, event)
            # Each rank may write a file of its own, and then give it the name that all use.
            moved = {event["path"] for event in events}
            for event in rank.of("rename"):
                if event["source"] in moved:
                    by_path.setdefault(event["path"], {}).setdefault(rank.number, event)
                    saved |= {event["path"]} if event["source"] in saved else set()
        shared = {path for path, events in by_path.items() if len(events) > 1}
        for path, events in by_path.items():
            sources = {event.get("source") for event in events.values()}
            if path in shared - {os.devnull} and not sources & shared:
                event = events[0] if 0 in events else next(iter(events.values()))
                rule = "saved-by-every-rank" if path in saved else "written-by-every-rank"
                yield Finding(
                    rule,
                    where(event),
                    f"{len(events)} ranks write {os.path.relpath(path, two.root)}",
                )
    for run in filter(None, (two, checked["one"], checked["resumed"])):
        for rank in run.ranks:
            renamed = {event["source"] for event in rank.of("rename")}
            saves = _saves(rank, checked)
            counts = Counter(event["path"] for event in saves)
            loads = [e for e in rank.of("load") if saves and e["number"] < saves[0]["number"]]
            counts.update({e["path"] for e in loads} & counts.keys())  # the run before wrote them
            models = {event["path"] for event in saves if event["model"]}
            for path, count in sorted(counts.items(), key=lambda item: item[0] not in models):
                if count > 1 and not any(_covers(source, path) for source in renamed):
                    event = next(e for e in saves if e["path"] == path)
                    yield Finding(
                        "written-in-place",
                        where(event),
                        f"{os.path.relpath(path, run.root)} is written in place {count} times; it "
                        "is broken if the job is killed meanwhile",
                    )
                    return


def _saves(rank, checked):
    """The checkpoints that a rank writes by itself: also by pickle and NumPy, if the run that was
    started again reads a file of that name."""
    again = checked["resumed"]
    return [
        event
        for event in rank.of("save", "dump")
        if "distributed" not in event["function"] and _is_checkpoint(event, again)
    ]


def _is_checkpoint(event, again):
    """Whether this is a checkpoint: not a file without parameters, such as predictions, nor one of
    pickle or NumPy that a run that is started again does not read."""
    if event["model"] is False:
        return False
    if event["kind"] == "save":
        return True
    return os.path.basename(event["path"]) in _names_read(again)


def _names_read(again):
    """The names of the files that a run that is started again reads."""
    return {os.path.basename(load["path"]) for load in again.any("load")} if again else set()


def _covers(source, path):
    return source == path or path.startswith(source + os.sep)


def loggers(checked):
    """Several runs of a logger for one job."""
    ranks = two_ranks(checked) or []
    logging = [rank for rank in ranks if rank.of("logger")]
    folders = [rank.first("logger")["folder"] for rank in logging]
    if len(logging) > 1 and (None in folders or len(set(folders)) < len(folders)):
        event = logging[0].first("logger")
        yield Finding(
            "several-loggers", where(event), f"{len(logging)} ranks start {event['what']}"
        )


def _missing_files(arguments, root):
    """The paths of files among arguments that do not exist, from the folder of a run."""
    paths = [argument.partition("=")[2] or argument for argument in arguments]
    named = [p for p in paths if os.path.splitext(p)[1][1:].isalpha()]
    return [path for path in named if not os.path.exists(os.path.join(root, path))]


def resumed(checked):
    """What a run that was killed and started again continues, and what it has lost."""
    killed, again = checked["killed"], checked["resumed"]
    if killed is None or again is None:
        why = checked.not_run.get("killed") or checked.not_run.get("resumed")
        if event := killed and first_exception(killed):
            why = f"the run that was to be killed failed: {event['error']}"
        yield NotChecked("resuming", why or "the script did not end on two processes")
        return
    if again.timed_out == "limit" and not again.any("step"):
        yield NotChecked("resuming", "the run that was started again needed more than --timeout")
        return
    if not again.ended and not again.any("step"):
        if missing := _missing_files(checked.options.resume_arguments, killed.root):
            why = f"--resume-args names {missing[0]}, which the run that was killed has not written"
            yield NotChecked("resuming", why)
            return
        place, text = failure(again)
        yield Finding("resume-fails", place, f"started again, the script fails: {text}"[:500])
        return
    saves = [*killed.any("save", "dump"), *again.any("save", "dump")]
    others = {event["path"] for event in saves if event["model"] is False}
    written = {os.path.basename(event["path"]) for event in saves if event["path"] not in others}
    source = checked.options.source
    loads = [
        event
        for rank in again.ranks
        for event in _restores(rank)
        if event["path"] not in others and _is_new(event["path"], killed, source)
    ]
    if not loads:
        for event in again.any("load_failed"):
            if _is_new(event["path"], killed, source):
                text = f"torch.load fails, and the script goes on without it: {event['error']}"
                yield Finding("resume-fails", where(event), text)
                return
        yield NotChecked(
            "resuming",
            f"the run that was started again reads none of {', '.join(sorted(written)[:3])}: if it "
            "takes an option to resume, give it with --resume-args",
        )
        return
    before, after = killed.ranks[0], again.ranks[0]
    if not after.steps:
        yield NotChecked("resuming", "the run that was started again takes no step")
        return
    place = where(loads[0])
    first = after.steps[0]
    states = [step["parameters"] for step in before.steps]
    if first["rounded"] and not before.steps[0]["rounded"]:
        yield Finding(
            "model-rounded", place, f"all parameters after the load are {first['rounded']} numbers"
        )
        return
    if first["parameters"] not in states:
        if trains_nothing(first):
            return  # the rule wrong-parameters says so
        yield NotChecked(
            "resuming",
            "the parameters after the load equal no earlier step's; they may be an average",
        )
        return
    equal = [i for i, state in enumerate(states) if state == first["parameters"]]
    saves = before.with_steps("save", "dump")
    saved = {steps for event, steps in saves if _is_checkpoint(event, again)}
    index = max([i for i in equal if i in saved] or equal)
    if index == 0:
        if trains_nothing(first):
            return
        yield Finding(
            "model-not-restored", place, "the first step starts from the initial parameters again"
        )
        return
    found = list(_lost(before, after, index, place, _uninterrupted(checked)))
    # Other ranks get the buffers of rank 0 with the first forward of a wrapper.
    found += _lost_buffers(before.steps[index], after.steps[0], place)
    found = found or list(_lost_on_other_ranks(killed, again, index, place))
    if _sets_rates_at_random(before):
        yield NotChecked("the rate after the load", "without a load, it goes up and down, too")
    yield from found or _other_step(killed, again, index, place)


def _other_step(killed, again, index, place):
    """The first step after the load, of the same weights and batches, is not the one before."""
    for before, after in _pairs(killed.ranks, again.ranks):
        if len(before.steps) <= index + 1 or len(after.steps) < 2:
            return
        if _read_for(before, index) != _read_for(after, 0) or not _read_for(after, 0):
            return
    before, after = killed.ranks[0], again.ranks[0]
    old, new = before.steps[index], after.steps[0]
    if old["optimizer"] != new["optimizer"]:
        return
    gradients = [step["sums"][0] for step in (old, new)]
    moves = [
        second["sums"][1][0] - first["sums"][1][0]
        for first, second in (before.steps[index : index + 2], after.steps[:2])
    ]
    largest = max(gradients[0][1], gradients[1][1])
    what = None
    if any(abs(a - b) > 1e-3 * largest for a, b in _pairs(*gradients)):
        norms = [f"{norm:.4g}" for _, norm in gradients]
        what = f"a gradient with a norm of {norms[0]}; after the load it has {norms[1]}"
    elif abs(moves[0] - moves[1]) > 1e-2 * max(map(abs, moves)):
        what = "an update that differs from the one after the load"
    if what:
        same = "for the same weights, optimizer state and batch"
        yield Finding("other-step-after-resume", place, f"{same} step {index + 1} had {what}")


def _read_for(rank, index):
    """What a step has read and put into its model; None if it has drawn random numbers."""
    step = rank.steps[index]
    start = rank.steps[index - 1]["number"] if index else 0
    events = [e for e in rank.of("batch") if start < e["number"] < step["number"]]
    inputs = [forward["inputs"] for forward in step["forwards"] if forward.get("inputs")]
    if step["drew"] or not events or not inputs:
        return None
    return [[event["samples"], event["leaves"]] for event in events], inputs


def _lost_on_other_ranks(killed, again, index, place):
    """What only rank 0 has restored: of ranks that had the same model before, as replicas have."""
    one, first = killed.ranks[0].steps[index], again.ranks[0].steps[0]
    for number, (before, after) in enumerate(_pairs(killed.ranks[1:], again.ranks[1:]), 1):
        if len(before.steps) <= index or not after.steps:
            continue
        if before.steps[index]["parameters"] != one["parameters"]:
            continue
        found = list(_lost(before, after, index, place))
        if after.steps[0]["parameters"] != first["parameters"]:
            text = "only rank 0's parameters are right after the load"
            found = [Finding("model-not-restored", place, text)]
        if found:
            observed = f"on rank {number}: {found[0].observed}"
            yield Finding(found[0].rule, found[0].place, observed)
            return


def _epoch_of(rank, index):
    """The number that was last given to set_epoch before the step with this index, or None."""
    numbers = [event["epoch"] for event, steps in rank.with_steps("set_epoch") if steps <= index]
    return numbers[-1] if numbers else None


def _restores(rank):
    """The loads of a rank that its training can go on from: before its first step, and not of what
    it has saved itself, as the best model is, which a test after the training loads."""
    saved = set()
    for event in rank.of("load", "save", "dump", "step"):
        if event["kind"] == "step":
            return
        if event["kind"] != "load":
            saved.add(event["path"])
        elif event["path"] not in saved:
            yield event


def _is_new(path, killed, source):
    """Whether the killed run has written this, and not somebody before: data, other weights."""
    written = {event["path"] for event in killed.any("save", "dump", "write", "rename")}
    if any(other == path or other.startswith(path + os.sep) for other in written):
        return True
    root = os.path.realpath(killed.root)
    return path.startswith(root + os.sep) and not (source / os.path.relpath(path, root)).exists()


def _uninterrupted(checked):
    """Rank 0 of the run that was neither killed nor started again, or None."""
    run = checked["two"] if checked["killed"].world_size > 1 else checked["one"]
    return next(iter(run.ranks), None) if run else None


def _lost(before, after, index, place, uninterrupted=None):
    old, new = before.steps[index], after.steps[0]
    is_lost = old["state"] != new["state"] and old["state"][0] > 0
    if is_lost:
        count = "has none" if not new["state"][0] else "differs"
        yield Finding(
            "optimizer-not-restored",
            place,
            f"{old['type']} had {old['state'][0]} tensors of state; after the load it {count}",
        )
    yield from _lost_schedule(before, after, index, place, is_lost)
    if not is_lost:
        yield from _lost_settings(before, after, index, place)
    if old["scaler"] and new["scaler"] and old["scaler"] != new["scaler"]:
        yield Finding(
            "scaler-not-restored",
            place,
            f"scale and growth count were {old['scaler']}; after the load they are {new['scaler']}",
        )
    yield from _lost_average(before, after, index, place)
    yield from _epoch(before, after, index, place, uninterrupted)


def _lost_buffers(old, new, place):
    """Statistics and other buffers of the model that the next step begins with."""
    ours, theirs = (
        next((each["buffers"] for each in step["forwards"] if "buffers" in each), {})
        for step in (old, new)
    )
    differ = [name for name, crc in ours.items() if theirs.get(name, crc) != crc]
    if differ:
        yield Finding(
            "buffers-not-restored",
            place,
            f"{len(differ)} of {len(ours)} buffers of the model ({differ[0]}, …) are not what they "
            "were before",
        )


def _lost_average(before, after, index, place):
    """An average of the weights, or a second model that follows the first one."""
    old, new = _following(before), _following(after)
    if not old or not new:
        return
    saved = dict(map(tuple, before.steps[index]["others"]))
    ours = Counter(saved[key] for key in old)
    theirs = Counter(dict(map(tuple, after.steps[0]["others"]))[key] for key in new)
    kept = (ours & theirs).total()
    if kept < 0.2 * ours.total():
        yield Finding(
            "ema-not-restored",
            place,
            f"{ours.total()} tensors besides the parameters change in training (an average of the "
            f"weights, a second model); after the load {kept} of them are as they were",
        )


def _following(rank):
    """The tensors besides the parameters that are there at all steps, and change; none if they are
    fewer than the parameters."""
    steps = [dict(map(tuple, step["others"])) for step in rank.steps]
    always = set.intersection(*map(set, steps)) if len(steps) > 1 else set()
    moving = {key for key in always if len({step[key] for step in steps}) > 1}
    return moving if len(moving) >= 0.8 * len(rank.steps[0]["parameters"]) else set()


def _first_steps(before, after, index):
    """The first two steps after the load, each with the same one before: the first may have what is
    in the state of the optimizer, before a schedule that is lost sets something else."""
    return list(zip(before.steps[index:][:2], after.steps[:2], strict=False))


def _lost_schedule(before, after, index, place, is_lost):
    """The rate, and what a schedule has counted, where the rate has not changed yet."""
    pairs = _first_steps(before, after, index)
    is_random = _sets_rates_at_random(before)
    for old, new in pairs:
        if not is_random and not all_close(old["rates"], new["rates"]):
            also = "; the rate is also in the state of the optimizer" if is_lost else ""
            yield Finding(
                "scheduler-not-restored",
                place,
                f"step {old['step'] + 1} had the rate {old['rates'][0]:.4g}; after the load it has "
                f"{new['rates'][0]:.4g}{also}",
            )
            return
    old, new = (step["schedulers"] for step in pairs[0])
    if [kind for kind, _ in old] != [kind for kind, _ in new]:
        return
    for (kind, count), (_, restored) in zip(old, new, strict=True):
        if count != restored:
            yield Finding(
                "scheduler-not-restored",
                place,
                f"{kind} had come to {count} (last_epoch); after the load it is at {restored}",
            )
            return


def _sets_rates_at_random(rank):
    """Whether the rate goes up and down from step to step without a scheduler: each step of some
    scripts multiplies it by the length of its text, and sets it back."""
    by_optimizer = {}  # those of a GAN take turns, at rates of their own
    for step in rank.steps:
        if step["rates"] and not step["schedulers"]:
            by_optimizer.setdefault(step["optimizer"], []).append(step["rates"][0])
    return any(map(_goes_up_and_down, by_optimizer.values()))


def _goes_up_and_down(rates):
    changes = [after > before for before, after in pairwise(rates) if after != before]
    return sum(first != second for first, second in pairwise(changes)) > 1


def _lost_settings(before, after, index, place):
    """What else than the rate the groups of parameters hold."""
    changed = [
        f"step {old['step'] + 1} had {name} {_short(ours[name])} in group {number} of "
        f"{old['type']}; after the load it has {_short(theirs[name])}"
        for old, new in _first_steps(before, after, index)
        for number, (ours, theirs) in enumerate(_pairs(old["settings"], new["settings"]))
        for name in sorted(ours.keys() & theirs.keys())
        if not all_close(ours[name], theirs[name])
    ]
    if changed:
        yield Finding("settings-not-restored", place, changed[0])


def _pairs(first, second):
    return zip(first, second, strict=False)


def _short(values):
    return ", ".join(f"{value:.4g}" for value in values)


def _epoch(before, after, index, place, uninterrupted):
    """The epoch and the order of the samples go on."""
    if counted := _counted_again(after, uninterrupted):
        yield Finding("epoch-not-restored", place, counted)
        return
    expected, number = _epoch_of(before, index), _epoch_of(after, 0)
    if expected is not None and number is not None and number < expected:
        yield Finding(
            "epoch-not-restored",
            place,
            f"step {index + 1} was in epoch {expected} of the sampler; after the load it is in "
            f"epoch {number}",
        )
        return
    ends = [epoch["steps"] + epoch["steps_before"] for epoch in before.training]
    if index in ends and expected is not None and number is not None and number > expected:
        yield Finding(
            "order-after-resume",
            place,
            f"step {index + 1} was the first one of epoch {expected} of the sampler; after the "
            f"load the first one is in epoch {number}: an epoch is skipped",
        )
        return
    read = [sum(rank.steps[0]["batches"].values()) for rank in (before, after)]
    if read[1] > read[0]:  # it skips the batches that were trained on, to find the position again
        yield from _skipped(before, after, index, place)
        return
    whole = [epoch for epoch in before.training if epoch["steps"] + epoch["steps_before"] <= index]
    again = _printed_again(before, after, uninterrupted)
    if whole and number is None and again is not None:
        yield Finding(
            "epoch-not-restored",
            place,
            f"started again, the script prints epoch {again}, the first one, again",
        )
        return
    loader = next((next(iter(s["batches"])) for s in before.steps if s["batches"]), None)
    old, new = _batches(before, loader), _batches(after, loader)
    if not old or not new or not new[0]:
        return
    earlier = before.steps[:index]
    if loader is None:
        expected = sum(len(_inputs(step)) for step in earlier)
    else:
        expected = sum(step["batches"].get(loader, 0) for step in earlier)
    if len(old) > expected and not _begin_alike(old[0], old[expected]) and new[0] == old[0]:
        # Within the first epoch this is also what a script does that repeats the epoch on purpose.
        ends = all(epoch["whole"] or epoch["iterable"] for epoch in after.training)
        yield Finding(
            "epoch-repeated" if not whole and after.training and ends else "order-after-resume",
            place,
            f"after {index} steps the run that was started again trains on the first batch of the "
            "first epoch",
        )


def _counted_again(after, uninterrupted):
    """What tells that a run does not go on from the epoch or step in its checkpoint, or None: of a
    number that is another one in each checkpoint of the run that was not interrupted."""
    loads = [event["counts"] for event in _restores(after) if event.get("counts")]
    written = _saved_counts(after)
    if not loads or not written or uninterrupted is None:
        return None
    saved = _saved_counts(uninterrupted)
    for key, loaded in loads[-1].items():
        series = [counts[key] for counts in saved if key in counts]
        ascends = len(series) > 1 and all(a < b for a, b in pairwise(series))
        again = written[0].get(key)
        if ascends and again is not None and again <= loaded:
            return (
                f"{key} is {loaded} in the checkpoint that is loaded, and {again} in the next one "
                "that is saved"
            )
    return None


def _saved_counts(rank):
    """The numbers of epochs and steps in the checkpoints of a rank, once for those that are saved
    after the same step."""
    saves = rank.with_steps("save", "dump")
    return list({steps: e["counts"] for e, steps in saves if steps and e.get("counts")}.values())


def _begin_alike(one, other):
    """Whether two batches are the same, but for their lengths, as those are of a text that each
    epoch reads from its beginning in pieces of random lengths."""
    length = min(len(one), len(other))
    return one[:length] == other[:length]


def _skipped(before, after, index, place):
    """A script that reads and skips batches after the load trains on the one that comes next."""
    loader = next((next(iter(s["batches"])) for s in before.steps if s["batches"]), None)
    trained = _last_read(before, loader)
    first = after.first("step")["number"]
    read = [samples for number, samples in _read(after, loader) if number < first]
    if loader is None or not read or index >= len(trained) or read[-1] == trained[index]:
        return
    ends = [epoch["steps"] + epoch["steps_before"] for epoch in before.training]
    start = max((end for end in ends if end <= index), default=0)
    what = None
    if trained[index] in read[:-1]:
        what = f"skips the batch of step {index + 1}, on which nothing was trained yet"
    elif start and read[-1] == trained[index - start] != trained[index]:
        what = f"trains on the batch of step {index - start + 1}, of the first epoch, again"
    if what:
        yield Finding("order-after-resume", place, f"the run that was started again {what}")


def _read(rank, loader):
    """The samples of each batch of a loader, with the number of the event."""
    events = rank.of("batch")
    return [(e["number"], e["samples"]) for e in events if str(e["loader"]) == loader]


def _last_read(rank, loader):
    """The samples of the last batch that was read from a loader before each step."""
    read = _read(rank, loader)
    steps = (step["number"] for step in rank.steps)
    return [next((s for n, s in reversed(read) if n < step), None) for step in steps]


def _batches(rank, loader):
    """The samples of each batch of a loader that is trained from, in order; or the inputs."""
    if loader is None:
        return [rows for step in rank.steps for rows in _inputs(step)]
    evaluated = {epoch["epoch"] for epoch in rank.evaluation}
    return [
        event["samples"]
        for event in rank.of("batch")
        if str(event["loader"]) == loader and event["epoch"] not in evaluated
    ]


def _inputs(step):
    """Checksums of what a step of a script without a DataLoader has put into its model at last; an
    evaluation may have come before."""
    return [forward["rows"] for forward in step["forwards"] if forward.get("rows")][-1:]


def _printed_again(before, after, uninterrupted):
    """The first epoch that a script prints, if that is the same after a restart; else None."""
    old, new = _printed_epochs(before), _printed_epochs(after)
    for key, numbers in _printed_epochs(uninterrupted).items() if uninterrupted else ():
        is_epoch = numbers == sorted(numbers) != numbers[:1] * len(numbers)  # no argument
        if is_epoch and key in old and key in new:
            return new[key][0] if new[key][0] == old[key][0] else None
    return None


def _printed_epochs(rank):
    """{(place, position in its text): the numbers of epochs that were printed there}."""
    found = {}
    for event in rank.of("print"):
        texts = re.findall(r"epoch\W{0,4}(\d+)", event["text"], re.IGNORECASE)
        for position, text in enumerate(texts):
            found.setdefault((where(event), position), []).append(int(text))
    return found


RULES = [writers, loggers, resumed]
