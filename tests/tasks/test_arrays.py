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


def make(images, size=8, augment="none"):
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.2, 0.2)
    return ArrayDataset(images, range(20), range(20), mean, std, size, augment)


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (20, 3, 8, 8), dtype=torch.uint8, generator=generator)


# ArrayDataset


def test_batches_are_the_images_and_labels(images):
    dataset = make(images)
    indices = torch.tensor([7, 0, 7])
    batch, labels = dataset.get_batch(indices, epoch=4, seed=3)
    assert torch.equal(batch, images[indices])
    assert batch.dtype == torch.uint8
    assert torch.equal(labels, indices)
    assert len(dataset) == 20
    image, label = dataset[7]
    assert torch.equal(image, images[7])
    assert label == 7


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
    assert torch.equal(labels, torch.arange(20))
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
    assert torch.equal(labels, train.labels)
    assert len(val) == 16
    assert not torch.equal(val.get_batch(indices[:16], 0, 0)[0], images[:16])
    other, _ = build_datasets(config("--augment=none", "--seed=1"))
    assert not torch.equal(other.get_batch(indices, 0, 0)[0], images)
    many, _ = build_datasets(config("--synthetic-samples=5000", "--image-size=8"))
    assert many.labels.bincount(minlength=10).min() > 400


def test_training_images_alone_are_augmented():
    train, val = build_datasets(config())
    indices = torch.arange(16)
    assert not torch.equal(train.get_batch(indices, 0, 0)[0], train.get_batch(indices, 1, 0)[0])
    assert torch.equal(val.get_batch(indices, 0, 0)[0], val.get_batch(indices, 1, 0)[0])


# CIFAR-10


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A CIFAR-10 of 6 images behind a local web server; yields (URL, file of requests)."""
    site = tmp_path / "site"
    base = site / "cifar-10-batches-py"
    base.mkdir(parents=True)

    def write(name, contents):
        data = pickle.dumps(contents)
        (base / name).write_bytes(data)
        return name, hashlib.md5(data).hexdigest()

    files = []
    for i, name in enumerate(["1", "2", "3", "4", "5", "test_batch"]):
        pixels = numpy.full((1, 3072), 40 * i, dtype="uint8")
        files.append(write(name, {"data": pixels, "labels": [i]}))
    meta, checksum = write("batches.meta", {"label_names": [f"c{i}" for i in range(10)]})
    with tarfile.open(site / "cifar10.tar.gz", "w:gz") as archive:
        archive.add(base, base.name)
    known = torchvision.datasets.CIFAR10
    monkeypatch.setattr(known, "train_list", files[:5])
    monkeypatch.setattr(known, "test_list", files[5:])
    names = {"filename": meta, "key": "label_names", "md5": checksum}
    monkeypatch.setattr(known, "meta", names)
    archive = (site / "cifar10.tar.gz").read_bytes()
    monkeypatch.setattr(known, "tgz_md5", hashlib.md5(archive).hexdigest())
    requests = tmp_path / "requests"
    with web_server(site, requests) as address:
        monkeypatch.setattr(known, "url", f"{address}/cifar10.tar.gz")
        yield known.url, requests


def load(rank, data_dir):
    cfg = config("--dataset=cifar10", f"--data-dir={data_dir}", "--augment=none")
    train, val = build_datasets(cfg)
    images, _ = train.get_batch(torch.arange(5), 0, 0)
    return images[:, 0, 0, 0].tolist(), train.labels.tolist(), describe(train, val)


def test_one_process_per_node_downloads_cifar10(server, tmp_path):
    first, second = run_ranks(load, 2, tmp_path / "data")
    assert first == second == load(0, tmp_path / "data")
    pixels, labels, facts = first
    assert pixels == [0, 40, 80, 120, 160]
    assert labels == [0, 1, 2, 3, 4]
    assert (facts["train_samples"], facts["val_samples"]) == (5, 1)
    assert facts["mean"] == list(CIFAR10["mean"])
    assert facts["classes"][1] == "c1"
    _, requests = server
    assert len(requests.read_text().splitlines()) == 1


def test_failed_download_ends_all_ranks(server, tmp_path, monkeypatch):
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "tgz_md5", "0" * 32)
    first, second = run_ranks(load, 2, tmp_path / "data")
    assert isinstance(first, UserError) and server[0] in str(first)
    assert "--data-dir" in str(first)
    assert isinstance(second, PeerError)
