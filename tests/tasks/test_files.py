"""Finding image files, and splitting off a validation set."""

import io
import os
import sys

import pytest
import torch

from tasks.images import build_datasets, describe
from tasks.images.cache import bad_files
from tasks.images.decode import BadImageError, decode
from tasks.images.files import find_images, split_images
from tasks.images.predict import find_files
from tests.images import break_file, config, folder, photo
from utils.errors import UserError

# Finding files


def test_finds_either_name_of_a_split_and_only_images(tmp_path):
    photo(tmp_path / "trainset" / "Катя" / "a.JPG")
    photo(tmp_path / "trainset" / "Катя" / ".hidden.jpg")
    photo(tmp_path / "trainset" / ".ipynb_checkpoints" / "b.jpg")
    photo(tmp_path / "test" / "Катя" / "b.png")
    train = find_images(tmp_path, "train")
    assert (train.classes, [os.path.basename(p) for p in train.paths]) == (["Катя"], ["a.JPG"])
    assert find_images(tmp_path, "val").folder.name == "test"
    photo(tmp_path / "val" / "Катя" / "c.png")
    assert find_images(tmp_path, "val").folder.name == "val"


def test_wrong_folders_are_reported(tmp_path):
    with pytest.raises(UserError, match=r"no train images.*trainset.*--data-dir(?!.*--val)"):
        find_images(tmp_path, "train")
    photo(tmp_path / "cat" / "1.jpg")
    with pytest.raises(UserError, match=r"no train images.*--val-fraction 0\.2"):
        find_images(tmp_path, "train")
    (tmp_path / "train").mkdir()
    with pytest.raises(UserError, match=r"/train .*class folders .*train/<class>/\*\.jpg"):
        find_images(tmp_path, "train")
    photo(tmp_path / "train" / "cat" / "a.jpg")
    (tmp_path / "train" / "empty").mkdir()
    (tmp_path / "train" / "void").mkdir()
    with pytest.raises(UserError, match=r"no images .*/empty, .*/void \(.*\.jpg"):
        find_images(tmp_path, "train")
    (tmp_path / "train" / "empty").rmdir()
    (tmp_path / "train" / "void").rmdir()
    photo(tmp_path / "val" / "dog" / "a.jpg")
    with pytest.raises(UserError, match=r"/train has .*/val lacks: cat"):
        build_datasets(config(tmp_path))
    photo(tmp_path / "val" / "cat" / "a.jpg")
    with pytest.raises(UserError, match=r"/val has .*/train lacks: dog"):
        build_datasets(config(tmp_path))


def test_what_is_not_read_is_counted_and_named(tmp_path, capsys):
    for name in ("1.jfif", "2.jpe", "3.avif", "4.JPG"):
        photo(tmp_path / "train" / "cat" / "x.jpg")
        (tmp_path / "train" / "cat" / "x.jpg").rename(tmp_path / "train" / "cat" / name)
    photo(tmp_path / "train" / "cat" / "@eaDir" / "1.jpg" / "SYNOPHOTO_THUMB_M.jpg")
    photo(tmp_path / "train" / "@eaDir" / "a.jpg")
    photo(tmp_path / "train" / "__MACOSX" / "cat" / "._1.jpg")
    photo(tmp_path / "train" / "dog" / "1.jpg")
    for name in ("a.HEIC", "b.heic", "notes.txt", "Thumbs.db", ".DS_Store", "README"):
        (tmp_path / "train" / "dog" / name).write_text("x")
    files = find_images(tmp_path, "train")
    assert (files.classes, files.labels) == (["cat", "dog"], [0, 0, 0, 0, 1])
    said = capsys.readouterr().err
    assert "ignored 4 files" in said and "2 .heic, 1 .txt, 1 without an extension" in said
    assert find_files([str(tmp_path / "train")]) == sorted(files.paths)
    assert capsys.readouterr().err == said
    (tmp_path / "train" / "dog" / "1.jpg").unlink()
    with pytest.raises(UserError, match=r"no images in .*dog"):
        find_images(tmp_path, "train")
    assert "2 .heic" in capsys.readouterr().err


def test_skipped_names_that_the_stream_cannot_encode(tmp_path, monkeypatch):
    photo(tmp_path / "写真.jpg")
    break_file(tmp_path / "写真.jpg")
    for name in ("stdout", "stderr"):
        errors = "backslashreplace" if name == "stderr" else "strict"
        stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1", errors=errors)
        monkeypatch.setattr(sys, name, stream)
    assert bad_files([str(tmp_path / "写真.jpg")], tmp_path)
    sys.stderr.flush()
    assert b"\\u5199" in sys.stderr.buffer.getvalue()


def test_file_names_in_any_script_and_dangling_links(tmp_path, capsys):
    latin1 = os.fsdecode(b"caf\xe9.jpg")  # not valid UTF-8, as in old archives
    for split in ("train", "val"):
        for i, name in enumerate((latin1, "图片 1.JPG", "صورة.jpg", "a\nb.jpg")):
            photo(tmp_path / split / "Ёж" / "x.jpg", (20 + i, 16))
            (tmp_path / split / "Ёж" / "x.jpg").rename(tmp_path / split / "Ёж" / name)
        photo(tmp_path / split / "犬" / "1.jpg")
    train, _ = build_datasets(config(tmp_path))
    assert train.classes == ["Ёж", "犬"]
    assert len(train.in_memory()) == 5
    os.symlink("/nowhere.jpg", tmp_path / "train" / "犬" / "2.jpg")
    break_file(tmp_path / "train" / "Ёж" / latin1)
    with pytest.raises(BadImageError, match=r"caf.\.jpg cannot be decoded") as caught:
        decode(tmp_path / "train" / "Ёж" / latin1)
    assert str(caught.value).encode()
    train, _ = build_datasets(config(tmp_path))
    with pytest.raises(BadImageError, match=r"2\.jpg cannot be read \(No such file"):
        train[len(train) - 1]
    assert len(build_datasets(config(tmp_path, "--on-bad-sample=skip"))[0]) == 4
    assert "skipping 2 of 11 files" in capsys.readouterr().err


def test_links_that_would_count_images_twice_are_refused(tmp_path):
    folder(tmp_path)
    cat = next((tmp_path / "train").iterdir())
    (cat / "again").symlink_to(cat)
    with pytest.raises(UserError, match=r"/again .*same folder .*symbolic link"):
        find_images(tmp_path, "train")
    (cat / "again").unlink()
    moved = tmp_path / "elsewhere"
    cat.rename(moved)
    cat.symlink_to(moved)  # a link alone is fine
    assert find_images(tmp_path, "train").paths


# Splitting off a validation set


def split_config(root, *flags):
    return config(root, "--val-fraction=0.34", *flags)


def test_validation_images_are_split_off_per_class(tmp_path):
    for name, count in (("cat", 9), ("dog", 3), ("owl", 2)):
        for i in range(count):
            photo(tmp_path / name / f"{i}.jpg")
    train, val = build_datasets(split_config(tmp_path))
    assert train.classes == val.classes == ["cat", "dog", "owl"]
    assert train.labels.bincount().tolist() == [6, 2, 1]
    assert val.labels.bincount().tolist() == [3, 1, 1]
    assert not set(train.paths) & set(val.paths)
    assert (train.split, val.split["val_fraction"], val.split["seed"]) == ({}, 0.34, 0)
    names = [os.path.relpath(path, tmp_path) for path in val.paths]
    assert val.split["val_files"] == sorted(names)
    assert build_datasets(split_config(tmp_path))[1].paths == val.paths
    assert build_datasets(split_config(tmp_path, "--seed=1"))[1].paths != val.paths
    # A test folder is not a class, and adding files changes the choice of few others.
    photo(tmp_path / "test" / "cat" / "0.jpg")
    for i in range(3):
        photo(tmp_path / "cat" / f"new{i}.jpg")
    _, again = build_datasets(split_config(tmp_path))
    kept = set(again.paths) & set(val.paths)
    assert len(again) == 4 + 1 + 1 and len(kept) >= 3


def test_resumed_run_keeps_its_split(tmp_path):
    for name in ("cat", "dog"):
        for i in range(9):
            photo(tmp_path / name / f"{i}.jpg")
    train, val = build_datasets(split_config(tmp_path))
    run = tmp_path.with_name(f"{tmp_path.name}-run")
    run.mkdir()
    torch.save({"data": describe(train, val), "epoch": 1}, run / "epoch-0001.pt")
    (run / "last.pt").write_bytes(b"damaged")
    for i in range(20):
        photo(tmp_path / "cat" / f"new{i}.jpg")
    train, again = build_datasets(split_config(tmp_path))
    assert again.paths == val.paths and len(train) == 12 + 20
    # But with different settings, and in a new run, files are chosen again.
    assert len(build_datasets(split_config(tmp_path, "--seed=1"))[1]) == 10 + 3
    assert len(build_datasets(config(tmp_path, "--val-fraction=0.5"))[1]) == 14 + 4
    assert len(build_datasets(split_config(tmp_path, "--resume=never"))[1]) == 10 + 3
    os.unlink(val.paths[0])
    with pytest.raises(UserError, match=r"\.jpg is missing"):
        build_datasets(split_config(tmp_path))


def test_class_added_to_a_resumed_run_is_trained_with(tmp_path):
    for i in range(4):
        photo(tmp_path / "cat" / f"{i}.jpg")
        photo(tmp_path / "dog" / f"{i}.jpg")
    cfg = split_config(tmp_path)
    saved = build_datasets(cfg)[1].split
    photo(tmp_path / "owl" / "0.jpg")
    train, val = split_images(find_images(tmp_path, "all"), cfg, saved)
    assert train.classes == val.classes and train.labels.count(2) == 1 and 2 not in val.labels
    for path in train.paths:
        if "/dog/" in path:
            os.unlink(path)
    with pytest.raises(UserError, match=r"no images .*/dog: add"):
        split_images(find_images(tmp_path, "all"), cfg, saved)


def test_impossible_splits_are_refused(tmp_path):
    for name, count in (("cat", 1), ("dog", 2), ("owl", 1)):
        for i in range(count):
            photo(tmp_path / "train" / name / f"{i}.jpg")
    with pytest.raises(UserError, match=r"one image in \S*/cat, \S*/owl, .*: add"):
        build_datasets(split_config(tmp_path))
    with pytest.raises(UserError, match="--val-fraction"):
        build_datasets(config(tmp_path, "--val-fraction=1"))
    (tmp_path / "val").mkdir()
    with pytest.raises(UserError, match="pass --val-fraction 0"):
        build_datasets(split_config(tmp_path))


def test_odd_file_names_survive_in_a_checkpoint(tmp_path):
    latin1 = os.fsdecode(b"caf\xe9.jpg")
    for name in (latin1, "图.jpg"):
        photo(tmp_path / "cat" / "x.jpg")
        (tmp_path / "cat" / "x.jpg").rename(tmp_path / "cat" / name)
    _, val = build_datasets(config(tmp_path, "--val-fraction=0.5"))
    torch.save(val.split | {"val_files": [f"cat/{latin1}"]}, tmp_path / "x.pt")
    saved = torch.load(tmp_path / "x.pt", weights_only=True)
    files = find_images(tmp_path, "all")
    _, val = split_images(files, config(tmp_path, "--val-fraction=0.5"), saved)
    assert [os.path.basename(path) for path in val.paths] == [latin1]
