"""One task twice: for the scripts of one_file/, and as a task of the ladder.

It is small, in float64, and has random transforms. Each sample that a script of one_file/ reads is
written to the file that the environment variable READS names.
"""

import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset
from torchvision.transforms import v2

from tasks.images import BEST, Settings, count, loss, measure, summarize  # noqa: F401
from utils.data import BatchDataset
from utils.data import describe_datasets as describe  # noqa: F401

TRAIN, VAL = 125, 31  # samples
STOP = (1, 1, 3)  # the rank, epoch and step, from 0, in which a run with STOPS is signaled


class Noise(Dataset):
    """Images of random pixels, somewhat brighter for larger labels: float64 (3, 8, 8), int."""

    def __init__(self, samples, seed):
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.rand(samples, 3, 8, 8, dtype=torch.float64, generator=generator)
        self.labels = [(3 * index + seed) % 10 for index in range(samples)]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        label = self.labels[index]
        return self.images[index] + label / 10, label


class Recorded(Dataset):
    """A dataset of a script that writes each (part, epoch, index) that is read."""

    def __init__(self, dataset, part):
        self.dataset, self.part = dataset, part
        self.log = os.open(os.environ["READS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, key):
        epoch, index = key
        os.write(self.log, f"{self.part} {epoch} {index}\n".encode())
        return self.dataset[key]


class Batches(BatchDataset):
    """The images of a script in batches of the ladder, which says epoch and seed."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def get_batch(self, indices, epoch, seed):
        """(images, labels)."""
        samples = [self.images[epoch, index] for index in indices.tolist()]
        images, labels = zip(*samples, strict=True)
        return torch.stack(images), torch.tensor(labels)


def _images(wrap, seed):
    """The training set and the validation set. wrap: the class Images of a script."""
    transform = v2.Compose([v2.RandomCrop(8, padding=2), v2.RandomHorizontalFlip()])
    return wrap(Noise(TRAIN, 0), transform, seed), wrap(Noise(VAL, 1), nn.Identity(), seed)


def recorded_datasets(wrap, seed):
    """The training set and the validation set of a script. wrap: its class Images."""
    train, val = _images(wrap, seed)
    return Recorded(train, "train"), Recorded(val, "val")


def build_datasets(cfg):
    """See docs/own-task.md."""
    from one_file.train_ddp import Images  # which imports this module

    return tuple(Batches(images) for images in _images(Images, cfg.seed))


def small_model():
    """A classifier of these images. GroupNorm: the scripts do not synchronize BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
    ).double()


def build_model(cfg, train_set):
    """See docs/own-task.md."""
    return small_model()


def end_step(epoch, step):
    """Send one rank and its loader processes the signal that STOPS names, if it is in the
    environment. So does torchrun, which starts each rank as the leader of a process group."""
    if "STOPS" in os.environ and (dist.get_rank(), epoch, step) == STOP:
        assert os.getpgrp() == os.getpid()
        os.killpg(os.getpgrp(), signal.Signals[os.environ["STOPS"]])
