"""Augmentation is a function of (seed, epoch, index), the same bit for bit on every device."""

import hashlib

import pytest
import torch
from torchvision.transforms.v2 import functional as F

from tasks.images import augment
from tasks.images.augment import CropFlip, crop_flip

GOLDEN_CROPS = "54685402621ffd18"


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (400, 3, 16, 16), dtype=torch.uint8, generator=generator)


def test_cpu_and_gpu_code_crop_alike():
    padded = torch.randint(0, 256, (64, 13, 13, 3)).byte()
    corners = torch.randint(0, 5, (64, 2))
    flipped = torch.rand(64) < 0.5
    on_cpu = augment._crop_flip_on_cpu(padded, 9, corners, flipped)
    on_gpu = augment._crop_flip_on_gpu(padded, 9, corners, flipped)
    assert torch.equal(on_cpu, on_gpu)


def test_crops_equal_those_of_torchvision(images):
    corners = torch.randint(0, 5, (400, 2))
    flipped = torch.rand(400) < 0.5
    result = crop_flip(images, corners, flipped)
    assert result.is_contiguous(memory_format=torch.channels_last)
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    for i in range(400):
        top, left = corners[i].tolist()
        crop = F.crop(padded[i], top, left, 16, 16)
        if flipped[i]:
            crop = F.horizontal_flip(crop)
        assert torch.equal(result[i], crop)


def test_draws_never_change(images):
    result = CropFlip(400)(images[:20], torch.arange(20), epoch=2, seed=5)
    assert hashlib.sha256(result.contiguous().numpy().tobytes()).hexdigest()[:16] == GOLDEN_CROPS


def test_draws_depend_on_seed_epoch_and_index_alone(images):
    indices = torch.randperm(400)
    images = images[indices]
    expected = CropFlip(400)(images, indices, epoch=2, seed=5)
    other_order = torch.randperm(400)
    later = CropFlip(400)  # has seen other epochs and seeds, and reads other batches
    assert not torch.equal(later(images, indices, epoch=3, seed=5), expected)
    assert not torch.equal(later(images, indices, epoch=2, seed=6), expected)
    state = torch.get_rng_state()
    parts = [later(images[i], indices[i], epoch=2, seed=5) for i in other_order.split(33)]
    assert torch.equal(torch.cat(parts), expected[other_order])
    assert torch.equal(torch.get_rng_state(), state)  # the process's own draws are left alone


def test_crops_and_flips_are_uniform():
    marked = torch.zeros(2000, 1, 8, 8, dtype=torch.uint8)
    marked[:, :, 4, 3] = 1  # pad by 1: moves by -1, 0 or 1 each way; a flip takes 3 to 4
    result = CropFlip(2000)(marked, torch.arange(2000), epoch=0, seed=0)
    _, _, rows, columns = result.nonzero().T
    assert len(rows) == 2000  # no mark is lost
    assert [*rows.bincount()[3:]] == [pytest.approx(667, abs=80)] * 3
    assert [*columns.bincount()[2:]] == [pytest.approx(n, abs=80) for n in (333, 667, 667, 333)]


def test_draws_follow_the_images_to_another_device(images):
    """A dataset that has been read on the CPU is moved to a GPU within the same epoch."""
    crop = CropFlip(400)
    crop(images, torch.arange(400), epoch=0, seed=0)
    moved = crop(images.to("meta"), torch.arange(400, device="meta"), epoch=0, seed=0)
    assert crop.draws.device.type == moved.device.type == "meta"
    crop(images, torch.arange(400), epoch=0, seed=0)
    assert crop.draws.device.type == "cpu"
