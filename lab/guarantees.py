"""Measure what readers of streams guarantee: this project's, litdata's, WebDataset's and datasets'.

    python -m lab.guarantees            the table
    python -m lab.guarantees --write    also lab/results/guarantees.json; then make readme

Each reader goes through the same 113 samples in twelve small files, in the setting that its own
documentation recommends for training in random order. The ranks of a run are simulated one after
another: a process group of PyTorch's "fake" backend tells a reader its rank and their number.
"""

import argparse
import copy
import importlib.metadata
import io
import json
import multiprocessing
import random
import tarfile
import tempfile
from collections import Counter
from contextlib import contextmanager
from itertools import chain, islice, zip_longest
from operator import itemgetter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import tasks.images as task
from sources.samplers import DistributedSamplerWrapper, ShardOrder
from sources.shards import Shards
from sources.streams import Streamed
from tools.lib.ladder import RESULTS, ROOT
from tools.lib.markdown import markdown_table
from utils.config import load_config
from utils.data import build_loader

SIZES = [10] * 11 + [3]  # samples in each file
SAMPLES = sum(SIZES)
GLOBAL_BATCH, BUFFER = 12, 30
STEPS = 4  # until a run is stopped
RESULT = RESULTS / "guarantees.json"


def write_files(folder, sizes=SIZES, first=0):
    """Write the samples, which are their numbers, as JSON lines and in tar files. Returns folder"""
    for shard, size in enumerate(sizes):
        numbers = range(first, first + size)
        text = "".join(json.dumps({"id": number}) + "\n" for number in numbers)
        (folder / f"{shard:02}.jsonl").write_text(text)
        with tarfile.open(folder / f"{shard:02}.tar", "w") as archive:
            for number in numbers:
                member = tarfile.TarInfo(f"{number:05}.cls")
                member.size = len(str(number))
                archive.addfile(member, io.BytesIO(str(number).encode()))
        first += size
    return folder


@contextmanager
def rank_of(rank, ranks):
    """A process group in which this process has the given rank."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Reader:
    """What one rank reads. Made, and iterated over, in rank_of(). Each iteration is the next epoch,
    and yields lists of the numbers of samples.

    workers: loader processes. drop_last: as in training; otherwise, nothing that a library can keep
    is left out.
    """

    package = ""  # that it needs
    resumes_with_workers = True

    def __init__(self, folder, rank, ranks, workers=0, drop_last=True):
        self.folder, self.rank, self.ranks, self.workers = folder, rank, ranks, workers
        self.batch, self.drop_last, self.epoch = GLOBAL_BATCH // ranks, drop_last, -1
        self.loader = self.open()

    @property
    def stateful(self):
        """What has a state_dict(), if anything."""
        return self.loader

    def open(self):
        """The loader."""
        raise NotImplementedError

    def __iter__(self):
        return (batch.tolist() for batch in self.loader)


class Ours(Reader):
    def open(self):
        flags = [f"--global-batch-size={GLOBAL_BATCH}", f"--num-workers={self.workers}"]
        cfg = load_config(task.Settings, None, [*flags, "--device=cpu"])
        dataset = self.dataset()
        self.sampler = DistributedSampler(dataset, shuffle=False, drop_last=self.drop_last)
        if isinstance(dataset, Shards) and self.drop_last:
            order = ShardOrder(dataset.shard_sizes, buffer=BUFFER)
            self.sampler = DistributedSamplerWrapper(order, cfg.seed)
        device = torch.device("cpu")
        return build_loader(dataset, self.sampler, self.batch, device, cfg, self.drop_last)

    def __iter__(self):
        self.epoch += 1
        self.sampler.set_epoch(self.epoch)
        for batch, _ in self.loader:
            self.loader.advance()  # as the Checkpointer does after a step
            if self.loader.counts:
                yield batch.tolist()
        self.loader.end_epoch()


class OfShards(Ours):
    def dataset(self):
        return Shards(sorted(self.folder.glob("*.jsonl")), transform=itemgetter("id"))


class Lines(IterableDataset):
    """The numbers in the files, mixed by a buffer."""

    def __init__(self, folder):
        self.paths = sorted(folder.glob("*.jsonl"))

    def __iter__(self):
        buffer = []
        for path in random.sample(self.paths, len(self.paths)):
            for line in path.read_text().splitlines():
                buffer.append(json.loads(line)["id"])
                if len(buffer) == BUFFER:
                    yield buffer.pop(random.randrange(BUFFER))
        random.shuffle(buffer)
        yield from buffer


class OfStream(Ours):
    def dataset(self):
        return Streamed(Lines(self.folder), SAMPLES)


class HuggingFace(Reader):
    package = "datasets"
    resumes_with_workers = False  # it needs torchdata's StatefulDataLoader

    def open(self):
        from datasets.distributed import split_dataset_by_node

        self.stream = split_dataset_by_node(self.mixed(), self.rank, self.ranks)
        return DataLoader(
            self.stream, self.batch, num_workers=self.workers, drop_last=self.drop_last
        )

    def mixed(self):
        """All samples in random order."""
        return self.read(self.folder).shuffle(seed=0, buffer_size=BUFFER)

    def read(self, folder):
        """The samples in the files of a folder."""
        from datasets import load_dataset

        files = [str(path) for path in sorted(folder.glob("*.jsonl"))]
        cache = str(self.folder / "cache")
        return load_dataset(
            "json", data_files=files, split="train", streaming=True, cache_dir=cache
        )

    @property
    def stateful(self):
        return self.stream

    def __iter__(self):
        self.epoch += 1
        self.stream.set_epoch(self.epoch)
        return (batch["id"].tolist() for batch in self.loader)


class LitData(Reader):
    package = "litdata"

    def open(self):
        from litdata import StreamingDataLoader, StreamingDataset

        stream = StreamingDataset(str(self.folder / "optimized"), shuffle=True, seed=0)
        return StreamingDataLoader(
            stream, batch_size=self.batch, num_workers=self.workers, drop_last=self.drop_last
        )


def write_optimized(folder, sizes=SIZES, first=0):
    """Write the samples in the format of litdata, ten in each chunk."""
    from litdata import optimize

    optimize(
        fn=_unchanged,
        inputs=list(range(first, first + sum(sizes))),
        output_dir=str(folder / "optimized"),
        chunk_size=10,
        num_workers=1,
        start_method="fork",  # it would set a different one for all loaders
        verbose=False,
    )


def _unchanged(number):
    return number


def in_a_process(function, *arguments):
    """Call a function in a separate process, because litdata leaves a signal handler behind."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    process.join()


class WebDataset(Reader):
    package = "webdataset"

    def open(self):
        from webdataset import WebLoader
        from webdataset.filters import detshuffle

        stream = self.stream([str(path) for path in sorted(self.folder.glob("*.tar"))])
        stream = stream.compose(detshuffle(BUFFER)).decode().to_tuple("cls").batched(self.batch)
        loader = WebLoader(stream, batch_size=None, num_workers=self.workers)
        loader = loader.unbatched().compose(detshuffle(BUFFER))
        return loader.batched(self.batch, partial=not self.drop_last)

    def stream(self, paths):
        """The samples of the tar files."""
        from webdataset import WebDataset, split_by_node

        settings = {"shardshuffle": 100, "detshuffle": True, "seed": 0}
        return WebDataset(paths, nodesplitter=split_by_node, **settings)

    def __iter__(self):
        return ([int(number) for number in numbers] for (numbers,) in self.loader)


class Resampled(WebDataset):
    def open(self):
        return super().open().with_epoch(SAMPLES // GLOBAL_BATCH)

    def stream(self, paths):
        from webdataset import WebDataset, split_by_node

        return WebDataset(paths, resampled=True, shardshuffle=False, nodesplitter=split_by_node)


READERS = {
    "`Shards`": OfShards,
    "`Streamed`": OfStream,
    "datasets": HuggingFace,
    "litdata": LitData,
    "WebDataset, `split_by_node`": WebDataset,
    "WebDataset, `resampled`": Resampled,
}


def epochs_of(reader, folder, ranks, workers=0, drop_last=True, epochs=1):
    """The batches of each epoch of each rank: lists of lists of lists."""
    result = []
    for rank in range(ranks):
        with rank_of(rank, ranks):
            opened = reader(folder, rank, ranks, workers, drop_last)
            result.append([list(opened) for _ in range(epochs)])
    return result


def batches_of(*args, **settings):
    """The batches of one epoch of each rank."""
    return [epochs[0] for epochs in epochs_of(*args, **settings)]


def global_batches(batches):
    """The samples of each step of all ranks together, sorted."""
    return [sorted(chain(*parts)) for parts in zip_longest(*batches, fillvalue=[])]


def resumed(reader, folder, ranks, new_ranks, workers=0):
    """Stop within an epoch, and continue on new_ranks. Returns the batches of each rank until then,
    those that would have followed, and those that the resumed run has read. A rank without a state,
    because there were fewer ranks, gets the state of the first one."""
    opening, followed, states = [], [], []
    for rank in range(ranks):
        with rank_of(rank, ranks):
            opened = reader(folder, rank, ranks, workers)
            batches = iter(opened)
            opening.append(list(islice(batches, STEPS)))
            states.append(copy.deepcopy(opened.stateful.state_dict()))
            followed.append(list(batches))
    read = []
    for rank in range(new_ranks):
        with rank_of(rank, new_ranks):
            opened = reader(folder, rank, new_ranks, workers)
            opened.stateful.load_state_dict(states[rank if rank < ranks else 0])
            read.append(list(opened))
    return opening, followed, read


def yes(is_so):
    """The value as text."""
    return "yes" if is_so else "no"


def times_read(batches):
    """How often samples are read, as text."""
    counts = Counter(chain(*chain(*batches)))
    if max(counts.values()) > 1:
        return "no: some twice, some not at all" if len(counts) < SAMPLES else "no: some twice"
    return "yes" if len(counts) == SAMPLES else f"at most once: {len(counts)} of {SAMPLES}"


def how_resumed(reader, folder, ranks, new_ranks, workers=0, samples=SAMPLES):
    """How the rest of an epoch differs from what would have followed, as text. samples: of an epoch
    in which each comes once."""
    with rank_of(0, 1):
        if not hasattr(reader(folder, 0, 1).stateful, "state_dict"):
            return "it has no state"
    if workers and not reader.resumes_with_workers:
        return "not measured"
    try:
        opening, followed, read = resumed(reader, folder, ranks, new_ranks, workers)
    except (LookupError, ValueError) as error:  # the state does not fit
        return f"no: {type(error).__name__}"
    if read == followed or global_batches(read) == global_batches(followed):
        return "yes"
    if samples is None:
        return "no"
    counts = Counter(chain(*chain(*opening), *chain(*read)))
    missing, again = samples - len(counts), counts.total() - len(counts)
    return f"no: {missing} samples not read, {again} read twice"


def facts_about(reader, folder):
    """{question: answer as text}."""
    one, two, three = (batches_of(reader, folder, ranks) for ranks in (1, 2, 3))
    with_workers = [batches_of(reader, folder, 2, workers) for workers in (1, 2)]
    kept = batches_of(reader, folder, 2, drop_last=False)
    epochs = epochs_of(reader, folder, 1, epochs=2)[0]
    again = batches_of(reader, folder, 1)
    orders = [global_batches(batches) for batches in (one, two, three)]
    return {
        "the same global batches on 1, 2 and 3 ranks": yes(orders[0] == orders[1] == orders[2]),
        "the same with 0, 1 and 2 loader processes": yes(with_workers == [two, two]),
        "all ranks take the same number of steps": yes(len({len(steps) for steps in two}) == 1),
        "every sample once per epoch, on 2 ranks, in training": times_read(two),
        "the same, keeping what fills no batch": times_read(kept),
        "a different order in the next epoch": yes(epochs[0] != epochs[1]),
        "the same order when the run is repeated": yes(again == one),
        "resumed within an epoch, 2 ranks: exact": how_resumed(reader, folder, 2, 2),
        "the same, with 2 loader processes": how_resumed(reader, folder, 2, 2, 2),
        "resumed on 1 rank instead of 2": how_resumed(reader, folder, 2, 1),
        "resumed on 3 ranks instead of 2": how_resumed(reader, folder, 2, 3),
    }


def measure(names=READERS):
    """{reader: {question: answer}}."""
    with tempfile.TemporaryDirectory(prefix="guarantees-") as temporary:
        folder = write_files(Path(temporary))
        if "litdata" in names:
            in_a_process(write_optimized, folder)
        return {name: facts_about(READERS[name], folder) for name in names}


def table(result):
    """The answers as a table in Markdown. result: {reader: {question: answer}}."""
    questions = next(iter(result.values()))
    rows = [[question, *(facts[question] for facts in result.values())] for question in questions]
    return markdown_table(["", *result], rows)


def main():
    parser = argparse.ArgumentParser(prog="python -m lab.guarantees", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    args = parser.parse_args()
    result = measure()
    packages = {reader.package for reader in READERS.values()} - {""}
    versions = {name: importlib.metadata.version(name) for name in ("torch", *sorted(packages))}
    print(table(result))
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    if args.write:
        RESULT.write_text(json.dumps({"versions": versions, "readers": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
