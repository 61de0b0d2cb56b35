"""Tasks whose batches have shapes of every kind, with small datasets and models.

Each dataset draws from the three global generators, so that a sample shows its seeds.
"""

import random
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import numpy
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils.data import Dataset

import tasks.images
from utils.batches import map_tensors
from utils.data import BatchDataset, describe_datasets
from utils.seeds import derive_seed

COUNT = 40  # samples of each dataset
IGNORED = -100


def noise():
    """One number of each global generator, float32 (3,)."""
    return torch.tensor([random.random(), numpy.random.rand(), torch.rand(()).item()])


# Datasets that know nothing of this project


class Numbered(Dataset):
    """Base of datasets of COUNT samples."""

    def __len__(self):
        return COUNT


class Regression(Numbered):
    """Pairs of vectors and Python's floats."""

    def __getitem__(self, index):
        return noise() + index, index / 7


class SeveralLabels(Numbered):
    """Pairs of vectors and a vector with a 1.0 for each label."""

    def __getitem__(self, index):
        labels = [float(index % divisor == 0) for divisor in (2, 3, 5, 7)]
        return noise() + index / 10, torch.tensor(labels)


class Rows(Numbered):
    """Dicts, as of Hugging Face's datasets: dataset[index] is a dict of values, dataset[indices] a
    dict of lists, and __getitems__(indices) a list of dicts."""

    def __getitem__(self, key):
        if isinstance(key, list):
            rows = [self[index] for index in key]
            return {name: [row[name] for row in rows] for name in rows[0]}
        draws = noise()
        ids = (torch.arange(6) * (key + 1) + (10 * draws).long().sum()) % 11
        length = 1 + key % 6  # the number of targets varies
        labels = torch.where(torch.arange(6) < length, (ids + 1) % 11, IGNORED)
        return {"input_ids": ids, "labels": labels, "draws": draws, "text": f"row {key}"}

    def __getitems__(self, indices):
        columns = self[indices]
        return [{name: columns[name][i] for name in columns} for i in range(len(indices))]


class Triples(Numbered):
    """Tuples of three: image, question, answer."""

    def __getitem__(self, index):
        return noise().view(3, 1, 1).expand(3, 2, 2), torch.tensor([index, 1]), index % 4


@dataclass
class Photo:
    """What Photos returns."""

    pixels: torch.Tensor
    label: int
    place: dict


class Photos(Numbered):
    """Dataclasses."""

    def __getitem__(self, index):
        return Photo(noise(), index % 4, {"height": index / 3})


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


class OnlyLists(Dataset):
    """A dataset with __getitems__ alone."""

    def __len__(self):
        return COUNT

    def __getitems__(self, indices):
        return [(noise() + index, index % 4) for index in indices]


class Forwarding:
    """A wrapper that forwards everything else to a dataset, but for __getitem__."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __getattr__(self, name):
        if name == "dataset":
            raise AttributeError(name)  # of a copy that is being unpickled
        return getattr(self.dataset, name)

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.dataset[index] | {"wrapped": noise()}


class WholeBatches(BatchDataset):
    """Makes whole batches, and uses them as the images of pixels / 255 on the device."""

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randint(0, 200, (COUNT, 3), generator=generator, dtype=torch.uint8)

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        raise AssertionError("get_batch() is there")

    def get_batch(self, indices, epoch, seed):
        assert indices.dtype == torch.int64 and indices.dim() == 1
        draws = [[derive_seed(seed, epoch, i, c) % 50 for c in range(3)] for i in indices.tolist()]
        shifts = torch.tensor(draws, dtype=torch.uint8, device=indices.device)
        return self.images[indices] + shifts, indices % 4

    def on_device(self, batch, dtype):
        images, labels = batch
        return images.to(dtype) / 255, labels

    def resident_bytes(self):
        return self.images.nbytes

    def resident(self, device):
        moved = WholeBatches()
        moved.images = moved.images.to(device)
        return moved


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
        means = {name: total / sums["count"] for name, total in sums.items() if name != "count"}
        return {name: mean.item() for name, mean in means.items()}

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


def _name_photo(weight, photo):
    height = photo.place["height"][:, None]
    return {"classes": (torch.cat([photo.pixels, height], 1) @ weight,), "aux": None}


def _find_boxes(weight, images):
    return {"boxes": torch.stack([image.mean((1, 2)) @ weight for image in images])}


def _box_loss(outputs, targets):
    pairs = zip(outputs["boxes"], targets, strict=True)
    return sum((box - target["boxes"]).abs().sum() for box, target in pairs)


def _linear(weight, inputs):
    return inputs @ weight


TOKENS = make_task(_token_loss, lambda batch: (batch["labels"] != IGNORED).sum())
IMAGES = make_task(tasks.images.loss, tasks.images.count, tasks.images.measure)
CASES = {  # name: dataset, model, task
    "regression with an L1 loss": (
        Regression(),
        Function(3, 1, lambda weight, inputs: (inputs @ weight)[:, 0]),
        make_task(
            lambda outputs, targets: (outputs - targets).abs().sum(),
            measure=lambda outputs, targets: {"squares": ((outputs - targets) ** 2).sum()},
        ),
    ),
    "several labels": (
        SeveralLabels(),
        Function(3, 4, _linear),
        make_task(
            lambda outputs, targets: binary_cross_entropy_with_logits(
                outputs, targets, reduction="sum"
            ),
            torch.numel,
        ),
    ),
    "dicts": (Rows(), Function(11, 11, _token_logits), TOKENS),
    "tuples of three": (
        Triples(),
        Function(14, 4, _answer),
        make_task(
            lambda outputs, triple: cross_entropy(outputs, triple[2], reduction="sum"),
            lambda triple: len(triple[2]),
        ),
    ),
    "dataclasses": (
        Photos(),
        Function(4, 4, _name_photo),
        make_task(
            lambda outputs, photo: cross_entropy(
                outputs["classes"][0], photo.label, reduction="sum"
            ),
            lambda photo: len(photo.label),
        ),
    ),
    "boxes": (
        Boxes(),
        Function(3, 4, _find_boxes),
        make_task(_box_loss, lambda targets: torch.tensor(sum(len(t["boxes"]) for t in targets))),
    ),
    "only __getitems__": (OnlyLists(), Function(3, 4, _linear), IMAGES),
    "a forwarding wrapper": (Forwarding(Rows()), Function(11, 11, _token_logits), TOKENS),
    "whole batches": (WholeBatches(), Function(3, 4, _linear), IMAGES),
}


# Without processes


@contextmanager
def as_rank(rank, world_size):
    """Loaders behave as on this one of `world_size` replicas, without a process group."""
    with mock.patch.multiple("utils.data", dp_rank=lambda: rank, dp_world_size=lambda: world_size):
        yield


def samples_of(batch):
    """The samples of a batch, as comparable values: nested tuples of numbers and texts."""
    lengths = {len(tensor) for tensor in _columns(batch)}
    assert len(lengths) == 1
    return [_sample(batch, i) for i in range(lengths.pop())]


def _columns(batch):
    """The parts of a batch that have one entry per sample: tensors, and lists that a collate_fn
    has made."""
    if isinstance(batch, torch.Tensor | list):
        return [batch]
    values = vars(batch) if isinstance(batch, Photo) else batch
    values = values.values() if isinstance(values, dict) else values
    return [column for value in values for column in _columns(value)]


def _sample(batch, i):
    if isinstance(batch, torch.Tensor | list):
        return _plain(batch[i])
    values = vars(batch) if isinstance(batch, Photo) else batch
    if isinstance(values, dict):
        return tuple((name, _sample(value, i)) for name, value in values.items())
    return tuple(_sample(value, i) for value in values)


def _plain(value):
    texts = []
    map_tensors(lambda tensor: texts.append(f"{tensor.dtype} {tensor.tolist()}"), value)
    return tuple(texts) or value
