"""Small datasets, models and tasks whose batches have shapes of every kind.

Each dataset draws from the three global generators, so that a sample shows its seeds.
"""

import random
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import numpy
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import tasks.images
from utils.batches import map_tensors
from utils.data import BatchDataset, describe_datasets
from utils.metrics import mean_loss
from utils.seeds import derive_seed

COUNT = 40  # samples of each dataset
IGNORED = -100


def noise():
    """One number of each global generator, float32 (3,)."""
    return torch.tensor([random.random(), numpy.random.rand(), torch.rand(()).item()])


# Datasets


class Numbered(Dataset):
    """Base of datasets of COUNT samples."""

    def __len__(self):
        return COUNT


class Regression(Numbered):
    """Pairs of vectors and Python's floats."""

    def __getitem__(self, index):
        return noise() + index, index / 7


class Rows(Numbered):
    """Dicts, as of Hugging Face's datasets; the number of targets varies."""

    def __getitem__(self, index):
        draws, places = noise(), torch.arange(6)
        ids = (places * (index + 1) + int(99 * draws[0])) % 11
        labels = torch.where(places < 1 + index % 6, (ids + 1) % 11, IGNORED)
        return {"input_ids": ids, "labels": labels, "draws": draws, "text": f"row {index}"}


class Triples(Numbered):
    """Image, question and answer."""

    def __getitem__(self, index):
        image = noise().view(3, 1, 1).expand(3, 2, 2)
        return image, torch.tensor([index, 1]), index % 4


class Boxes(Numbered):
    """Images of varying size with 0 to 3 boxes, as for detection."""

    def __getitem__(self, index):
        image = noise().view(3, 1, 1).repeat(1, 2 + index % 3, 2)
        boxes = noise()[:1] + torch.arange(4.0 * (index % 4)).view(-1, 4)
        return image, {"boxes": boxes, "id": index}

    def collate_fn(self, samples):
        """Lists of images and of dicts."""
        images, targets = zip(*samples, strict=True)
        return list(images), list(targets)


class WholeBatches(BatchDataset):
    """Makes whole batches of uint8 pixels, which the model gets as pixels / 255."""

    def __init__(self):
        self.pixels = torch.arange(3 * COUNT, dtype=torch.uint8).view(COUNT, 3)

    def __len__(self):
        return COUNT

    def get_batch(self, indices, epoch, seed):
        seeds = [derive_seed(seed, epoch, index) for index in indices.tolist()]
        shifts = torch.tensor([[s % 97, s % 89, s % 83] for s in seeds], dtype=torch.uint8)
        return self.pixels[indices] + shifts, indices % 4

    def on_device(self, batch, dtype):
        pixels, labels = batch
        return pixels.to(dtype) / 255, labels


# Models and tasks


class Function(nn.Module):
    """A model of one weight matrix: function(weight, inputs) -> outputs of any kind."""

    def __init__(self, rows, columns, function):
        super().__init__()
        generator = torch.Generator().manual_seed(rows)
        self.weight = nn.Parameter(torch.randn(rows, columns, generator=generator) / 8)
        self.function = function

    def forward(self, inputs):
        return self.function(self.weight, inputs)


def make_task(loss, count=len, measure=lambda outputs, targets: {}):
    """A task with the mean loss, and the means of what it measures."""

    def summarize(sums):
        return {name: mean_loss(sums[name], sums["count"]) for name in sums if name != "count"}

    names = {"loss": loss, "count": count, "measure": measure, "summarize": summarize}
    return SimpleNamespace(**names, describe=describe_datasets, BEST=("loss", min))


def _token_logits(weight, batch):
    return {"logits": weight[batch["input_ids"]] + batch["draws"].sum(1)[:, None, None]}


def _token_loss(outputs, targets):
    logits, labels = outputs["logits"].flatten(0, 1), targets["labels"].flatten()
    return cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


def _answer(weight, triple):
    image, question, _ = triple
    return torch.cat([image.flatten(1), question], 1) @ weight


def _find_boxes(weight, images):
    return {"boxes": torch.stack([image.mean((1, 2)) @ weight for image in images])}


def _box_loss(outputs, targets):
    """Two terms: of the boxes, and of the images."""
    boxes = outputs["boxes"]
    distances = [(box - t["boxes"]).abs().sum() for box, t in zip(boxes, targets, strict=True)]
    return torch.stack([sum(distances), boxes.square().sum()])


def _box_counts(targets):
    return torch.tensor([sum(len(target["boxes"]) for target in targets), len(targets)])


CASES = {  # name: dataset, model, task
    "pairs": (
        Regression(),
        Function(3, 1, lambda weight, inputs: (inputs @ weight)[:, 0]),
        make_task(
            lambda outputs, targets: (outputs - targets).abs().sum(),
            measure=lambda outputs, targets: {"squares": ((outputs - targets) ** 2).sum()},
        ),
    ),
    "dicts": (
        Rows(),
        Function(11, 11, _token_logits),
        make_task(_token_loss, lambda batch: (batch["labels"] != IGNORED).sum()),
    ),
    "triples": (
        Triples(),
        Function(14, 4, _answer),
        make_task(
            lambda outputs, triple: cross_entropy(outputs, triple[2], reduction="sum"),
            lambda triple: len(triple[2]),
        ),
    ),
    "boxes": (
        Boxes(),
        Function(3, 4, _find_boxes),
        make_task(_box_loss, _box_counts),
    ),
    "whole batches": (
        WholeBatches(),
        Function(3, 4, lambda weight, inputs: inputs @ weight),
        make_task(tasks.images.loss, tasks.images.count, tasks.images.measure),
    ),
}


# Without processes


@contextmanager
def as_rank(rank, ranks):
    """Loaders behave as on one of several ranks, without a process group."""
    with mock.patch.multiple("utils.data", dp_rank=lambda: rank, dp_world_size=lambda: ranks):
        yield


def samples_of(batch):
    """The samples of a batch, each as a text of its numbers and dtypes."""
    rows = zip(*_columns(batch), strict=True)
    return [str([map_tensors(_plain, value) for value in row]) for row in rows]


def _columns(batch):
    """The parts of a batch that have one entry per sample: tensors, and lists."""
    if isinstance(batch, torch.Tensor | list):
        return [batch]
    parts = batch.values() if isinstance(batch, dict) else batch
    return [column for part in parts for column in _columns(part)]


def _plain(tensor):
    return f"{tensor.dtype} {tensor.tolist()}"
