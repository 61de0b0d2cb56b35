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
    assert pixels_of(train) == pixels_of(plain_train)
    assert pixels_of(val) == pixels_of(plain_val)
    assert train.labels.tolist() != plain_train.labels.tolist()  # the samples are mixed
    images, labels = train.get_batch(torch.arange(12), 3, 0)
    assert torch.equal(labels, train.labels)
    assert torch.equal(images, train.get_batch(torch.arange(12), 3, 0)[0])
    if augment == "none":
        assert torch.equal(images, torch.stack([train[i][0] for i in range(12)]))
        assert torch.equal(images, train.in_memory().get_batch(torch.arange(12), 3, 0)[0])


def test_synthetic_images_keep_their_pixels(tmp_path, monkeypatch):
    make(monkeypatch, tmp_path / "tars", "--synthetic", 40, "--image-size", 16, "--per-shard", 16)
    train, val = build_datasets(settings(tmp_path / "tars"))
    flags = ["--dataset=synthetic", "--image-size=16", "--synthetic-samples=40", "--augment=none"]
    plain_train, plain_val = build_datasets(load_config(Settings, argv=flags))
    assert train.classes == plain_train.classes
    assert pixels_of(train) == pixels_of(plain_train)
    assert pixels_of(val) == pixels_of(plain_val)


def test_shards_of_an_earlier_call_are_kept(tmp_path, monkeypatch, capsys):
    (tmp_path / "train-00000.tar").touch()
    with pytest.raises(SystemExit):
        make(monkeypatch, tmp_path, "--synthetic", 8)
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
    samples, _ = of_folder(files)
    samples["train"][2] = {"cls": b"0", "txt": b"no image"}
    tars = tmp_path / "tars"
    tars.mkdir()
    write_tars(tars, "train", samples["train"], per_shard=5)
    write_tars(tars, "val", samples["val"], per_shard=5)
    train, _ = build_datasets(settings(tars, "--loader=workers"))
    assert train.classes == ["0", "1"]
    with pytest.raises(BadImageError, match=r"00000009 in .*train-00001.tar cannot be decoded"):
        train[9]
    with pytest.raises(BadImageError, match=r"00000002 in .*train-00000.tar .*\(no file .*\.jpg"):
        train[2]
    train, val = build_datasets(settings(tars, "--on-bad-sample=skip"))
    assert train.shard_sizes == [4, 4, 2]
    assert train.labels.tolist() == [0] * 5 + [1] * 5
    assert len(val) == 12
    good = [sample for i, sample in enumerate(samples["train"]) if i not in (2, 9)]
    for i in range(10):
        assert torch.equal(train.original(i), decode(good[i]["jpg"]))
    assert "skipping 2 of 12 images: 00000002 in" in capsys.readouterr().err


def test_wrong_folders(tmp_path, pair):
    (pair[0] / "val" / "cat").rename(tmp_path / "cat")
    with pytest.raises(UserError, match=r"/train has .*/val lacks: cat"):  # cat 0, dog 0 in val
        of_folder(pair[0])
    with pytest.raises(UserError, match=r"no files .*/train-\*.tar"):
        build_datasets(settings(tmp_path))
    with pytest.raises(UserError, match=r"val_fraction .*dataset=imagefolder"):
        build_datasets(settings(pair[1], "--val-fraction=0.5"))
    (pair[1] / "classes.txt").write_text("cat\n")
    with pytest.raises(UserError, match=r"labels .* 0 to 1, .* 1 classes"):
        build_datasets(settings(pair[1]))
