"""loader=auto and loader=device: when the dataset is kept on the device."""

import os
from types import SimpleNamespace

import pytest
import torch

from tests.launch import run_ranks
from tests.test_image_folder import config, folder
from utils import image_folder, resident
from utils.array_data import ArrayDataset
from utils.data import build_datasets
from utils.errors import PeerError, UserError
from utils.image_folder import FolderDataset
from utils.resident import make_resident

CPU = torch.device("cpu")
AUTO, DEVICE = SimpleNamespace(loader="auto"), SimpleNamespace(loader="device")


class Plain(torch.utils.data.Dataset):
    """Any Dataset: without as_array()."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.zeros(3, 8, 8, dtype=torch.uint8), index


class Offering(Plain):
    """A user's dataset with as_array()."""

    def as_array(self):
        images = torch.stack([self[i][0] for i in range(len(self))])
        return ArrayDataset(images, range(len(self)), [0.5] * 3, [0.25] * 3, size=8)


def test_auto_keeps_what_fits_in_a_quarter_of_the_memory(monkeypatch):
    array = Offering().as_array()
    for dataset in (Offering(), array):
        nbytes = 4 * 3 * 8 * 8
        monkeypatch.setattr(resident, "_free_memory", lambda device, n=nbytes: 4 * n)
        assert isinstance(make_resident(dataset, CPU, AUTO), ArrayDataset)
        monkeypatch.setattr(resident, "_free_memory", lambda device, n=nbytes: 4 * n - 1)
        assert make_resident(dataset, CPU, AUTO) is None
        assert isinstance(make_resident(dataset, CPU, DEVICE), ArrayDataset)


def test_dataset_without_as_array_is_for_workers():
    assert make_resident(Plain(), CPU, AUTO) is None
    with pytest.raises(UserError, match=r"Plain on the device.*no as_array.*--loader workers"):
        make_resident(Plain(), CPU, DEVICE)


def test_image_folder_needs_a_writable_cache(tmp_path, monkeypatch):
    train, _, _ = build_datasets(config(folder(tmp_path)))
    array = make_resident(train, CPU, AUTO)
    indices = torch.tensor([3, 1, 2])
    for ours, theirs in zip(array.get_batch(indices, 5), train.get_batch(indices, 5), strict=True):
        assert torch.equal(ours, theirs)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert make_resident(train, CPU, AUTO) is None


def test_resized_crop_is_for_workers(tmp_path):
    train, val, _ = build_datasets(config(folder(tmp_path), "--augment=resized_crop"))
    assert make_resident(train, CPU, AUTO) is None
    assert make_resident(val, CPU, AUTO) is not None
    with pytest.raises(UserError, match=r"augments the original images: pass --loader workers"):
        make_resident(train, CPU, DEVICE)
    no_cache = FolderDataset(val.paths, val.labels.tolist(), val.preprocessing)
    assert make_resident(no_cache, CPU, AUTO) is None


def test_ranks_decide_alike_and_decode_once_per_node(tmp_path, monkeypatch):
    cfg = config(folder(tmp_path))
    decode = image_folder.decode

    def body(rank):
        train, _, _ = build_datasets(cfg)
        decoded = []
        monkeypatch.setattr(image_folder, "decode", lambda p: decoded.append(p) or decode(p))
        monkeypatch.setattr(resident, "_free_memory", lambda device: 0 if rank == 1 else 1e12)
        too_large = make_resident(train, CPU, AUTO)
        monkeypatch.setattr(resident, "_free_memory", lambda device: 1e12)
        decoded.clear()
        array = make_resident(train, CPU, AUTO)
        return too_large, len(decoded), array.get_batch(torch.arange(12), 0)[0].sum().item()

    first, second, third = run_ranks(body, 3)
    assert first[0] is second[0] is third[0] is None
    assert [first[1], second[1], third[1]] == [13, 1, 1]  # one image each to know their size
    assert first[2] == second[2] == third[2]


def test_bad_file_ends_all_ranks(tmp_path):
    path = folder(tmp_path) / "train" / "dog" / "3.jpg"
    path.write_bytes(b"")

    def body(rank):
        train, _, _ = build_datasets(config(tmp_path))
        make_resident(train, CPU, AUTO)

    first, second = run_ranks(body, 2)
    assert isinstance(first, UserError) and "dog/3.jpg" in str(first)
    assert isinstance(second, PeerError)


def test_free_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5, 9))
    assert resident._free_memory(torch.device("cuda")) == 5
    assert resident._free_memory(CPU) > 2**20


def test_ranks_on_one_device_share_its_memory(monkeypatch):
    """A GPU is known by its UUID, as each task of SLURM's may see another one as cuda:0."""
    array, cuda = Offering().as_array(), torch.device("cuda", 0)
    nbytes = 4 * 3 * 8 * 8
    monkeypatch.setattr(resident, "_free_memory", lambda device: 4 * 2 * nbytes)

    def body(rank, gpus):
        properties = SimpleNamespace(uuid=gpus[rank])
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return resident._ranks_on(cuda), make_resident(array, CPU, AUTO) is None

    assert run_ranks(body, 3, "aba") == [(2, True), (1, True), (2, True)]
    assert run_ranks(body, 2, "ab") == [(1, False)] * 2
    monkeypatch.setattr(resident, "_free_memory", lambda device: 4 * 2 * nbytes - 1)
    assert run_ranks(body, 2, "ab") == [(1, True)] * 2
