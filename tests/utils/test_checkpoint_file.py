"""Files of checkpoints: complete or absent on the disk, and refused if they are damaged."""

import os
import zipfile

import numpy
import pytest
import torch

from tests.utils.test_checkpoint import make_state, save
from utils.checkpoint_file import (
    FORMAT,
    keep_newest,
    read_checkpoint,
    save_atomically,
    sorted_by_epoch,
)
from utils.errors import UserError


def test_flipped_bit_is_detected(tmp_path):
    """torch.load alone would load it."""
    path, state = tmp_path / "last.pt", make_state()
    save(tmp_path, state)
    with zipfile.ZipFile(path) as archive:
        record = next(i for i in archive.infolist() if i.filename.endswith("data/0"))
    content = bytearray(path.read_bytes())
    weight = state["model"][0].weight.detach().numpy().tobytes()
    content[content.index(weight, record.header_offset)] ^= 1
    path.write_bytes(content)
    torch.load(path, weights_only=True)
    with pytest.raises(UserError, match=r"cannot be read|is damaged"):
        read_checkpoint(path)


class Malicious:
    """A pickle that would run code."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_files_that_are_no_checkpoints_are_refused(tmp_path):
    for content, message in (
        ({"format": FORMAT, "x": Malicious(tmp_path / "ran")}, "cannot be read"),
        ([1], rf"x\.pt .* format {FORMAT}"),
        ({"format": 2}, rf"x\.pt .* format {FORMAT}"),
    ):
        torch.save(content, tmp_path / "x.pt")
        with pytest.raises(UserError, match=message):
            read_checkpoint(tmp_path / "x.pt")
    with pytest.raises(UserError, match="cannot be read"):
        read_checkpoint(tmp_path / "missing.pt")
    assert not (tmp_path / "ran").exists()


def test_type_that_is_refused_is_named(tmp_path):
    """The file is whole, so that its owner can allow the type, or convert the value."""
    torch.save({"format": FORMAT, "mine": numpy.arange(3)}, tmp_path / "x.pt")
    with pytest.raises(UserError, match=r"x\.pt is whole.* numpy\.ndarray"):
        read_checkpoint(tmp_path / "x.pt")


def test_file_and_folder_are_flushed_to_the_disk(tmp_path, monkeypatch):
    events, fsync, rename = [], os.fsync, os.replace

    def flush(file):
        events.append(f"fsync {os.readlink(f'/proc/self/fd/{file}')}")
        fsync(file)

    def move(source, target):
        events.append(f"rename {source}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "replace", move)
    path = tmp_path / "x.pt"
    save_atomically([1, 2], path)
    assert events == [f"fsync {path}.tmp", f"rename {path}.tmp", f"fsync {tmp_path}"]
    assert torch.load(path) == [1, 2] and os.listdir(tmp_path) == ["x.pt"]


def test_files_of_others_are_neither_counted_nor_removed(tmp_path):
    for name in ("epoch-0001.pt", "epoch-0002.pt", "epoch-0001-keep.pt", "epoch-3b.pt"):
        (tmp_path / name).touch()
    assert [path.name for path in sorted_by_epoch(tmp_path)] == ["epoch-0001.pt", "epoch-0002.pt"]
    keep_newest(tmp_path, 1, 2)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"epoch-0002.pt", "epoch-0001-keep.pt", "epoch-3b.pt"}
