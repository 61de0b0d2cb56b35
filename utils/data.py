"""Datasets by name, and loaders for any map-style Dataset of (image, label).

What a global batch holds depends only on (seed, epoch, sample index), not on the number of ranks or
workers: the sampler decides the order, and random transforms are seeded for each sample. A loader
is part of the checkpoint: a resumed run continues with the next global batch.

A dataset is faster if it also has `get_batch(indices, epoch)`: int64 (n,) -> uint8 images
(n, 3, height, width) and int64 labels (n,), augmented as a function of (seed, epoch, index). uint8
images are normalized on the device, with the dataset's `mean` and `std` (per channel, in [0, 1]).
"""

import random
import signal
import zlib
from importlib.util import find_spec

import numpy
import torch
from torch.utils.data import DataLoader, default_collate
from torchvision.datasets import FakeData
from torchvision.transforms import ToTensor

from utils.distributed import cores_per_rank, dp_rank, dp_world_size, main_process_first
from utils.errors import UserError, option


def build_datasets(cfg):
    """The training set, the validation set and the class names, as the config selects them."""
    if cfg.dataset == "fake":
        return _fake(cfg)
    with option(f"--dataset {cfg.dataset} (--dataset fake needs no file)"):
        if cfg.dataset == "imagefolder":
            from utils.image_folder import build
        else:
            from utils.array_data import build
    with main_process_first():  # one download per node
        return build(cfg)


def _fake(cfg):
    """Random images and labels, to try out a script."""
    train, val = (
        FakeData(n, (3, cfg.image_size, cfg.image_size), 10, ToTensor(), random_offset=cfg.seed + n)
        for n in (cfg.synthetic_samples, max(1, cfg.synthetic_samples // 4))
    )
    return train, val, list("0123456789")


def describe_data(train_set, val_set, classes):
    """What a checkpoint stores about the data: preprocessing, and enough to notice other data."""
    facts = {"classes": list(classes)}
    for name, dataset in (("train", train_set), ("val", val_set)):
        labels = getattr(dataset, "labels", getattr(dataset, "targets", ()))
        facts[f"{name}_samples"] = len(dataset)
        facts[f"{name}_labels"] = zlib.crc32(numpy.asarray(labels).astype(str).tobytes())
    return facts | getattr(train_set, "preprocessing", {}) | getattr(val_set, "split", {})


def build_loader(dataset, sampler, batch_size, device, cfg, train=False):
    """A Loader for any map-style dataset of (image, label).

    batch_size: this rank's share of the global batch. train: drop the samples that do not fill a
    global batch, and seed dropout for each step.
    Raises UserError if the global batch cannot be divided evenly or filled.
    """
    batch = cfg.global_batch_size
    if batch != batch_size * dp_world_size():
        raise UserError(
            f"global_batch_size {batch} cannot be divided evenly among {dp_world_size()} replicas: "
            f"pass --global-batch-size {-(-batch // dp_world_size()) * dp_world_size()}"
        )
    if len(dataset) < (batch if train else 1):
        raise UserError(
            f"{len(dataset)} {'training' if train else 'validation'} samples do not fill one "
            f"global batch of {batch}: pass a smaller --global-batch-size, or add samples"
        )
    kind = Loader
    if train and cfg.audit:
        with option("--audit"):
            from utils.audit import AuditedLoader as kind
    return kind(dataset, sampler, batch_size, device, cfg, train)


class Loader:
    """Iterates over (images, labels) on the device: float images, channels_last if 4-D.

    step: batches yielded in this epoch; start: where the next iteration begins, after a resume;
    epoch: of the current iteration; indices: the samples of the last batch, int64 (n,).
    """

    def __init__(self, dataset, sampler, batch_size, device, cfg, train):
        self.dataset, self.sampler, self.batch_size = dataset, sampler, batch_size
        self.device, self.train, self.seed, self.dtype = device, train, cfg.seed, cfg.torch_dtype
        self.global_batch = cfg.global_batch_size
        self.step = self.start = 0
        std = torch.tensor(getattr(dataset, "std", (1.0,)), dtype=self.dtype)[:, None, None]
        mean = torch.tensor(getattr(dataset, "mean", (0.0,)), dtype=self.dtype)[:, None, None]
        self.scale, self.shift = (1 / (255 * std)).to(device), (-mean / std).to(device)
        resident = _resident(dataset, device, cfg)
        self.name = "device" if resident else "workers"
        workers = min(32, cores_per_rank() - 1) if device.type == "cuda" else 0  # a CPU is busy
        workers = 0 if resident else workers if cfg.num_workers < 0 else cfg.num_workers
        self.reader = DataLoader(
            _Batches(resident or dataset, cfg.seed),
            batch_size=None,  # the sampler yields whole batches
            sampler=_BatchSampler(sampler, batch_size, len(self), device if resident else "cpu"),
            num_workers=workers,
            pin_memory=device.type == "cuda" and not resident,
            persistent_workers=workers > 0,
            worker_init_fn=_init_worker,
            generator=torch.Generator(),  # leaves the global random state alone
        )

    def __len__(self):
        """Batches per epoch, the same on every rank."""
        samples, batch = len(self.sampler), self.batch_size
        return samples // batch if self.train else -(-samples // batch)

    def __iter__(self):
        self.step, self.start = self.start, 0
        self.epoch = getattr(self.sampler, "epoch", 0)  # as set by set_epoch()
        self.reader.sampler.start = self.step
        for batch in self.reader:
            if isinstance(batch, UserError):
                raise batch
            images, labels, self.indices = batch
            if self.train:
                seed_step(self.seed, self.epoch, self.step)
            self.step += 1
            if not labels.is_floating_point():
                labels = labels.long()
            yield self._normalize(images), labels.to(self.device, non_blocking=True)
        self.step = 0

    def _normalize(self, images):
        images = images.to(self.device, non_blocking=True)
        is_4d = images.dim() == 4
        pixels = images.dtype == torch.uint8 and is_4d
        if pixels or images.is_floating_point():  # others, such as the indices of words, stay
            layout = torch.channels_last if is_4d else torch.contiguous_format
            images = images.to(self.dtype, memory_format=layout)
        return images.mul_(self.scale).add_(self.shift) if pixels else images

    def state_dict(self):
        """How far the epoch is, in global batches; all ranks call it together."""
        return {"step": self.step, "global_batch": self.global_batch}

    def load_state_dict(self, state):
        """Continue with the next global batch, on any number of ranks. Raises UserError if the
        global batch size has changed within the epoch."""
        if state["step"] and state["global_batch"] != self.global_batch:
            raise UserError(
                f"the run stopped within an epoch, after {state['step']} global batches of "
                f"{state['global_batch']}: finish that epoch with the same batch size, not "
                f"{self.global_batch}"
            )
        self.start = state["step"]


def _resident(dataset, device, cfg):
    """The dataset as an ArrayDataset on the device, or None if workers are to read it."""
    if cfg.loader == "workers" or (cfg.loader == "auto" and not find_spec("utils.resident")):
        return None
    with option("--loader device"):
        from utils.resident import make_resident
    return make_resident(dataset, device, cfg)


def seed_step(seed, epoch, step):
    """Seed the random numbers in the model (dropout): different on each rank and in each step, but
    the same in a run that resumes within an epoch."""
    seed = hash((seed, epoch, step, dp_rank()))  # of integers: the same in every process
    torch.default_generator.manual_seed(seed)  # torch.manual_seed checks for CUDA: 50 times slower
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


class _BatchSampler:
    """(epoch, indices) for each batch of this rank. The epoch travels with the indices, because
    persistent workers keep the copy of the dataset that they started with. All batches have the
    same size: in evaluation, the last one repeats samples, which evaluate() does not count."""

    def __init__(self, sampler, batch_size, count, device):
        self.sampler, self.batch_size, self.device = sampler, batch_size, device
        self.start, self.count = 0, count

    def __iter__(self):
        epoch, indices = getattr(self.sampler, "epoch", 0), numpy.fromiter(self.sampler, int)
        padding = indices[: -len(indices) % self.batch_size]  # or a short batch would recompile
        indices = torch.from_numpy(numpy.append(indices, padding)).to(self.device)
        for batch in indices.split(self.batch_size)[self.start : self.count]:
            yield epoch, batch


class _Batches:
    """Makes whole batches, in a worker or in this process: (images, labels, indices)."""

    def __init__(self, dataset, seed):
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, batch):
        epoch, indices = batch
        try:
            make = getattr(self.dataset, "get_batch", self._collate)
            return *make(indices, epoch), indices
        except UserError as error:  # if raised in a worker, it would include the worker's traceback
            return error

    def _collate(self, indices, epoch):
        state = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
        samples = []
        for index in indices.tolist():
            seed = hash((self.seed, epoch, index))  # of integers: the same in every process
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            numpy.random.seed(seed % 2**32)
            image, label = self.dataset[index]  # fails here if a sample is anything else
            samples.append((image, label))
        torch.set_rng_state(state[0])
        random.setstate(state[1])
        numpy.random.set_state(state[2])
        return default_collate(samples)


def _init_worker(_):
    """Signals may reach every process of a job, but only the rank should handle them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if find_spec("utils.preemption"):
        from utils.preemption import shield_worker

        shield_worker()
