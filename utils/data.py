"""Loaders for any map-style dataset. What a global batch holds depends only on (seed, epoch, sample
index), not on the number of ranks or workers; a resumed run continues with the next one."""

import multiprocessing
import time
import weakref
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, Subset

from utils.batches import as_pair, collate, dtype_for, map_tensors
from utils.distributed import cores_per_rank, dp_rank, dp_world_size
from utils.errors import UserError
from utils.seeds import SampleSeeds, seed_step, start_batch
from utils.signals import shield_worker


class BatchDataset(Dataset[Any]):
    """A dataset that makes whole batches, for speed. Any other map-style dataset works as well.

    A subclass that overrides __getitem__ of a class with get_batch() must override that, too.
    in_order: samples can only be asked for in ascending order, as from a stream.
    device: where get_batch() gets its indices and makes its batches; if not on the CPU, in the
    process of the rank.
    """

    in_order = False
    device = torch.device("cpu")

    def get_batch(self, indices: Tensor, epoch: int, seed: int) -> Any:
        """The batch of the samples with these indices, int64 (n,). Random transforms must be a
        function of (seed, epoch, index)."""
        return fetch_samples(self, indices, epoch, seed)

    def on_device(self, batch: Any, dtype: torch.dtype) -> Any:
        """The batch as the training loop gets it. Called with the batch on the device, in which
        floating-point tensors are of `dtype`; for example, to normalize uint8 images there."""
        return batch


def inner_dataset(dataset: Any) -> Any:
    """The dataset from which a Subset, or a Subset of one, has been chosen."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def fetch_samples(dataset: Any, indices: Tensor, epoch: int, seed: int) -> Any:
    """A batch of dataset[index] for each of the indices, int64 (n,), made by the dataset's method
    collate_fn(samples), if it has one. The generators of torch, random and numpy are seeded with
    (seed, epoch, index) before each sample."""
    samples = []
    with SampleSeeds(seed, epoch) as seeds:
        for index in indices.tolist():
            seeds.seed(index)
            samples.append(dataset[index])
        return getattr(inner_dataset(dataset), "collate_fn", collate)(samples)


def describe_datasets(train_set: Any, val_set: Any) -> dict[str, Any]:
    """What a checkpoint stores about any two datasets: their sizes and, because a split may be
    random, a checksum of the indices of a Subset."""
    facts: dict[str, Any] = {}
    for name, dataset in (("train", train_set), ("val", val_set)):
        facts[f"{name}_samples"] = len(dataset)
        if isinstance(dataset, Subset):
            indices = numpy.ascontiguousarray(dataset.indices, numpy.int64)
            facts[f"{name}_subset"] = zlib.crc32(indices.data)
    return facts


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
    Raises UserError if the shares do not make a global batch, or if the samples do not fill one; or
    for a Subset of a BatchDataset.
    """
    replicas = dp_world_size()
    if cfg.global_batch_size != batch_size * replicas:
        raise UserError(
            f"global_batch_size {cfg.global_batch_size} is not {replicas} replicas x {batch_size}: "
            f"pass --global-batch-size {replicas * max(1, batch_size)}"
        )
    if isinstance(dataset, Subset) and isinstance(inner_dataset(dataset), BatchDataset):
        kind = type(inner_dataset(dataset)).__name__
        raise UserError(f"a Subset would bypass get_batch() of {kind}: choose its samples instead")
    if len(sampler) < (batch_size if train else 1):  # type: ignore[arg-type]
        kind = "training" if train else "validation"
        raise UserError(f"{len(dataset)} {kind} samples do not fill one global batch")
    return Loader(dataset, sampler, batch_size, device, cfg, train, micro_batches)


class Loader:
    """Iterates over (inputs, targets) on the device; floating-point tensors have the run's dtype.

    A batch that is not a pair, such as a dict, is yielded as (batch, batch). In evaluation, the
    last batch may be smaller; a rank that has no samples left yields batches that do not count,
    because a forward pass may communicate and so must run on all ranks.

    step: batches that have been trained of the epoch epoch_of_step, and so where its iteration
    begins. Only the Checkpointer moves it, so that neither a look at a batch nor a `break` can.
    read: batches of this epoch up to the one that was yielded last; indices: its samples, int64
    (n,); counts: whether it counts; started: when the iteration began (time.perf_counter); waited:
    seconds for which batches were waited for, so far; computed: how many of these this thread
    itself computed, to make the batches. A look at other batches, while the iteration that is
    trained goes on, changes none of these.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: Any,
        batch_size: int,
        device: torch.device,
        cfg: Any,
        train: bool,
        micro_batches: int | None = None,
    ) -> None:
        self.dataset, self.sampler, self.batch_size = dataset, sampler, batch_size
        self.device, self.train, self.seed, self.dtype = device, train, cfg.seed, cfg.torch_dtype
        self.global_batch = cfg.global_batch_size
        self.step = self.epoch_of_step = self.start = self.read = self.epoch = 0
        self.iterations: dict[object, Any] = {}  # that go on: (batches read, indices of the last)
        self.trained: Any = None  # the iteration whose batches are trained
        self.is_over = False  # a run is resumed behind the last batch: the next iteration is empty
        self.indices = torch.zeros(0, dtype=torch.int64)
        self.counts, self.started = True, time.perf_counter()
        self.waited = self.computed = 0.0
        self.micro_batches = micro_batches
        # DistributedSampler adds others at the end, so that all ranks have the same number.
        self.own_samples = len(range(dp_rank(), len(dataset), dp_world_size()))
        self.source_device = torch.device("cpu")
        if isinstance(dataset, BatchDataset):
            self.source_device = dataset.device
        workers = cfg.num_workers
        if workers < 0:  # on a CPU, workers would compete with training
            workers = min(32, cores_per_rank() - 1) if device.type != "cpu" else 0
        self.timeout = cfg.timeout
        source = _Batches(dataset, cfg.seed, train, micro_batches or 1)
        keys = _BatchSampler(self)
        self.reader: Any = self._build_reader(source, keys, workers, persistent_workers=True)

    def _build_reader(self, source, keys, workers, persistent_workers=False):
        is_on_cpu = self.source_device.type == "cpu"
        workers = workers if is_on_cpu else 0
        # Not by the server that Python 3.14 starts: a signal to all processes would end it.
        is_forked = workers and multiprocessing.get_start_method() == "forkserver"
        return DataLoader(
            source,
            batch_size=None,  # the sampler yields whole batches
            sampler=keys,
            collate_fn=_unchanged,  # the default would make tensors of arrays
            num_workers=workers,
            persistent_workers=persistent_workers and workers > 0,
            pin_memory=self.device.type != "cpu" and is_on_cpu,
            timeout=self.timeout if workers else 0,  # beyond it, other ranks have given up
            worker_init_fn=shield_worker,
            multiprocessing_context="fork" if is_forked else None,
            generator=torch.Generator(),  # leaves the global random state alone
        )

    def __len__(self) -> int:
        """Batches per epoch, the same on every rank."""
        samples, batch = len(self.sampler), self.batch_size
        return samples // batch if self.train else -(-samples // batch)

    @property
    def samples(self) -> int:
        """This rank's samples in this epoch so far: those that are trained, or are evaluated."""
        if self.train:
            return self.step * self.batch_size
        return min(self.read * self.batch_size, self.own_samples)

    def __iter__(self) -> Iterator[Any]:
        # Persistent workers serve one iteration at a time: one within it starts its own.
        own = self.reader.dataset, self.reader.sampler, self.reader.num_workers
        reader = self._build_reader(*own) if self.iterations else self.reader
        iteration = object()
        try:
            yield from self._iterate(reader, iteration)
        finally:
            self.iterations.pop(iteration, None)

    def _iterate(self, reader, iteration):
        self.iterations[iteration] = self.step, self.indices
        self.epoch = getattr(self.sampler, "epoch", 0)  # as set by set_epoch()
        self.start = self.step % len(self) if self.epoch == self.epoch_of_step else 0
        is_over, self.is_over = self.is_over and self.epoch == self.epoch_of_step, False
        if is_over:
            return
        wall, cpu = time.perf_counter(), time.thread_time()
        if self.trained not in self.iterations:
            self.started = wall
        for number, (contents, indices) in enumerate(reader, start=self.start):
            if iteration not in self.iterations:
                raise UserError("an iterator ends with checkpoint.save(): make one in each epoch")
            if self.trained is iteration or self.trained not in self.iterations:
                self.waited += time.perf_counter() - wall
                self.computed += time.thread_time() - cpu
                self._begin(number, torch.as_tensor(indices))
                self.iterations[iteration] = self.read, self.indices
            parts = [self.prepare(part) for part in contents]
            yield parts[0] if self.micro_batches is None else parts
            wall, cpu = time.perf_counter(), time.thread_time()

    def _begin(self, number, indices):
        self.read, self.indices = number + 1, indices
        self.counts = self.train or number * self.batch_size < self.own_samples
        if self.train:
            seed_step(self.seed, self.epoch, number, dp_rank())
        start_batch(self.seed, self.epoch, indices)

    def examples(self, *batches: Sequence[int]) -> Iterator[Any]:
        """The samples with these indices, for each of the batches, as prepare() takes them. If the
        loader has processes, one of them reads: a file that the dataset opens when it is first read
        would otherwise be open before these are forked, which would share its position, and read
        each other's samples."""
        keys = [(0, torch.tensor(indices, device=self.source_device)) for indices in batches]
        source = _Batches(self.dataset, self.seed, self.train)
        reader = self._build_reader(source, keys, min(1, self.reader.num_workers))
        return (parts[0] for parts, _ in reader)

    def prepare(self, contents: Any) -> tuple[Any, Any]:
        """The inputs and the targets of a batch that has been read, on the device. Raises the
        UserError that is in its place, if there was one."""
        if isinstance(contents, UserError):
            raise contents
        contents = map_tensors(self._move, contents)
        if isinstance(self.dataset, BatchDataset):
            contents = self.dataset.on_device(contents, self.dtype)
        return as_pair(contents)

    def _move(self, tensor):
        return tensor.to(self.device, dtype_for(tensor, self.dtype), non_blocking=True)

    def advance(self) -> bool:
        """What has been read is trained. Called by the Checkpointer, after each step. Returns
        whether that is more than before."""
        before = self.step, self.epoch_of_step
        if self.step and self.epoch != self.epoch_of_step:
            raise UserError("set_epoch() began an epoch before checkpoint.save() (--save-epochs)")
        if self.iterations and self.trained not in self.iterations:  # the first step of an epoch
            self.trained = [*self.iterations][-1]  # an older one is a look that is kept
        self.read, self.indices = self.iterations.get(self.trained, (self.read, self.indices))
        self.step, self.epoch_of_step = self.read, self.epoch
        return before != (self.step, self.epoch_of_step)

    def end_epoch(self) -> None:
        """The next iteration begins at the first batch, also if a `break` has ended this one.
        Called by the Checkpointer."""
        self.step = self.read = 0
        self.iterations.clear()

    def state_dict(self) -> dict[str, Any]:
        """How far the epoch is, in global batches."""
        return {"step": self.step, "epoch": self.epoch_of_step, "global_batch": self.global_batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the next global batch, on any number of ranks."""
        if state["step"] and state["global_batch"] != self.global_batch:
            raise UserError(
                f"the run stopped within an epoch of global batches of {state['global_batch']}: "
                f"finish that epoch with the same size, not {self.global_batch}"
            )
        self.step = self.read = state["step"]  # also if it is not read at once
        self.epoch_of_step = self.epoch = state["epoch"]
        self.is_over = self.step == len(self)


class _BatchSampler:
    """(epoch, indices) for each batch of this rank. The epoch travels with the indices, because
    persistent workers keep the copy of the dataset that they started with."""

    def __init__(self, loader):
        self.loader = weakref.proxy(loader)  # not a cycle, which would delay the end of workers

    def __iter__(self):
        loader = self.loader
        indices = torch.from_numpy(numpy.fromiter(loader.sampler, int)).to(loader.source_device)
        if not loader.train:
            indices = indices[: loader.own_samples]
        batches = indices.split(loader.batch_size) if len(indices) else []
        filler = torch.zeros(1, dtype=torch.int64, device=indices.device)
        for number in range(loader.start, len(loader)):
            # Beyond this rank's samples, the forward pass must run nevertheless.
            batch = batches[number] if number < len(batches) else filler
            yield loader.epoch, _as_array(batch)


class _Batches(Dataset[Any]):
    """Makes whole batches, in a worker or in this process: (their micro-batches, indices).

    set_epoch() of a dataset is called here, in each process: what the script sets on its own copy
    does not reach the others.
    """

    def __init__(self, dataset, seed, train, micro_batches=1):
        self.dataset, self.seed, self.micro_batches = dataset, seed, micro_batches
        self.set_epoch = getattr(inner_dataset(dataset), "set_epoch", None) if train else None

    def __getitem__(self, key):
        epoch, indices = key[0], torch.as_tensor(key[1])
        try:
            if self.set_epoch:
                self.set_epoch(epoch)
            parts = indices.tensor_split(self.micro_batches)
            made = [self._make(part, epoch) for part in parts]
        except UserError as error:  # raised in a worker, it would hold the worker's traceback
            made = [error]
        return made, _as_array(indices)

    def _make(self, indices, epoch):
        if isinstance(self.dataset, BatchDataset):
            return self.dataset.get_batch(indices, epoch, self.seed)
        return fetch_samples(self.dataset, indices, epoch, self.seed)


def _as_array(indices):
    """The indices as an array, unless they are on a device: passing a tensor to a different process
    is slower, because a file in shared memory is opened for it."""
    return indices.numpy() if indices.device.type == "cpu" else indices


def _unchanged(batch):
    return batch
