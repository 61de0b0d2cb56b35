"""A task whose samples come from a stream, which data_dir names."""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

from sources.streams import Streamed
from tasks.images import Settings  # noqa: F401, as all tests pass some of these
from utils.data import describe_datasets

BEST = ("loss", min)


class Numbers(IterableDataset):
    """Rows of four numbers, mixed by a buffer, in an order that differs from epoch to epoch."""

    def __init__(self, rows, stop=None):
        self.rows, self.stop = rows, stop

    def __iter__(self):
        buffer = []
        for number in range(self.rows):
            buffer.append(number)
            if len(buffer) == 10:
                yield self.row(buffer.pop(random.randrange(10)))
        while buffer:
            yield self.row(buffer.pop(random.randrange(len(buffer))))

    def row(self, number):
        return torch.sin(torch.arange(4) + 4.0 * number).tolist()


class DividedAmongRanks(Numbers):
    def __iter__(self):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        return (row for number, row in enumerate(super().__iter__()) if number % ranks == rank)


class DividedAmongWorkers(Numbers):
    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        return (row for number, row in enumerate(super().__iter__()) if number % workers == worker)


class HuggingFace:
    """A datasets.IterableDataset of three files' worth of rows, which mixes them itself."""

    def __new__(cls, rows):
        import datasets

        rows = [{"row": row} for row in Numbers(rows)]
        stream = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=3)
        return stream.shuffle(seed=7, buffer_size=10)


def to_pair(sample):
    inputs = torch.tensor(sample["row"] if isinstance(sample, dict) else sample)
    return inputs + torch.rand(4) / 10, inputs.sum(0, keepdim=True)


def build_datasets(cfg):
    train = Streamed(globals()[cfg.data_dir](63), 63, to_pair)
    return train, Streamed(Numbers(11), 11, to_pair)


def build_model(cfg, train_set):
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss(outputs, targets):
    return (outputs - targets).square().sum()


def count(targets):
    return len(targets)


def measure(outputs, targets):
    return {}


def summarize(sums):
    return {"loss": sums["loss"] / sums["count"]}


def describe(train_set, val_set):
    return describe_datasets(train_set, val_set) | train_set.describe("train")
