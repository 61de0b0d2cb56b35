"""Rules about the samples that the ranks train on."""

from check.findings import Finding, NotChecked
from check.rules.common import (
    first_ranks,
    holds_parts,
    probe_of,
    replicas,
    same_data,
    two_ranks,
    where,
)

OWN = "a generator of its own"  # as inside/check_inside/data.py calls those that a dataset holds


def same_samples(checked):
    """Ranks that train on the same samples; shares that overlap, or leave samples out."""
    ranks = replicas(checked)
    if how := holds_parts(checked):
        why = f"they hold parts of one model ({how}): `check diff` compares them with one process"
        yield NotChecked("what the ranks have in common", why)
        return
    if ranks is None:
        two = checked["two"]
        if two is not None and two.world_size < 2 and two.ended:
            yield NotChecked("all that concerns several ranks", "the script joins no process group")
        return
    if not all(rank.training for rank in ranks):
        yield from _same_inputs(ranks)
        return
    for first, second in _pairs(ranks):
        ours, theirs = first["base_samples"], second["base_samples"]
        if not ours or not theirs:
            why = "the loader reads samples by keys, or yields batches, that cannot be compared"
            yield NotChecked("samples per rank", why)
            continue
        if _takes_a_slice(ranks, first, second):
            continue
        if not same_data(ranks, first, second):
            yield from _other_orders(ranks, first, second)
            continue
        count = min(len(ours), len(theirs))
        common = set(ours) & set(theirs)
        replaced = len(set(ours)) < 0.9 * len(ours)  # drawn with replacement
        if ours[:count] == theirs[:count] or (
            not first["iterable"] and set(ours) == set(theirs) and not replaced
        ):
            yield Finding(
                "same-samples",
                where(first),
                f"rank 0 and rank 1 trained on the same {len(common)} of {len(set(ours))} samples",
            )
        elif first["iterable"] and len(common) > 0.2 * len(set(ours)):
            yield Finding(
                "same-samples",
                where(first),
                f"rank 0 and rank 1 read {len(common)} equal samples of {len(set(ours))}",
            )
        elif first["has_all"] and second["has_all"] and first["dataset"] == first["base"]:
            yield Finding(
                "same-samples",
                where(first),
                f"each rank goes through all {first['dataset_len']} samples, in its own order",
            )
        elif first["whole"] and not (replaced or first["iterable"]):
            length = first["dataset_len"]
            read = _read_by_all(ranks, first)
            missing = length - len(read) if length else 0
            if len(common) <= _fillers(ranks, first, missing):
                continue
            text = f"{len(common)} samples are in the shares of rank 0 and of rank 1"
            if first["dataset"] == first["base"]:  # or the ranks may have drawn different subsets
                text += f", and {missing} of {length} in neither"
            yield Finding("shares-overlap", where(first), text)


def _takes_a_slice(ranks, epoch, other):
    """Whether each rank trains a different part of the batches that all of them read."""
    size = epoch["sizes"][1]
    if set(epoch["base_samples"][:size]) != set(other["base_samples"][:size]):
        return False
    inputs = []
    for rank in ranks[:2]:
        forwards = [
            f["inputs"] for step in rank.steps[:3] for f in step["forwards"] if "inputs" in f
        ]
        inputs.append([rows for rows in forwards if rows])
    most = max((len(rows) for rows in inputs[0]), default=0)
    if not all(inputs) or most * len(ranks) > size:
        return False
    ours, theirs = ({row for rows in own for row in rows} for own in inputs)
    return not ours & theirs


def _other_orders(ranks, first, second):
    """Datasets of the ranks that hold the same samples, but each in a different order, so that
    indices that are divided do not divide the samples."""
    ours, theirs = probe_of(ranks[0], first), probe_of(ranks[1], second)
    if not ours or not theirs or not (ours["repeats"] and theirs["repeats"]):
        return
    samples = [dict((i, tuple(leaves)) for i, leaves in p["rows"]) for p in (ours, theirs)]
    sets = [set(own.values()) for own in samples]
    common = len(sets[0] & sets[1])
    least = min(map(len, sets))
    if least < 0.5 * min(map(len, samples)) or ours["length"] != theirs["length"]:
        return  # too many are equal by themselves; or no order of one set
    likely = least**2 / ours["length"]  # in both of two random parts of the same samples
    if common < max(4, 0.2 * likely):
        return  # each rank has loaded different samples
    if least < ours["length"]:
        text = f"of {least} samples of each rank's dataset, {common} are in the other dataset, too"
    else:
        shares = [
            {own[index] for index in epoch["base_samples"] if index in own}
            for own, epoch in zip(samples, (first, second), strict=True)
        ]
        both = shares[0] & shares[1]
        if not both:
            return
        text = f"{len(both)} of {len(shares[0])} samples are in the shares of rank 0 and of rank 1"
    observed = f"{text}: the ranks have them under different indices"
    yield Finding("shares-overlap", where(first), observed)


def _fillers(ranks, epoch, missing):
    """How many samples may be in both shares so that these have the same number of batches."""
    return max(len(ranks) * 2 - 1, 0 if missing else len(ranks) * epoch["sizes"][1])


def _pairs(ranks):
    """The first training epochs of each loader, on rank 0 and on rank 1."""
    seen = set()
    others = {}
    for epoch in ranks[1].training:
        others.setdefault(epoch["loader"], epoch)
    for epoch in ranks[0].training:
        if epoch["loader"] not in seen and epoch["loader"] in others:
            seen.add(epoch["loader"])
            yield epoch, others[epoch["loader"]]


def _read_by_all(ranks, first, what="base_samples"):
    """The samples of all ranks in their first training epochs of the loader of an epoch."""
    epochs = [[e for e in rank.training if e["loader"] == first["loader"]][:1] for rank in ranks]
    return {sample for own in epochs for epoch in own for sample in epoch[what]}


def _same_inputs(ranks):
    """The inputs of the model, where there is no DataLoader that tells the samples."""
    ours, theirs = (
        [tuple(f["rows"]) for step in rank.steps for f in step["forwards"] if f.get("rows")]
        for rank in ranks[:2]
    )
    common = set(ours) & set(theirs)  # whole batches: a single state of a game may come twice
    begins = ours[:3] == theirs[:3]  # until rank 0 draws for an evaluation, for example
    if not ours or not theirs:
        trains = all(rank.steps for rank in ranks)
        why = "the script trains without a DataLoader" if trains else "a rank takes no step"
        yield NotChecked("samples per rank", why)
    elif begins or len(common) > 0.5 * len(set(ours)):
        place = where(next(iter(ranks[0].steps[0]["forwards"]), None))
        yield Finding(
            "same-samples",
            place,
            f"{len(common)} of {len(set(ours))} batches are the same on rank 0 and rank 1",
        )


def samples_left_out(checked):
    """Samples of the training set that no rank has in an epoch."""
    ranks = replicas(checked)
    if ranks is None:
        return
    for first, second in _pairs(ranks):
        length = first["dataset_len"]
        ours, theirs = set(first["samples"]), set(second["samples"])
        if first["iterable"] or not length or not first["whole"] or not second["whole"]:
            continue
        if not ours or not theirs:
            continue
        if len(ours) < 0.9 * len(first["samples"]) or ours & theirs:
            continue  # with replacement, or reported as an overlap
        if _others_later(ranks, first["loader"], _read_by_all(ranks, first, "samples")):
            continue
        if first["dataset"] != first["base"] or not same_data(ranks, first, second):
            continue
        missing = length - len(_read_by_all(ranks, first, "samples"))
        largest = first["sizes"][1] * 2 * len(ranks)
        if missing > max(largest, 0.1 * length):
            yield Finding(
                "samples-left-out",
                where(first),
                f"{missing} of {length} samples are in no rank's share of an epoch",
            )


def _others_later(ranks, loader, samples):
    """Whether later epochs of a loader have different samples: each epoch is a part of them all."""
    later = [e for rank in ranks for e in rank.training if e["loader"] == loader]
    return any(set(epoch["samples"]) - samples for epoch in later)


def no_set_epoch(checked):
    """The order of the first epoch comes again."""
    for rank in first_ranks(checked, "two", "one"):
        by_loader = {}
        for epoch in rank.training:
            by_loader.setdefault(epoch["loader"], []).append(epoch)
        for epochs in by_loader.values():
            if len(epochs) < 2 or epochs[0]["iterable"]:
                continue
            first = epochs[0]["samples"]
            if not _same_order(*epochs[:2]) or epochs[0]["sizes"][0] == 1:
                continue
            if first == sorted(first):
                yield Finding(
                    "not-shuffled",
                    where(epochs[0]),
                    f"the first two epochs read the {len(first)} samples in the dataset's order",
                )
            else:
                yield Finding(
                    "no-set-epoch",
                    where(epochs[0]),
                    f"the first two epochs read the {len(first)} samples in the same order",
                )
            return


def _same_order(first, second):
    """Whether two epochs have one order: of the samples, or of a DistributedSampler among them."""
    orders = [
        [crc for _, shuffles, crc in epoch["orders"] if shuffles] for epoch in (first, second)
    ]
    if any(orders):
        return orders[0] == orders[1]
    return bool(first["samples"]) and first["samples"] == second["samples"]


def uneven_batches(checked):
    """Ranks with different numbers of batches wait for each other forever."""
    ranks = replicas(checked)
    if ranks is None or ranks[0].of("join"):
        return
    for first, second in _pairs(ranks):
        if not first["iterable"] and not (first["whole"] and second["whole"]):
            continue
        key = "batches" if first["iterable"] else "sizes"
        ours, theirs = first[key], second[key]
        if key == "sizes":
            ours, theirs = ours[0], theirs[0]
        elif first["cut"] or second["cut"]:
            yield NotChecked(
                "the same number of batches on all ranks",
                "an IterableDataset has more batches than the check reads",
            )
            continue
        if ours != theirs:
            yield Finding(
                "uneven-batches",
                where(first),
                f"rank 0 has {ours} batches per epoch, rank 1 has {theirs}",
            )


def validation_in_training(checked):
    """Samples that are validated on one rank and trained on another."""
    ranks = replicas(checked)
    if ranks is None:
        return
    learned = {s for rank in ranks for epoch in rank.training for s in epoch["base_samples"]}
    for evaluated in ranks[0].evaluation:
        samples = set(evaluated["base_samples"])
        if len(samples & learned) > 0.95 * len(samples):
            continue  # a part of the training set, on purpose
        for other in ranks:
            for trained in other.training:
                if (
                    evaluated["base"] == trained["base"]
                    and evaluated["dataset"] != trained["dataset"] != trained["base"]
                    and not evaluated["iterable"]
                    and same_data(ranks, evaluated, trained)
                ):
                    common = set(evaluated["base_samples"]) & set(trained["base_samples"])
                    if common:
                        yield Finding(
                            "validation-in-training",
                            where(evaluated),
                            f"{len(common)} samples that rank 0 validates are trained by rank "
                            f"{other.number}",
                        )
                        return


def same_random_numbers(checked):
    """Ranks, workers or epochs whose augmentation draws the same numbers."""
    if holds_parts(checked):
        return  # the ranks read the same samples, and have to
    # Processes that join no group do not train together: each of them is the whole script.
    together = checked["two"] if two_ranks(checked) else None
    for run in filter(None, (together, checked["one"])):
        groups = {}
        for rank in run.ranks:
            trained = {epoch["dataset"] for epoch in rank.training}
            for fetch in rank.fetches:
                if fetch["dataset"] in trained and not fetch["reseeded"]:
                    for generator in fetch["drew"]:
                        key = (fetch["dataset"], generator)
                        source = (rank.number, fetch["worker"])
                        groups.setdefault(key, []).append(
                            (fetch["before"][generator], source, rank)
                        )
        for (_, generator), draws in groups.items():
            by_state = {}
            for state, source, rank in draws:
                by_state.setdefault(state, {})[source] = rank
            shared = [sources for sources in by_state.values() if len(sources) > 1]
            is_own = generator.startswith(OWN)
            if len(shared) > is_own:  # one that is seeded for each sample has equal states once
                (first, rank), (second, _) = list(shared[0].items())[:2]
                source = (
                    f"the dataset's {generator.removeprefix(OWN + '.')}" if is_own else generator
                )
                yield Finding(
                    "same-augmentation",
                    where(rank.training[0]),
                    f"{_name(first)} and {_name(second)} draw equal numbers from {source}",
                )
                return


def same_numbers_again(checked):
    """Samples of one batch that draw the same numbers, since fork_rng restores the generator."""
    for rank in first_ranks(checked, "one", "two"):
        trained = {epoch["dataset"] for epoch in rank.training}
        for fetch in rank.fetches:
            times = max(map(fetch["forks"].count, fetch["forks"]), default=0)
            if times > 1 and fetch["dataset"] in trained:
                yield Finding(
                    "same-augmentation",
                    where(rank.training[0]),
                    f"{times} samples of a batch draw the same numbers within fork_rng, which "
                    "nothing seeds",
                )
                return


def _name(source):
    rank, worker = source
    return f"rank {rank}" + ("" if worker is None else f", worker {worker},")


def not_limited(checked):
    """Datasets that --limit-data does not shorten."""
    for rank in first_ranks(checked, "one"):
        for epoch in rank.epochs:
            if epoch["not_limited"]:
                yield NotChecked("epochs of --limit-data samples", epoch["not_limited"])


RULES = [
    same_samples,
    samples_left_out,
    no_set_epoch,
    uneven_batches,
    validation_in_training,
    same_random_numbers,
    same_numbers_again,
    not_limited,
]
