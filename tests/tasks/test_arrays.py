"""dataset=cifar10 and dataset=synthetic: images in memory."""

import hashlib
import pickle
import tarfile

import numpy
import pytest
import torch
import torchvision
from torchvision.transforms.v2 import functional as F

from tasks.images import Settings, build_datasets, describe
from tasks.images.arrays import ArrayDataset
from tasks.images.augment import CropFlip
from tasks.images.cifar10 import CIFAR10
from tests.processes import run_ranks, web_server
from utils.config import load_config
from utils.errors import PeerError, UserError

GOLDEN_IMAGES = "696286ebffd55604"


def config(*flags):
    base = ["--dataset=synthetic", "--synthetic-samples=64", "--device=cpu"]
    return load_config(Settings, argv=[*base, *flags])


def make(images, **options):
    options = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.2, 0.2), "size": images.shape[-1]} | options
    classes = [f"class {i}" for i in range(len(images))]
    return ArrayDataset(images, range(len(images)), classes, **options)


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (20, 3, 8, 8), dtype=torch.uint8, generator=generator)


# ArrayDataset


def test_batches_are_the_images_and_labels(images):
    dataset = make(images)
    indices = torch.tensor([7, 0, 7])
    batch, labels = dataset.get_batch(indices, epoch=4, seed=3)
    assert torch.equal(batch, images[indices]) and labels.tolist() == [7, 0, 7]
    assert (batch.dtype, labels.dtype, len(dataset)) == (torch.uint8, torch.int64, 20)
    image, label = dataset[7]
    assert torch.equal(image, images[7]) and (label, type(label)) == (7, int)


def test_images_are_resized_to_the_size_of_the_model(images):
    dataset = make(images, size=12, augment="crop_flip")
    indices = torch.tensor([2, 5])
    batch, _ = dataset.get_batch(indices, 1, 3)
    resized = F.resize(images[indices], [12, 12])
    assert torch.equal(batch, CropFlip(20)(resized, indices, epoch=1, seed=3))
    assert dataset.preprocessing == {
        "image_size": 12,
        "resize": 12,
        "interpolation": "bilinear",
        "mean": [0.4, 0.5, 0.6],
        "std": [0.2, 0.2, 0.2],
    }


def test_images_are_normalized_on_the_device(images):
    dataset = make(images)
    normalized, labels = dataset.on_device((images, torch.arange(20)), torch.float64)
    assert normalized.dtype == torch.float64 and labels.tolist() == [*range(20)]
    assert normalized.is_contiguous(memory_format=torch.channels_last)
    expected = F.normalize(images.double() / 255, dataset.mean, dataset.std)
    torch.testing.assert_close(normalized, expected)
    assert images.dtype == torch.uint8  # the batch itself is not changed


# Synthetic images


def test_synthetic_images_never_change():
    train, val = build_datasets(config("--augment=none"))
    indices = torch.arange(64)
    images, labels = train.get_batch(indices, 0, 0)
    assert hashlib.sha256(images.contiguous().numpy().tobytes()).hexdigest()[:16] == GOLDEN_IMAGES
    assert (images.shape, len(val), len(train.classes)) == ((64, 3, 32, 32), 16, 10)
    assert torch.equal(labels, train.labels) and labels.max() < 10
    assert not torch.equal(val.get_batch(indices[:16], 0, 0)[0], images[:16])
    other, _ = build_datasets(config("--augment=none", "--seed=1"))
    assert not torch.equal(other.get_batch(indices, 0, 0)[0], images)
    many, _ = build_datasets(config("--synthetic-samples=5000", "--image-size=8"))
    assert many.labels.bincount(minlength=10).min() > 400


def test_training_images_alone_are_augmented():
    train, val = build_datasets(config())
    indices = torch.arange(16)
    for dataset, same in ((train, False), (val, True)):
        first, second = (dataset.get_batch(indices, epoch, 0)[0] for epoch in (0, 1))
        assert torch.equal(first, second) is same


# CIFAR-10


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A CIFAR-10 of 12 images behind a local web server; yields (URL, file of requests)."""
    site = tmp_path / "site"
    base = site / "cifar-10-batches-py"
    base.mkdir(parents=True)
    rng = numpy.random.default_rng(0)
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    for name in names:
        batch = {"data": rng.integers(0, 256, (2, 3072), dtype="uint8"), "labels": [3, 5]}
        (base / name).write_bytes(pickle.dumps(batch))
    labels = {"label_names": [f"c{i}" for i in range(10)]}
    (base / "batches.meta").write_bytes(pickle.dumps(labels))
    with tarfile.open(site / "cifar-10-python.tar.gz", "w:gz") as archive:
        archive.add(base, base.name)

    def md5(path):
        return hashlib.md5(path.read_bytes()).hexdigest()

    requests = tmp_path / "requests"
    with web_server(site, requests) as address:
        known = torchvision.datasets.CIFAR10
        url = f"{address}/cifar-10-python.tar.gz"
        monkeypatch.setattr(known, "url", url)
        monkeypatch.setattr(known, "tgz_md5", md5(site / "cifar-10-python.tar.gz"))
        monkeypatch.setattr(known, "train_list", [(n, md5(base / n)) for n in names[:5]])
        monkeypatch.setattr(known, "test_list", [("test_batch", md5(base / "test_batch"))])
        meta = {"filename": "batches.meta", "key": "label_names", "md5": md5(base / "batches.meta")}
        monkeypatch.setattr(known, "meta", meta)
        yield url, requests


def load(rank, data_dir):
    cfg = config("--dataset=cifar10", f"--data-dir={data_dir}", "--augment=none")
    train, val = build_datasets(cfg)
    pixels = int(train.get_batch(torch.arange(10), 0, 0)[0].sum())
    return len(train), len(val), pixels, train.mean, describe(train, val)


def test_one_process_per_node_downloads_cifar10(server, tmp_path):
    first, second = run_ranks(load, 2, tmp_path / "data")
    assert first == second == load(0, tmp_path / "data")
    assert (*first[:2], first[3]) == (10, 2, list(CIFAR10["mean"]))
    assert first[4]["classes"][1] == "c1" and first[4]["image_size"] == 32
    assert len(server[1].read_text().splitlines()) == 1


def test_failed_download_ends_all_ranks(server, tmp_path, monkeypatch):
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "tgz_md5", "0" * 32)
    first, second = run_ranks(load, 2, tmp_path / "data")
    assert isinstance(first, UserError) and server[0] in str(first)
    assert "--data-dir" in str(first)
    assert isinstance(second, PeerError)
