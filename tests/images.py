"""Writes folders of images for tests."""

import numpy
from PIL import Image

from tasks.images import Settings
from utils.config import load_config


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
    """The settings for the images in the folder `root`, with an --image-size of 16."""
    base = ["--dataset=imagefolder", f"--data-dir={root}", f"--output-dir={root}-run"]
    base += ["--image-size=16", "--device=cpu", "--loader=workers"]
    return load_config(Settings, argv=[*base, *flags])
