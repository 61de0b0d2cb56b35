"""python -m tools.bench_loader: images/s of the loaders alone, each beside torchvision's reference.

JPEG files, decode + RandomResizedCrop(224) + flip, on one core and with one worker a core, against
ImageFolder, Pillow and the v1 transforms, whose workers also normalise. Ours is timed up to the
uint8 batch, which is what goes to a GPU ("to uint8"), and up to normalised floats on the CPU. And
32x32 images in memory, pad + crop + flip + normalisation on one core, against the tutorial's
pipeline. All take turns; medians of --repeats.

    --data-dir DIR   a folder with train/<class>/ and val/<class>/; default: made-up photographs
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torchvision
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms

from tools.bench import machine
from tools.bench_report import interval, write_table
from tools.peer import Pictures
from utils.config import load_config
from utils.datasets import IMAGENET, build_datasets
from utils.distributed import available_cores
from utils.loaders import EpochSampler, build_loader

CPU = torch.device("cpu")
CLASSES = 4


def make_photographs(root, count, size=(500, 400)):
    """JPEGs as large as ImageNet's on average: smooth shapes under a little noise."""
    generator = torch.Generator().manual_seed(0)
    for split, images in (("train", count), ("val", CLASSES)):
        for i in range(images):
            coarse = torch.rand(1, 3, 12, 15, generator=generator)
            smooth = torch.nn.functional.interpolate(coarse, size[::-1], mode="bicubic")[0]
            noisy = smooth + 0.06 * torch.randn(smooth.shape, generator=generator)
            pixels = (255 * noisy.clamp(0, 1)).byte().permute(1, 2, 0).numpy()
            path = root / split / str(i % CLASSES) / f"{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path, quality=88)
    return root


def ours(flags, workers, normalised):
    """The scripts' loader, and how many images an epoch of it has."""
    cfg = load_config([*flags, f"--num-workers={workers}", "--num-threads=1"])
    images, _ = build_datasets(cfg)
    loader = build_loader(images, EpochSampler(images, 0), cfg, CPU, train=True)
    return loader if normalised else loader.reader, loader.batch_size * len(loader)


def reference(flags, workers):
    """The same by torchvision's ImageFolder, or from memory for other data sets."""
    cfg = load_config(flags)
    if cfg.dataset == "imagefolder":
        pipeline = [
            transforms.RandomResizedCrop(cfg.image_size),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(*IMAGENET),
        ]
        folder = str(Path(cfg.data_dir) / "train")
        images = torchvision.datasets.ImageFolder(folder, transforms.Compose(pipeline))
    else:
        images = Pictures(build_datasets(cfg)[0], cfg)
    batch = cfg.global_batch_size
    loader = DataLoader(
        images, batch, True, num_workers=workers, drop_last=True, persistent_workers=workers > 0
    )
    return loader, batch * len(loader)


def speed(loader, images):
    start = time.perf_counter()
    for _ in loader:
        pass
    return images / (time.perf_counter() - start)


def in_turns(pair, repeats):
    """[(loader, images an epoch) of ours and of the reference] -> images/s of each, by epoch."""
    for loader in pair:
        speed(*loader)  # starts workers, fills caches
    runs = [[speed(*loader) for loader in pair] for _ in range(repeats)]
    return [list(times) for times in zip(*runs, strict=True)]


def main():
    parser = argparse.ArgumentParser(prog="python -m tools.bench_loader", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--data-dir", help="of JPEG files")
    parser.add_argument("--images", type=int, default=2048, help="made-up photographs")
    parser.add_argument("--repeats", type=int, default=5, help="epochs of each (default: 5)")
    parser.add_argument("--output", default="runs/bench-loader", help="folder of the reports")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    lines = ["| images | cores | ours, images/s | reference, images/s | ratio |", "|---" * 5 + "|"]
    found = machine() | {"command": " ".join(sys.argv[1:]), "rows": {}}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        root = args.data_dir or make_photographs(Path(folder), args.images)
        jpeg = ["--dataset=imagefolder", f"--data-dir={root}", "--augment=resized_crop"]
        jpeg += ["--image-size=224", "--global-batch-size=64", "--loader=workers"]
        small = ["--dataset=synthetic", "--image-size=32", "--global-batch-size=256"]
        small += ["--synthetic-samples=25600", "--loader=device"]
        for name, flags, workers, normalised in (
            ("JPEG to uint8, loader=workers", jpeg, 0, False),
            ("JPEG to uint8, loader=workers", jpeg, available_cores(), False),
            ("JPEG to float, loader=workers", jpeg, 0, True),
            ("JPEG to float, loader=workers", jpeg, available_cores(), True),
            ("32x32 to float, loader=device", small, 0, True),
        ):
            os.sched_setaffinity(0, cores if workers else cores[-1:])
            pair = [ours(flags, workers, normalised), reference(flags, workers)]
            both = in_turns(pair, args.repeats)
            middle, low, high = interval(*reversed(both))
            speeds = [f"{statistics.median(s):,.0f}" for s in both]
            lines.append(
                f"| {name} | {max(1, workers)} | {' | '.join(speeds)} | "
                f"{middle:.2f} ({low:.2f} to {high:.2f}) |"
            )
            found["rows"][f"{name}, {workers} workers"] = both
            print(lines[-1], flush=True)
            del pair  # and its workers
    text = f"{found['cpu']}, torch {found['torch']}, medians of {args.repeats} epochs in turns.\n\n"
    text += "\n".join(lines) + "\n"
    write_table(found, text, args.output, "loader")


if __name__ == "__main__":
    main()
