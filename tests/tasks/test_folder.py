"""dataset=imagefolder: which images come out, and how they are augmented."""

import random

import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as F

from tasks.images import build_datasets
from tasks.images.augment import CropFlip
from tasks.images.decode import decode
from tasks.images.folder import FolderDataset, random_box
from tests.forked import fork_script
from tests.images import config, folder
from utils.checkpoint import FORMAT
from utils.seeds import derive_seed

PREPROCESSING = {
    "image_size": 32,
    "resize": 36,
    "interpolation": "bilinear",
    "mean": [0],
    "std": [1],
}
# Augmentation


def test_random_boxes_follow_the_rule_of_torchvision():
    draws = random.Random(0)
    boxes = [random_box(500, 400, draws) for _ in range(300)]
    for top, left, h, w in boxes:
        assert 0 <= top <= top + h <= 500
        assert 0 <= left <= left + w <= 400
        assert 0.72 < w / h < 1.36
    areas = [h * w / 200_000 for _, _, h, w in boxes]
    assert 0.07 < min(areas) < 0.2
    assert 0.8 < max(areas) <= 1


@pytest.mark.parametrize("size", [(1, 1), (1, 300)])
def test_boxes_of_extreme_images_are_inside(size):
    for seed in range(100):
        top, left, h, w = random_box(*size, random.Random(seed))
        assert 0 <= top < top + h <= size[0]
        assert 0 <= left < left + w <= size[1]


@pytest.mark.parametrize("augment", ["none", "crop_flip", "resized_crop"])
def test_batches_depend_on_seed_epoch_and_index_alone(augment, tmp_path):
    train, val = build_datasets(config(folder(tmp_path), f"--augment={augment}"))
    everything = torch.arange(12)
    images, labels = train.get_batch(everything, 3, 0)
    assert images.dtype == torch.uint8
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert labels.tolist() == [0] * 6 + [1] * 6
    order = torch.randperm(12)
    parts = [train.get_batch(part, 3, 0)[0] for part in order.split(5)]
    assert torch.equal(torch.cat(parts), images[order])
    plain = torch.stack([train[i][0] for i in range(12)])
    if augment == "none":
        assert torch.equal(images, plain)
    else:
        assert not torch.equal(images, train.get_batch(everything, 4, 0)[0])
        assert not torch.equal(images, train.get_batch(everything, 3, 1)[0])
    if augment == "crop_flip":
        assert torch.equal(images, CropFlip(12)(plain, everything, epoch=3, seed=0))
    validated, _ = val.get_batch(everything, 3, 0)
    assert torch.equal(validated, torch.stack([val[i][0] for i in range(12)]))


def test_resized_crop_uses_the_original_image(tmp_path):
    train, val = build_datasets(config(folder(tmp_path), "--augment=resized_crop"))
    assert (val.resize, val[0][0].shape) == (18, (3, 16, 16))
    images, _ = train.get_batch(torch.tensor([2]), 0, 0)
    draws, original = random.Random(derive_seed(0, 0, 2)), decode(train.paths[2])
    expected = F.resized_crop(original, *random_box(*original.shape[1:], draws), [16, 16])
    flipped = F.horizontal_flip(expected)
    assert torch.equal(images[0], flipped if draws.random() < 0.5 else expected)
    assert train.nbytes is None


# Datasets


def test_preprocessing_follows_the_weights(tmp_path):
    folder(tmp_path)
    inputs = {"mean": [0.5] * 3, "std": [0.1] * 3}

    def build(expected):
        torch.save({"format": FORMAT, "data": expected | {"classes": []}}, tmp_path / "weights.pt")
        return build_datasets(config(tmp_path, f"--weights={tmp_path / 'weights.pt'}"))

    train, val = build(inputs | {"image_size": 16, "resize": 20})
    expected = inputs | {"image_size": 16, "resize": 20, "interpolation": "bilinear"}
    assert train.preprocessing == val.preprocessing == expected
    assert (val.mean, val.std, val.size, val.resize) == ([0.5] * 3, [0.1] * 3, 16, 20)
    # Weights for another size do not determine how much of the image is cropped.
    inputs |= {"image_size": 224, "resize": 232, "interpolation": "bicubic"}
    expected |= {"resize": 16, "interpolation": "bicubic"}
    assert build(inputs)[0].preprocessing == expected
    neutral = build({})[0].preprocessing
    assert neutral["mean"] == [0.485, 0.456, 0.406] and neutral["std"] == [0.229, 0.224, 0.225]
    assert (train.augment, val.augment) == ("crop_flip", "none")


@pytest.mark.parametrize("size", [(1, 1), (3000, 1), (1, 3000)])
def test_images_of_one_pixel_or_one_line(size, tmp_path):
    Image.new("L", size, 200).save(tmp_path / "a.png")
    image, label = FolderDataset([tmp_path / "a.png"], [3], "abcd", PREPROCESSING)[0]
    assert image.shape == (3, 32, 32)
    assert (image == 200).all()
    assert label == 3


def test_two_processes_train_on_a_folder(tmp_path):
    flags = {"dataset": "imagefolder", "data_dir": folder(tmp_path / "images")}
    run = fork_script("train_ddp.py", 2, output_dir=tmp_path / "run", **flags)
    assert run.code == 0, run.stderr
    assert "data: Resident, 12 training samples" in run.stdout  # it fits in memory
    assert run.rows[-1]["val_samples"] == 12
