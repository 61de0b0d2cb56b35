"""Measure what mixtures of two sources guarantee, in this project and in four libraries.

    python -m lab.mixtures            the table
    python -m lab.mixtures --write    also lab/results/mixtures.json; then make readme

Each reader mixes three parts of 113 samples with one part of 60, in the setting that its own
documentation recommends for training in random order, with seeds wherever it takes one. Readers
whose library is not installed keep the answers that they had: MosaicML's streaming and datasets
need different versions of one package. Ranks are simulated as in lab.guarantees.
"""

import argparse
import importlib.metadata
import json
import os
import random
import tempfile
from collections import Counter
from contextlib import suppress
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.utils.data import DistributedSampler

from lab.guarantees import (
    BUFFER,
    GLOBAL_BATCH,
    HuggingFace,
    Ours,
    Reader,
    WebDataset,
    batches_of,
    epochs_of,
    global_batches,
    how_resumed,
    in_a_process,
    resumed,
    table,
    write_files,
    write_optimized,
    yes,
)
from sources.mixture import Mixture
from sources.shards import Shards
from tools.lib.ladder import RESULTS, ROOT

SIZES = {"a": [10] * 11 + [3], "b": [10] * 6}  # samples in each file of a source
FIRST = {"a": 0, "b": 1000}  # the number of its first sample
WEIGHTS = {"a": 0.75, "b": 0.25}
SAMPLES = 108  # per epoch, where that can be chosen: in nine global batches
RESULT = RESULTS / "mixtures.json"
reads = Counter()  # of samples, by a reader without loader processes


def counted(number):
    """The number of a sample that is read."""
    reads["all"] += 1
    return number


class OfMixture(Ours):
    def dataset(self):
        sources = {
            name: Shards(
                sorted((self.folder / name).glob("*.jsonl")),
                transform=lambda line: counted(line["id"]),
            )
            for name in WEIGHTS
        }
        cfg = SimpleNamespace(global_batch_size=GLOBAL_BATCH)
        return Mixture(sources, WEIGHTS, cfg=cfg, samples=SAMPLES)


class OfDatasets(HuggingFace):
    """Streams of datasets, interleaved at random."""

    def mixed(self):
        from datasets import interleave_datasets

        streams = [
            self.read(self.folder / name)
            .map(lambda row: {"id": counted(row["id"])})
            .shuffle(seed=0, buffer_size=BUFFER)
            for name in WEIGHTS
        ]
        return interleave_datasets(streams, list(WEIGHTS.values()), seed=0)


class OfTables(Reader):
    """Map-style datasets, interleaved anew for each epoch, as there is no set_epoch()."""

    package = "datasets"

    def open(self):
        from datasets import Dataset, interleave_datasets
        from torchdata.stateful_dataloader import StatefulDataLoader

        tables = [
            Dataset.from_dict({"id": range(FIRST[name], FIRST[name] + sum(SIZES[name]))}).shuffle(
                seed=self.epoch + 1
            )
            for name in WEIGHTS
        ]
        mixed = interleave_datasets(tables, list(WEIGHTS.values()), seed=self.epoch + 1)
        mixed.set_transform(lambda rows: {"id": [counted(number) for number in rows["id"]]})
        sampler = DistributedSampler(mixed, shuffle=False, drop_last=True)
        return StatefulDataLoader(
            mixed, self.batch, sampler=sampler, num_workers=self.workers, drop_last=True
        )

    def __iter__(self):
        self.epoch += 1
        if self.epoch:
            self.loader = self.open()
        return (batch["id"].tolist() for batch in self.loader)


class OfLitData(Reader):
    package = "litdata"

    def open(self):
        from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset

        streams = [
            StreamingDataset(
                str(self.folder / name / "optimized"), shuffle=True, seed=0, transform=counted
            )
            for name in WEIGHTS
        ]
        mixed = CombinedStreamingDataset(
            streams, seed=0, weights=list(WEIGHTS.values()), iterate_over_all=False
        )
        return StreamingDataLoader(
            mixed, batch_size=self.batch, num_workers=self.workers, drop_last=True
        )


class OfWebDataset(WebDataset):
    def open(self):
        from webdataset import RandomMix, WebLoader
        from webdataset.filters import detshuffle

        mixed = RandomMix([self.source(name) for name in WEIGHTS], list(WEIGHTS.values()))
        loader = WebLoader(mixed, batch_size=None, num_workers=self.workers)
        loader = loader.compose(detshuffle(BUFFER))
        return loader.batched(self.batch, partial=False)

    def source(self, name):
        """The numbers in the tar files of a source."""
        from webdataset.filters import detshuffle

        stream = self.stream([str(path) for path in sorted((self.folder / name).glob("*.tar"))])
        return stream.compose(detshuffle(BUFFER)).decode().to_tuple("cls")

    def __iter__(self):
        self.epoch += 1
        random.seed(self.epoch)  # RandomMix draws from the global generator
        torch.manual_seed(self.epoch)  # of loader processes
        return super().__iter__()


class OfMosaicML(Reader):
    """Each rank on a separate node, as ranks of one node wait for each other."""

    package = "mosaicml-streaming"

    def open(self):
        from streaming import Stream, StreamingDataLoader, StreamingDataset
        from streaming.base.util import clean_stale_shared_memory

        os.environ |= {"RANK": str(self.rank), "WORLD_SIZE": str(self.ranks)}
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        clean_stale_shared_memory()

        class Counting(StreamingDataset):
            def __getitem__(self, index):
                return counted(super().__getitem__(index)["id"])

        streams = [
            Stream(local=str(self.folder / name / "mds"), proportion=weight)
            for name, weight in WEIGHTS.items()
        ]
        mixed = Counting(
            streams=streams,
            epoch_size=SAMPLES,
            batch_size=self.batch,
            shuffle=True,
            shuffle_seed=0,
            num_canonical_nodes=6,
            batching_method="stratified",
        )
        return StreamingDataLoader(
            mixed, batch_size=self.batch, num_workers=self.workers, drop_last=True
        )


def write_mds(folder, sizes, first):
    """Write the samples in MosaicML's format, one shard."""
    from streaming import MDSWriter

    with MDSWriter(out=str(folder / "mds"), columns={"id": "int"}) as writer:
        for number in range(first, first + sum(sizes)):
            writer.write({"id": number})


READERS = {
    "`Mixture`": OfMixture,
    "datasets, `interleave_datasets` of streams": OfDatasets,
    "the same of tables": OfTables,
    "litdata, `CombinedStreamingDataset`": OfLitData,
    "WebDataset, `RandomMix`": OfWebDataset,
    "MosaicML streaming, `Stream(proportion=)`": OfMosaicML,
}


def distance(batches):
    """The largest difference, in samples, between what the larger source has given after a step
    and its share. batches: of each rank."""
    given = wanted = worst = 0
    for numbers in global_batches(batches):
        given += sum(number < FIRST["b"] for number in numbers)
        wanted += WEIGHTS["a"] * len(numbers)
        worst = max(worst, abs(given - wanted))
    return worst


def is_exact(worst):
    """Whether the share is exact, as text."""
    return "yes" if worst < 1 else f"no: off by up to {worst:g}"


def repeats(epochs):
    """Whether a sample comes again before its source has been used up, over several epochs of each
    rank, as text."""
    counts = Counter()
    for parts in zip(*epochs, strict=True):
        counts += Counter(chain(*chain(*parts)))
    for name, first in FIRST.items():
        own = [counts[number] for number in range(first, first + sum(SIZES[name]))]
        if max(own) - min(own) > 1:
            return f"no: one {max(own)} times, one {min(own)} times"
    return "yes"


def reads_again(reader, folder, exact):
    """Whether a run that is resumed on two ranks, without loader processes, reads samples that it
    does not train on, as text. exact: whether it is resumed exactly, as text."""
    if exact != "yes":
        return exact
    reads.clear()
    batches = chain(*resumed(reader, folder, 2, 2))
    again = reads.total() - sum(map(len, chain(*batches)))
    return f"no: {again} samples are read again" if again else "yes"


def facts_about(reader, folder):
    """{question: answer as text}."""
    one, two, three = (batches_of(reader, folder, ranks) for ranks in (1, 2, 3))
    with_workers = [batches_of(reader, folder, 2, workers) for workers in (1, 2)]
    epochs = epochs_of(reader, folder, 2, epochs=5)
    orders = [global_batches(batches) for batches in (one, two, three)]
    exact = how_resumed(reader, folder, 2, 2, 0, None)
    return {
        "samples in an epoch, on 1 rank": str(sum(map(len, one[0]))),
        "shares of the samples exact to less than one, after every step": is_exact(distance(two)),
        "the same global batches on 1, 2 and 3 ranks": yes(orders[0] == orders[1] == orders[2]),
        "the same with 0, 1 and 2 loader processes": yes(with_workers == [two, two]),
        "over five epochs, each sample as often as the others of its source, or once more": repeats(
            epochs
        ),
        "resumed within an epoch, 2 ranks: exact": exact,
        "the same, without reading samples again": reads_again(reader, folder, exact),
        "resumed exactly with 2 loader processes": how_resumed(reader, folder, 2, 2, 2, None),
        "resumed on 1 rank instead of 2": how_resumed(reader, folder, 2, 1, 0, None),
        "resumed on 3 ranks instead of 2": how_resumed(reader, folder, 2, 3, 0, None),
    }


def is_installed(reader):
    """Whether the library of a reader can be measured here."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return not reader.package or bool(importlib.metadata.version(reader.package))
    return False


def measure(names):
    """{reader: {question: answer}}."""
    with tempfile.TemporaryDirectory(prefix="mixtures-") as temporary:
        folder = Path(temporary)
        for name, sizes in SIZES.items():
            (folder / name).mkdir()
            write_files(folder / name, sizes, FIRST[name])
            for package, write in (("litdata", write_optimized), ("mosaicml-streaming", write_mds)):
                if any(READERS[reader].package == package for reader in names):
                    in_a_process(write, folder / name, sizes, FIRST[name])
        return {name: facts_about(READERS[name], folder) for name in names}


def main():
    parser = argparse.ArgumentParser(prog="python -m lab.mixtures", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", metavar="LIBRARY", help="such as litdata")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    args = parser.parse_args()
    names = [name for name, reader in READERS.items() if is_installed(reader)]
    if args.only is not None:
        names = [name for name in names if READERS[name].package == args.only]
    result = measure(names)
    print(table(result))
    if args.write:
        old = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
        known = old.get("readers", {}) | result
        packages = {READERS[name].package for name in names} - {""}
        versions = {name: importlib.metadata.version(name) for name in ("torch", *sorted(packages))}
        written = {
            "versions": old.get("versions", {}) | versions,
            "readers": {name: known[name] for name in READERS if name in known},
        }
        RESULT.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
