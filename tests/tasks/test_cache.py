"""What takes long to compute from image files: decoded images, and lists of bad files."""

import os
import time
import uuid

import pytest
import torch

from tasks.images import build_datasets
from tasks.images import folder as image_folder
from tasks.images.cache import bad_files
from tasks.images.decode import BadImageError, decode
from tests.images import break_file, config, folder, photo
from utils.cache_file import write_atomically
from utils.errors import UserError


def test_bad_files_are_skipped_and_listed(tmp_path, capsys):
    break_file(folder(tmp_path) / "train" / "dog" / "3.jpg")
    with pytest.raises(BadImageError, match=r"dog/3\.jpg"):
        build_datasets(config(tmp_path, "--loader=device"))
    cfg = config(tmp_path, "--on-bad-sample=skip")
    train, val = build_datasets(cfg)
    assert train.labels.tolist() == [0] * 6 + [1] * 5
    assert len(val) == 12
    out = capsys.readouterr().err
    assert "skipping 1 of 24 files" in out and "dog/3.jpg" in out
    for path in (tmp_path / "val" / "cat").glob("*.jpg"):
        break_file(path)
    with pytest.raises(UserError, match=r"none .* in .*/val/cat "):
        build_datasets(cfg)


def test_folder_is_decoded_once_until_a_file_changes(tmp_path, monkeypatch):
    cfg = config(folder(tmp_path), "--augment=none")
    decoded = []

    def counted(path):
        decoded.append(path)
        return decode(path)

    def read():
        train, _ = build_datasets(cfg)
        images, labels = train.in_memory().get_batch(torch.arange(12), 0, 0)
        count = len(decoded)
        assert torch.equal(images, train.get_batch(torch.arange(12), 0, 0)[0])
        assert torch.equal(labels, train.labels)
        decoded.clear()
        return count

    monkeypatch.setattr(image_folder, "decode", counted)
    assert read() == 12
    assert read() == 0
    photo(tmp_path / "train" / "cat" / "0.jpg", (30, 30))
    assert read() == 12
    for path in (tmp_path / ".cache").iterdir():  # a cache that was cut short is not used
        os.truncate(path, 100)
    assert read() == 12


def test_cache_folder_can_be_moved_and_must_be_writable(tmp_path):
    folder(tmp_path / "images")
    build_datasets(config(tmp_path / "images", f"--cache-dir={tmp_path}/c", "--loader=device"))
    assert len(list((tmp_path / "c").glob("decoded-*.u8"))) == 2
    assert not (tmp_path / "images" / ".cache").exists()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"/file/cache.*: .*--cache-dir"):
        bad_files(["/etc/hostname"], tmp_path / "file" / "cache")


def test_large_folders_are_checked_in_parallel(tmp_path):
    for i in range(1100):
        photo(tmp_path / f"{i:04}.jpg", (2, 2))
    paths = [str(path) for path in sorted(tmp_path.glob("*.jpg"))]
    for number in (77, 800, 1099):
        os.truncate(paths[number], 20)
    state = torch.get_rng_state()
    assert bad_files(paths, tmp_path / "cache") == {paths[i] for i in (77, 800, 1099)}
    assert torch.equal(state, torch.get_rng_state())


def test_what_killed_processes_left_is_removed(tmp_path):
    """In time: nodes may share the folder, and a different process may still write its file."""
    old = tmp_path / f"old.npy.{uuid.uuid4().hex}.tmp"
    young = tmp_path / f"young.npy.{uuid.uuid4().hex}.tmp"
    foreign = tmp_path / "download.tmp"
    young.touch()
    two_days_ago = time.time() - 2 * 86400
    for path in (old, foreign):
        path.touch()
        os.utime(path, (two_days_ago, two_days_ago))
    write_atomically(tmp_path / "new", lambda file: file.write(b"x"), "")
    assert set(tmp_path.iterdir()) == {young, foreign, tmp_path / "new"}
