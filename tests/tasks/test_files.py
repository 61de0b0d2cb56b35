"""Finding image files, and splitting off a validation set."""

import os

import pytest
import torch

from tasks.images import build_datasets, describe
from tasks.images.decode import BadImageError, decode
from tasks.images.files import find_images
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
    assert train.classes == ["Катя"]
    assert train.paths == [f"{tmp_path}/trainset/Катя/a.JPG"]
    assert find_images(tmp_path, "val").folder.name == "test"
    photo(tmp_path / "val" / "Катя" / "c.png")
    assert find_images(tmp_path, "val").folder.name == "val"


def test_wrong_folders_are_reported(tmp_path):
    with pytest.raises(UserError, match=r"no train images.*trainset.*--data-dir"):
        find_images(tmp_path, "train")
    photo(tmp_path / "cat" / "1.jpg")
    with pytest.raises(UserError, match=r"no train images.*--val-fraction 0\.2"):
        find_images(tmp_path, "train")
    (tmp_path / "train").mkdir()
    with pytest.raises(UserError, match=r"/train .*class folders .*train/<class>/\*\.jpg"):
        find_images(tmp_path, "train")
    photo(tmp_path / "train" / "cat" / "a.jpg")
    (tmp_path / "train" / "empty").mkdir()
    with pytest.raises(UserError, match=r"no images in .*/empty \(.*\.jpg"):
        find_images(tmp_path, "train")
    (tmp_path / "train" / "empty").rmdir()
    photo(tmp_path / "val" / "dog" / "a.jpg")
    with pytest.raises(UserError, match=r"/train has .*/val lacks: cat"):
        build_datasets(config(tmp_path))
    photo(tmp_path / "val" / "cat" / "a.jpg")
    with pytest.raises(UserError, match=r"/val has .*/train lacks: dog"):
        build_datasets(config(tmp_path))


def test_what_is_not_read_is_counted_and_named(tmp_path, capsys):
    cat, dog = tmp_path / "train" / "cat", tmp_path / "train" / "dog"
    for name in ("1.jfif", "2.jpe", "3.avif", "4.JPG"):
        photo(cat / "x.jpg")
        (cat / "x.jpg").rename(cat / name)
    photo(cat / "@eaDir" / "1.jpg" / "SYNOPHOTO_THUMB_M.jpg")
    photo(tmp_path / "train" / "__MACOSX" / "cat" / "._1.jpg")
    photo(dog / "1.jpg")
    for name in ("a.HEIC", "b.heic", "notes.txt", "Thumbs.db", ".DS_Store", "README"):
        (dog / name).touch()
    files = find_images(tmp_path, "train")
    assert files.classes == ["cat", "dog"]
    assert files.labels == [0, 0, 0, 0, 1]
    said = capsys.readouterr().err
    assert "ignored 4 files" in said
    assert "2 .heic, 1 .txt, 1 without an extension" in said
    assert find_files([str(tmp_path / "train")]) == sorted(files.paths)
    assert capsys.readouterr().err == said


def test_file_names_of_any_encoding(tmp_path):
    latin1 = os.fsdecode(b"caf\xe9.jpg")  # not valid UTF-8, as in old archives
    folder = tmp_path / "Ёж"
    for name in (latin1, "图片 1.JPG", "a\nb.jpg"):
        photo(folder / "x.jpg")
        (folder / "x.jpg").rename(folder / name)
    train, val = build_datasets(config(tmp_path, "--val-fraction=0.34"))
    assert train.classes == ["Ёж"]
    assert len(train.in_memory()) == 2
    assert len(val.in_memory()) == 1
    break_file(folder / latin1)
    with pytest.raises(BadImageError, match=r"caf.\.jpg cannot be decoded") as caught:
        decode(folder / latin1)
    assert str(caught.value).encode()


def test_dangling_link_is_a_bad_file(tmp_path):
    folder(tmp_path)
    os.symlink("/nowhere.jpg", tmp_path / "train" / "dog" / "9.jpg")
    train, _ = build_datasets(config(tmp_path))
    with pytest.raises(BadImageError, match=r"9\.jpg cannot be read \(No such file"):
        train[12]
    assert len(build_datasets(config(tmp_path, "--on-bad-sample=skip"))[0]) == 12


def test_links_that_would_count_images_twice_are_refused(tmp_path):
    cat = tmp_path / "train" / "cat"
    photo(cat / "1.jpg")
    (cat / "again").symlink_to(cat)
    with pytest.raises(UserError, match=r"/again .*same folder .*symbolic link"):
        find_images(tmp_path, "train")
    (cat / "again").unlink()
    cat.rename(tmp_path / "elsewhere")
    cat.symlink_to(tmp_path / "elsewhere")  # a link alone is fine
    assert len(find_images(tmp_path, "train").paths) == 1


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
    assert val.split["val_files"] == sorted(os.path.relpath(path, tmp_path) for path in val.paths)
    assert build_datasets(split_config(tmp_path))[1].paths == val.paths
    assert build_datasets(split_config(tmp_path, "--seed=1"))[1].paths != val.paths
    # A test folder is not a class, and adding files changes the choice of few others.
    photo(tmp_path / "test" / "cat" / "0.jpg")
    for i in range(3):
        photo(tmp_path / "cat" / f"new{i}.jpg")
    _, again = build_datasets(split_config(tmp_path))
    assert len(again) == 4 + 1 + 1
    assert len(set(again.paths) & set(val.paths)) >= 3


def test_resumed_run_keeps_its_split(tmp_path):
    data, run = tmp_path / "data", tmp_path / "data-run"
    for name in ("cat", "dog"):
        for i in range(9):
            photo(data / name / f"{i}.jpg")
    train, val = build_datasets(split_config(data))
    run.mkdir()
    torch.save({"data": describe(train, val), "epoch": 1}, run / "epoch-0001.pt")
    (run / "last.pt").write_bytes(b"damaged")
    for i in range(20):
        photo(data / "cat" / f"new{i}.jpg")
    train, again = build_datasets(split_config(data))
    assert again.paths == val.paths
    assert len(train) == 12 + 20
    # But with different settings, and in a new run, files are chosen again.
    assert len(build_datasets(split_config(data, "--seed=1"))[1]) == 10 + 3
    assert len(build_datasets(config(data, "--val-fraction=0.5"))[1]) == 14 + 4
    assert len(build_datasets(split_config(data, "--resume=never"))[1]) == 10 + 3
    os.unlink(val.paths[0])
    with pytest.raises(UserError, match=r"\.jpg is missing"):
        build_datasets(split_config(data))


def test_impossible_splits_are_refused(tmp_path):
    photo(tmp_path / "train" / "cat" / "0.jpg")
    with pytest.raises(UserError, match=r"one image in \S*/cat, .*: add"):
        build_datasets(split_config(tmp_path))
    with pytest.raises(UserError, match="--val-fraction"):
        build_datasets(config(tmp_path, "--val-fraction=20"))
    (tmp_path / "val").mkdir()
    with pytest.raises(UserError, match="pass --val-fraction 0"):
        build_datasets(split_config(tmp_path))
