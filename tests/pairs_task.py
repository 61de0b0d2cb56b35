"""A task for docs/recipes/contrastive-loss.md: pairs of vectors that belong together."""

import torch
from tasks.contrastive import BEST, count, loss, measure, summarize  # noqa: F401, of the page
from torch import nn
from torch.nn.functional import normalize
from torch.utils.data import Dataset, default_collate

from tasks.images import Settings  # noqa: F401, as all tests pass some of these
from utils.data import describe_datasets as describe  # noqa: F401


class Pairs(Dataset):
    """((image (8,), text (6,)), number), made from the same four random numbers."""

    def __init__(self, pairs, seed):
        generator = torch.Generator().manual_seed(seed)
        causes = torch.randn(pairs, 4, dtype=torch.float64, generator=generator)
        self.images, self.texts = causes.repeat(1, 2), (causes[:, :3] ** 3).repeat(1, 2)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return (self.images[index], self.texts[index]), index


class Groups(Dataset):
    """Each sample is a group of pairs: a fixed set of candidates, on any number of ranks."""

    def __init__(self, pairs, size):
        self.pairs, self.size = pairs, size

    def __len__(self):
        return len(self.pairs) // self.size  # pairs that do not fill a group are left out

    def __getitem__(self, index):
        first = index * self.size
        return default_collate([self.pairs[i] for i in range(first, first + self.size)])


class TwoTowers(nn.Module):
    """(images (..., 8), texts (..., 6)) -> their embeddings, each (..., 5)."""

    def __init__(self):
        super().__init__()
        self.image_tower, self.text_tower = nn.Linear(8, 5), nn.Linear(6, 5)
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, pairs):
        images, texts = pairs
        images = normalize(self.image_tower(images), dim=-1)
        texts = normalize(self.text_tower(texts), dim=-1)
        return images * self.log_scale.exp(), texts


def build_datasets(cfg):
    return Pairs(60, 0), Groups(Pairs(31, 1), 6)


def build_model(cfg, train_set):
    return TwoTowers()
