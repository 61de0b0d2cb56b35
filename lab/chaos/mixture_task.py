"""The text task with a mixture of shards, a stream and a mixture of these. For --task mixture."""

import random

from torch.utils.data import IterableDataset, Subset

import tasks.text as text
from sources.mixture import Mixture
from sources.streams import Streamed
from tasks.text import (  # noqa: F401
    BEST,
    Settings,
    blocks,
    build_model,
    count,
    layers,
    loss,
    measure,
    summarize,
    tensor_parallel_plan,
)

# The weights of the last entry are reached within the third epoch of five steps.
WEIGHTS = [
    (0, {"shards": 3, "stream": 2, "nested": 1}),
    (12, {"shards": 1, "stream": 2, "nested": 3}),
]


class InRandomOrder(IterableDataset):
    """The samples of a dataset, in an order that differs from pass to pass."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        indices = range(len(self.dataset))
        return map(self.dataset.__getitem__, random.sample(indices, len(indices)))


def build_datasets(cfg):
    train_set, val_set = text.build_datasets(cfg)
    parts = [Subset(train_set, range(first, len(train_set), 4)) for first in range(4)]
    stream = Streamed(InRandomOrder(parts[1]), len(parts[1]), collate_fn=train_set.collate_fn)
    nested = Mixture({"odd": parts[2], "even": parts[3]}, {"odd": 2, "even": 1}, cfg=cfg)
    sources = {"shards": parts[0], "stream": stream, "nested": nested}
    return Mixture(sources, WEIGHTS, cfg=cfg, samples=60), val_set


def describe(train_set, val_set):
    return train_set.describe() | val_set.pieces.describe("val")
