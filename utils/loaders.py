"""Loaders: one interface, `for images, labels in loader`, two ways to fill it.

WorkersLoader reads in worker processes; DeviceLoader keeps the whole set on the training device.
Both give the same batches, bit for bit, whatever the number of ranks and workers: the sampler
decides the order, augment.py the crops. Images come normalised, float, channels_last, on `device`.
A loader is part of a checkpoint: the run that loads it goes on with the very next global batch.
"""

import os
import signal

import torch
from torch.utils.data import DataLoader, Sampler
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from utils.augment import crop_flip, resized_crop_boxes
from utils.distributed import (
    UserError,
    all_gather_object,
    available_cores,
    die_with_parent,
    get_local_world_size,
    get_world_size,
    is_main_process,
    main_process_first,
)
from utils.images import cache_folder
from utils.runtime import seed_step
from utils.threads import cores_of_rank


class EpochSampler(Sampler):
    """RandomSampler whose order depends on (seed, epoch) alone, as DistributedSampler's does.

    The same permutation, so that one process and many see the same global batches.
    """

    def __init__(self, dataset, seed):
        self.dataset, self.seed, self.epoch = dataset, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.dataset)

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(torch.randperm(len(self.dataset), generator=generator).tolist())


def build_loader(dataset, sampler, cfg, device, train=False):
    """The loader that the config asks for, with this rank's share of the global batch.

    train: augment, and drop the samples that do not fill a global batch.
    Raises UserError where the global batch cannot be shared out or the set cannot fill one.
    """
    ranks, batch = get_world_size(), cfg.global_batch(get_world_size())
    if batch % ranks:
        near = ", ".join(str(b) for b in (batch // ranks * ranks, -(-batch // ranks) * ranks) if b)
        raise UserError(
            f"global_batch_size {batch} cannot be shared by {ranks} processes: "
            f"pass --global-batch-size {near.replace(', ', ' or ')}"
        )
    if train and len(dataset) < batch:
        raise UserError(
            f"the training set has {len(dataset)} samples, fewer than one global batch of "
            f"{batch}: pass a smaller --global-batch-size"
        )
    if train and cfg.micro_batches > batch // ranks:
        raise UserError(
            f"the {batch // ranks} samples that a process has in a step do not make "
            f"{cfg.micro_batches} micro-batches: pass a smaller --micro-batches"
        )
    kind = DeviceLoader if _resident(dataset, cfg, device) else WorkersLoader
    return kind(dataset, sampler, cfg, device, batch // ranks, train)


def _resident(dataset, cfg, device):
    """Whether the set shall lie on the device; the same answer on every rank."""
    if cfg.loader != "auto":
        return cfg.loader == "device"
    folder = cache_folder(cfg)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    fits = dataset.nbytes() < _free_memory(device) / 4
    writable = cfg.dataset != "imagefolder" or os.access(existing, os.W_OK)
    return all(all_gather_object(fits and writable and cfg.augment != "resized_crop"))


def _free_memory(device):
    """Bytes that this process may hope for."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    pages = os.sysconf("SC_PHYS_PAGES")  # all of them: what is free counts no cached files
    return pages * os.sysconf("SC_PAGE_SIZE") / 2 / get_local_world_size()


class _Loader:
    """What both have in common: where the epoch stands, and the last step to the model's input.

    step: batches given out in this epoch; start: where the next iteration starts, after a restart;
    seen: indices of the samples given out (int64 tensors), kept with cfg.audit, else None.
    """

    def __init__(self, dataset, sampler, cfg, device, batch_size, train, workers=0):
        self.dataset, self.sampler, self.device = dataset, sampler, device
        self.num_threads = cfg.num_threads
        if device.type == "cpu":  # leave the workers their cores
            torch.set_num_threads(cfg.num_threads or max(1, cores_of_rank() - workers))
        self.batch_size, self.train, self.seed = batch_size, train, cfg.seed
        self.crop_flip = train and cfg.augment == "crop_flip"
        self.resized_crop = train and cfg.augment == "resized_crop"
        dtype = getattr(torch, cfg.dtype)
        std = torch.tensor(dataset.std, dtype=dtype).repeat(dataset.size)  # of a row's pixels
        mean = torch.tensor(dataset.mean, dtype=dtype).repeat(dataset.size)
        self.scale, self.shift = (1 / (255 * std)).to(device), (-mean / std).to(device)
        self.step = self.start = 0
        self.audit, self.seen = train and cfg.audit, None

    def __iter__(self):
        self.step, self.start = self.start, 0
        if self.audit and self.step == 0:
            self.seen = []
        for images, labels, indices in self._batches(self.step):
            if self.train:
                seed_step(self.seed, _epoch(self.sampler), self.step)
            if self.seen is not None:
                self.seen.append(indices)
            self.step += 1
            yield self._normalize(images), labels
        self.step = 0

    def state_dict(self):
        """Where the epoch stands, in global batches and samples; all ranks call it together."""
        batch = self.batch_size * get_world_size()
        state = {"step": self.step, "global_batch": batch, "samples": self.step * batch}
        if self.device.type == "cpu":
            state |= {"ranks": get_world_size(), "threads": torch.get_num_threads()}
        if self.step and self.seen is not None:
            ranks = all_gather_object([indices.cpu() for indices in self.seen])
            state["seen"] = torch.cat([indices for rank in ranks for indices in rank])
        return state

    def load_state_dict(self, state):
        """Go on with the next global batch, whatever the number of ranks was. UserError where the
        rest of the epoch cannot be cut into batches of the size it was begun with.

        As many ranks on the CPU go on with as many threads: with others float32 sums round
        otherwise. (Unless cfg.num_threads says how many, or there are not so many cores.)
        """
        batch = self.batch_size * get_world_size()
        if state["step"] and state["global_batch"] != batch:
            raise UserError(
                f"the run stopped after {state['step']} global batches of {state['global_batch']} "
                f"samples, in the middle of an epoch, and a global batch is {batch} here: finish "
                f"that epoch with as many processes as before"
            )
        if self.device.type == "cpu" and state.get("ranks") == get_world_size():
            cores = available_cores() // get_local_world_size()
            if not self.num_threads and state["threads"] <= cores:
                torch.set_num_threads(state["threads"])
        self.start, self.seen = state["step"], None
        if self.audit and "seen" in state:
            self.seen = [state["seen"]] if is_main_process() else []

    def __len__(self):
        """Batches an epoch, on this rank and on every other."""
        samples, batch = len(self.sampler), self.batch_size
        return samples // batch if self.train else -(-samples // batch)

    def _normalize(self, images):
        """uint8 (n, 3, h, w) -> (pixel / 255 - mean) / std, whole rows at a time.

        In two roundings on every device: a GPU would multiply and add in one.
        """
        images = images.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)
        rows = images.flatten(2).to(self.scale.dtype).mul_(self.scale).add_(self.shift)
        return rows.view(images.shape).permute(0, 3, 1, 2)


class DeviceLoader(_Loader):
    """The whole set as uint8 on the training device; whole batches are cut and mirrored there."""

    name = "device"

    def __init__(self, dataset, sampler, cfg, device, batch_size, train):
        super().__init__(dataset, sampler, cfg, device, batch_size, train)
        with main_process_first():  # one process a node decodes a folder, the others map its file
            images = dataset.resident(cache_folder(cfg))
        # index_select copies whole images where they lie one after another in memory.
        self.images, self.labels = images.permute(0, 2, 3, 1).to(device), dataset.labels.to(device)

    def _batches(self, start):
        order = torch.tensor(list(self.sampler), device=self.device)
        for indices in order.split(self.batch_size)[start : len(self)]:
            images = self.images.index_select(0, indices).permute(0, 3, 1, 2)
            if self.crop_flip:
                images = crop_flip(images, indices, self.seed, _epoch(self.sampler))
            yield images, self.labels[indices], indices


class WorkersLoader(_Loader):
    """A DataLoader: worker processes read, decode and augment; pixels stay uint8 until the device.

    That is a quarter of the bytes of float32 on the way there.
    """

    name = "workers"

    def __init__(self, dataset, sampler, cfg, device, batch_size, train):
        workers = cfg.num_workers
        if workers < 0 and device.type == "cuda":
            workers = min(8, max(0, available_cores() // get_local_world_size() - 1))
        elif workers < 0:
            workers = cores_of_rank() // 2
        super().__init__(dataset, sampler, cfg, device, batch_size, train, workers)
        self.reader = DataLoader(
            _Reader(dataset, self.seed, self.crop_flip, self.resized_crop),
            sampler=_Batches(sampler, batch_size, len(self)),
            batch_size=None,  # a sample of this DataLoader is a whole batch
            num_workers=workers,
            pin_memory=device.type == "cuda",
            persistent_workers=workers > 0,
            worker_init_fn=_follow_the_rank,
            generator=torch.Generator(),  # leaves the global random numbers alone
        )

    def _batches(self, start):
        self.reader.sampler.start = start
        for batch in self.reader:
            if isinstance(batch, UserError):
                raise batch
            images, labels, indices = batch
            yield (
                images.to(self.device, non_blocking=True),
                labels.to(self.device, non_blocking=True),
                indices,
            )


def _epoch(sampler):
    return getattr(sampler, "epoch", 0)  # as set by set_epoch(); evaluation has none


class _Batches:
    """(epoch, indices) batch by batch. The epoch travels with the indices, because persistent
    workers keep the copy of the data set that they were started with."""

    def __init__(self, sampler, batch_size, count):
        self.sampler, self.batch_size, self.count = sampler, batch_size, count
        self.start = 0

    def __len__(self):
        return self.count

    def __iter__(self):
        indices = torch.tensor(list(self.sampler))
        for batch in indices.split(self.batch_size)[self.start : self.count]:
            yield _epoch(self.sampler), batch


class _Reader:
    """Makes a batch in a worker: uint8 images (n, 3, size, size), int64 labels and indices (n,)."""

    def __init__(self, dataset, seed, crop_flip, resized_crop):
        self.dataset, self.seed = dataset, seed
        self.crop_flip, self.resized_crop = crop_flip, resized_crop

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, batch):
        epoch, indices = batch
        try:
            return self._images(indices, epoch), self.dataset.labels[indices], indices
        except UserError as error:
            return error  # raised, it would arrive with the worker's traceback in its message

    def _images(self, indices, epoch):
        if self.resized_crop:
            images = self._resized_crops(indices, epoch)
        else:
            images = self.dataset.stack(indices)
        if self.crop_flip:
            images = crop_flip(images, indices, self.seed, epoch)
        return images.contiguous(memory_format=torch.channels_last)  # here, not in the rank

    def _resized_crops(self, indices, epoch):
        stored = [self.dataset.load(int(index)) for index in indices]
        boxes = resized_crop_boxes([i.shape[1:] for i in stored], indices, self.seed, epoch)
        size, images = [self.dataset.size] * 2, []
        interpolation = self.dataset.interpolation
        for image, (*box, mirror) in zip(stored, boxes, strict=True):
            image = F.resized_crop(image, *box, size, InterpolationMode(interpolation))
            images.append(F.horizontal_flip(image) if mirror else image)
        return torch.stack(images)


def _follow_the_rank(worker):
    """Ctrl-C reaches the whole process group, but is for the rank to answer; a rank that is
    killed takes its workers along."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
