"""One task twice, small and in float64: for one_file/*.py, and as a task of the ladder."""

import torch
from torch import nn
from torch.utils.data import Dataset
from torchvision.transforms import v2

from one_file.train_ddp import Images
from tasks.images import BEST, count, loss, measure, summarize  # noqa: F401
from utils.config import Config as Settings  # noqa: F401
from utils.data import BatchDataset
from utils.data import describe_datasets as describe  # noqa: F401

TRAIN, VAL = (
    90,
    31,
)  # images; 7 global batches of 12, and a validation set that two ranks cannot share


class Noise(Dataset):
    """Images of random pixels, some of which tell the label: float64 (3, 8, 8), int."""

    def __init__(self, samples, seed):
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.rand(samples, 3, 8, 8, dtype=torch.float64, generator=generator)
        self.labels = [(3 * index + seed) % 10 for index in range(samples)]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        label = self.labels[index]
        return self.images[index] + label / 10, label


class Batches(BatchDataset):
    """Images of one_file in batches of the ladder, which says epoch and seed."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def get_batch(self, indices, epoch, seed):
        """(images, labels)."""
        samples = [self.images[epoch, index] for index in indices.tolist()]
        images, labels = zip(*samples, strict=True)
        return torch.stack(images), torch.tensor(labels)


def images_of(seed):
    """The training set and the validation set of one_file."""
    transform = v2.Compose([v2.RandomCrop(8, padding=2), v2.RandomHorizontalFlip()])
    return Images(Noise(TRAIN, 0), transform, seed), Images(Noise(VAL, 1), nn.Identity(), seed)


def small_model():
    """A classifier of these images, with dropout of nothing and no BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
    ).double()


def build_datasets(cfg):
    """As the ladder wants it."""
    return tuple(Batches(images) for images in images_of(cfg.seed))


def build_model(cfg, train_set):
    """As the ladder wants it."""
    return small_model()
