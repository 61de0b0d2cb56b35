"""A task for docs/recipes/multimodal.md: sequences, a few of which come with an image."""

import torch
from torch import nn
from torch.utils.data import Dataset
from utils.optional_tower import OptionalTower  # of the page

from tasks.images import BEST, Settings, count, loss, measure, summarize  # noqa: F401
from utils.data import describe_datasets as describe  # noqa: F401


class Posts(Dataset):
    """((text (6,), image (3, 8, 8), whether there is one), label); every ninth has an image."""

    def __init__(self, samples, seed):
        generator = torch.Generator().manual_seed(seed)
        self.texts = torch.randint(20, (samples, 6), generator=generator)
        self.images = torch.randn(samples, 3, 8, 8, generator=generator)

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        has_image = torch.tensor(index % 9 == 0)
        return (self.texts[index], self.images[index] * has_image, has_image), index % 10


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.text_tower = nn.Sequential(nn.Embedding(20, 16), nn.Flatten(), nn.Linear(96, 16))
        first = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Tanh(), nn.Flatten())
        second = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 16))
        self.images = OptionalTower(nn.Sequential(first, second))
        self.head = nn.Linear(16, 10)

    def forward(self, posts):
        texts, images, present = posts
        return self.head(self.images(self.text_tower(texts), images, present).tanh())


def build_datasets(cfg):
    return Posts(60, 0), Posts(31, 1)


def build_model(cfg, train_set):
    return TwoTowers()


def blocks(model):
    return [model.text_tower, *model.images.tower]
