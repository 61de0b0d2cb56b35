"""dataset=imagefolder: files of every kind, caches, bad files, and splits."""

import os
import pickle
import random
import zlib
from dataclasses import fields
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image
from torch.utils.data import SequentialSampler
from torchvision.transforms.v2 import functional as F

from utils import image_folder
from utils.augment import CropFlip
from utils.config import load_config
from utils.data import build_datasets, build_loader, describe_data
from utils.errors import UserError
from utils.image_folder import (
    BadImageError,
    FolderDataset,
    bad_files,
    decode,
    find_images,
    is_image,
    random_box,
    split_images,
)
from utils.sampler import EpochSampler

CPU = torch.device("cpu")
PREPROCESSING = {
    "image_size": 32,
    "resize": 36,
    "interpolation": "bilinear",
    "mean": [0],
    "std": [1],
}


def photo(path, size=(20, 16), mode="RGB", **options):
    """Write an image of noise that depends on the file's name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    seed = sum(path.name.encode())
    pixels = numpy.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype="uint8")
    Image.fromarray(pixels).convert(mode).save(path, **options)


def folder(root, count=6, sizes=((20, 16), (16, 16), (40, 9))):
    """Write train and val images of a cat and a dog class."""
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            for i in range(count):
                photo(root / split / name / f"{i}.jpg", sizes[i % len(sizes)])
    return root


def break_file(path):
    path.write_bytes(path.read_bytes()[:200])


def config(root, *flags):
    base = ["--dataset=imagefolder", f"--data-dir={root}", f"--output-dir={root}-run"]
    return load_config(argv=[*base, "--image-size=16", "--device=cpu", *flags])


def test_settings_have_help_texts_and_are_flags_of_image_folders_only(tmp_path, capfd):
    settings = fields(image_folder.Settings)
    assert [f.name for f in settings] == ["val_fraction", "on_bad_sample", "cache_dir"]
    assert all(len(f.metadata["help"]) > 20 for f in settings)
    assert [f.name for f in settings if f.metadata["free"]] == ["cache_dir"]
    assert config(tmp_path, "--val-fraction=0.2").val_fraction == 0.2
    with pytest.raises(SystemExit):
        load_config(argv=["--dataset=synthetic", "--val-fraction=0.2"])
    assert "--val-fraction" in capfd.readouterr().err


# Finding files


def test_finds_either_name_of_a_split_and_only_images(tmp_path):
    photo(tmp_path / "trainset" / "Катя" / "a.JPG")
    photo(tmp_path / "trainset" / "Катя" / ".hidden.jpg")
    photo(tmp_path / "trainset" / ".ipynb_checkpoints" / "b.jpg")
    photo(tmp_path / "trainset" / "Катя" / ".thumbnails" / "c.jpg")
    (tmp_path / "trainset" / "Катя" / "notes.txt").write_text("x")
    photo(tmp_path / "test" / "Катя" / "b.png")
    train = find_images(tmp_path, "train")
    assert (train.classes, [os.path.basename(p) for p in train.paths]) == (["Катя"], ["a.JPG"])
    assert find_images(tmp_path, "val").folder.name == "test"
    photo(tmp_path / "val" / "Катя" / "c.png")
    assert find_images(tmp_path, "val").folder.name == "val"


def test_wrong_folders_are_reported(tmp_path):
    with pytest.raises(UserError, match=r"no train images.*trainset.*--data-dir"):
        find_images(tmp_path, "train")
    (tmp_path / "train").mkdir()
    with pytest.raises(UserError, match="has no class folders"):
        find_images(tmp_path, "train")
    photo(tmp_path / "train" / "cat" / "a.jpg")
    (tmp_path / "train" / "empty").mkdir()
    (tmp_path / "train" / "void").mkdir()
    with pytest.raises(UserError, match=r"no images in .*train/empty, .*train/void \("):
        find_images(tmp_path, "train")
    (tmp_path / "train" / "empty").rmdir()
    (tmp_path / "train" / "void").rmdir()
    photo(tmp_path / "val" / "dog" / "a.jpg")
    with pytest.raises(UserError, match=r"train has classes that .*val lacks: cat"):
        build_datasets(config(tmp_path))
    photo(tmp_path / "val" / "cat" / "a.jpg")
    with pytest.raises(UserError, match=r"val has classes that .*train lacks: dog"):
        build_datasets(config(tmp_path))


def test_file_names_in_any_script_and_dangling_links(tmp_path, capsys):
    latin1 = os.fsdecode(b"caf\xe9.jpg")  # not valid UTF-8, as in old archives
    for split in ("train", "val"):
        for i, name in enumerate((latin1, "图片 1.JPG", "صورة.jpg", "a\nb.jpg")):
            photo(tmp_path / split / "Ёж" / "x.jpg", (20 + i, 16))
            (tmp_path / split / "Ёж" / "x.jpg").rename(tmp_path / split / "Ёж" / name)
        photo(tmp_path / split / "犬" / "1.jpg")
    train, _, classes = build_datasets(config(tmp_path))
    assert classes == ["Ёж", "犬"]
    assert len(train.as_array()) == 5
    os.symlink("/nowhere.jpg", tmp_path / "train" / "犬" / "2.jpg")
    break_file(tmp_path / "train" / "Ёж" / latin1)
    with pytest.raises(BadImageError, match=r"caf.\.jpg cannot be decoded") as caught:
        decode(tmp_path / "train" / "Ёж" / latin1)
    assert str(caught.value).encode()
    train, _, _ = build_datasets(config(tmp_path))
    with pytest.raises(BadImageError, match=r"2\.jpg cannot be decoded \(No such file"):
        train[len(train) - 1]
    assert len(build_datasets(config(tmp_path, "--on-bad-sample=skip"))[0]) == 4
    assert "skipping 2 of 11 files" in capsys.readouterr().out


def test_links_that_would_count_images_twice_are_refused(tmp_path):
    folder(tmp_path)
    cat = next((tmp_path / "train").iterdir())
    (cat / "again").symlink_to(cat)
    with pytest.raises(UserError, match=r"again is the same folder as .*would count twice"):
        find_images(tmp_path, "train")
    (cat / "again").unlink()
    moved = tmp_path / "elsewhere"
    cat.rename(moved)
    cat.symlink_to(moved)  # a link alone is fine
    assert find_images(tmp_path, "train").paths


def test_file_that_may_not_be_read_is_not_a_broken_one(tmp_path, monkeypatch):
    """It would otherwise stay on the list of bad files when the permissions are corrected."""
    folder(tmp_path)

    def refused(path):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refused)
        with pytest.raises(UserError, match=r"cannot read .*: Permission denied"):
            build_datasets(config(tmp_path, "--on-bad-sample=skip"))
    train, _, _ = build_datasets(config(tmp_path, "--on-bad-sample=skip"))
    assert len(train) == len(build_datasets(config(tmp_path))[0])


# Decoding


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("a.jpg", "RGB"),
        ("b.jpg", "CMYK"),
        ("c.jpg", "L"),
        ("d.png", "P"),
        ("e.png", "RGBA"),
        ("f.png", "I;16"),
        ("g.bmp", "RGB"),
        ("h.webp", "RGB"),
        ("i.tiff", "RGB"),
        ("j.tiff", "I;16"),
        ("k.tiff", "CMYK"),
        ("l.png", "LA"),
        ("m.png", "1"),
        ("n.webp", "RGBA"),
        ("o.gif", "P"),
        ("p.GIF", "L"),
        ("q.jpeg", "L"),
        ("r.ppm", "RGB"),
    ],
)
@pytest.mark.parametrize("fast", [True, False])
def test_every_kind_of_image_is_decoded_in_color(name, mode, fast, tmp_path, monkeypatch):
    if not fast:  # a torchvision that no longer decodes
        monkeypatch.setattr(image_folder, "decode_image", None)
    if mode == "I;16":
        Image.fromarray(numpy.full((16, 20), 40000, dtype="uint16")).save(tmp_path / name)
        assert (decode(tmp_path / name) == 40000 // 256).all()
    else:
        photo(tmp_path / name, mode=mode)
    image = decode(tmp_path / name)
    assert (image.shape, image.dtype) == ((3, 16, 20), torch.uint8)
    assert image.float().mean() > 50
    assert is_image((tmp_path / name).relative_to(tmp_path))


def test_16_bit_pixels_of_either_byte_order_keep_their_upper_8_bits(tmp_path):
    for name, dtype in (("little.tiff", "<u2"), ("big.tiff", ">u2")):
        values = numpy.array([[0, 255, 256, 65535]], dtype=dtype)
        image = Image.frombytes("I;16B" if dtype[0] == ">" else "I;16", (4, 1), values.tobytes())
        image.save(tmp_path / name)
        assert decode(tmp_path / name)[0].tolist() == [[0, 0, 1, 255]]


@pytest.mark.parametrize("name", ["a.jpg", "a.tiff", "a.png", "a.webp"])
def test_exif_rotation_is_applied(name, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees
    photo(tmp_path / name, exif=exif)
    assert decode(tmp_path / name).shape == (3, 20, 16)


@pytest.mark.parametrize("name", ["a.gif", "a.webp", "a.png"])
def test_animation_uses_first_frame(name, tmp_path):
    frames = [Image.new("RGB", (20, 16), color) for color in ("red", "lime", "blue")]
    options = {"lossless": True} if name == "a.webp" else {}
    frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], **options)
    red = torch.tensor([255, 0, 0], dtype=torch.uint8).view(3, 1, 1).expand(3, 16, 20)
    assert torch.equal(decode(tmp_path / name), red)


@pytest.mark.parametrize("size", [(1, 1), (3000, 1), (1, 3000), (10000, 10000)])
@pytest.mark.parametrize("suffix", ["jpg", "png", "bmp"])
def test_one_pixel_one_line_and_100_megapixels(size, suffix, tmp_path, recwarn):
    if suffix == "png" and size[0] == 10000:
        pytest.skip("takes 20 seconds to write, and JPEG covers the same decoder")
    Image.new("L", size, 200).save(tmp_path / f"a.{suffix}")
    image, label = FolderDataset([tmp_path / f"a.{suffix}"], [3], PREPROCESSING)[0]
    assert image.shape == (3, 32, 32) and (image == 200).all() and label == 3
    assert not [w for w in recwarn if issubclass(w.category, Image.DecompressionBombWarning)]


def test_decompression_bomb_is_refused(tmp_path):
    """A PNG of 10 KB that claims to have 10 gigapixels."""
    photo(tmp_path / "a.png")
    data = bytearray((tmp_path / "a.png").read_bytes())
    data[16:24] = (100_000).to_bytes(4) * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4)
    (tmp_path / "a.png").write_bytes(data)
    with pytest.raises(BadImageError, match=r"a\.png cannot be decoded .*decompression bomb"):
        decode(tmp_path / "a.png")


def test_floating_point_pixels_are_refused(tmp_path):
    Image.fromarray(numpy.ones((4, 4), dtype="float32")).save(tmp_path / "a.tiff")
    with pytest.raises(BadImageError, match=r"a\.tiff cannot be decoded .*floating-point"):
        decode(tmp_path / "a.tiff")


@pytest.mark.parametrize("part", [0, 0.3, 0.9])
def test_truncated_image_is_reported(part, tmp_path):
    path = tmp_path / "a.jpg"
    photo(path)
    path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])
    with pytest.raises(BadImageError, match=r"a\.jpg cannot be decoded.*--on-bad-sample skip") as e:
        decode(path)
    assert e.value.path == str(path) and e.value.reason in str(e.value)
    copy = pickle.loads(pickle.dumps(e.value))  # as a worker process sends it
    assert (str(copy), copy.path, copy.reason) == (str(e.value), e.value.path, e.value.reason)


# Augmentation


@pytest.mark.parametrize("size", [(1, 1), (500, 400), (1, 300), (300, 1), (224, 224)], ids=str)
def test_random_boxes_are_inside_the_image_and_follow_the_rule(size):
    draws = random.Random(0)
    boxes = [random_box(*size, draws) for _ in range(300)]
    for top, left, h, w in boxes:
        assert 0 <= top <= top + h <= size[0] and 0 <= left <= left + w <= size[1] and h and w
    if min(size) > 1:
        areas = [h * w / (size[0] * size[1]) for _, _, h, w in boxes]
        assert 0.07 < min(areas) < 0.2 and 0.8 < max(areas) <= 1
        assert all(0.72 < w / h < 1.36 for _, _, h, w in boxes)


@pytest.mark.parametrize("augment", ["none", "crop_flip", "resized_crop"])
def test_batches_depend_on_seed_epoch_and_index_alone(augment, tmp_path):
    train, val, _ = build_datasets(config(folder(tmp_path), f"--augment={augment}"))
    everything = torch.arange(12)
    images, labels = train.get_batch(everything, 3)
    assert images.dtype == torch.uint8 and images.shape == (12, 3, 16, 16)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert labels.tolist() == [0] * 6 + [1] * 6 and labels.dtype == torch.int64
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    parts = [train.get_batch(part, 3)[0] for part in order.split(5)]
    assert torch.equal(torch.cat(parts), images[order])
    plain = torch.stack([train[i][0] for i in range(12)])
    if augment == "none":
        assert torch.equal(images, plain)
        return
    assert not torch.equal(images, train.get_batch(everything, 4)[0])
    other, _, _ = build_datasets(config(tmp_path, f"--augment={augment}", "--seed=1"))
    assert not torch.equal(images, other.get_batch(everything, 3)[0])
    if augment == "crop_flip":
        assert torch.equal(images, CropFlip(12, seed=0)(plain, everything, epoch=3))
    assert torch.equal(val.get_batch(everything, 3)[0], torch.stack([val[i][0] for i in range(12)]))


def test_resized_crop_uses_the_original_image(tmp_path):
    train, val, _ = build_datasets(config(folder(tmp_path), "--augment=resized_crop"))
    assert (val.resize, val[0][0].shape) == (18, (3, 16, 16))
    images, _ = train.get_batch(torch.tensor([2]), 0)
    draws, original = random.Random(hash((0, 0, 2))), decode(train.paths[2])
    expected = F.resized_crop(original, *random_box(*original.shape[1:], draws), [16, 16])
    flipped = F.horizontal_flip(expected)
    assert torch.equal(images[0], flipped if draws.random() < 0.5 else expected)
    assert train.as_array() is None and val.as_array() is not None


# Datasets


def test_preprocessing_follows_the_weights(tmp_path):
    cfg, inputs = config(folder(tmp_path)), {"mean": [0.5] * 3, "std": [0.1] * 3}

    def build(expected):
        vars(cfg)["weights_inputs"] = expected  # a property of the Settings of --weights
        return image_folder.build(cfg)

    train, val, _ = build(inputs | {"image_size": 16, "resize": 20})
    expected = inputs | {"image_size": 16, "resize": 20, "interpolation": "bilinear"}
    assert train.preprocessing == val.preprocessing == expected
    assert (val.mean, val.std, val.size, val.resize) == ([0.5] * 3, [0.1] * 3, 16, 20)
    # Weights for another size do not determine how much of the image is cropped.
    inputs |= {"image_size": 224, "resize": 232, "interpolation": "bicubic"}
    expected |= {"resize": 16, "interpolation": "bicubic"}
    assert build(inputs)[0].preprocessing == expected
    neutral = build({})[0].preprocessing
    assert neutral["mean"] == [0.485, 0.456, 0.406] and neutral["std"] == [0.229, 0.224, 0.225]
    assert (train.augment, val.augment, train.seed) == ("crop_flip", "none", 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_array_and_workers_give_the_same_batches(workers, tmp_path):
    folder(tmp_path, count=10)
    batches = []
    for flags in (["--loader=device"], ["--loader=workers", f"--num-workers={workers}"]):
        cfg = config(tmp_path, "--global-batch-size=6", *flags)
        train, _, _ = build_datasets(cfg)
        sampler = EpochSampler(train, seed=cfg.seed)
        loader = build_loader(train, sampler, 6, CPU, cfg, train=True)
        for epoch in (0, 1):
            sampler.set_epoch(epoch)
            batches.append(list(loader))
    first, second, same_first, same_second = batches
    assert len(first) == 3
    for ours, theirs in zip(first + second, same_first + same_second, strict=True):
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    assert not torch.equal(first[0][0], second[0][0])


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_file_read_by_a_worker_is_one_line(workers, tmp_path):
    break_file(folder(tmp_path) / "train" / "dog" / "3.jpg")
    cfg = config(tmp_path, "--loader=workers", f"--num-workers={workers}", "--global-batch-size=4")
    train, _, _ = build_datasets(cfg)
    with pytest.raises(BadImageError, match=r"dog/3\.jpg") as caught:
        list(build_loader(train, SequentialSampler(train), 4, CPU, cfg))
    assert "\n" not in str(caught.value)


# The cache, and bad files


def test_bad_files_are_skipped_and_listed(tmp_path, capsys):
    break_file(folder(tmp_path) / "train" / "dog" / "3.jpg")
    with pytest.raises(BadImageError, match=r"dog/3\.jpg"):
        build_datasets(config(tmp_path))[0].as_array()
    cfg = config(tmp_path, "--on-bad-sample=skip")
    train, val, _ = build_datasets(cfg)
    assert (len(train), len(val), train.labels.tolist()) == (11, 12, [0] * 6 + [1] * 5)
    out = capsys.readouterr().out
    assert "skipping 1 of 24 files" in out and "dog/3.jpg" in out
    assert len(train.as_array()) == 11
    for path in (tmp_path / "val").rglob("*.jpg"):
        break_file(path)
    with pytest.raises(UserError, match=r"none of the images in .*val.cat, .*val.dog can be"):
        build_datasets(cfg)


def test_folder_is_decoded_once_until_a_file_changes(tmp_path, monkeypatch):
    cfg = config(folder(tmp_path), "--augment=none")
    calls = []
    monkeypatch.setattr(image_folder, "decode", lambda path: calls.append(path) or decode(path))
    everything = torch.arange(12)
    for expected in (12, 12):
        train, _, _ = build_datasets(cfg)
        images, labels = train.as_array().get_batch(everything, 0)
        assert len(calls) == expected
    assert torch.equal(images, train.get_batch(everything, 0)[0])
    assert torch.equal(labels, train.labels)
    calls.clear()
    photo(tmp_path / "train" / "cat" / "0.jpg", (30, 30))
    build_datasets(cfg)[0].as_array()
    assert len(calls) == 12
    for path in (tmp_path / ".cache").iterdir():  # a cache that was cut short is not used
        os.truncate(path, 100)
    assert len(build_datasets(cfg)[0].as_array()) == 12 and len(calls) == 24


def test_cache_folder_can_be_moved_and_must_be_writable(tmp_path):
    folder(tmp_path / "images")
    build_datasets(config(tmp_path / "images", f"--cache-dir={tmp_path / 'c'}"))[0].as_array()
    assert len(list((tmp_path / "c").glob("decoded-*.u8"))) == 1
    assert not (tmp_path / "images" / ".cache").exists()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="pass --cache-dir with a writable folder"):
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


# Splitting off a validation set


def split_config(root, *flags):
    return config(root, "--val-fraction=0.34", *flags)


@pytest.mark.parametrize("inside", ["", "train"])
def test_validation_images_are_split_off_per_class(inside, tmp_path):
    for name, count in (("cat", 9), ("dog", 3), ("owl", 2)):
        for i in range(count):
            photo(tmp_path / inside / name / f"{i}.jpg")
    train, val, classes = build_datasets(split_config(tmp_path))
    assert classes == ["cat", "dog", "owl"]
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
        photo(tmp_path / inside / "cat" / f"new{i}.jpg")
    again = build_datasets(split_config(tmp_path))[1]
    kept = set(again.paths) & set(val.paths)
    assert len(again) == 4 + 1 + 1 and len(kept) >= 3


def test_resumed_run_keeps_its_split(tmp_path):
    for name in ("cat", "dog"):
        for i in range(9):
            photo(tmp_path / name / f"{i}.jpg")
    train, val, classes = build_datasets(split_config(tmp_path))
    run = tmp_path.with_name(f"{tmp_path.name}-run")
    run.mkdir()
    torch.save({"data": describe_data(train, val, classes), "epoch": 1}, run / "epoch-0001.pt")
    (run / "last.pt").write_bytes(b"damaged")
    for i in range(20):
        photo(tmp_path / "cat" / f"new{i}.jpg")
    train, again, _ = build_datasets(split_config(tmp_path))
    assert again.paths == val.paths and len(train) == 12 + 20
    # But with other settings, and in a new run, files are chosen again.
    assert len(build_datasets(split_config(tmp_path, "--seed=1"))[1]) == 10 + 3
    assert len(build_datasets(config(tmp_path, "--val-fraction=0.5"))[1]) == 14 + 4
    assert len(build_datasets(split_config(tmp_path, "--resume=never"))[1]) == 10 + 3
    os.unlink(val.paths[0])
    with pytest.raises(UserError, match=r"is missing .* one of 1 such files.*--resume never"):
        build_datasets(split_config(tmp_path))


def test_class_added_to_a_resumed_run_is_trained_with(tmp_path):
    for i in range(4):
        photo(tmp_path / "cat" / f"{i}.jpg")
        photo(tmp_path / "dog" / f"{i}.jpg")
    cfg = split_config(tmp_path)
    saved = image_folder.build(cfg)[1].split
    photo(tmp_path / "owl" / "0.jpg")
    train, val = split_images(find_images(tmp_path, "all"), cfg, saved)
    assert train.classes == val.classes and train.labels.count(2) == 1 and 2 not in val.labels
    for path in train.paths:
        if "/dog/" in path:
            os.unlink(path)
    with pytest.raises(UserError, match=r"no images are left to train with in .*dog: add some"):
        split_images(find_images(tmp_path, "all"), cfg, saved)


def test_impossible_splits_are_refused(tmp_path, capfd):
    photo(tmp_path / "train" / "cat" / "0.jpg")
    with pytest.raises(UserError, match=r"train/cat has a single image"):
        build_datasets(split_config(tmp_path))
    with pytest.raises(SystemExit):
        config(tmp_path, "--val-fraction=1")
    assert "val_fraction=1.0 leaves nothing to train on" in capfd.readouterr().err
    (tmp_path / "val").mkdir()
    with pytest.raises(UserError, match="pass --val-fraction 0"):
        build_datasets(split_config(tmp_path))


def test_odd_file_names_survive_in_a_checkpoint(tmp_path):
    latin1 = os.fsdecode(b"caf\xe9.jpg")
    for name in (latin1, "图.jpg"):
        photo(tmp_path / "cat" / "x.jpg")
        (tmp_path / "cat" / "x.jpg").rename(tmp_path / "cat" / name)
    _, val, _ = build_datasets(config(tmp_path, "--val-fraction=0.5"))
    torch.save(val.split | {"val_files": [f"cat/{latin1}"]}, tmp_path / "x.pt")
    saved = torch.load(tmp_path / "x.pt", weights_only=True)
    files = find_images(tmp_path, "all")
    _, val = split_images(files, config(tmp_path, "--val-fraction=0.5"), saved)
    assert [os.path.basename(path) for path in val.paths] == [latin1]
