"""sources/resident.py: which datasets are kept on the device."""

import copy
from types import SimpleNamespace

import pytest
import torch

from sources import resident
from sources.resident import Resident, keep_on_device
from tasks.images import build_datasets, describe
from tasks.images import folder as image_folder
from tasks.images.arrays import ArrayDataset
from tests.images import config, folder
from tests.processes import run_ranks
from utils.errors import UserError

NBYTES = 4 * 3 * 8 * 8


def make(size=8):
    images = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    return ArrayDataset(images, range(4), "abcd", [0.5] * 3, [0.25] * 3, size, "crop_flip")


def test_auto_keeps_what_fits_in_a_quarter_of_the_memory(monkeypatch):
    dataset = make()
    assert dataset.nbytes == NBYTES
    monkeypatch.setattr(resident, "_free_memory", lambda device: 4 * NBYTES)
    assert keep_on_device(dataset, "auto") is not dataset
    assert keep_on_device(dataset, "workers") is dataset
    monkeypatch.setattr(resident, "_free_memory", lambda device: 4 * NBYTES - 1)
    assert keep_on_device(dataset, "auto") is dataset
    assert keep_on_device(dataset, "device") is not dataset


def test_batches_are_made_on_the_device():
    dataset = make()
    expected, _ = dataset.get_batch(torch.tensor([1]), 0, 3)
    kept = copy.deepcopy(Resident(dataset, dataset, torch.device("meta")))
    images, labels = kept.get_batch(torch.tensor([1], device="meta"), 0, 3)
    assert kept.device == images.device == labels.device == torch.device("meta")
    assert (kept.classes, len(kept), kept[1][1]) == (dataset.classes, 4, 1)
    assert torch.equal(kept.labels, dataset.labels)  # which stay where they were
    assert torch.equal(dataset.get_batch(torch.tensor([1]), 0, 3)[0], expected)


def test_image_folder_is_decoded_into_memory(tmp_path, monkeypatch):
    train, val = build_datasets(config(folder(tmp_path)))
    kept = keep_on_device(train)
    assert type(kept.moved) is ArrayDataset
    assert describe(kept, keep_on_device(val)) == describe(train, val)
    indices = torch.tensor([3, 1, 2])
    images, labels = train.get_batch(indices, 5, 0)
    kept_images, kept_labels = kept.get_batch(indices, 5, 0)
    assert torch.equal(kept_images, images)
    assert torch.equal(kept_labels, labels)
    monkeypatch.setattr("os.access", lambda path, mode: False)  # of the cache
    assert keep_on_device(train) is train


def test_what_cannot_be_on_the_device_is_for_workers(tmp_path):
    cfg = config(folder(tmp_path), "--augment=resized_crop")
    train, val = build_datasets(cfg)
    assert keep_on_device(train) is train and keep_on_device(val) is not val
    assert make(size=12).nbytes is None  # a GPU would round differently
    for dataset in (train, make(size=12)):
        with pytest.raises(UserError, match=type(dataset).__name__):
            keep_on_device(dataset, "device")


def test_ranks_decide_alike_and_decode_once_per_node(tmp_path, monkeypatch):
    cfg = config(folder(tmp_path))
    decode = image_folder.decode

    def body(rank):
        train, _ = build_datasets(cfg)
        decoded = []
        monkeypatch.setattr(image_folder, "decode", lambda p: decoded.append(p) or decode(p))
        monkeypatch.setattr(resident, "_free_memory", lambda device: 0 if rank == 1 else 1e12)
        assert keep_on_device(train) is train and not decoded
        monkeypatch.setattr(resident, "_free_memory", lambda device: 1e12)
        kept = keep_on_device(train)
        return len(decoded), kept.get_batch(torch.arange(12), 0, 0)[0].sum().item()

    first, second = run_ranks(body, 2)
    assert (first[0], second[0]) == (12, 0) and first[1] == second[1]


def test_ranks_on_one_device_share_its_memory(monkeypatch):
    """A GPU is known by its UUID, because each task of SLURM's may see a different one as cuda:0.
    On a CPU, the ranks of the node share it."""

    def body(rank):
        properties = SimpleNamespace(uuid="aba"[rank])
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(resident, "_free_memory", lambda device: 6)
        return [resident._memory_of_rank(torch.device(kind)) for kind in ("cuda:0", "cpu")]

    assert run_ranks(body, 3) == [[3, 2], [6, 2], [3, 2]]
