"""dataset=shards, and tools.shards, which makes such files."""

import sys

import pytest
import torch

from tasks.images import Settings, build_datasets, describe
from tasks.images.decode import BadImageError, decode
from tests.images import break_file, config, folder
from tools.shards import main, of_folder, write_tars
from utils.config import load_config
from utils.errors import UserError


def make(monkeypatch, *flags):
    """Run tools.shards."""
    monkeypatch.setattr(sys, "argv", ["shards", *map(str, flags)])
    main()


def settings(data, *flags):
    base = ["--dataset=shards", f"--data-dir={data}", "--image-size=16", "--device=cpu"]
    return load_config(Settings, argv=[*base, *flags])


def pixels_of(dataset):
    return sorted((dataset[i][1], dataset[i][0].tolist()) for i in range(len(dataset)))


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """A folder of images, and the same images in shards of five."""
    files = folder(tmp_path / "files", count=6)
    make(monkeypatch, tmp_path / "tars", "--images", files, "--per-shard", 5)
    return files, tmp_path / "tars"


@pytest.mark.parametrize("augment", ["none", "resized_crop"])
def test_images_are_those_of_the_folder(augment, pair):
    files, tars = pair
    train, val = build_datasets(settings(tars, f"--augment={augment}"))
    plain_train, plain_val = build_datasets(config(files, f"--augment={augment}"))
    assert train.classes == val.classes == ["cat", "dog"]
    assert train.shard_sizes == val.shard_sizes == [5, 5, 2]
    for ours, plain in ((train, plain_train), (val, plain_val)):
        assert pixels_of(ours) == pixels_of(plain)
        assert ours.labels.tolist() != plain.labels.tolist()  # the samples are mixed
    images, labels = train.get_batch(torch.arange(12), 3, 0)
    assert images.shape == (12, 3, 16, 16) and torch.equal(labels, train.labels)
    assert torch.equal(images, train.get_batch(torch.arange(12), 3, 0)[0])
    if augment == "none":
        assert torch.equal(images, torch.stack([train[i][0] for i in range(12)]))
        in_memory = train.in_memory()
        assert torch.equal(in_memory.get_batch(torch.arange(12), 3, 0)[0], images)


def test_synthetic_images_keep_their_pixels(tmp_path, monkeypatch):
    make(monkeypatch, tmp_path / "tars", "--synthetic", 40, "--image-size", 16, "--per-shard", 16)
    shards = build_datasets(settings(tmp_path / "tars"))
    flags = ["--dataset=synthetic", "--image-size=16", "--synthetic-samples=40", "--augment=none"]
    plain = build_datasets(load_config(Settings, argv=flags))
    for ours, theirs in zip(shards, plain, strict=True):
        assert ours.classes == theirs.classes
        assert pixels_of(ours) == pixels_of(theirs)


def test_what_cannot_be_written_is_refused(tmp_path, monkeypatch, capsys):
    new = tmp_path / "new"
    with pytest.raises(SystemExit):
        make(monkeypatch, new, "--synthetic", 8, "--per-shard", 0)
    assert "--per-shard must be" in capsys.readouterr().err and not new.exists()
    (tmp_path / "x.txt").write_bytes(b"caf\xe9\n\n")
    with pytest.raises(SystemExit):
        make(monkeypatch, new, "--text", tmp_path / "x.txt")
    assert "x.txt" in capsys.readouterr().err
    (new / "train-00000.tar").touch()
    with pytest.raises(SystemExit):
        make(monkeypatch, new, "--synthetic", 8)
    assert "train-00000.tar exists" in capsys.readouterr().err


def test_other_files_have_another_description(pair):
    """By which a resumed run refuses them."""
    facts = describe(*build_datasets(settings(pair[1])))
    assert facts["train_shards"].startswith("3 files, 12 samples")
    (pair[1] / "train-00002.tar").rename(pair[1] / "train-00002b.tar")
    assert describe(*build_datasets(settings(pair[1])))["train_shards"] != facts["train_shards"]


def test_damaged_images(tmp_path, capsys):
    files = folder(tmp_path / "files", count=6)
    break_file(files / "train" / "dog" / "3.jpg")
    samples, classes = of_folder(files)
    tars = tmp_path / "tars"
    tars.mkdir()
    samples["train"][2] = {"cls": b"0", "txt": b"no image"}
    for split in samples:
        write_tars(tars, split, samples[split], per_shard=5)
    train, _ = build_datasets(settings(tars, "--loader=workers"))
    assert train.classes == ["0", "1"] == [str(i) for i in range(len(classes))]
    with pytest.raises(BadImageError, match=r"00000009 in .*train-00001.tar cannot be decoded"):
        train[9]
    with pytest.raises(BadImageError, match=r"00000002 in .*train-00000.tar .*\(no file .*\.jpg"):
        train[2]
    for _ in range(2):
        train, val = build_datasets(settings(tars, "--on-bad-sample=skip"))
        assert train.shard_sizes == [4, 4, 2] and len(val) == 12
        assert train.labels.tolist() == [0] * 5 + [1] * 5
        expected = [decode(s["jpg"]) for i, s in enumerate(samples["train"]) if i not in (2, 9)]
        assert all(torch.equal(train.original(i), image) for i, image in enumerate(expected))
        assert "skipping 2 of 12 images: 00000002 in" in capsys.readouterr().err
        for listed in (tars / ".cache").glob("bad-*.json"):
            listed.write_bytes(bytes(20))  # as a loss of power leaves it: it is made again


def test_wrong_folders(tmp_path, pair):
    with pytest.raises(UserError, match=r"no files .*/train-\*.tar"):
        build_datasets(settings(tmp_path))
    with pytest.raises(UserError, match=r"val_fraction .*dataset=imagefolder"):
        build_datasets(settings(pair[1], "--val-fraction=0.5"))
    (pair[1] / "classes.txt").write_text("cat\n")
    with pytest.raises(UserError, match=r"labels .* 0 to 1, .* 1 classes"):
        build_datasets(settings(pair[1]))


def test_the_names_of_the_classes_are_utf_8(pair, tmp_path):
    names = pair[1] / "classes.txt"
    names.write_text("caf\u00e9\n\u65e5\u672c\n", encoding="utf-8-sig")  # as Notepad writes it
    assert build_datasets(settings(pair[1]))[0].classes == ["caf\u00e9", "\u65e5\u672c"]
    names.write_bytes(b"caf\xe9\nx\n")
    with pytest.raises(UserError, match=r"classes\.txt: .*UTF-8$"):
        build_datasets(settings(pair[1]))
