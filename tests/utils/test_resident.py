"""loader=auto and loader=device: when the dataset is kept on the device."""

import os
from types import SimpleNamespace

import pytest
import torch

from tasks.images import build_datasets
from tasks.images import folder as image_folder
from tasks.images.arrays import ArrayDataset
from tasks.images.folder import FolderDataset
from tests.images import config, folder
from tests.processes import run_ranks
from utils import resident
from utils.data import BatchDataset
from utils.errors import PeerError, UserError
from utils.resident import make_resident

CPU = torch.device("cpu")
NBYTES = 4 * 3 * 8 * 8


class Plain(BatchDataset):
    """Without resident_bytes() and resident()."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.zeros(3, 8, 8, dtype=torch.uint8), index


class Offering(Plain):
    """A user's dataset with both."""

    def resident_bytes(self):
        return NBYTES

    def resident(self, device):
        images = torch.stack([self[i][0] for i in range(len(self))])
        array = ArrayDataset(images, range(len(self)), "abcd", [0.5] * 3, [0.25] * 3, size=8)
        return array.resident(device)


def test_auto_keeps_what_fits_in_a_quarter_of_the_memory(monkeypatch):
    for dataset in (Offering(), Offering().resident(CPU)):
        assert dataset.resident_bytes() == NBYTES
        monkeypatch.setattr(resident, "_free_memory", lambda device: 4 * NBYTES)
        assert isinstance(make_resident(dataset, CPU, "auto"), ArrayDataset)
        monkeypatch.setattr(resident, "_free_memory", lambda device: 4 * NBYTES - 1)
        assert make_resident(dataset, CPU, "auto") is None
        assert isinstance(make_resident(dataset, CPU, "device"), ArrayDataset)


def test_dataset_without_resident_is_for_workers():
    assert make_resident(Plain(), CPU, "auto") is None
    with pytest.raises(UserError, match=r"loader=device .* Plain .*--loader workers"):
        make_resident(Plain(), CPU, "device")


def test_image_folder_needs_a_writable_cache(tmp_path, monkeypatch):
    train, _ = build_datasets(config(folder(tmp_path)))
    array = make_resident(train, CPU, "auto")
    indices = torch.tensor([3, 1, 2])
    batches = [dataset.get_batch(indices, 5, 0) for dataset in (array, train)]
    for ours, theirs in zip(*batches, strict=True):
        assert torch.equal(ours, theirs)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert make_resident(train, CPU, "auto") is None


def test_resized_crop_is_for_workers(tmp_path):
    train, val = build_datasets(config(folder(tmp_path), "--augment=resized_crop"))
    assert make_resident(train, CPU, "auto") is None
    assert make_resident(val, CPU, "auto") is not None
    with pytest.raises(UserError, match=r"loader=device .* FolderDataset .*--loader workers"):
        make_resident(train, CPU, "device")
    no_cache = FolderDataset(val.paths, val.labels.tolist(), val.classes, val.preprocessing)
    assert make_resident(no_cache, CPU, "auto") is None


def test_ranks_decide_alike_and_decode_once_per_node(tmp_path, monkeypatch):
    cfg = config(folder(tmp_path))
    decode = image_folder.decode

    def body(rank):
        train, _ = build_datasets(cfg)
        decoded = []
        monkeypatch.setattr(image_folder, "decode", lambda p: decoded.append(p) or decode(p))
        monkeypatch.setattr(resident, "_free_memory", lambda device: 0 if rank == 1 else 1e12)
        too_large = make_resident(train, CPU, "auto")
        assert decoded == []
        monkeypatch.setattr(resident, "_free_memory", lambda device: 1e12)
        array = make_resident(train, CPU, "auto")
        return too_large, len(decoded), array.get_batch(torch.arange(12), 0, 0)[0].sum().item()

    first, second, third = run_ranks(body, 3)
    assert first[0] is second[0] is third[0] is None
    assert [first[1], second[1], third[1]] == [12, 0, 0]
    assert first[2] == second[2] == third[2]


def test_bad_file_ends_all_ranks(tmp_path):
    path = folder(tmp_path) / "train" / "dog" / "3.jpg"
    path.write_bytes(b"")

    def body(rank):
        train, _ = build_datasets(config(tmp_path))
        make_resident(train, CPU, "auto")

    first, second = run_ranks(body, 2)
    assert isinstance(first, UserError) and "dog/3.jpg" in str(first)
    assert isinstance(second, PeerError)


def test_free_memory(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (5, 9))
    assert resident._free_memory(torch.device("cuda")) == 5
    assert resident._free_memory(CPU) > 2**20


def test_ranks_on_one_device_share_its_memory(monkeypatch):
    """A GPU is known by its UUID, as each task of SLURM's may see a different one as cuda:0. On a
    CPU, the ranks of the node share it."""
    cuda = torch.device("cuda", 0)

    def body(rank, gpus):
        properties = SimpleNamespace(uuid=gpus[rank])
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        fits = []
        for memory in (4 * len(gpus) * NBYTES, 4 * len(gpus) * NBYTES - 1):
            monkeypatch.setattr(resident, "_free_memory", lambda device, memory=memory: memory)
            fits.append(make_resident(Offering(), CPU, "auto") is not None)
        return resident._ranks_on(cuda), resident._ranks_on(CPU), fits

    assert run_ranks(body, 3, "aba") == [(n, 3, [True, False]) for n in (2, 1, 2)]
