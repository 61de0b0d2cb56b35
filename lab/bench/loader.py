"""Compare the loaders with torchvision's reference pipeline, in images/s.

    python -m lab.bench.loader

JPEG files are decoded, cropped by RandomResizedCrop(224) and flipped, on one core and with one
worker per core. The reference is ImageFolder with Pillow and the v1 transforms, whose workers also
normalize. Our loader is timed up to the uint8 batch, which is what is copied to a GPU ("to uint8"),
and up to normalized floats on the CPU ("to float"). Then 32x32 images in memory are padded,
cropped, flipped and normalized on one core; the reference is the tutorial's pipeline. With a GPU,
workers on all cores are also compared with torchvision's decoder on the GPU. All runs are
interleaved; the table shows medians of --repeats epochs.

    --data-dir DIR   a folder with train/<class>/ and val/<class>/; default: synthetic photographs
"""

import argparse
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torchvision
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.transforms.v2 import RandomResizedCrop

import tasks.images as task
from lab.bench.peer import PillowImages
from lab.bench.report import interval, spread, write_table
from lab.bench.runner import machine, take_turns
from tools.lib.markdown import markdown_table
from utils.config import load_config
from utils.data import BatchDataset, build_loader
from utils.distributed import cores_per_rank
from utils.sampler import EpochSampler

CPU = torch.device("cpu")
CLASSES = 4
ON_GPU = "JPEG to uint8 (reference: decoded on the GPU)"
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def make_photographs(root, count, size=(500, 400)):
    """Write JPEGs of ImageNet's average size: smooth shapes under a little noise. Returns root."""
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


class Pixels(BatchDataset):
    """The same images as a dataset, but not normalized: uint8, as they are copied to a GPU."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.dataset[index]

    def get_batch(self, indices, epoch, seed):
        return self.dataset.get_batch(indices, epoch, seed)


def ours(flags, workers, *, normalized):
    """The scripts' loader, and the number of images in an epoch of it."""
    flags = [*flags, f"--num-workers={workers}", "--num-threads=1"]
    cfg = load_config(task.Settings, None, flags)
    train_set, _ = task.build_datasets(cfg)
    if not normalized:
        train_set = Pixels(train_set)
    sampler, batch = EpochSampler(train_set, seed=0), cfg.global_batch_size
    loader = build_loader(train_set, sampler, batch, CPU, cfg, train=True)
    return loader, batch * len(loader)


def reference(flags, workers):
    """The same with torchvision's ImageFolder, or from memory for any other dataset."""
    cfg = load_config(task.Settings, None, flags)
    if cfg.dataset == "imagefolder":
        pipeline = [
            transforms.RandomResizedCrop(cfg.image_size),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(**IMAGENET),
        ]
        folder = str(Path(cfg.data_dir) / "train")
        images = torchvision.datasets.ImageFolder(folder, transforms.Compose(pipeline))
    else:
        images = PillowImages(cfg)
    batch = cfg.global_batch_size
    loader = DataLoader(
        images, batch, True, num_workers=workers, drop_last=True, persistent_workers=workers > 0
    )
    return loader, batch * len(loader)


def _decode_jpegs(paths, device):
    files = [torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8) for path in paths]
    try:
        from torchcodec.decoders import decode_jpeg
    except (ImportError, OSError, RuntimeError):  # or one for a different torch
        from torchvision.io import ImageReadMode, decode_jpeg

        return decode_jpeg(files, ImageReadMode.RGB, device=device)
    return decode_jpeg(files, device=device)


class DecodedOnDevice:
    """uint8 batches (64, 3, 224, 224) of JPEG files that a GPU decodes and crops."""

    def __init__(self, root, device="cuda"):
        files = sorted((Path(root) / "train").rglob("*"))
        self.paths = [path for path in files if path.suffix.lower() in (".jpg", ".jpeg")]
        self.device, self.crop = device, RandomResizedCrop(224, antialias=True)

    def __iter__(self):
        for i in range(0, len(self.paths) - 63, 64):
            images = _decode_jpegs(self.paths[i : i + 64], self.device)
            yield torch.stack([self.crop(image) for image in images])
        if self.device == "cuda":
            torch.cuda.synchronize()


def images_per_second(loader, images):
    """The speed of one epoch of `images` images."""
    start = time.perf_counter()
    for _ in loader:
        pass
    return images / (time.perf_counter() - start)


def compare(our_loader, reference_loader, repeats):
    """Time both, interleaved. Each is (loader, images per epoch).

    Returns {name: images/s of each epoch}, or None if one of them has failed.
    """
    pair = {"ours": our_loader, "reference": reference_loader}
    jobs = {name: partial(images_per_second, *loader) for name, loader in pair.items()}
    take_turns(jobs, 1)  # starts workers, fills caches
    samples, errors = take_turns(jobs, repeats)
    return None if errors else samples


def main():
    parser = argparse.ArgumentParser(prog="python -m lab.bench.loader", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--data-dir", help="a folder of JPEG files")
    parser.add_argument("--images", type=int, default=2048, help="number of synthetic photographs")
    parser.add_argument("--repeats", type=int, default=5, help="epochs of each (default: 5)")
    parser.add_argument("--output", default="runs/bench-loader", help="folder of the reports")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    head = ["images", "cores", "ours, images/s", "reference, images/s", "ratio"]
    rows, result = [], machine() | {"rows": {}}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        root = args.data_dir or make_photographs(Path(folder), args.images)
        jpeg = ["--dataset=imagefolder", f"--data-dir={root}", "--augment=resized_crop"]
        jpeg += ["--image-size=224", "--global-batch-size=64", "--loader=workers"]
        small = ["--dataset=synthetic", "--image-size=32", "--global-batch-size=256"]
        small += ["--synthetic-samples=25600", "--loader=device"]
        cases = [
            ("JPEG to uint8, loader=workers", jpeg, 0, False),
            ("JPEG to uint8, loader=workers", jpeg, cores_per_rank(), False),
            ("JPEG to float, loader=workers", jpeg, 0, True),
            ("JPEG to float, loader=workers", jpeg, cores_per_rank(), True),
            ("32x32 to float, loader=device", small, 0, True),
        ]
        if torch.cuda.is_available():
            cases.append((ON_GPU, jpeg, cores_per_rank(), False))
        for name, flags, workers, normalized in cases:
            os.sched_setaffinity(0, cores if workers else cores[-1:])
            loaders = [ours(flags, workers, normalized=normalized), reference(flags, workers)]
            if name == ON_GPU:
                loaders[1] = DecodedOnDevice(root), loaders[0][1]
            speeds = compare(*loaders, args.repeats)
            if speeds is None:  # its error has been printed; the other rows are worth a report
                continue
            ratio = interval(speeds["reference"], speeds["ours"])
            medians = [f"{statistics.median(s):,.0f}" for s in speeds.values()]
            rows.append([name, str(max(1, workers)), *medians, spread(*ratio, ".2f")])
            result["rows"][f"{name}, {workers} workers"] = list(speeds.values())
            print("  ".join(rows[-1]), flush=True)
            del loaders  # and their workers
    text = f"{result['cpu']}, torch {result['torch']}, medians of {args.repeats} interleaved epochs"
    write_table(result, f"{text}.\n\n{markdown_table(head, rows)}\n", args.output, "loader")


if __name__ == "__main__":
    main()
