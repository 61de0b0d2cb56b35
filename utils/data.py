"""Loaders for any map-style dataset, whatever its samples are.

What a global batch holds depends only on (seed, epoch, sample index), not on the number of ranks or
workers: the sampler decides the order, and random transforms are seeded for each sample. A loader
is part of the checkpoint: a resumed run continues with the next global batch.
"""

import io
import multiprocessing
import pickle
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Sampler,
    Subset,
    get_worker_info,
)

from utils.batches import as_pair, collate, dtype_for, map_tensors, tensors_of
from utils.distributed import cores_per_rank, dp_rank, dp_world_size
from utils.errors import UserError
from utils.resident import make_resident
from utils.seeds import SampleSeeds, seed_step, start_batch
from utils.signals import shield_worker


class BatchDataset(Dataset[Any]):
    """A dataset that can do more than return one sample, for speed. Everything but __len__ and
    __getitem__ is optional. Any other map-style dataset works as well.

    A subclass that overrides __getitem__ of a class with get_batch() must override that, too.
    in_order: samples can only be asked for in ascending order, as from a stream.
    global_batch_size: what the run's must be, if the order of the samples depends on it.
    """

    in_order = False
    global_batch_size: int | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        number, maker = next((n, c) for n, c in enumerate(cls.__mro__) if "get_batch" in vars(c))
        overrides = any("__getitem__" in vars(c) for c in cls.__mro__[:number])
        if overrides and maker is not BatchDataset:
            raise TypeError(
                f"{cls.__name__} overrides __getitem__, but batches are made by "
                f"{maker.__name__}.get_batch(): override it as well"
            )

    def get_batch(self, indices: Tensor, epoch: int, seed: int) -> Any:
        """The batch of the samples with these indices, int64 (n,). Random transforms must be a
        function of (seed, epoch, index)."""
        return fetch_samples(self, indices, epoch, seed)

    def on_device(self, batch: Any, dtype: torch.dtype) -> Any:
        """The batch as the training loop gets it. Called with the batch on the device, in which
        floating-point tensors are of `dtype`; for example, to normalize uint8 images there."""
        return batch

    def resident_bytes(self) -> int | None:
        """The memory that resident() takes on a device, in bytes, or None if it cannot be used."""
        return None

    def resident(self, device: torch.device) -> "BatchDataset | None":
        """This dataset with its samples in the memory of `device`, where get_batch() then gets its
        indices and makes its batches; None if that is not possible."""
        return None


def fetch_samples(
    dataset: Any,
    indices: Tensor,
    epoch: int,
    seed: int,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> Any:
    """A batch of dataset[index] for each of the indices, int64 (n,), made by collate_fn; by
    default, by the dataset's method of that name, if it has one, or by utils.batches.collate.

    The generators of torch, random and numpy are seeded with (seed, epoch, index) before each
    sample. So __getitems__, which could read many samples at once, is called with one index at a
    time, and only if the dataset has no __getitem__.
    """
    with SampleSeeds(seed, epoch) as seeds:
        return _fetch(dataset, indices, collate_fn, seeds.seed)


def _fetch(dataset, indices, collate_fn=None, seed=None):
    samples = []
    # Of the class: a wrapper may forward all attributes to the dataset in it.
    getitem = getattr(type(dataset), "__getitem__", Dataset.__getitem__)
    has_only_getitems = getitem is Dataset.__getitem__ and hasattr(type(dataset), "__getitems__")
    for index in indices.tolist():
        if seed is not None:
            seed(index)
        if has_only_getitems:
            samples += dataset.__getitems__([index])
        else:
            samples.append(dataset[index])
    return (collate_fn or collate_fn_of(dataset, [dataset]))(samples)


def collate_fn_of(dataset: Any, sources: Sequence[Any]) -> Any:
    """The function that makes a batch of a dataset's samples, which come from `sources`, or from
    the datasets in a Subset or a ConcatDataset among these."""
    parts = [part for source in sources for part in parts_of(source, until="collate_fn")]
    found = [getattr(part, "collate_fn", collate) for part in parts]
    if len({getattr(function, "__func__", function) for function in found}) > 1:
        raise UserError(
            f"the datasets in a {type(dataset).__name__} have different methods collate_fn: give "
            f"them the same one"
        )
    return found[0]


def parts_of(dataset: Any, until: str = "") -> list[Any]:
    """The datasets that a Subset or a ConcatDataset, or both of them, make one of; or [dataset].
    until: the name of an attribute of which only the outermost counts."""
    if until and hasattr(dataset, until):
        return [dataset]
    if isinstance(dataset, Subset):
        return parts_of(dataset.dataset, until)
    if isinstance(dataset, ConcatDataset):
        return [inner for part in dataset.datasets for inner in parts_of(part, until)]
    return [dataset]


def describe_datasets(train_set: Any, val_set: Any) -> dict[str, Any]:
    """What a checkpoint stores about any two datasets: their sizes and, because a split may be
    random, a checksum of the indices of each Subset in them."""
    facts: dict[str, Any] = {}
    for name, dataset in (("train", train_set), ("val", val_set)):
        indices = [numpy.ascontiguousarray(s.indices, numpy.int64) for s in _subsets_in(dataset)]
        facts[f"{name}_samples"] = len(dataset)
        facts[f"{name}_subsets"] = [zlib.crc32(array.data) for array in indices]
    return facts


def _subsets_in(dataset):
    """The Subsets that a dataset consists of: itself, and Subsets in the attributes of a Subset, of
    a ConcatDataset, or of a dataset that transforms the samples of a different one."""
    found = [dataset]
    for part in found:  # which grows meanwhile
        values = vars(part).values() if isinstance(part, Dataset) else []
        for value in values:
            inner = value if isinstance(value, list | tuple) else [value]
            new = [each for each in inner if isinstance(each, Dataset)]
            found += [each for each in new if all(each is not known for known in found)]
    return [part for part in found if isinstance(part, Subset)]


def build_loader(
    dataset: Any,
    sampler: Sampler[int],
    batch_size: int,
    device: torch.device,
    cfg: Any,
    train: bool = False,
    micro_batches: int | None = None,
) -> "Loader":
    """A Loader for any map-style dataset.

    batch_size: this rank's share of the global batch. train: drop the samples that do not fill a
    global batch, and seed dropout for each step. micro_batches: a number; the loader then yields
    lists of that many parts of a batch, each of which is collated separately.
    Raises UserError if the global batch cannot be divided evenly or filled.
    """
    batch = cfg.global_batch_size
    if batch != batch_size * dp_world_size():
        raise UserError(
            f"global_batch_size {batch} cannot be divided evenly among {dp_world_size()} replicas: "
            f"pass --global-batch-size {-(-batch // dp_world_size()) * dp_world_size()}"
        )
    own = dataset.global_batch_size if train and isinstance(dataset, BatchDataset) else None
    if own not in (None, batch):
        raise UserError(
            f"global_batch_size is {batch}, but the {type(dataset).__name__} was made for global "
            f"batches of {own}: make it with batch_size=cfg.global_batch_size"
        )
    samples = len(sampler)  # type: ignore[arg-type] # PyTorch types it without a length
    if train and samples < batch_size:
        raise UserError(
            f"{samples * dp_world_size()} training samples do not fill one global batch of "
            f"{batch}: pass a smaller --global-batch-size, or add samples"
        )
    if len(dataset) == 0:
        raise UserError("there are no validation samples: correct build_datasets() of the task")
    return Loader(dataset, sampler, batch_size, device, cfg, train, micro_batches)


class Loader:
    """Iterates over (inputs, targets) on the device; floating-point tensors have the run's dtype.

    A batch that is not a pair, such as a dict, is yielded as (batch, batch). In evaluation, the
    last batch may be smaller; a rank that has no samples left yields batches that do not count,
    because a forward pass may communicate and so must run on all ranks.

    step: batches yielded in this epoch; start: where the next iteration begins, after a resume;
    epoch: of the current iteration; indices: the samples of the last batch, int64 (n,); counts:
    whether the last batch counts; samples: this rank's samples in this epoch so far; started: when
    the iteration began (time.perf_counter).
    """

    def __init__(
        self,
        dataset: Any,
        sampler: Sampler[int],
        batch_size: int,
        device: torch.device,
        cfg: Any,
        train: bool,
        micro_batches: int | None = None,
    ) -> None:
        self.dataset, self.sampler, self.batch_size = dataset, sampler, batch_size
        self.device, self.train, self.seed, self.dtype = device, train, cfg.seed, cfg.torch_dtype
        self.global_batch = cfg.global_batch_size
        self.step = self.start = self.samples = 0
        self.counts, self.started = True, time.perf_counter()
        for part in parts_of(dataset):
            if isinstance(part, BatchDataset) and part is not dataset:
                raise UserError(
                    f"a {type(dataset).__name__} cannot make the batches of the "
                    f"{type(part).__name__} in it: choose the samples in the "
                    f"{type(part).__name__} itself, or write a BatchDataset around it"
                )
        resident = None
        if cfg.loader != "workers" and isinstance(dataset, BatchDataset):
            resident = make_resident(dataset, device, cfg.loader)
        elif cfg.loader == "device":
            raise UserError(
                f"loader=device needs a BatchDataset with resident(), not a "
                f"{type(dataset).__name__}: pass --loader workers"
            )
        self.source = dataset if resident is None else resident
        self.name = "workers" if resident is None else "device"
        self.reader = self._build_reader(resident is not None, micro_batches, cfg)

    def _build_reader(self, is_resident, micro_batches, cfg):
        workers = cfg.num_workers
        if workers < 0:  # on a CPU, workers would compete with training
            workers = min(32, cores_per_rank() - 1) if self.device.type != "cpu" else 0
        if is_resident:
            workers = 0
        self.timeout = cfg.timeout if workers else 0  # beyond it, other ranks have given up
        self.source_device = self.device if is_resident else torch.device("cpu")
        batches = _Batches(self.source, cfg.seed, self.train, micro_batches)
        return self._reader(batches, _BatchSampler(self), workers, persistent_workers=workers > 0)

    def _reader(self, dataset, keys, workers, **options):
        method = multiprocessing.get_start_method()
        return DataLoader(
            dataset,
            batch_size=None,  # the sampler yields whole batches
            sampler=keys,
            collate_fn=_unchanged,
            num_workers=workers,
            pin_memory=self.device.type != "cpu" and self.source_device.type == "cpu",
            timeout=self.timeout,
            worker_init_fn=shield_worker,
            # Not by the server that Python 3.14 starts: a signal to all processes would end it.
            multiprocessing_context="fork" if workers and method == "forkserver" else None,
            generator=torch.Generator(),  # leaves the global random state alone
            **options,
        )

    def __len__(self) -> int:
        """Batches per epoch, the same on every rank."""
        samples = len(self.sampler)  # type: ignore[arg-type] # PyTorch types it without a length
        batch = self.batch_size
        return samples // batch if self.train else -(-samples // batch)

    @property
    def own_samples(self) -> int:
        """How many of the sampler's indices are this rank's own. The others, at the end, have been
        added by DistributedSampler so that all ranks have the same number of them."""
        return len(range(dp_rank(), len(self.dataset), dp_world_size()))

    def __iter__(self) -> Iterator[Any]:
        self.step, self.start = self.start, 0
        self.samples = self.step * self.batch_size
        self.epoch = getattr(self.sampler, "epoch", 0)  # as set by set_epoch()
        self.started = time.perf_counter()
        for contents, indices in self._read(self.reader):
            self.indices = torch.as_tensor(indices)
            if self.train:
                seed_step(self.seed, self.epoch, self.step, dp_rank())
            start_batch(self.seed, self.epoch, self.indices)
            self.counts = self.train or self.step * self.batch_size < self.own_samples
            if self.counts:
                self.samples += len(self.indices)
            self.step += 1
            yield self._prepare(contents)
        self.step = 0

    def _read(self, reader):
        try:
            for made in reader:
                if isinstance(made, UserError):
                    raise made
                yield made
        except RuntimeError as error:
            if not str(error).startswith("DataLoader timed out"):
                raise
            raise UserError(
                f"the loader processes have passed on no batch for {self.timeout:g} seconds (see "
                f"their output above, if any): pass --num-workers 0 to see the error, or a larger "
                f"--timeout"
            ) from None

    def read_apart(self, dataset: Any, keys: Sequence[Any]) -> Iterator[Any]:
        """dataset[key] for each key, in a separate process if the loader has any: a file that the
        dataset opens when it is first read would otherwise be open before these are forked, which
        would share its position, and read each other's samples."""
        return self._read(self._reader(dataset, keys, min(1, self.reader.num_workers)))

    def _tensor(self, indices):
        return torch.tensor(indices, device=self.source_device)

    def examples(self, *batches: Sequence[int]) -> Iterator[tuple[Any, Any]]:
        """The inputs and the targets of the samples with these indices, for each of the batches, on
        the device, to see what a model and a task make of them."""
        source = _Batches(self.source, self.seed, self.train)
        for contents, _ in self.read_apart(source, [(0, self._tensor(b)) for b in batches]):
            yield self._prepare(contents)

    def wrap_reader(self, wrapper: Callable[[Any], Any]) -> None:
        """Read from wrapper(reader) from now on, an iterable with the attributes of the reader."""
        self.reader = wrapper(self.reader)

    def _prepare(self, contents):
        if isinstance(contents, _MicroBatches):
            return [self._prepare(part) for part in contents]
        contents = map_tensors(self._move, contents)
        if isinstance(self.source, BatchDataset):
            contents = self.source.on_device(contents, self.dtype)
        return as_pair(contents)

    def _move(self, tensor):
        return tensor.to(self.device, dtype_for(tensor, self.dtype), non_blocking=True)

    def state_dict(self) -> dict[str, Any]:
        """How far the epoch is, in global batches."""
        return {"step": self.step, "global_batch": self.global_batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the next global batch, on any number of ranks. Raises UserError if the
        global batch size has changed within the epoch."""
        if state["step"] and state["global_batch"] != self.global_batch:
            raise UserError(
                f"the run stopped within an epoch, after {state['step']} global batches of "
                f"{state['global_batch']}: finish that epoch with the same batch size, not "
                f"{self.global_batch}"
            )
        self.start = state["step"]


class _BatchSampler:
    """(epoch, indices) for each batch of this rank. The epoch travels with the indices, because
    persistent workers keep the copy of the dataset that they started with."""

    def __init__(self, loader):
        # Not a cycle: the garbage collector would close the queues of the workers before their
        # loader can tell them to end, and then wait five seconds for each.
        self.loader = weakref.proxy(loader)

    def __iter__(self):
        loader = self.loader
        indices = torch.from_numpy(numpy.fromiter(loader.sampler, int)).to(loader.source_device)
        if not loader.train:
            indices = indices[: loader.own_samples]
        batches = indices.split(loader.batch_size) if len(indices) else []
        for number in range(loader.step, len(loader)):
            if number < len(batches):
                batch = batches[number]
            else:  # of a rank without samples: the forward pass must run nevertheless
                batch = torch.zeros(1, dtype=torch.int64, device=loader.source_device)
            yield loader.epoch, _as_array(batch)


class _MicroBatches(list[Any]):
    """The parts of one batch."""


class _Batches(Dataset[Any]):
    """Makes whole batches, in a worker or in this process: (contents, indices).

    set_epoch() of a dataset is called here, in each process: what the script sets on its own copy
    does not reach the others.
    """

    def __init__(self, dataset, seed, train, micro_batches=None):
        self.dataset, self.seed, self.micro_batches = dataset, seed, micro_batches
        parts = parts_of(dataset)
        self.parts = [part for part in parts if train and hasattr(part, "set_epoch")]
        self.epoch = -1
        is_pure = all(getattr(type(part), "is_pure", False) for part in parts)
        self.is_random = None if is_pure else True  # whether samples need seeds; None: not tried

    def __getitem__(self, batch):
        epoch, indices = batch
        indices = torch.as_tensor(indices)
        try:
            if epoch != self.epoch:
                self.epoch = epoch
                for part in self.parts:
                    part.set_epoch(epoch)
            if self.micro_batches is None:
                made = self._make(indices)
            else:
                parts = indices.tensor_split(self.micro_batches)
                made = _MicroBatches([self._make(part) for part in parts])
            whole = made, _as_array(indices)
            return whole if get_worker_info() is None else _Pickled(whole)
        except UserError as error:  # if raised in a worker, it would include the worker's traceback
            return error
        except StopIteration as error:  # it would end the epoch, as if there were no more batches
            raise RuntimeError("the dataset raised StopIteration") from error
        except Exception as error:
            if get_worker_info() is not None and not _can_be_sent(type(error)):
                raise RuntimeError(f"{type(error).__qualname__}: {error}") from error
            raise

    def _make(self, indices):
        if isinstance(self.dataset, BatchDataset):
            return self.dataset.get_batch(indices, self.epoch, self.seed)
        if self.is_random is False:
            if (made := self._make_unseeded(indices)) is not None:
                return made
            self.is_random = True
        start = time.perf_counter()
        made = fetch_samples(self.dataset, indices, self.epoch, self.seed)
        # Seeding takes as long as reading a short text, and is nothing beside an image.
        if self.is_random is None and time.perf_counter() - start < 3e-4 * len(indices):
            again = tensors_of(self._make_unseeded(indices))
            pairs = zip(tensors_of(made), again, strict=False)
            self.is_random = not again or not all(torch.equal(*pair) for pair in pairs)
        return made

    def _make_unseeded(self, indices):
        """The batch; None if it takes random numbers from the generators that are to be seeded."""
        with SampleSeeds(self.seed, self.epoch) as seeds:
            try:
                made = _fetch(self.dataset, indices)
            except Exception:  # raised again by fetch_samples(), unless these numbers caused it
                return None
            return None if seeds.are_used() else made


def _as_array(indices):
    """The indices as an array, unless they are on a device. Passing a tensor to another process is
    slower, because a file in shared memory is opened for it."""
    return indices.numpy() if indices.device.type == "cpu" else indices


def _can_be_sent(value):
    """Whether a worker can pickle it. If not, the queue's thread would print an error, and the rank
    would wait."""
    try:
        ForkingPickler.dumps(value)
    except Exception:
        return False
    return True


class _Pickled:
    """A batch that a loader process passes on. The queue would pickle it, too, but in a thread,
    whose error is only printed: the rank would wait for the batch until the timeout."""

    def __init__(self, batch):
        buffer = io.BytesIO()
        pickler = ForkingPickler(buffer)
        pickler.dispatch_table[Tensor] = _reduce
        try:
            pickler.dump(batch)
        except Exception as error:
            raise UserError(
                f"a loader process cannot pass its batch on ({error}): correct the dataset or its "
                f"collate_fn, or pass --num-workers 0; if shared memory is full, enlarge /dev/shm "
                f"(docker run --shm-size=8g)"
            ) from None
        self.data = buffer.getvalue()

    def __reduce__(self):
        return pickle.loads, (self.data,)


def _reduce(tensor):
    """How a tensor is pickled: in shared memory, but a small one as an array, because receiving a
    piece of shared memory takes a round trip to the worker, longer than copying 64 KiB."""
    if tensor.is_conj() or tensor.is_neg():  # which the receiver would not know
        tensor = tensor.resolve_conj().resolve_neg()
    is_small = tensor.layout is torch.strided and tensor.nbytes <= 2**16
    if is_small and tensor.is_contiguous():
        with suppress(TypeError, RuntimeError):  # NumPy has neither bfloat16 nor gradients
            return torch.from_numpy, (tensor.numpy(),)
    return reduce_tensor(tensor)


def _unchanged(batch):
    return batch
