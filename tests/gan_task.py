"""A task for docs/recipes/gan.md: points on a circle, as images of two pixels."""

import torch
from tasks.gan import GAN, count, generator_loss, loss, measure, summarize  # noqa: F401, its page
from torch import nn
from torch.utils.data import Dataset

from tasks.images import Settings  # noqa: F401, as all tests pass some of these
from utils.data import describe_datasets as describe  # noqa: F401

BEST = ("distance", min)
norm = nn.LayerNorm  # tests put another one in its place


class WithNoise(Dataset):
    """Images with noise, which is a function of (seed, epoch, index)."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"image": self.images[index], "noise": torch.randn(16)}


def circle(points, seed):
    generator = torch.Generator().manual_seed(seed)
    angles = torch.randn(points, dtype=torch.float64, generator=generator)
    return torch.stack([angles.cos(), angles.sin()], 1)


def network(inputs, outputs):
    """Two hidden layers."""
    hidden = nn.Linear(inputs, 32), norm(32), nn.LeakyReLU(0.2)
    return nn.Sequential(*hidden, nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, outputs))


def build_datasets(cfg):
    return WithNoise(circle(60, 0)), WithNoise(circle(31, 1))


def build_model(cfg, train_set):
    return GAN(network(16, 2), network(2, 1))
