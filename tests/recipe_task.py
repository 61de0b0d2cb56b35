"""A task of one's own for the pages of docs/recipes: sequences, classified by their mean.

A copy has it as my_task.py.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import Dataset

from utils.config import Config, setting
from utils.data import describe_datasets as describe  # noqa: F401

BEST = ("accuracy", max)


@dataclass(frozen=True)
class Settings(Config):
    """Settings of my_task.py."""

    context: int = setting(8, "length of every batch", low=1)
    padding: str = setting("context", "of shorter sequences")


class Documents(Dataset):
    """(a sequence, its class). pieces: of length 1 to context."""

    def __init__(self, pieces, context, padding):
        self.pieces, self.context = pieces, context
        self.labels = torch.tensor([int(piece.mean() > 0) for piece in pieces])

    def __len__(self):
        return len(self.pieces)

    def __getitem__(self, index):
        piece = self.pieces[index]
        return pad(piece, (0, self.context - len(piece))), self.labels[index]


def build_datasets(cfg):
    torch.manual_seed(0)
    pieces = [torch.randn(1 + number % cfg.context) for number in range(48)]
    return tuple(Documents(part, cfg.context, cfg.padding) for part in (pieces[:32], pieces[32:]))


def build_model(cfg, train_set):
    return nn.Sequential(nn.Linear(cfg.context, 8), nn.ReLU(), nn.Linear(8, 2))


def blocks(model):
    return [model[0]]


def loss(outputs, targets):
    return cross_entropy(outputs, targets, reduction="sum")


def count(targets):
    return len(targets)


def measure(outputs, targets):
    return {"correct": (outputs.argmax(1) == targets).sum()}


def summarize(sums):
    return {name: sums[key] / sums["count"] for name, key in NAMES.items()}


NAMES = {"loss": "loss", "accuracy": "correct"}
