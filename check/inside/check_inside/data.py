"""Observes DataLoaders: which samples each rank gets, in which order, with which random numbers."""

import contextlib
import os
import random
import sys
import time
import weakref
import zlib
from array import array
from multiprocessing import util
from pathlib import Path

from check_inside import exact, lengths, limits
from check_inside.record import (
    PLAN,
    called_by_user,
    checksum,
    guarded,
    place,
    record,
    replace,
)
from check_inside.state import STATE

SAMPLES_PER_EVENT = 256
CONTENTS = 8  # batches of an epoch, whose contents are compared between ranks
PROBES = 512  # samples of a dataset that are compared between ranks
PROBE_SECONDS = 2.0
MOST_INDICES = 3_000_000  # of an epoch: infinite samplers never end


class Epoch:
    """One pass over a DataLoader."""

    def __init__(self, number, loader, iterator):
        self.number = number
        # The script frees loaders and their processes, which an iterator ends when it is freed.
        self.loader = STATE.loaders(loader)
        self.dataset = loader.dataset
        self.makes_batches = loader.batch_sampler is not None
        self.is_iterable = not hasattr(loader.dataset, "__getitem__") or is_iterable(loader)
        self.is_endless = not self.is_iterable and not _has_length(loader)
        self.has_all = _has_all(loader)
        self.drawn = array("q")  # indices, in the order of the sampler
        self.sizes = array("q")  # of the batches
        self.batches = 0
        self.position = 0  # in drawn, of the next batch
        self.steps_before = STATE.steps
        self.backwards_before = STATE.backwards_of_run
        self.own_backwards = 0  # those that may be for a batch of this pass
        self.is_read = False  # since the last backward
        self.evaluated = None  # the weights of the model that evaluates the last batch, if one does
        self.forwards = {}
        self.fingerprints = []
        self.iterator = weakref.ref(iterator)
        self.orders = []  # of the DistributedSamplers that are iterated
        self.is_cut = False
        self.is_whole = False  # all indices have been drawn
        self.is_left = False  # before its end
        self.place = place()

    def backwards(self):
        """The number of backwards within this pass, or 0 if most were of a different loader: next()
        does not tell that the last batch of an evaluation has been read."""
        count = STATE.backwards_of_run - self.backwards_before
        return count if 2 * self.own_backwards > count else 0

    def forward(self, weights, key, forward):
        """A model with these weights was called, maybe for the last batch."""
        is_evaluation = not forward["grad"] or not forward["training"]
        if self.evaluated is None and STATE.reader == self.number:
            self.evaluated = weights if is_evaluation else ()
        if is_evaluation or not self.evaluated:  # else it is for a different loader
            self.forwards.setdefault(key, forward)

    def backward(self, trained):
        """A backward was run; the models that are trained have these weights. It is not for a batch
        that one of them has evaluated, if a different loader has been read since."""
        is_own = self.is_read or STATE.reader == self.number or self.evaluated not in trained
        self.own_backwards += is_own
        self.is_read = False

    def steps(self):
        return STATE.steps - self.steps_before

    def draw(self, indices):
        batch = list(indices) if self.makes_batches else [indices]
        if not all(isinstance(key, int) for key in batch):
            batch = [sample for key in batch for sample in samples_of(key)]
        if batch:
            self.drawn.extend(batch)
            self.sizes.append(len(batch))

    def drain(self):
        """Draw what the sampler still has, without reading the samples."""
        iterator = self.iterator()
        if iterator is None:
            return
        while len(self.drawn) < MOST_INDICES:
            try:
                before = len(self.sizes)
                self.draw(next(iterator._sampler_iter))
            except StopIteration:
                self.is_whole = True
                return
            except Exception:  # the script has freed what it reads
                return
            if len(self.sizes) == before:
                return


def samples_of(key):
    """A number for each sample that a key of a dataset stands for: the index itself, or a checksum
    of a key with several parts, such as (epoch, index). A list or tensor of indices is a batch."""
    import torch

    parts = [key] if not isinstance(key, tuple) else list(key)
    parts = [part.tolist() if hasattr(part, "tolist") else part for part in parts]
    size = max((len(part) for part in parts if isinstance(part, list)), default=1)
    columns = [part if isinstance(part, list) else [part] * size for part in parts]
    if any(len(column) != size for column in columns):
        return []
    leaves = torch.utils._pytree.tree_leaves(columns)
    if not all(isinstance(leaf, int | str | bytes) for leaf in leaves):
        return []
    rows = list(zip(*columns, strict=True))
    if len(parts) == 1 and all(isinstance(row[0], int) for row in rows):
        return [row[0] for row in rows]
    return [zlib.crc32(repr(row).encode()) for row in rows]


def is_iterable(loader):
    """Whether the loader reads an IterableDataset."""
    from torch.utils.data import IterableDataset

    return isinstance(loader.dataset, IterableDataset)


def _has_length(loader):
    """Whether the loader ends: a sampler without a length may yield indices forever."""
    try:
        len(loader)
    except TypeError:
        return False
    return True


def _has_all(loader):
    """Whether an epoch of the loader has each sample of its dataset once, as PyTorch's own samplers
    for one process see to."""
    from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

    sampler = loader.sampler
    if type(loader.batch_sampler) not in (BatchSampler, type(None)):
        return False
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(loader.dataset)
    return type(sampler) is SequentialSampler


_read = {}  # ordinal -> dataset, without those that are subsets of one
_epochs = 0
_orders = []  # of samplers that are iterated while a loader starts
_is_starting = False


def install(name, torch):
    """Replace the methods of the loader's iterator that draw indices and return batches."""
    from torch.utils.data import _utils, dataloader

    base = dataloader._BaseDataLoaderIter
    loader_class = dataloader.DataLoader

    def make_iter(original):
        def __iter__(self):
            global _is_starting
            STATE.datasets(self.dataset)  # before loader processes are forked, which then know it
            _orders.clear()
            for epoch in [epoch for epoch in STATE.active if epoch.loader == STATE.loaders(self)]:
                finish_epoch(epoch)  # that was left by `break`, or after a number of next()
            _is_starting = True
            try:
                iterator = original(self)  # with workers, it reads the sampler now
            finally:
                _is_starting = False
            iterator._check_epoch = begin(self, iterator)
            return iterator

        return __iter__

    def make_next_index(original):
        def _next_index(self):
            indices = original(self)
            # Workers are given their first indices before the epoch is known.
            early = self.__dict__.setdefault("_check_early", [])
            epoch = self.__dict__.get("_check_epoch")
            if epoch is None or epoch.is_cut:
                early.append(indices)
            else:
                epoch.draw(indices)
            return indices

        return _next_index

    def make_next(original):
        def __next__(self):
            epoch = self.__dict__.get("_check_epoch")
            if epoch is None:
                return original(self)
            if limits.cuts(epoch) and limits.may_end(sys._getframe(1)):
                cut(epoch)
                raise StopIteration
            try:
                batch = original(self)
            except StopIteration:
                epoch.is_whole = True
                finish_epoch(epoch)
                raise
            return batch_of(epoch, batch)

        return __next__

    def make_reset(original):
        def _reset(self, loader, first_iter=False):
            if not first_iter:
                if self._check_epoch is not None:
                    finish_epoch(self._check_epoch)
                self._check_epoch = None
                self._check_early = []
            return original(self, loader, first_iter)

        return _reset

    _finish_at_exit()
    # Processes that the script forks forget what is to be done at the end.
    util.register_after_fork(Epoch, lambda epoch: _finish_at_exit())
    replace(loader_class, "__iter__", make_iter)
    replace(base, "_next_index", make_next_index)
    replace(base, "__next__", make_next)
    for kind in (
        dataloader._SingleProcessDataLoaderIter,
        dataloader._MultiProcessingDataLoaderIter,
    ):
        if "_reset" in vars(kind):
            replace(kind, "_reset", make_reset)
    replace(_utils.fetch._MapDatasetFetcher, "fetch", _observe_fetch)
    replace(_utils.fetch._IterableDatasetFetcher, "fetch", _observe_fetch)
    for function in ("manual_seed", "seed", "set_rng_state"):
        for module in (torch, torch.random):
            replace(module, function, _observe_seed)
    replace(random, "seed", _observe_seed)
    replace(random, "setstate", _observe_seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        replace(numpy.random, "seed", _observe_seed)
        replace(numpy.random, "set_state", _observe_seed)

    for module in (torch, torch.random):
        if hasattr(module, "fork_rng"):
            replace(module, "fork_rng", _observe_fork)
    sampler = torch.utils.data.DistributedSampler

    def make_set_epoch(original):
        def set_epoch(self, epoch):
            record("set_epoch", epoch=epoch, place=place())
            return original(self, epoch)

        return set_epoch

    def make_order(original):
        def __iter__(self):
            indices = list(original(self))
            order = [STATE.samplers(self), self.shuffle, zlib.crc32(array("q", indices).tobytes())]
            if _is_starting:
                _orders.append(order)
            elif STATE.active:
                STATE.active[-1].orders.append(order)
            return iter(indices)

        return __iter__

    if PLAN["run"] == "two":
        replace(torch.Tensor, "numpy", _observe_conversion)
        replace(torch.Tensor, "tolist", _observe_conversion)
    replace(sampler, "set_epoch", make_set_epoch)
    replace(sampler, "__iter__", make_order)


_recorded = set()


def _observe_conversion(original):
    """What becomes of numbers in an array or a list is not seen."""

    def convert(self, *args, **kwargs):
        if self.dim() and len(self) > 1 and not STATE.fetching and called_by_user():
            _record_once("converted", size=len(self))
        return original(self, *args, **kwargs)

    return convert


def _record_once(kind, **fields):
    where = place()
    if (kind, str(where)) not in _recorded:
        _recorded.add((kind, str(where)))
        record(kind, place=where, **fields)


@guarded
def begin(loader, iterator):
    """The Epoch of a loader that starts now."""
    global _epochs
    epoch = Epoch(_epochs, loader, iterator)
    _epochs += 1
    epoch.orders += _orders
    STATE.active.append(epoch)
    weakref.finalize(iterator, leave, epoch).atexit = False
    for indices in iterator.__dict__.pop("_check_early", []):
        epoch.draw(indices)
    return epoch


def batch_of(epoch, batch):
    """Observe a batch that the loader hands out; returns the batch that the script gets."""
    size = _record_batch(epoch, batch)
    return batch if size is None else exact.batch_of(epoch.loader, batch, size)


@guarded
def _record_batch(epoch, batch):
    """Returns the number of its samples."""
    note_noise()
    ordinal = epoch.loader
    number = epoch.batches
    epoch.batches += 1
    epoch.is_read = True
    epoch.evaluated = None
    STATE.reader = epoch.number
    STATE.batches[ordinal] = STATE.batches.get(ordinal, 0) + 1
    size = epoch.sizes[number] if number < len(epoch.sizes) else 0
    start, epoch.position = epoch.position, epoch.position + size
    rows = fingerprints(batch) if epoch.is_iterable else []
    epoch.fingerprints += rows
    is_compared = size and number < CONTENTS
    record(
        "batch",
        epoch=epoch.number,
        loader=ordinal,
        batch=number,
        size=size,
        samples=list(epoch.drawn[start : start + size])[:SAMPLES_PER_EVENT] or rows,
        leaves=contents(batch, size) if is_compared else [],
    )
    return size


def note_noise():
    """The states of the generators from which noise may be drawn before the next forward."""
    if PLAN["run"] in ("killed", "resumed"):
        STATE.random_states = random_states()
    if PLAN["run"] == "two" and STATE.steps < 3:
        STATE.noise = [generator_states()]


def generator_states():
    """Checksums of the states of PyTorch's generator, and of those that the script has made.

    The latter only where a DataLoader has the samples: they may be what chooses them.
    """
    import torch

    made = STATE.generators[:20] if STATE.active else []
    own = filter(None, (reference() for reference in made))
    states = [torch.random.get_rng_state(), *(generator.get_state() for generator in own)]
    return [checksum(state) for state in states]


def contents(batch, size):
    """A checksum of each sample, for each tensor of a batch."""
    count = min(size, SAMPLES_PER_EVENT)
    return [[checksum(x[i]) for i in range(count)] for x in _tensors(batch) if len(x) == size]


def fingerprints(batch):
    """A checksum of each sample of a batch, by which ranks that read the same ones are noticed."""
    tensors = _tensors(batch)
    if not tensors:
        return []
    samples = len(tensors[0])
    tensors = [tensor for tensor in tensors if len(tensor) == samples]
    rows = [0] * min(samples, SAMPLES_PER_EVENT)
    for tensor in tensors:
        rows = [checksum(tensor[i], crc) for i, crc in enumerate(rows)]
    return rows


def _tensors(batch):
    """The tensors of a batch that have dimensions."""
    import torch
    from torch.utils import _pytree

    return [x for x in _pytree.tree_leaves(batch) if isinstance(x, torch.Tensor) and x.dim()]


def cut(epoch):
    """Stop an epoch that has had enough batches; the sampler's order is recorded to its end."""
    epoch.is_cut = True
    epoch.drain()
    finish_epoch(epoch)


def leave(epoch):
    """A loop that is left by `break`, or by an error, drops the iterator: the epoch has ended."""
    epoch.is_left = True
    finish_epoch(epoch)


@guarded
def finish_epoch(epoch):
    """Record the whole epoch."""
    if epoch not in STATE.active:
        return
    STATE.active.remove(epoch)
    if epoch.backwards() and epoch.steps_before >= STATE.steps_of_epochs:
        STATE.training_epochs += 1  # loaders that are read in turns have one epoch together
        STATE.steps_of_epochs = STATE.steps
    fields = _dataset(epoch.dataset, epoch)
    if fields["base"] not in _read and not epoch.is_iterable:
        _read[fields["base"]] = STATE.datasets.objects[fields["base"]]
    path = Path(PLAN["folder"]) / f"indices-{os.getpid()}-{epoch.number}"
    path.write_bytes(epoch.drawn.tobytes())
    record(
        "epoch",
        epoch=epoch.number,
        loader=epoch.loader,
        place=epoch.place,
        indices=path.name,
        sizes=[len(epoch.sizes), max(epoch.sizes, default=0)],
        fingerprints=epoch.fingerprints,
        orders=epoch.orders,
        batches=epoch.batches,
        cut=epoch.is_cut,
        whole=epoch.is_whole,
        left=epoch.is_left,
        has_all=epoch.has_all,
        steps=epoch.steps(),
        steps_before=epoch.steps_before,
        backwards=epoch.backwards(),
        forwards=list(epoch.forwards.values()),
        iterable=epoch.is_iterable,
        not_limited=lengths.why_not_limited(epoch),
        **fields,
    )


def finish():
    """Record the epochs that are under way, with their orders to the end."""
    for epoch in list(STATE.active):
        cut(epoch)
    if PLAN["run"] == "two":
        for number, dataset in sorted(_read.items()):
            _probe(number, dataset)
        _read.clear()


def _probe(number, dataset):
    """Record what a dataset has at some indices, with the same random numbers for each: ranks that
    read one dataset have the same, whatever they have drawn before.

    At the end, since reading may open files, which loader processes would then share.
    """
    STATE.fetching = STATE.calibrating = True
    end = time.monotonic() + PROBE_SECONDS
    rows = []
    try:
        count = len(dataset)
        indices = range(0, count, 1 + count // PROBES)
        twice = [_leaves(_sample(dataset, indices[0])) for _ in range(2)]
        for index in indices:
            rows.append([index, _leaves(_sample(dataset, index))])
            if time.monotonic() > end:
                break
        record("probe", dataset=number, repeats=twice[0] == twice[1], length=count, rows=rows)
    except Exception:  # it cannot be read any more
        return
    finally:
        STATE.fetching = STATE.calibrating = False


def _sample(dataset, index):
    import torch

    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    return dataset[index]


def _leaves(sample):
    """A checksum of each tensor, array, image, number or text of a sample."""
    import torch

    found = []
    for leaf in torch.utils._pytree.tree_leaves(sample):
        if isinstance(leaf, torch.Tensor):
            found.append(checksum(leaf, zlib.crc32(repr(tuple(leaf.shape)).encode())))
        elif hasattr(leaf, "tobytes"):
            found.append(zlib.crc32(leaf.tobytes()))
        elif isinstance(leaf, int | float | str | bytes | bool):
            found.append(zlib.crc32(repr(leaf).encode()))
    return found


def _finish_at_exit():
    import torch

    def end():
        if torch.utils.data.get_worker_info() is None:  # no process of a loader
            finish()

    util.Finalize(None, end, exitpriority=100)  # also at the end of a spawned process


def _dataset(dataset, epoch):
    """The dataset, the one that it is a subset of, and, for a subset, the indices in that one."""
    import torch

    subset = None
    base = dataset
    while isinstance(base, torch.utils.data.Subset):
        indices = [int(i) for i in base.indices]
        subset = indices if subset is None else [indices[i] for i in subset]
        base = base.dataset
    fields = {
        "dataset": STATE.datasets(dataset),
        "base": STATE.datasets(base),
        "dataset_len": len(dataset) if hasattr(dataset, "__len__") else None,
    }
    if subset:
        valid = [index for index in epoch.drawn if 0 <= index < len(subset)]
        path = Path(PLAN["folder"]) / f"base-{os.getpid()}-{epoch.number}"
        path.write_bytes(array("q", [subset[index] for index in valid]).tobytes())
        fields["base_indices"] = path.name
    return fields


_reseeds = 0
_forks = []  # while samples are read: of the states from which numbers were drawn, and restored


def _observe_seed(original):
    def seed(*args, **kwargs):
        global _reseeds
        _reseeds += 1
        return original(*args, **kwargs)

    return seed


def _observe_fork(original):
    @contextlib.contextmanager
    def fork_rng(*args, **kwargs):
        import torch

        with original(*args, **kwargs):
            before, seed = torch.random.get_rng_state(), torch.initial_seed()
            yield
            drew = not torch.equal(before, torch.random.get_rng_state())
            if STATE.fetching and drew and torch.initial_seed() == seed:
                _forks.append(checksum(before))

    return fork_rng


OWN = "a generator of its own"


def _own_states(dataset):
    """A checksum of the state of each generator that a dataset, or a part of it, holds."""
    import torch

    states, seen, pending = {}, set(), [(OWN, dataset)]
    while pending and len(seen) < 200:
        name, part = pending.pop(0)
        if id(part) in seen or isinstance(part, type | torch.nn.Module | torch.Tensor):
            continue
        seen.add(id(part))
        state = _state_of(part)
        if state is not None:
            states[name] = zlib.crc32(repr(state).encode())
        elif isinstance(part, list | tuple):
            pending += [(f"{name}[{i}]", x) for i, x in enumerate(part[:20])]
        elif hasattr(part, "__dict__"):
            pending += [(f"{name}.{key}", x) for key, x in list(vars(part).items())[:50]]
    return states


def _state_of(thing):
    import torch

    if isinstance(thing, torch.Generator):
        return thing.get_state().tolist()
    if isinstance(thing, random.Random):
        return thing.getstate()
    kinds = getattr(sys.modules.get("numpy"), "random", None)
    if kinds and isinstance(thing, kinds.RandomState):
        return [part.tolist() if hasattr(part, "tolist") else part for part in thing.get_state()]
    if kinds and isinstance(thing, kinds.Generator):
        return thing.bit_generator.state
    return None


@guarded
def random_states(dataset=None):
    """A checksum of the state of each generator that augmentations draw from."""
    import torch

    states = {
        "torch": checksum(torch.random.get_rng_state()),
        "random": zlib.crc32(repr(random.getstate()).encode()),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state()
        states["numpy"] = zlib.crc32(state[1].tobytes() + str(state[2:]).encode())
    return states | _own_states(dataset)


_fetches = {}


def _observe_fetch(original):
    def fetch(self, indices):
        import torch

        worker = torch.utils.data.get_worker_info()
        known = worker is None or id(self.dataset) in STATE.datasets.numbers  # not if spawned
        dataset = STATE.datasets(self.dataset) if known else None
        key = (dataset, STATE.training_epochs)
        _fetches[key] = _fetches.get(key, 0) + 1
        is_recorded = _fetches[key] <= 2  # the first two of each epoch show it
        before = random_states(self.dataset) if is_recorded else None
        reseeds = _reseeds
        STATE.fetching = True
        _forks.clear()
        try:
            return original(self, indices)
        finally:
            STATE.fetching = False
            if is_recorded:
                _record_fetch(self.dataset, dataset, worker, before, reseeds)

    return fetch


@guarded
def _record_fetch(source, dataset, worker, before, reseeds):
    after = random_states(source)
    record(
        "fetch",
        dataset=dataset,
        worker=worker and worker.id,
        before=before,
        drew=[name for name in before if before[name] != after.get(name)],
        reseeded=_reseeds > reseeds,
        forks=list(_forks),
    )
