"""A task whose samples come from a stream, which data_dir names."""

import os
import random

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from sources.streams import Streamed
from tasks.images import Settings  # noqa: F401, as all tests pass some of these
from tests.shards_task import BEST, build_model, count, loss, measure, summarize  # noqa: F401
from utils.data import describe_datasets


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


class Raising(Numbers):
    def row(self, number):
        if number == 40 and os.environ["RANK"] == "1":
            raise ValueError("row 40 is broken")
        return super().row(number)


class HuggingFace:
    """A datasets.IterableDataset of three files' worth of rows, which mixes them itself."""

    def __new__(cls, rows):
        import datasets

        rows = [{"row": row} for row in Numbers(rows)]
        stream = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=3)
        return stream.shuffle(seed=7, buffer_size=10)


class DividedHuggingFace:
    """The same, divided as its documentation says."""

    def __new__(cls, rows):
        from datasets.distributed import split_dataset_by_node

        return split_dataset_by_node(HuggingFace(rows), dist.get_rank(), dist.get_world_size())


def to_pair(sample):
    inputs = torch.tensor(sample["row"] if isinstance(sample, dict) else sample)
    return inputs + torch.rand(4) / 10, inputs.sum(0, keepdim=True)


def build_datasets(cfg):
    name, _, kind = cfg.data_dir.partition("-")
    train_length = 80 if kind == "short" else 63
    train = Streamed(globals()[name](63), train_length, to_pair, endless=kind == "endless")
    return train, Streamed(Numbers(11), 11, to_pair)


def describe(train_set, val_set):
    return describe_datasets(train_set, val_set) | train_set.describe("train")
