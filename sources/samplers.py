"""Samplers other than the permutation: any sampler of indices, divided among the ranks.

For scripts: docs/recipes/samplers.md, docs/recipes/length-buckets.md and docs/streams.md.
"""

import operator
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Sampler

from utils.distributed import dp_rank, dp_world_size
from utils.errors import UserError
from utils.seeds import SampleSeeds


class DistributedSamplerWrapper(Sampler[int]):
    """This replica's share of what any sampler draws, in place of a DistributedSampler.

    All replicas draw the same indices, and of n replicas, replica r takes numbers r, r + n, ..., as
    DistributedSampler(drop_last=True) divides its permutation. So the global batches do not depend
    on the number of ranks. With one process, it takes all.

    sampler: yields indices of the dataset, and has a length. It must draw its random numbers from
    the global generators of torch, random or numpy, which are seeded with (seed, epoch) meanwhile:
    leave out its argument `generator`. Its set_epoch(), if it has one, is called with the epoch.
    """

    def __init__(self, sampler: Any, seed: int) -> None:
        self.sampler, self.seed, self.epoch = sampler, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.sampler) // dp_world_size()

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw()[dp_rank() :: dp_world_size()][: len(self)].tolist())

    def draw(self) -> Tensor:
        """The indices of the epoch for all replicas together, int64 (n,). Raises UserError if they
        are not as many as the sampler says."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(self.epoch)
        with SampleSeeds(self.seed, self.epoch) as seeds:
            seeds.seed(0)
            indices = numpy.fromiter(map(operator.index, self.sampler), numpy.int64)
        if len(indices) != len(self.sampler):
            raise UserError(
                f"the {type(self.sampler).__name__} has yielded {len(indices)} indices, but its "
                f"length is {len(self.sampler)}: the ranks plan their steps by the length"
            )
        return torch.from_numpy(indices)

    def describe(self) -> dict[str, int]:
        """A checksum of the order of this epoch, for the data that a checkpoint describes: the
        ranks compare it, and a resumed run refuses other weights or lengths.

        Raises UserError if the sampler draws something else when it is asked again.
        """
        first, second = self.draw(), self.draw()
        if not torch.equal(first, second):
            raise UserError(
                f"the {type(self.sampler).__name__} draws different indices for the same seed and "
                f"epoch: it must use the global generators, so leave out its argument generator"
            )
        return {"train_order": zlib.crc32(first.numpy().data)}


class ShardOrder(Sampler[int]):
    """An order that reads files from their starts to their ends, and mixes what it reads.

    In each epoch, the files are permuted and read in turns, a sample of each, `interleave` of them
    at a time; and each `buffer` samples in a row are permuted. The order is for one process;
    DistributedSamplerWrapper divides it among the ranks. Draws from torch's global generator.

    shard_sizes: the number of samples in each file, whose indices are consecutive (of Shards:
    shard_sizes); interleave, buffer: larger ones mix better, and read in more places at a time.
    """

    def __init__(
        self, shard_sizes: Sequence[int], interleave: int = 16, buffer: int = 10_000
    ) -> None:
        self.sizes = numpy.asarray(shard_sizes)
        self.interleave, self.buffer = interleave, buffer

    def __len__(self) -> int:
        return int(self.sizes.sum())

    def __iter__(self) -> Iterator[int]:
        starts = self.sizes.cumsum() - self.sizes
        shards = torch.randperm(len(self.sizes)).numpy()
        parts = []
        for first in range(0, len(shards), self.interleave):
            group = shards[first : first + self.interleave]
            positions = numpy.concatenate([numpy.arange(self.sizes[shard]) for shard in group])
            indices = positions + numpy.repeat(starts[group], self.sizes[group])
            parts.append(indices[positions.argsort(kind="stable")])  # first those at position 0
        for block in torch.from_numpy(numpy.concatenate(parts)).split(self.buffer):
            yield from block[torch.randperm(len(block))].tolist()


class LengthBuckets(Sampler[int]):
    """An order in which the samples of each global batch have similar lengths, so that little is
    padded, and no rank waits for one with longer samples.

    In each epoch, the samples are permuted, sorted by length within groups of `batches` global
    batches, and cut into batches, which come in random order. Those that fill no batch, different
    ones in each epoch, come last. Draws from torch's global generator.

    lengths: of all samples, such as tokens; batch_size: the global batch size; batches: more of
    them pad less, and mix less.
    """

    def __init__(self, lengths: Sequence[int] | Tensor, batch_size: int, batches: int = 50) -> None:
        self.lengths = torch.as_tensor(lengths)
        self.batch_size, self.batches = batch_size, batches

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self))
        left_over = len(order) % self.batch_size
        filling, rest = order[: len(order) - left_over], order[len(order) - left_over :]
        rows = []
        for group in filling.split(self.batches * self.batch_size):
            by_length = group[self.lengths[group].argsort(stable=True)]
            rows.append(by_length.view(-1, self.batch_size))
        mixed = torch.cat(rows)[torch.randperm(len(filling) // self.batch_size)]
        return iter(torch.cat([mixed.flatten(), rest]).tolist())
