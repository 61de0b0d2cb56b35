"""Batches of small samples, such as texts: read without seeds where nothing is random, and passed
on by loader processes as arrays. Both take longer than to read a short text."""

import io
import pickle
import random
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import get_worker_info

from utils.batches import collate, tensors_of
from utils.data import BatchDataset, fetch_samples
from utils.errors import UserError
from utils.seeds import SampleSeeds

SMALL = 2**16  # bytes of a tensor


class SmallSamples(BatchDataset):
    """A map-style dataset whose samples may be read twice: __getitem__ must not keep what it has
    drawn. A subclass, or an instance, may have a different collate_fn.

    The first batch of each process is read with seeds and without. If it is the same, and no
    generator has been used, the next ones are read without, until one uses a generator.
    """

    is_random: bool | None = None  # whether samples need seeds; None: not tried in this process
    collate_fn = staticmethod(collate)

    def get_batch(self, indices: Tensor, epoch: int, seed: int) -> Any:
        """The batch of the samples with these indices, int64 (n,)."""
        if self.is_random is False:
            batch, is_used = self._read_unseeded(indices)
            if not is_used:
                return passed_on(batch)
            self.is_random = True
        batch = fetch_samples(self, indices, epoch, seed)
        if self.is_random is None:
            again, is_used = self._read_unseeded(indices)
            pairs = [*zip(tensors_of(batch), tensors_of(again), strict=False)]
            self.is_random = is_used or not (pairs and all(torch.equal(*pair) for pair in pairs))
        return passed_on(batch)

    def _read_unseeded(self, indices):
        """The batch, and whether a generator has been used."""
        with SampleSeeds(0, 0) as seeds:  # which restores the generators
            batch = self.collate_fn([self[index] for index in indices.tolist()])
            return batch, not _are_current(*seeds.states)

    def __getstate__(self) -> dict[str, Any]:
        """What a spawned process gets: it tries by itself."""
        return vars(self) | {"is_random": None}


def _are_current(ours, python, legacy):
    """Whether these are the states of the generators of torch, random and numpy."""
    _, keys, *places = numpy.random.get_state()
    is_numpy = places == [*legacy[2:]] and numpy.array_equal(keys, legacy[1])
    return is_numpy and python == random.getstate() and torch.equal(ours, torch.get_rng_state())


def passed_on(batch: Any) -> Any:
    """The batch or, in a loader process, what the process of the rank unpickles to it. Raises
    UserError if it cannot be pickled: the thread of the queue would only print its error."""
    return batch if get_worker_info() is None else _Pickled(batch)


class _Pickled:
    def __init__(self, batch):
        buffer = io.BytesIO()
        pickler = ForkingPickler(buffer)
        pickler.dispatch_table[Tensor] = _reduce
        try:
            pickler.dump(batch)
        except Exception as error:
            raise UserError(
                f"a loader process cannot pass its batch on ({error}): correct the dataset or its "
                f"collate_fn, or enlarge /dev/shm (docker run --shm-size=8g)"
            ) from None
        self.data = buffer.getvalue()

    def __reduce__(self):
        return pickle.loads, (self.data,)


def _reduce(tensor):
    """How a tensor is pickled: in shared memory, but a small one as an array, because to receive a
    piece of shared memory takes a round trip to the process, longer than to copy 64 KiB."""
    if tensor.is_conj() or tensor.is_neg():  # which the receiver would not know
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.layout is torch.strided and tensor.nbytes <= SMALL and tensor.is_contiguous():
        with suppress(TypeError, RuntimeError):  # NumPy has neither bfloat16 nor gradients
            return torch.from_numpy, (tensor.numpy(),)
    return reduce_tensor(tensor)
