"""A task with a loss of two terms, as for detection: the class of each image, and the center of a
box, which few images have. Some global batches have no box at all."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from tasks.images import BEST, Settings  # noqa: F401
from utils.data import describe_datasets as describe  # noqa: F401

TRAIN, VAL = 125, 31  # samples
BOXES = 20  # every 20th image has one


class Scenes(Dataset):
    """(image (3, 6, 6), (class, row and column of the center, whether there is a box))."""

    def __init__(self, samples, seed):
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randn(samples, 3, 6, 6, generator=generator)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        target = [index % 10, index % 7 / 7, index % 5 / 5, index % BOXES == 0]
        return self.images[index], torch.tensor(target)


def build_datasets(cfg):
    return Scenes(TRAIN, 0), Scenes(VAL, 1)


def build_model(cfg, train_set):
    return nn.Sequential(nn.Flatten(), nn.Linear(108, 12), nn.Tanh(), nn.Linear(12, 12))


def loss(outputs, targets):
    classes = cross_entropy(outputs[:, :10], targets[:, 0].long(), reduction="sum")
    distances = (outputs[:, 10:] - targets[:, 1:3]).abs().sum(1)
    return torch.stack([classes, (distances * targets[:, 3]).sum()])


def count(targets):
    return torch.stack([torch.ones_like(targets[:, 3]).sum(), targets[:, 3].sum()])


def measure(outputs, targets):
    return {"correct": (outputs[:, :10].argmax(1) == targets[:, 0]).sum()}


def summarize(sums):
    classes, boxes = sums["loss"] / sums["count"]
    accuracy = sums["correct"] / sums["count"][0]
    return {"loss": classes + boxes, "boxes": boxes, "accuracy": accuracy}


def blocks(model):
    return list(model[1:])


def layers(model):
    return [(layer, [layer]) for layer in model]
