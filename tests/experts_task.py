"""A task whose model has two experts: each sample uses one of them, and few use the second."""

import torch
from torch import nn
from torch.utils.data import Dataset

from tasks.images import BEST, Settings, count, loss, measure, summarize  # noqa: F401
from utils.data import describe_datasets as describe  # noqa: F401


class Points(Dataset):
    """Random float64 (8,) in [0, 1), and one of ten labels."""

    def __init__(self, samples, seed):
        generator = torch.Generator().manual_seed(seed)
        self.points = torch.rand(samples, 8, dtype=torch.float64, generator=generator)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index], index % 10


def chosen(points):
    """Which expert each sample uses, as an int64 (samples,)."""
    return (points[:, 0] > 0.9).long()


class Experts(nn.Module):
    """(samples, 8) -> (samples, 10). An expert that no sample uses has no part in the graph."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 10) for _ in range(2))

    def forward(self, points):
        outputs, numbers = points.new_zeros(len(points), 10), chosen(points)
        for number, expert in enumerate(self.experts):
            if (numbers == number).any():
                outputs[numbers == number] = expert(points[numbers == number])
        return outputs


def build_datasets(cfg):
    return Points(60, 0), Points(30, 1)


def build_model(cfg, train_set):
    return Experts()


def blocks(model):
    return []
