"""Streams: a map-style dataset in front of anything that can only be iterated over.

For tasks: docs/streams.md. Files of samples are better read by an index
(sources/shards.py), which reads no sample twice.
"""

import copy
import random
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, pairwise
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from sources.reading import passed_on
from utils.batches import collate, tensors_of
from utils.data import BatchDataset
from utils.errors import UserError
from utils.seeds import SampleSeeds

COMPARED = 8  # samples at the start of the stream


class Streamed(BatchDataset):
    """An iterable as a dataset whose samples are asked for in ascending order.

    Sample i is the ith that the iterable yields. Each rank, and each of its loader processes, goes
    through the whole stream and skips what others take: the iterable must not divide itself among
    them. In each epoch, it is iterated over anew, after iterable.set_epoch(epoch) if it has that.
    Random numbers that it draws from the global generators of torch, random and numpy depend on
    (seed, epoch) alone.

    length: samples per epoch, which must be known: the iterable may yield more, but not fewer.
    transform: makes of a sample what a batch is made of; only for samples that are not skipped, and
    before the next is read, so that it can copy what a stream will overwrite. Its random numbers
    depend on (seed, epoch, index). endless: do not begin anew in each epoch.
    collate_fn: makes a batch of a list of samples. Its random numbers depend on (seed, epoch, last
    index).
    """

    in_order = True

    def __init__(
        self,
        iterable: Iterable[Any],
        length: int,
        transform: Callable[[Any], Any] | None = None,
        endless: bool = False,
        collate_fn: Callable[[list[Any]], Any] = collate,
    ) -> None:
        if isinstance(iterable, Iterator):
            raise UserError(
                f"a {type(iterable).__name__} can be read only once, and each epoch reads it: pass "
                f"an object whose __iter__ begins anew"
            )
        self.iterable, self.length = iterable, length
        self.transform, self.endless, self.collate_fn = transform, endless, collate_fn
        self.current: _Pass | None = None
        self.checksum: int | None = None  # of the first samples, in the process of the rank
        self.is_checked = False  # in this process

    def __len__(self) -> int:
        return self.length

    def __getstate__(self) -> dict[str, Any]:
        """What a spawned process gets, without the generator, which cannot be sent."""
        return vars(self) | {"current": None}

    def __getitem__(self, index: int) -> Any:
        raise UserError(
            "a stream makes whole batches, because a sample alone knows neither the epoch nor the "
            "seed: pass the Streamed to build_loader() itself, and what is around it as transform"
        )

    def get_batch(self, indices: Tensor, epoch: int, seed: int) -> Any:
        """The batch of the samples with these indices, int64 (n,), in ascending order."""
        with SampleSeeds(seed, epoch) as seeds:
            samples = self.get_samples(indices.tolist(), epoch, seed)
            seeds.seed(-2 - int(indices[-1]))  # not the seed of any sample
            return passed_on(self.collate_fn(samples))

    def get_samples(self, indices: list[int], epoch: int, seed: int) -> list[Any]:
        """The samples with these indices, in ascending order."""
        if any(after < before for before, after in pairwise(indices)):
            raise UserError(
                "the samples of a stream must be asked for in ascending order: train with "
                "DistributedSampler(train_set, shuffle=False, drop_last=True), and let the stream "
                "itself mix its samples"
            )
        with SampleSeeds(seed, epoch) as seeds:
            # Each one before the next is read, because a stream may fill one buffer repeatedly.
            pairs = zip(self._read(indices, epoch, seed), indices, strict=True)
            return [self._transformed(sample, index, seeds) for sample, index in pairs]

    def _transformed(self, sample, index, seeds):
        if self.transform is None:
            return copy.deepcopy(sample)
        seeds.seed(index)
        return self.transform(sample)

    def _read(self, indices, epoch, seed):
        if get_worker_info() is not None and not self.is_checked:
            self._compare_with_rank()
        first = 0
        if self.endless:
            first, epoch = epoch * self.length, 0
        known = self.current
        if known is None or known.numbers != (seed, epoch) or indices[0] + first < known.position:
            self.current = known = _Pass(self.iterable, seed, epoch)
        return known.take([first + index for index in indices], self.length)

    def describe(self, name: str) -> dict[str, int]:
        """What a checkpoint stores about the data: a checksum of the first samples. The ranks
        compare it, so that a stream which divides itself among them is refused; and the loader
        processes compare theirs with it.

        name: of the split, such as "train". Raises UserError if the stream is a different one when
        it is read again.
        """
        self.checksum = self._checksum_of_start()
        if self._checksum_of_start() != self.checksum:
            raise UserError(
                f"the {type(self.iterable).__name__} yields different samples when it is read "
                f"again: it must draw its random numbers from the global generators, or seed its "
                f"own in __iter__"
            )
        return {f"{name}_stream": self.checksum}

    def _checksum_of_start(self):
        texts, values = [], []
        with SampleSeeds(0, 0):
            for sample in _Pass(self.iterable, 0, 0).start(min(COMPARED, self.length)):
                texts.append(repr(sample))
                values += [tensor.tolist() for tensor in tensors_of(sample)]
        text = f"([{', '.join(texts)}], {values})"
        return zlib.crc32(re.sub("0x[0-9a-f]+", "", text).encode())  # without addresses of objects

    def _compare_with_rank(self):
        self.is_checked = True
        if self.checksum is not None and self._checksum_of_start() != self.checksum:
            raise UserError(
                f"the {type(self.iterable).__name__} yields different samples in a loader process: "
                f"it divides itself among them, and would be divided twice. Pass --num-workers 0, "
                f"or make it yield all samples in every process"
            )


class _Pass:
    """One iteration over the stream, with separate random numbers. Use it in a SampleSeeds, which
    restores the process's.

    position: samples read so far; sample: the last of them.
    """

    def __init__(self, iterable, seed, epoch):
        self.numbers, self.position = (seed, epoch), 0
        if hasattr(iterable, "set_epoch"):
            iterable.set_epoch(epoch)
        with SampleSeeds(seed, epoch) as seeds:
            seeds.seed(-1)  # not the seed of any sample
            self.iterator = iter(iterable)
            self._keep_states()

    def start(self, count):
        """Yield at most the first `count` samples."""
        self._restore_states()
        return islice(self.iterator, count)

    def take(self, positions, length):
        """The samples at these positions, in ascending order."""
        self._restore_states()
        for position in positions:
            sample = self._skip_to(position, length)
            self._keep_states()
            yield sample
            self._restore_states()

    def _skip_to(self, position, length):
        # None, if the sample is the one that was read last.
        for sample in islice(self.iterator, position + 1 - self.position):
            self.position, self.sample = self.position + 1, sample
        if self.position <= position:
            raise UserError(
                f"the stream has ended after {self.position} samples of epoch {self.numbers[1]}, "
                f"but its length is given as {length}: pass the true one"
            )
        return self.sample

    def _keep_states(self):
        self.states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()

    def _restore_states(self):
        torch.set_rng_state(self.states[0])
        random.setstate(self.states[1])
        numpy.random.set_state(self.states[2])
