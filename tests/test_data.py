"""Images, sets and loaders: the same batches whoever makes them, and bad files named."""

import hashlib
import os
import pickle
import tarfile
import zlib
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
import torchvision
from PIL import Image
from torch.utils.data import DistributedSampler, SequentialSampler
from torchvision.transforms.v2 import functional as F

import utils.augment
import utils.images
import utils.loaders
import utils.threads
from tests.conftest import threads
from tests.launch import run_ranks, web_server
from tools.runs import flag_list
from utils.augment import crop_flip, random_bits, resized_crop_boxes
from utils.config import load_config
from utils.datasets import IMAGENET, FolderSet, SyntheticSet, build_datasets
from utils.distributed import PeerError, UserError
from utils.images import decode, find_bad, find_images
from utils.loaders import EpochSampler, WorkersLoader, build_loader
from utils.split import write_split

CPU = torch.device("cpu")


def config(*flags):
    return load_config(["--dataset=synthetic", "--synthetic-samples=50", *flags])


def photo(path, size=(20, 16), mode="RGB", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    number = sum(path.name.encode())
    pixels = numpy.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype="uint8")
    Image.fromarray(pixels).convert(mode).save(path, **options)


def folder(root, count=6, sizes=((20, 16), (16, 16), (40, 9))):
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            for i in range(count):
                photo(root / split / name / f"{i}.jpg", sizes[i % len(sizes)])
    return root


# Augmentation


@pytest.mark.parametrize("size", [32, 16, 9])
def test_cpu_and_gpu_crop_alike(size):
    generator = torch.Generator().manual_seed(size)
    padded = torch.randint(0, 256, (64, size + 4, size + 4, 3), generator=generator).byte()
    corners = torch.randint(0, 5, (64, 2), generator=generator)
    mirrored = torch.rand(64, generator=generator) < 0.5
    ways = utils.augment._crop_flip_on_cpu, utils.augment._crop_flip_on_gpu
    here, there = (way(padded, size, corners, mirrored) for way in ways)
    assert torch.equal(here, there)
    for i, ((top, left), flipped) in enumerate(zip(corners.tolist(), mirrored, strict=True)):
        crop = padded[i, top : top + size, left : left + size]
        assert torch.equal(here[i], crop.flip(1) if flipped else crop)


def test_random_bits_never_change_and_differ_by_everything():
    bits = random_bits(1, 2, torch.tensor([3, 4]), 2)
    digest = hashlib.sha256(bits.numpy().tobytes()).hexdigest()
    assert digest[:16] == GOLDEN_BITS
    many = torch.cat(
        [random_bits(s, e, torch.arange(500), 4).flatten() for s in (0, 1) for e in (0, 1, 2)]
    )
    assert len(many.unique()) == len(many)
    assert abs(many.double().mean() / 2**62 - 0.5) < 0.01


GOLDEN_BITS = "d450f2e5aff97f4b"


def test_crop_flip_equals_one_image_at_a_time():
    images = torch.randint(0, 256, (400, 3, 16, 16), dtype=torch.uint8)
    indices = torch.randperm(400)
    result = crop_flip(images, indices, seed=5, epoch=2)
    bits = random_bits(5, 2, indices, 3).tolist()
    for image, (top, left, mirror), got in zip(images, bits, result, strict=True):
        padded = torch.nn.functional.pad(image, (2, 2, 2, 2))
        want = F.crop(padded, top % 5, left % 5, 16, 16)
        assert torch.equal(got, F.horizontal_flip(want) if mirror % 2 else want)
    order = torch.randperm(400)
    parts = [crop_flip(images[i], indices[i], 5, 2) for i in order.split(33)]
    assert torch.equal(torch.cat(parts), result[order])
    assert 150 < sum(mirror % 2 for *_, mirror in bits) < 250
    assert not torch.equal(result, crop_flip(images, indices, 5, 3))


def test_crops_lie_inside_and_follow_the_rule():
    sizes = [(1, 1), (500, 400), (1, 300), (300, 1), (224, 224)] * 100
    boxes = resized_crop_boxes(sizes, torch.arange(500), seed=0, epoch=0)
    assert boxes == resized_crop_boxes(sizes, torch.arange(500), seed=0, epoch=0)
    for (height, width), (top, left, h, w, _) in zip(sizes, boxes, strict=True):
        assert 0 <= top <= top + h <= height and 0 <= left <= left + w <= width and h and w
    areas = [h * w / (500 * 400) for _, _, h, w, _ in boxes[1::5]]
    assert 0.07 < min(areas) < 0.2 and 0.8 < max(areas) <= 1
    assert 30 < sum(mirror for *_, mirror in boxes[1::5]) < 70


# Files


def test_both_names_of_the_splits_and_only_images(tmp_path):
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


def test_bad_folders_are_named(tmp_path):
    with pytest.raises(UserError, match=r"no train images.*trainset.*--data-dir"):
        find_images(tmp_path, "train")
    (tmp_path / "train").mkdir()
    with pytest.raises(UserError, match="holds no class folders"):
        find_images(tmp_path, "train")
    photo(tmp_path / "train" / "cat" / "a.jpg")
    (tmp_path / "train" / "empty").mkdir()
    (tmp_path / "train" / "void").mkdir()
    with pytest.raises(UserError, match=r"no images in .*train/empty, .*train/void \("):
        find_images(tmp_path, "train")
    (tmp_path / "train" / "empty").rmdir()
    (tmp_path / "train" / "void").rmdir()
    photo(tmp_path / "val" / "dog" / "a.jpg")
    cfg = config("--dataset=imagefolder", f"--data-dir={tmp_path}")
    with pytest.raises(UserError, match=r"train has cat; only .*val has dog"):
        build_datasets(cfg)


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
def test_every_kind_of_image_comes_out_in_colour(name, mode, fast, tmp_path, monkeypatch):
    if not fast:  # a torchvision that decodes no more
        monkeypatch.setattr(utils.images, "decode_image", None)
    if mode == "I;16":
        Image.fromarray(numpy.full((16, 20), 40000, dtype="uint16")).save(tmp_path / name)
        assert (decode(tmp_path / name) == 40000 // 256).all()
    else:
        photo(tmp_path / name, mode=mode)
    image = decode(tmp_path / name)
    assert (image.shape, image.dtype) == ((3, 16, 20), torch.uint8)
    assert image.float().mean() > 50
    assert find_images_in(tmp_path) == [name]


def find_images_in(folder):
    return [path.name for path in folder.iterdir() if utils.images.is_image(Path(path.name))]


@pytest.mark.parametrize("name", ["a.jpg", "a.tiff", "a.png", "a.webp"])
def test_a_rotated_photo_stands_upright(name, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    photo(tmp_path / name, exif=exif)
    assert decode(tmp_path / name).shape == (3, 20, 16)


@pytest.mark.parametrize("name", ["a.gif", "a.webp", "a.png"])
def test_of_an_animation_the_first_frame(name, tmp_path):
    frames = [Image.new("RGB", (20, 16), colour) for colour in ("red", "lime", "blue")]
    options = {"lossless": True} if name == "a.webp" else {}
    frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], **options)
    red = torch.tensor([255, 0, 0], dtype=torch.uint8).view(3, 1, 1).expand(3, 16, 20)
    assert torch.equal(decode(tmp_path / name), red)


@pytest.mark.parametrize("size", [(1, 1), (3000, 1), (1, 3000), (10000, 10000)])
@pytest.mark.parametrize("ending", ["jpg", "png", "bmp"])
def test_one_pixel_one_line_and_a_hundred_megapixels(size, ending, tmp_path, recwarn):
    if ending == "png" and size[0] == 10000:
        pytest.skip("the same decoder as for JPEG, and 20 seconds to write")
    Image.new("L", size, 200).save(tmp_path / f"a.{ending}")
    images = FolderSet([tmp_path / f"a.{ending}"], ["x"], [0], IMAGENET, 32, 36)
    assert images[0][0].shape == (3, 32, 32) and (images[0][0] == 200).all()
    assert not [w for w in recwarn if issubclass(w.category, Image.DecompressionBombWarning)]


def test_what_would_fill_the_memory_is_refused(tmp_path):
    """A PNG of 10 KB that claims 10 gigapixels."""
    photo(tmp_path / "a.png")
    data = bytearray((tmp_path / "a.png").read_bytes())
    data[16:24] = (100_000).to_bytes(4) * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4)
    (tmp_path / "a.png").write_bytes(data)
    with pytest.raises(UserError, match=r"a\.png cannot be decoded .*decompression bomb"):
        decode(tmp_path / "a.png")


def test_pixels_of_unknown_range_are_refused(tmp_path):
    Image.fromarray(numpy.ones((4, 4), dtype="float32")).save(tmp_path / "a.tiff")
    with pytest.raises(UserError, match=r"a\.tiff cannot be decoded .*floating-point"):
        decode(tmp_path / "a.tiff")


def test_names_in_any_script_and_links_to_nowhere(tmp_path, capsys):
    strange = os.fsdecode(b"caf\xe9.jpg")  # Latin-1, as an old archive leaves it
    for split in ("train", "val"):
        for i, name in enumerate((strange, "图片 1.JPG", "صورة.jpg", "a\nb.jpg")):
            photo(tmp_path / split / "Ёж" / "x.jpg", (20 + i, 16))
            (tmp_path / split / "Ёж" / "x.jpg").rename(tmp_path / split / "Ёж" / name)
        photo(tmp_path / split / "犬" / "1.jpg")
    cfg = config("--dataset=imagefolder", f"--data-dir={tmp_path}", "--image-size=16")
    train, _ = build_datasets(cfg)
    assert train.classes == ["Ёж", "犬"]
    assert train.resident(tmp_path / "cache").shape == (5, 3, 16, 16)
    os.symlink("/nowhere.jpg", tmp_path / "train" / "犬" / "2.jpg")
    break_file(tmp_path / "train" / "Ёж" / strange)
    with pytest.raises(UserError, match=r"caf.\.jpg cannot be decoded") as caught:
        decode(tmp_path / "train" / "Ёж" / strange)
    assert str(caught.value).encode()
    with pytest.raises(UserError, match=r"2\.jpg cannot be decoded \(No such file"):
        build_datasets(cfg)[0].stack([len(build_datasets(cfg)[0]) - 1])
    cfg = replace(cfg, on_bad_sample="skip")
    assert len(build_datasets(cfg)[0]) == 4
    assert "left out: 2 of 11 files" in capsys.readouterr().out


# A validation set out of the training images


def split_flags(root, *flags):
    base = ("--dataset=imagefolder", "--image-size=16", "--val-fraction=0.34")
    return (*base, f"--data-dir={root}", f"--output-dir={root}-run", *flags)


@pytest.mark.parametrize("inside", ["", "train"])
def test_a_set_without_validation_images_is_split(inside, tmp_path):
    for name, count in (("cat", 9), ("dog", 3), ("owl", 2)):
        for i in range(count):
            photo(tmp_path / inside / name / f"{i}.jpg")
    cfg = config(*split_flags(tmp_path))
    train, val = build_datasets(cfg)
    assert train.labels.bincount().tolist() == [6, 2, 1] and val.classes == train.classes
    assert val.labels.bincount().tolist() == [3, 1, 1]
    assert not set(train.paths) & set(val.paths)
    assert run_ranks(lambda rank: build_datasets(cfg)[1].paths, 2) == [val.paths] * 2
    other = build_datasets(config(*split_flags(tmp_path, "--seed=1")))[1]
    assert other.paths != val.paths
    # What is written stays, whatever comes; but for other settings, and for a new start.
    photo(tmp_path / "test" / "cat" / "0.jpg")
    Path(f"{tmp_path}-run").mkdir()
    write_split(cfg, val)
    for i in range(20):
        photo(tmp_path / inside / "cat" / f"new{i}.jpg")
    train, again = build_datasets(cfg)
    assert again.paths == val.paths and len(train) == 9 + 20
    assert build_datasets(config(*split_flags(tmp_path, "--seed=1")))[1].paths != val.paths
    anew = build_datasets(config(*split_flags(tmp_path, "--resume=never")))[1]
    assert len(anew) == 10 + 1 + 1
    os.unlink(val.paths[0])
    with pytest.raises(UserError, match=r"is gone or broken, one of 1 that .*split\.json"):
        build_datasets(cfg)


def test_sets_that_cannot_be_split(tmp_path):
    photo(tmp_path / "train" / "cat" / "0.jpg")
    with pytest.raises(UserError, match=r"train/cat holds one image"):
        build_datasets(config(*split_flags(tmp_path)))
    (tmp_path / "val").mkdir()
    with pytest.raises(UserError, match="pass --val-fraction 0"):
        build_datasets(config(*split_flags(tmp_path)))


@pytest.mark.parametrize("part", [0, 0.3, 0.9])
def test_a_broken_image_is_named(part, tmp_path):
    path = tmp_path / "a.jpg"
    photo(path)
    path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])
    with pytest.raises(UserError, match=r"a\.jpg cannot be decoded.*--on-bad-sample skip"):
        decode(path)


# Sets


def break_file(path):
    path.write_bytes(path.read_bytes()[:200])


def test_bad_files_are_left_out_and_listed(tmp_path, capsys):
    break_file(folder(tmp_path) / "train" / "dog" / "3.jpg")
    flags = ("--dataset=imagefolder", f"--data-dir={tmp_path}", "--image-size=16")
    with pytest.raises(UserError, match=r"dog/3\.jpg"):
        build_datasets(config(*flags))[0].resident(tmp_path / "cache")
    train, val = build_datasets(config(*flags, "--on-bad-sample=skip"))
    assert (len(train), len(val), train.labels.tolist()) == (11, 12, [0] * 6 + [1] * 5)
    assert "1 of 24 files" in capsys.readouterr().out
    assert train.resident(tmp_path / "cache").shape == (11, 3, 16, 16)
    for path in (tmp_path / "val").rglob("*.jpg"):
        break_file(path)
    with pytest.raises(UserError, match=r"none of the images of .*val.cat"):
        build_datasets(config(*flags, "--on-bad-sample=skip"))


def test_a_folder_is_decoded_once_until_a_file_changes(tmp_path, monkeypatch):
    cfg = config("--dataset=imagefolder", f"--data-dir={folder(tmp_path)}", "--image-size=16")
    calls = []
    monkeypatch.setattr(
        utils.images, "decode", lambda path, real=decode: calls.append(path) or real(path)
    )
    monkeypatch.setattr("utils.datasets.decode", utils.images.decode)
    cache = tmp_path / "cache"
    for expected in (12, 12):
        images = build_datasets(cfg)[0].resident(cache)
        assert len(calls) == expected
    assert torch.equal(images, build_datasets(cfg)[0].stack(range(12)))
    calls.clear()
    photo(tmp_path / "train" / "cat" / "0.jpg", (30, 30))
    build_datasets(cfg)[0].resident(cache)
    assert len(calls) == 12
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="pass --cache-dir, or --loader workers"):
        find_bad(["/etc/hostname"], tmp_path / "file" / "cache")


def test_large_folders_are_read_by_workers(tmp_path):
    for i in range(1100):
        photo(tmp_path / f"{i}.jpg", (2, 2))
    paths = [str(path) for path in sorted(tmp_path.glob("*.jpg"))]
    break_file(tmp_path / "77.jpg")
    os.truncate(tmp_path / "800.jpg", 20)
    bad = find_bad(paths, tmp_path / "cache")
    assert str(tmp_path / "800.jpg") in bad and len(bad) <= 2


def test_synthetic_images_never_change():
    data = SyntheticSet(64, 32, seed=0, split=0)
    images = data.stack(range(64))
    assert hashlib.sha256(images.numpy().tobytes()).hexdigest()[:16] == GOLDEN_IMAGES
    assert torch.equal(data[7][0], images[7]) and data[7][1] == data.labels[7]
    assert torch.equal(data.resident(None), images)
    assert not torch.equal(SyntheticSet(64, 32, 0, 1).stack(range(64)), images)
    assert not torch.equal(SyntheticSet(64, 32, 1, 0).stack(range(64)), images)
    counts = SyntheticSet(10000, 8, 0, 0).labels.bincount()
    assert len(counts) == 10 and counts.min() > 850


GOLDEN_IMAGES = "658ed94847ff9eba"


@pytest.fixture
def cifar_server(tmp_path, monkeypatch):
    """A CIFAR-10 of 12 images behind a server on this machine; yields (url, requests)."""
    site = tmp_path / "site"
    base = site / "cifar-10-batches-py"
    base.mkdir(parents=True)
    rng = numpy.random.default_rng(0)
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    for name in names:
        batch = {"data": rng.integers(0, 256, (2, 3072), dtype="uint8"), "labels": [3, 5]}
        (base / name).write_bytes(pickle.dumps(batch))
    labels = {"label_names": [f"c{i}" for i in range(10)]}
    (base / "batches.meta").write_bytes(pickle.dumps(labels))
    with tarfile.open(site / "cifar-10-python.tar.gz", "w:gz") as archive:
        archive.add(base, base.name)

    def md5(path):
        return hashlib.md5(path.read_bytes()).hexdigest()

    requests = tmp_path / "requests"
    with web_server(site, requests) as address:
        known = torchvision.datasets.CIFAR10
        url = f"{address}/cifar-10-python.tar.gz"
        monkeypatch.setattr(known, "url", url)
        monkeypatch.setattr(known, "tgz_md5", md5(site / "cifar-10-python.tar.gz"))
        monkeypatch.setattr(known, "train_list", [(n, md5(base / n)) for n in names[:5]])
        monkeypatch.setattr(known, "test_list", [("test_batch", md5(base / "test_batch"))])
        meta = {"filename": "batches.meta", "key": "label_names", "md5": md5(base / "batches.meta")}
        monkeypatch.setattr(known, "meta", meta)
        yield url, requests


def cifar_on_ranks(data_dir, ranks):
    def body(rank):
        try:
            train, val = build_datasets(config("--dataset=cifar10", f"--data-dir={data_dir}"))
        except Exception as error:
            return error
        return len(train), len(val), int(train.resident(None).sum()), train.meta()["image_size"]

    return run_ranks(body, ranks)


def test_one_download_a_node(cifar_server, tmp_path):
    results = cifar_on_ranks(tmp_path / "data", 3)
    assert results == [results[0]] * 3 and results[0][:2] == (10, 2)
    assert len(cifar_server[1].read_text().splitlines()) == 1
    cifar_on_ranks(tmp_path / "data", 2)
    assert len(cifar_server[1].read_text().splitlines()) == 1


def test_a_download_that_fails_ends_all_ranks(cifar_server, tmp_path, monkeypatch):
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "tgz_md5", "0" * 32)
    first, *others = cifar_on_ranks(tmp_path / "data", 3)
    assert isinstance(first, UserError) and cifar_server[0] in str(first)
    assert [type(error) for error in others] == [PeerError, PeerError]


# Loaders


def batches(cfg, train_set, rank=0, ranks=1, epochs=(0, 1), kind=None):
    sampler = DistributedSampler(train_set, ranks, rank, seed=cfg.seed, drop_last=True)
    if ranks == 1:
        sampler = EpochSampler(train_set, cfg.seed)
    loader = build_loader(train_set, sampler, cfg, CPU, train=True)
    assert kind in (None, loader.name)
    found = []
    for epoch in epochs:
        sampler.set_epoch(epoch)
        found.append(list(loader))
        assert len(found[-1]) == len(loader)
    return found


@pytest.mark.parametrize("dataset", ["synthetic", "imagefolder"])
@pytest.mark.parametrize("workers", [0, 2])
def test_both_loaders_and_any_world_give_the_same_batches(dataset, workers, tmp_path):
    flags = [f"--dataset={dataset}", "--image-size=16", "--global-batch-size=6"]
    if dataset == "imagefolder":
        flags.append(f"--data-dir={folder(tmp_path, count=10)}")
    cfg = config(*flags, "--loader=device")
    other = config(*flags, "--loader=workers", f"--num-workers={workers}")
    train_set, _ = build_datasets(cfg)
    whole = batches(cfg, train_set, kind="device")
    state = torch.get_rng_state()
    same = batches(other, train_set, kind="workers")
    assert torch.equal(state, torch.get_rng_state())
    for ours, theirs in zip(whole[0] + whole[1], same[0] + same[1], strict=True):
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    assert not torch.equal(whole[0][0][0], whole[1][0][0])
    assert whole[0][0][0].is_contiguous(memory_format=torch.channels_last)

    def body(rank):
        images = [i.numpy() for epoch in batches(other, train_set, rank, 3) for i, _ in epoch]
        return numpy.stack(images)

    shares = run_ranks(body, 3)
    for step, (images, _) in enumerate(whole[0] + whole[1]):
        for rank in range(3):
            assert numpy.array_equal(shares[rank][step], images[rank::3].numpy())


def test_a_resumed_epoch_goes_on_with_the_very_next_batch_at_any_world_size():
    """Six batches of an epoch, cut after 2 on two ranks and after 4 on one; three finish."""

    def body(rank, world_size, state, steps, kind):
        flags = ["--global-batch-size=6", "--synthetic-samples=40", "--image-size=8", "--audit"]
        cfg = config(*flags, f"--loader={kind}", "--num-workers=1")
        train_set, _ = build_datasets(cfg)
        sampler = DistributedSampler(train_set, world_size, rank, seed=cfg.seed, drop_last=True)
        loader = build_loader(train_set, sampler, cfg, CPU, train=True)
        if state:
            loader.load_state_dict(state)
        batches, left = [], None
        for images, _ in loader:
            batches.append(images.sum((1, 2, 3)).tolist())
            if len(batches) == steps:
                left = loader.state_dict(), torch.cat(loader.seen).tolist()
        left = left or (loader.state_dict(), torch.cat(loader.seen).tolist())
        return batches[:steps], *left, len(list(loader))

    straight = run_ranks(body, 1, 1, None, None, "device")[0]
    found, state, seen = [], None, []
    for world_size, steps, kind in ((2, 2, "device"), (1, 2, "workers"), (3, None, "device")):
        ranks = run_ranks(body, world_size, world_size, state, steps, kind)
        for shares in zip(*(rank[0] for rank in ranks), strict=True):
            found.append(sorted(number for share in shares for number in share))
        state, seen = ranks[0][1], [index for rank in ranks for index in rank[2]]
        assert [rank[3] for rank in ranks] == [6] * world_size  # the next epoch is a whole one
    assert found == [sorted(batch) for batch in straight[0]]
    assert sorted(seen) == sorted(straight[2]) and len(set(seen)) == 36
    assert state["step"] == 0


def test_an_epoch_cannot_go_on_with_another_global_batch():
    cfg = config("--global-batch-size=10")
    train_set, _ = build_datasets(cfg)
    loader = build_loader(train_set, EpochSampler(train_set, 0), cfg, CPU, train=True)
    state = {"step": 3, "global_batch": 5, "samples": 15}
    with pytest.raises(
        UserError, match=r"3 global batches of 5 samples.*a global batch is 10 here"
    ):
        loader.load_state_dict(state)
    loader.load_state_dict(state | {"step": 0})
    assert len(list(loader)) == 5


def test_planted_set_epoch_forgotten_repeats_the_first_epoch():
    cfg = config("--global-batch-size=10", "--image-size=16")
    first, second = batches(cfg, build_datasets(cfg)[0], epochs=(0, 0))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(first, second, strict=True))


def test_pixels_are_normalised_as_torchvision_does():
    cfg = config("--global-batch-size=25", "--augment=none", "--dtype=float64")
    train_set, val_set = build_datasets(cfg)
    loader = build_loader(val_set, SequentialSampler(val_set), cfg, CPU)
    images = torch.cat([images for images, _ in loader])
    pixels = F.to_dtype(val_set.resident(None), torch.float64, scale=True)
    assert images.dtype == torch.float64 and len(images) == len(val_set) == 12
    torch.testing.assert_close(
        images, F.normalize(pixels, val_set.mean, val_set.std), atol=1e-12, rtol=0
    )
    assert set(train_set.meta()) == {
        *("classes", "image_size", "resize", "interpolation", "mean", "std")
    }


def test_resized_crops_do_not_depend_on_the_workers(tmp_path):
    flags = ["--dataset=imagefolder", f"--data-dir={folder(tmp_path)}", "--augment=resized_crop"]
    flags += ["--image-size=16", "--global-batch-size=4"]
    train_set, val_set = build_datasets(config(*flags))
    assert (val_set.resize, val_set[0][0].shape) == (18, (3, 16, 16))
    none, two = (
        batches(config(*flags, f"--num-workers={n}"), train_set, kind="workers") for n in (0, 2)
    )
    assert all(
        torch.equal(a, b) for (a, _), (b, _) in zip(none[0] + none[1], two[0] + two[1], strict=True)
    )


def test_auto_takes_the_device_where_the_set_fits(tmp_path, monkeypatch):
    cfg = config("--global-batch-size=10", "--image-size=16")
    train_set, _ = build_datasets(cfg)
    batches(cfg, train_set, kind="device")
    monkeypatch.setattr(utils.loaders, "_free_memory", lambda device: 4 * train_set.nbytes() - 1)
    batches(cfg, train_set, kind="workers")
    monkeypatch.undo()
    flags = ["--dataset=imagefolder", f"--data-dir={folder(tmp_path)}", "--image-size=16"]
    cfg = config(*flags, "--global-batch-size=4")
    batches(cfg, build_datasets(cfg)[0], kind="device")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    batches(cfg, build_datasets(cfg)[0], kind="workers")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_file_met_by_a_worker_is_one_line(workers, tmp_path):
    break_file(folder(tmp_path) / "train" / "dog" / "3.jpg")
    flags = ["--dataset=imagefolder", f"--data-dir={tmp_path}", "--image-size=16"]
    cfg = config(*flags, "--loader=workers", f"--num-workers={workers}", "--global-batch-size=4")
    with pytest.raises(UserError, match=r"dog/3\.jpg") as caught:
        batches(cfg, build_datasets(cfg)[0])
    assert "\n" not in str(caught.value)


def test_batches_that_cannot_be_shared_out_are_refused():
    cfg = config("--global-batch-size=64")
    with pytest.raises(UserError, match="50 samples, fewer than one global batch of 64"):
        batches(cfg, build_datasets(cfg)[0])

    def body(rank):
        cfg = config("--global-batch-size=7")
        try:
            batches(cfg, build_datasets(cfg)[0], rank, 3)
        except UserError as error:
            return str(error)

    assert "pass --global-batch-size 6 or 9" in run_ranks(body, 3)[2]


def workers_loader(device, cores, monkeypatch, **flags):
    monkeypatch.setattr(utils.loaders, "cores_of_rank", lambda: cores)
    cfg = config("--loader=workers", "--global-batch-size=10", *flag_list(flags))
    train_set, _ = build_datasets(cfg)
    with monkeypatch.context() as patch:
        if device != "cpu":  # there is none here
            patch.setattr(torch.Tensor, "to", lambda self, *args, **kwargs: self)
            patch.setattr(torch, "tensor", lambda *args, device=None, **kw: torch.ones(3))
        return WorkersLoader(train_set, range(50), cfg, torch.device(device), 10, train=True)


def test_cuda_memory_and_workers_by_the_cores(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5, 9))
    assert utils.loaders._free_memory(torch.device("cuda")) == 5
    for device, cores, workers in (("cpu", 4, 2), ("cpu", 1, 0), ("cuda", 1, 0), ("cuda", 32, 8)):
        monkeypatch.setattr(utils.loaders, "available_cores", lambda cores=cores: cores)
        loader = workers_loader(device, cores, monkeypatch)
        assert loader.reader.num_workers == workers
        if device == "cpu":
            assert threads[-1] == cores - workers


def test_the_threads_of_a_run_are_kept(monkeypatch):
    monkeypatch.setattr(utils.loaders, "available_cores", lambda: 4)
    saved = workers_loader("cpu", 4, monkeypatch).state_dict()
    saved["threads"] = 3

    def resumed(cores=4, ranks=1, **flags):
        loader = workers_loader("cpu", cores, monkeypatch, **flags)
        loader.load_state_dict(saved | {"ranks": ranks})
        return threads[-1]

    assert saved["ranks"] == 1 and resumed() == resumed(cores=2) == 3
    assert resumed(ranks=2) == 2  # on another number of ranks no sum is the same
    assert resumed(num_threads=1) == 1
    monkeypatch.setattr(utils.loaders, "available_cores", lambda: 2)
    assert resumed(cores=2) == 1


def test_busy_cores_are_not_counted_on(monkeypatch, capsys):
    def cores(busy, quota=4, seen=4):
        monkeypatch.setattr(utils.threads, "_busy_cores", lambda seconds: busy)
        monkeypatch.setattr(utils.threads, "available_cores", lambda: quota)
        monkeypatch.setattr(utils.threads, "_ticks", lambda: dict.fromkeys(range(seen)))
        utils.threads._cores_of_rank.cache_clear()
        return utils.threads.cores_of_rank()

    assert cores(0) == 4 and not capsys.readouterr().err
    assert (
        cores(2) == 2
        and "2 cores are busy with something else: using 2 of 4" in capsys.readouterr().err
    )
    assert cores(4) == 1
    assert cores(3, quota=2, seen=64) == 2  # a container on a large machine
    monkeypatch.setattr(utils.threads, "get_local_world_size", lambda: 2)
    assert cores(0) == 2 and cores(3) == 1
    utils.threads._cores_of_rank.cache_clear()


def test_busy_cores_are_counted_by_the_kernel(monkeypatch, tmp_path):
    mine = min(os.sched_getaffinity(0))
    stat = tmp_path / "stat"
    monkeypatch.setattr(utils.threads, "STAT", stat)
    assert utils.threads._busy_cores(0) == 0  # no such file: not Linux
    text = "cpu  9 9 9 9 9 9 9 9\ncpu{mine} {user} 0 0 {idle} 0 0 0 0 {user} 0\ncpu9999 0 0 0 1"
    stat.write_text(text.format(mine=mine, user=0, idle=0))
    later = text.format(mine=mine, user=8, idle=2)
    monkeypatch.setattr(utils.threads.time, "sleep", lambda seconds: stat.write_text(later))
    assert utils.threads._busy_cores(0.1) == 1
    assert utils.threads._busy_cores(0.1) == 0  # no tick has passed
