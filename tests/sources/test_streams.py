"""sources/streams.py: any iterable as a dataset, as docs/streams.md promises it."""

import copy
import pickle
import random
import zlib
from functools import partial

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from sources.streams import Streamed
from tests.forked import ROUNDING, fork_script, killed_at, largest_difference
from tests.recipes import RUN, run_to_end, with_task
from tests.streams_task import DividedAmongWorkers, Numbers
from tools.lib.ladder import ROOT
from tools.verify.run import project_with_task
from utils.batches import tensors_of
from utils.errors import UserError

TASK = "tests.streams_task"
OLD = "DistributedSampler(train_set, seed=cfg.seed, drop_last=True)"
NEW = "DistributedSampler(train_set, shuffle=False, drop_last=True)"


class Counting(IterableDataset):
    """0, 1, ..., and how many passes have begun, in which epochs."""

    def __init__(self, stop):
        self.stop, self.epochs, self.read = stop, [], 0

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        for number in range(self.stop):
            self.read += 1
            yield number


def batch(dataset, *indices, epoch=0, seed=0):
    return dataset.get_batch(torch.tensor(indices), epoch, seed)


def test_samples_are_those_of_the_iterable():
    stream = Counting(20)
    dataset = Streamed(stream, 20, transform=lambda number: number * 10)
    assert len(dataset) == 20
    assert batch(dataset, 1, 4).tolist() == [10, 40] and batch(dataset, 5, 19).tolist() == [50, 190]
    assert stream.epochs == [0] and stream.read == 20
    assert batch(dataset, 3, 3, 4).tolist() == [30, 30, 40]  # a new pass
    assert batch(dataset, 4, epoch=2).tolist() == [40]
    assert batch(dataset, 9, epoch=2).tolist() == [90]
    assert stream.epochs == [0, 0, 2]


def test_random_numbers_of_collate_fn_depend_on_the_batch_alone():
    dataset = Streamed(Counting(20), 20, collate_fn=lambda samples: torch.rand(()))
    first, second = batch(dataset, 1, 4), batch(dataset, 5, 6)
    torch.manual_seed(1)  # whatever the process has drawn before
    assert batch(dataset, 1, 4) == first != second


def test_transforms_are_called_for_own_samples_alone():
    seen = []
    dataset = Streamed(Counting(20), 20, transform=lambda number: seen.append(number) or number)
    batch(dataset, 3, 8)
    assert seen == [3, 8]


def test_an_endless_stream_continues_in_the_next_epoch():
    stream = Counting(10**9)
    dataset = Streamed(stream, 10, endless=True)
    assert batch(dataset, 2, 9).tolist() == [2, 9]
    assert batch(dataset, 0, 3, epoch=1).tolist() == [10, 13]
    assert stream.epochs == [0] and stream.read == 14
    resumed = Streamed(Counting(10**9), 10, endless=True)
    assert batch(resumed, 3, epoch=1).tolist() == [13]


def test_random_numbers_depend_on_seed_and_epoch_and_not_on_the_process():
    def read(seed, epoch, step):
        """Every step-th row, (sample, a number of Python, one of torch)."""
        dataset = Streamed(
            Numbers(30), 30, lambda row: torch.tensor([row[0], random.random(), torch.rand(())])
        )
        rows = []
        for indices in torch.arange(0, 30, step).split(4):
            rows.append(dataset.get_batch(indices, epoch, seed))
            random.random(), torch.rand(3)  # of the training loop
        return torch.cat(rows)

    whole = read(0, 1, 1)
    assert len(whole[:, 0].unique()) == 30
    assert torch.equal(read(0, 1, 2), whole[::2])
    assert torch.equal(read(0, 1, 3), whole[::3])
    assert not torch.equal(read(0, 2, 1), whole)
    assert not torch.equal(read(1, 1, 1), whole)
    state = torch.get_rng_state()
    batch(Streamed(Numbers(30), 30), 1, 2)
    assert torch.equal(torch.get_rng_state(), state)


def test_wrong_uses_are_refused():
    with pytest.raises(UserError, match=r"generator .* once, .*__iter__"):
        Streamed((number for number in range(3)), 3)
    with pytest.raises(UserError, match=r"ascending order: .*shuffle=False, "):
        batch(Streamed(Counting(20), 20), 4, 1)
    with pytest.raises(UserError, match=r"ended after 20 samples of epoch 3, .* 25: "):
        batch(Streamed(Counting(20), 25), 2, 22, epoch=3)
    with pytest.raises(UserError, match=r"Streamed to build_loader\(\)"):
        Streamed(Counting(20), 20)[3]  # of a dataset around it: in every epoch, the same order


@pytest.mark.parametrize("transform", [None, copy.deepcopy])
def test_a_stream_that_overwrites_its_samples(transform):
    """As one does that reads into a buffer of its own."""

    class Overwriting(IterableDataset):
        def __iter__(self):
            buffer = numpy.zeros(3)
            for number in range(20):
                buffer[:] = number
                yield {"n": buffer[:1]}

    dataset = Streamed(Overwriting(), 20, transform)
    assert batch(dataset, 0, 2, 3)["n"].flatten().tolist() == [0, 2, 3]
    assert batch(dataset, 4, 9)["n"].flatten().tolist() == [4, 9]
    dataset.describe("train")


def test_the_checksum_is_that_of_earlier_versions():
    """A run may be resumed with a new version."""
    for samples in ([[1.5, "a"], {"n": 2}], [torch.arange(3), {"n": torch.ones(1)}]):
        values = [tensor.tolist() for tensor in tensors_of(samples)]
        checksum = zlib.crc32(repr((samples, values)).encode())
        assert Streamed(samples, 2).describe("x") == {"x_stream": checksum}


def test_a_stream_that_cannot_be_repeated_is_refused():
    class Unseeded(Numbers):
        generator = random.Random(0)

        def row(self, number):
            return self.generator.random()

    with pytest.raises(UserError, match=r"Unseeded .*different samples .*again: .*__iter__"):
        Streamed(Unseeded(30), 30).describe("train")
    facts = Streamed(Numbers(30), 30).describe("train")
    assert facts == Streamed(Numbers(30), 30).describe("train")
    assert facts == Streamed(Numbers(31), 30).describe("train")  # only the start is compared


def test_objects_without_a_text_of_their_own_can_be_compared():
    class Objects(Numbers):
        def row(self, number):
            return object()

    assert Streamed(Objects(30), 30).describe("x") == Streamed(Objects(30), 30).describe("x")


def read_in(workers, dataset):
    """The first numbers of all rows of a Streamed, read by so many loader processes."""
    dataset.describe("train")
    read = partial(dataset.get_batch, epoch=0, seed=0)
    indices = torch.arange(40).split(4)
    loader = DataLoader(indices, batch_size=None, collate_fn=read, num_workers=workers)
    return torch.cat([columns[0] for columns in loader])


def test_a_stream_that_divides_itself_among_workers_is_refused():
    assert len(read_in(1, Streamed(DividedAmongWorkers(40), 40))) == 40  # it has all of it
    with pytest.raises(UserError, match=r"DividedAmongWorkers .*--num-workers 0"):
        read_in(2, Streamed(DividedAmongWorkers(40), 40))


def test_several_workers_yield_the_same_batches():
    one, two = read_in(0, Streamed(Numbers(40), 40)), read_in(2, Streamed(Numbers(40), 40))
    assert torch.equal(one, two)


def test_a_stream_can_be_sent_to_a_process():
    dataset = Streamed(Counting(20), 20)
    batch(dataset, 3)
    assert batch(pickle.loads(pickle.dumps(dataset)), 5).tolist() == [5]


# Runs


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """train_ddp.py with the line of the page."""
    folder = project_with_task("images", tmp_path_factory.mktemp("project") / "copy")
    page = (ROOT / "docs" / "streams.md").read_text()
    assert f"-    train_sampler = {OLD}" in page and f"+    train_sampler = {NEW}" in page
    script = with_task(folder / "train_ddp.py", TASK)
    text = script.read_text()
    assert text.count(OLD) == 1
    script.write_text(text.replace(OLD, NEW))
    return script


@pytest.mark.parametrize(
    ("stream", "workers"), [("Numbers", 1), pytest.param("HuggingFace", 0, marks=pytest.mark.slow)]
)
def test_runs_train_the_same_weights(stream, workers, script, tmp_path):
    if stream == "HuggingFace":
        pytest.importorskip("datasets")
    flags = {"data_dir": stream, "save_steps": 2, "audit": True}
    _, one = run_to_end(script, 1, tmp_path / "one", **flags)
    run_to_end(script, 2, tmp_path / "killed", killed_at(1, 3), num_workers=workers, **flags)
    run, end = run_to_end(script, 3, tmp_path / "killed", **flags)
    assert largest_difference(end["model"], one["model"]) < ROUNDING
    assert [(row["train_samples"], row["val_samples"]) for row in run.rows] == [(60, 11)] * 2


def test_a_stream_that_divides_itself_among_ranks_ends_the_run(script, tmp_path):
    flags = RUN | {"data_dir": "DividedAmongRanks", "output_dir": tmp_path / "run"}
    run = fork_script(script, 2, **flags)
    assert run.code == 1
    assert "train_stream: " in run.stderr
