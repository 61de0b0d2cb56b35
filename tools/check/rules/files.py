"""Rules about checkpoints: who writes them, how, and what a run that is started again continues."""

import os
import re
from collections import Counter

from tools.check.findings import Finding, NotChecked
from tools.check.rules.common import two_ranks, where


def writers(checked):
    """Files that each rank writes, and checkpoints that are overwritten in place."""
    two = checked["two"]
    ranks = two_ranks(checked)
    if ranks is not None:
        by_path = {}
        saved = {event["path"] for rank in ranks for event in _saves(rank, checked)}
        for rank in ranks:
            for event in [*_saves(rank, checked), *rank.of("write", "dump")]:
                by_path.setdefault(event["path"], {}).setdefault(rank.number, event)
        for path, events in by_path.items():
            if len(events) > 1 and os.path.basename(path) != "null":
                event = events[0] if 0 in events else next(iter(events.values()))
                rule = "saved-by-every-rank" if path in saved else "written-by-every-rank"
                yield Finding(
                    rule,
                    where(event),
                    f"{len(events)} ranks write {os.path.relpath(path, two.root)}",
                )
    for run in filter(None, (two, checked["one"])):
        for rank in run.ranks:
            renamed = {event["source"] for event in rank.of("rename")}
            saves = _saves(rank, checked)
            counts = Counter(event["path"] for event in saves)
            for path, count in counts.items():
                if count > 1 and not any(_covers(source, path) for source in renamed):
                    event = next(e for e in saves if e["path"] == path)
                    yield Finding(
                        "written-in-place",
                        where(event),
                        f"{os.path.relpath(path, run.root)} is overwritten {count} times; it is "
                        "broken if the job is killed meanwhile",
                    )
                    return


def _saves(rank, checked):
    """The checkpoints that a rank writes by itself: also by pickle and NumPy, if the run that was
    started again reads a file of that name."""
    again = checked["resumed"]
    loaded = {os.path.basename(event["path"]) for event in again.any("load")} if again else set()
    return [
        event
        for event in rank.of("save", "dump")
        if "distributed" not in event["function"]
        and (event["kind"] == "save" or os.path.basename(event["path"]) in loaded)
    ]


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


def resumed(checked):
    """What a run that was killed and started again continues, and what it has lost."""
    killed, again = checked["killed"], checked["resumed"]
    if killed is None or again is None:
        why = checked.not_run.get("killed") or checked.not_run.get("resumed")
        yield NotChecked("resuming", why or "the script did not end on two processes")
        return
    if not again.ended and not again.any("step"):
        lines = [line for line in again.output.strip().splitlines() if "Error" in line]
        text = lines[-1] if lines else f"exit code {again.code}"
        yield Finding("resume-fails", None, f"started again, the script fails: {text}"[:500])
        return
    written = {os.path.basename(event["path"]) for event in killed.any("save", "dump")}
    source = checked.options.source
    loads = [event for event in again.any("load") if _is_new(event["path"], killed, source)]
    if not loads:
        yield NotChecked(
            "resuming",
            f"the run that was started again reads none of {', '.join(sorted(written)[:3])}: if it "
            "takes an option to resume, give it with --resume-args",
        )
        return
    before, after = killed.ranks[0], again.ranks[0]
    if not after.steps:
        yield NotChecked("resuming", "the run that was started again makes no step")
        return
    place = where(loads[0])
    first = after.steps[0]
    states = [step["parameters"] for step in before.steps]
    if first["parameters"] not in states:
        yield NotChecked("resuming", "the parameters after the load are those of no step before")
        return
    index = max(i for i, state in enumerate(states) if state == first["parameters"])
    if index == 0:
        yield Finding(
            "model-not-restored", place, "the first step starts from the initial parameters again"
        )
        return
    yield from _lost(before, after, index, place)


def _is_new(path, killed, source):
    """Whether the killed run has written this, and not somebody before: data, other weights."""
    written = {event["path"] for event in killed.any("save", "dump", "write", "rename")}
    if any(other == path or other.startswith(path + os.sep) for other in written):
        return True
    root = os.path.realpath(killed.root)
    return path.startswith(root + os.sep) and not (source / os.path.relpath(path, root)).exists()


def _lost(before, after, index, place):
    old, new = before.steps[index], after.steps[0]
    if old["state"] != new["state"] and old["state"][0]:
        count = "has none" if not new["state"][0] else "differs"
        yield Finding(
            "optimizer-not-restored",
            place,
            f"{old['type']} had {old['state'][0]} tensors of state; after the load it {count}",
        )
    # The first rate may be that of the optimizer's state, before a schedule that is lost sets one.
    for earlier, later in zip(before.steps[index:][:2], after.steps[:2], strict=False):
        if not _close(earlier["rates"], later["rates"]):
            yield Finding(
                "scheduler-not-restored",
                place,
                f"step {earlier['step'] + 1} had the rate {earlier['rates'][0]:.4g}; after the "
                f"load it has {later['rates'][0]:.4g}",
            )
            break
    if old["scaler"] and new["scaler"] and old["scaler"] != new["scaler"]:
        yield Finding(
            "scaler-not-restored",
            place,
            f"scale and growth count were {old['scaler']}; after the load they are {new['scaler']}",
        )
    yield from _epoch(before, after, index, place)


def _close(first, second):
    return len(first) == len(second) and all(
        abs(a - b) <= 1e-9 + 1e-6 * abs(a) for a, b in zip(first, second, strict=True)
    )


def _epoch(before, after, index, place):
    """The epoch and the order of the samples go on."""
    read = [sum(rank.steps[0]["batches"].values()) for rank in (before, after)]
    if read[1] > read[0]:
        return  # it skips the batches that were trained on, to find the position again
    numbers = [e["epoch"] for e in after.of("set_epoch")[:1]]
    earlier = [e["epoch"] for e in before.of("set_epoch")]
    printed = [_printed_epochs(rank) for rank in (before, after)]
    if numbers and len(set(earlier)) > 1 and numbers[0] == earlier[0]:
        yield Finding(
            "epoch-not-restored",
            place,
            f"started again, the sampler is set to epoch {numbers[0]}, the first one; there were "
            f"{len(set(earlier))} before",
        )
        return
    whole = [epoch for epoch in before.training if epoch["steps"] + epoch["steps_before"] <= index]
    if whole and not numbers and all(printed) and printed[1][0] == printed[0][0]:
        yield Finding(
            "epoch-not-restored",
            place,
            f"started again, the script prints epoch {printed[1][0]}, the first one, again",
        )
        return
    loader = next((next(iter(s["batches"])) for s in before.steps if s["batches"]), None)
    old, new = _batches(before, loader), _batches(after, loader)
    if not old or not new or not new[0]:
        return
    expected = sum(step["batches"].get(loader, 0) for step in before.steps[:index])
    if len(old) > expected and old[0] != old[expected] and new[0] == old[0]:
        # Within the first epoch this is also what a script does that repeats the epoch on purpose.
        ends = all(epoch["ended"] or epoch["iterable"] for epoch in after.training)
        yield Finding(
            "epoch-repeated" if not whole and after.training and ends else "order-after-resume",
            place,
            f"after {index} steps the run that was started again reads the first batch of the "
            "first epoch",
        )


def _batches(rank, loader):
    """The samples of each batch of a loader that is trained from, in order."""
    evaluated = {epoch["epoch"] for epoch in rank.evaluation}
    return [
        event["samples"]
        for event in rank.of("batch")
        if str(event["loader"]) == loader and event["epoch"] not in evaluated
    ]


def _printed_epochs(rank):
    found = []
    for event in rank.of("print"):
        match = re.search(r"epoch\W{0,4}(\d+)", event["text"], re.IGNORECASE)
        if match:
            found.append(int(match[1]))
    return found


RULES = [writers, loggers, resumed]
