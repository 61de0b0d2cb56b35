"""Loaders for any map-style dataset: the same batches on any number of ranks and workers."""

import random
import signal
from functools import cache

import numpy
import pytest
import torch
from torch.utils.data import DistributedSampler, Subset

import utils.data
from tests.any_batch import (
    CASES,
    COUNT,
    Boxes,
    Numbered,
    Regression,
    Rows,
    WholeBatches,
    as_rank,
    noise,
    samples_of,
)
from utils.batches import as_pair, collate, map_tensors
from utils.config import Config
from utils.data import BatchDataset, build_loader, describe_datasets
from utils.errors import UserError
from utils.sampler import EpochSampler
from utils.seeds import SampleSeeds
from utils.signals import SIGNALS

CPU = torch.device("cpu")
BATCH, STEPS = 12, 3  # of 40 samples, 4 fill no global batch
PAIRS = [(torch.tensor([float(i)]), i) for i in range(COUNT)]  # a list is a dataset, too


def train_loader(dataset, rank=0, ranks=1, micro_batches=None, **settings):
    """A loader with the sampler of a script for this number of ranks."""
    cfg = Config(**{"global_batch_size": BATCH, "num_workers": 0} | settings)
    sampler = DistributedSampler(dataset, ranks, rank, seed=cfg.seed, drop_last=True)
    if ranks == 1:
        sampler = EpochSampler(dataset, cfg.seed)
    size = cfg.global_batch_size // ranks
    with as_rank(rank, ranks):
        return build_loader(dataset, sampler, size, CPU, cfg, True, micro_batches)


def eval_loader(dataset, rank=0, ranks=1, **settings):
    cfg = Config(**{"global_batch_size": BATCH, "num_workers": 0} | settings)
    sampler = DistributedSampler(dataset, ranks, rank, shuffle=False)
    with as_rank(rank, ranks):
        return build_loader(dataset, sampler, cfg.global_batch_size // ranks, CPU, cfg)


def read(loader, epoch=0):
    """The samples of each batch of an epoch."""
    loader.sampler.set_epoch(epoch)
    return [samples_of(batch) for batch in loader]


def flat(batches):
    return [sample for batch in batches for sample in batch]


@cache
def reference(name, epoch=0):
    """The global batches of an epoch, by one process without workers."""
    return read(train_loader(CASES[name][0]), epoch)


def share(batches, rank, ranks):
    """A rank's share of the global batches."""
    return [batch[rank::ranks] for batch in batches]


# The same global batches


@pytest.mark.parametrize("name", ["boxes", "whole batches"])
def test_workers_change_nothing(name):
    loader = train_loader(CASES[name][0], 1, 2, num_workers=2)
    assert loader.reader.num_workers == 2
    for epoch in (0, 1):
        assert read(loader, epoch) == share(reference(name, epoch), 1, 2)


@pytest.mark.parametrize(("name", "workers"), [("dicts", 0), ("boxes", 1), ("whole batches", 0)])
def test_micro_batches_are_parts_of_a_batch(name, workers):
    loader = train_loader(CASES[name][0], 1, 2, micro_batches=4, num_workers=workers)
    for batch, whole in zip(loader, share(reference(name), 1, 2), strict=True):
        parts = [samples_of(part) for part in batch]
        assert [len(part) for part in parts] == [2, 2, 1, 1]
        assert flat(parts) == whole


@pytest.mark.parametrize("name", ["dicts", "boxes"])
def test_random_transforms_depend_on_seed_epoch_and_index(name):
    dataset = CASES[name][0]
    loader = train_loader(dataset, seed=3)
    loader.sampler.set_epoch(2)
    batch, samples = next(iter(loader)), []
    with SampleSeeds(3, 2) as seeds:
        for index in loader.indices.tolist():
            seeds.seed(index)
            samples.append(dataset[index])
    own = getattr(dataset, "collate_fn", collate)(samples)
    own = map_tensors(lambda t: t.float() if t.is_floating_point() else t, own)
    assert samples_of(batch) == samples_of(as_pair(own))


@pytest.mark.parametrize("name", ["pairs", "whole batches"])
def test_each_epoch_and_each_seed_draws_anew(name):
    first, second = flat(reference(name)), flat(reference(name, 1))
    other = flat(read(train_loader(CASES[name][0], seed=1)))
    assert len(set(first)) == STEPS * BATCH
    assert not set(first) & set(second) and not set(first) & set(other)


def test_evaluation_leaves_the_generators_alone():
    def states():
        _, keys, position, *_ = numpy.random.get_state()
        return torch.get_rng_state().tolist(), random.getstate(), keys.tolist(), position

    before = states()
    for _ in eval_loader(Rows()):
        assert states() == before
    assert states() == before


def test_dropout_depends_on_the_step_and_the_rank_alone():
    def draws(name, start=0, rank=0, ranks=1, **options):
        loader = train_loader(CASES[name][0], rank, ranks, **options)
        loader.load_state_dict({"step": start, "epoch": 0, "global_batch": BATCH})
        with as_rank(rank, ranks):
            return [torch.rand(()).item() for _ in loader]

    expected = draws("whole batches")
    assert len(set(expected)) == STEPS
    assert draws("dicts") == draws("pairs", num_workers=1) == expected
    assert draws("boxes", start=1, micro_batches=2) == expected[1:]
    assert not {*draws("dicts", rank=1, ranks=2)} & {*expected}


# The position


@pytest.mark.parametrize("name", CASES)
def test_ranks_divide_the_same_global_batches_also_when_resumed(name):
    dataset = CASES[name][0]
    state = {"step": 0, "epoch": 0, "global_batch": BATCH}
    for ranks, stop in ((2, 1), (4, 2), (3, 3)):
        for rank in range(ranks):
            loader, seen = train_loader(dataset, rank, ranks), []
            assert len(loader) == STEPS
            loader.load_state_dict(state)
            for batch in loader:
                seen.append(samples_of(batch))
                loader.advance()
                assert loader.samples == loader.step * BATCH // ranks
                if loader.step == stop:
                    break
            assert seen == share(reference(name)[state["step"] : stop], rank, ranks)
        state = loader.state_dict()
    assert state == {"step": STEPS, "epoch": 0, "global_batch": BATCH}


def test_epoch_continues_with_the_same_global_batch_size_only():
    loader = train_loader(PAIRS)
    with pytest.raises(UserError, match=r"\b5\b.*\b12\b"):
        loader.load_state_dict({"step": 3, "epoch": 0, "global_batch": 5})
    loader.load_state_dict({"step": 0, "epoch": 0, "global_batch": 5})
    assert len(list(loader)) == STEPS


@pytest.mark.parametrize("workers", [0, 2])
def test_looks_and_breaks_move_nothing(workers):
    loader, other = train_loader(Rows(), num_workers=workers), train_loader(Boxes())
    for epoch in (0, 1):
        loader.sampler.set_epoch(epoch)
        expected, before = reference("dicts", epoch), loader.state_dict()
        next(iter(loader))
        for _ in loader:
            break
        assert loader.state_dict() == before
        kept, seen, indices = iter(loader), [], []
        assert samples_of(next(kept)) == expected[0]
        for batch in loader:
            seen.append(samples_of(batch))
            seeds = torch.initial_seed()
            looks = [samples_of(look) for _, look in zip(range(2), loader, strict=False)]
            assert looks == expected[loader.step : loader.step + 2]
            assert loader.advance()
            assert (loader.read, loader.samples) == (loader.step, loader.step * BATCH)
            indices += loader.indices.tolist()
            if loader.step < STEPS:
                assert samples_of(next(iter(loader))) == expected[loader.step]
            assert loader.step == 1 or torch.initial_seed() == seeds
            assert (samples_of(next(iter(other))), other.step) == (reference("boxes")[0], 0)
        assert seen == expected
        assert indices == [*loader.sampler][: STEPS * BATCH]
        assert samples_of(next(kept)) == expected[1]
        kept.close()
        loader.end_epoch()


def test_epoch_ends_with_its_save():
    """Also after a `break`, and if an iterator of it is kept."""
    loader = train_loader(Rows())
    kept = iter(loader)
    next(kept)
    assert loader.advance()
    assert not loader.advance()
    loader.end_epoch()
    assert (loader.step, read(loader)) == (0, reference("dicts"))
    with pytest.raises(UserError, match="iterator"):
        next(kept)
    for _ in loader:
        loader.advance()
    loader.sampler.set_epoch(1)
    with pytest.raises(UserError, match="save"):
        for _ in loader:
            loader.advance()


def test_loader_that_was_read_to_its_end_ends_once_more():
    """As the shorter one of two in zip(); one that is repeated goes on."""
    loader = train_loader(Rows())
    loader.load_state_dict({"step": STEPS, "epoch": 1, "global_batch": BATCH})
    assert read(loader, 1) == []
    assert read(loader, 1) == reference("dicts", 1)


def test_loader_that_is_read_later_keeps_its_position():
    loader = train_loader(Rows())
    loader.load_state_dict({"step": 2, "epoch": 1, "global_batch": BATCH})
    loader.advance()
    assert read(loader, 1) == reference("dicts", 1)[2:]


# Evaluation


def test_each_sample_is_evaluated_once_even_with_more_ranks_than_samples():
    for count, ranks, size in ((1, 3, 2), (4, 3, 2), (9, 4, 2), (40, 1, 7)):
        seen, lengths = [], set()
        for rank in range(ranks):
            loader = eval_loader(PAIRS[:count], rank, ranks, global_batch_size=size * ranks)
            batches = 0
            with as_rank(rank, ranks):
                for _, labels in loader:
                    batches += 1
                    assert 1 <= len(labels) <= size
                    seen += labels.tolist() * loader.counts
            assert loader.samples == len(range(rank, count, ranks))
            lengths |= {batches, len(loader)}
        assert sorted(seen) == list(range(count)) and len(lengths) == 1


# Batches


def test_floating_point_tensors_get_the_dtype_of_the_run():
    row, _ = next(iter(eval_loader(Rows(), dtype="float64")))
    assert (row["draws"].dtype, row["labels"].dtype) == (torch.float64, torch.int64)
    images, targets = next(iter(eval_loader(Boxes(), dtype="float64")))
    assert images[0].dtype == targets[0]["boxes"].dtype == torch.float64
    _, labels = next(iter(eval_loader([(torch.zeros(2), 0.5)] * 20)))
    assert labels.dtype == torch.float32


class OnDevice(WholeBatches):
    """Makes its batches on a device of its own."""

    device = torch.device("meta")

    def get_batch(self, indices, epoch, seed):
        assert indices.device.type == "meta" and indices.dtype == torch.int64
        return super().get_batch(torch.arange(len(indices)), epoch, seed)


def test_dataset_on_a_device_makes_batches_in_the_process_of_the_rank():
    loader = train_loader(OnDevice(), num_workers=2, dtype="float64")
    assert loader.reader.num_workers == 0
    batches = [images for images, _ in loader]
    assert [images.shape for images in batches] == [(BATCH, 3)] * STEPS
    assert batches[0].dtype == torch.float64 and 0 <= batches[0].max() <= 1
    images, _ = loader.prepare(*loader.examples([2, 3]))
    assert images.shape == (2, 3)


def test_batch_dataset_may_have_plain_samples():
    class Plain(BatchDataset, Regression):
        pass

    assert read(train_loader(Plain())) == reference("pairs")


# Subsets


def test_subset_is_collated_by_the_dataset_in_it():
    subset = Subset(Subset(Boxes(), range(30)), range(20))
    images, targets = next(iter(train_loader(subset)))
    assert isinstance(images, list) and len(targets) == BATCH


def test_subset_of_whole_batches_is_refused():
    with pytest.raises(UserError, match="WholeBatches"):
        train_loader(Subset(Subset(WholeBatches(), range(30)), range(20)))


class Epochs(Numbered):
    """Samples that depend on set_epoch(), as of a curriculum."""

    epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return torch.tensor([float(self.epoch)]), index


@pytest.mark.parametrize("workers", [0, 2])
def test_datasets_learn_the_epoch_in_each_process(workers):
    loader = train_loader(Subset(Epochs(), range(COUNT)), num_workers=workers)
    for epoch in (0, 1, 4):
        loader.sampler.set_epoch(epoch)
        assert {x for inputs, _ in loader for x in inputs.flatten().tolist()} == {epoch}
    dataset = Epochs()
    list(eval_loader(dataset))
    assert dataset.epoch == -1


# Files, and other things of processes


class OpenedAtFirstAccess(Numbered):
    """As everybody is told to: each loader process then opens the file itself."""

    file = None

    def __getitem__(self, index):
        self.file = self.file or open(__file__, "rb")  # noqa: SIM115
        return noise(), index


def test_examples_are_read_by_a_loader_process():
    dataset, same = OpenedAtFirstAccess(), OpenedAtFirstAccess()
    loader = train_loader(dataset, num_workers=2)
    found = list(map(loader.prepare, loader.examples([3], [3, 7])))
    assert [targets.tolist() for _, targets in found] == [[3], [3, 7]]
    assert found[0][0][0].equal(found[1][0][0])
    assert dataset.file is None
    next(train_loader(same).examples([3]))
    same.file.close()


class BlockedSignals(Numbered):
    def __getitem__(self, index):
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        return torch.tensor([number in blocked for number in SIGNALS]), 0


def test_workers_leave_signals_to_their_rank():
    blocked, _ = next(iter(eval_loader(BlockedSignals(), num_workers=1)))
    assert blocked.all()


def test_workers_are_forked_by_their_rank(monkeypatch):
    for method, workers, forked in (("forkserver", 1, True), ("forkserver", 0, False)):
        monkeypatch.setattr(utils.data.multiprocessing, "get_start_method", lambda m=method: m)
        context = train_loader(PAIRS, num_workers=workers).reader.multiprocessing_context
        assert (context is not None and context.get_start_method() == "fork") == forked


def test_automatic_workers_leave_cores_to_training(monkeypatch):
    def reader(device, cores, workers=-1):
        monkeypatch.setattr(utils.data, "DataLoader", lambda *args, **options: options)
        monkeypatch.setattr(utils.data, "cores_per_rank", lambda: cores)
        cfg = Config(num_workers=workers, timeout=9.0)
        options = build_loader(PAIRS, range(COUNT), 256, torch.device(device), cfg).reader
        return options["num_workers"], options["pin_memory"], options["timeout"]

    assert reader("cpu", 4) == (0, False, 0)
    assert reader("cpu", 4, workers=3) == (3, False, 9.0)
    assert reader("cuda", 4) == (3, True, 9.0)
    assert reader("cuda", 64) == (32, True, 9.0)
    assert reader("cuda", 4, workers=0) == (0, True, 0)


# Errors


class Broken(Numbered):
    def __getitem__(self, index):
        raise UserError("0.jpg cannot be read")


def test_user_error_in_a_worker_is_one_line():
    loader = eval_loader(Broken(), num_workers=1)
    with pytest.raises(UserError, match=r"^0\.jpg cannot be read$"):
        next(iter(loader))
    # The error keeps the loader alive, and the garbage collector would take 5 seconds.
    loader.reader._iterator._shutdown_workers()


def test_batch_that_cannot_be_divided_or_filled_is_refused():
    with pytest.raises(UserError, match="40 training"):
        train_loader(PAIRS, global_batch_size=64)
    with pytest.raises(UserError, match="0 validation"):
        eval_loader([])
    with pytest.raises(UserError, match="--global-batch-size 6"):
        train_loader(PAIRS, 0, 3, global_batch_size=7)
    assert len(eval_loader(PAIRS, global_batch_size=64)) == 1


# What a checkpoint stores about the data


def test_description_tells_splits_apart():
    rows = Rows()
    assert describe_datasets(PAIRS, rows) == {"train_samples": COUNT, "val_samples": COUNT}
    facts = describe_datasets(Subset(rows, [3, 1]), Subset(rows, range(3)))
    assert (facts["train_samples"], facts["val_samples"]) == (2, 3)
    strided = numpy.arange(3).repeat(2)[::2]
    assert facts == describe_datasets(Subset(rows, torch.tensor([3, 1])), Subset(rows, strided))
    swapped = describe_datasets(Subset(rows, [1, 3]), Subset(rows, range(3)))
    assert swapped["train_subset"] != facts["train_subset"]
    assert swapped["val_subset"] == facts["val_subset"]
