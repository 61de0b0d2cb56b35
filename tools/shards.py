"""Make shards, files of many samples each, from a folder of images, from synthetic ones, or a text.

    python -m tools.shards DEST --images my_images    DEST/train-00000.tar, DEST/val-00000.tar, ...
    python -m tools.shards DEST --synthetic 8192      the images of the images task's default
    python -m tools.shards DEST --text book.txt       DEST/train-00000.jsonl, ..., of its paragraphs

The samples are mixed, with --seed: an order that reads file by file must not read class by class.
"""

import argparse
import io
import json
import random
import re
import tarfile
from pathlib import Path

from PIL import Image

from tasks.images import Settings, synthetic
from tasks.images.files import find_splits
from utils.config import load_config
from utils.errors import UserError
from utils.reports import report_errors


def write_tars(folder, split, samples, per_shard=1000):
    """Write folder/SPLIT-*.tar. samples: [{extension: bytes}]."""
    for shard, first in enumerate(range(0, len(samples), per_shard)):
        with tarfile.open(folder / f"{split}-{shard:05}.tar", "w") as archive:
            for number, sample in enumerate(samples[first : first + per_shard], start=first):
                for extension, data in sorted(sample.items()):
                    member = tarfile.TarInfo(f"{number:08}.{extension}")
                    data = data if isinstance(data, bytes) else data.read_bytes()
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))


def write_json_lines(folder, split, values, per_shard=1000):
    """Write folder/SPLIT-*.jsonl, a line for each value."""
    for shard, first in enumerate(range(0, len(values), per_shard)):
        lines = [json.dumps(value) + "\n" for value in values[first : first + per_shard]]
        (folder / f"{split}-{shard:05}.jsonl").write_text("".join(lines), encoding="utf-8")


def of_folder(data_dir):
    """({split: [{"cls": bytes, "jpg": the path}]}, classes) of a folder of images. Raises UserError
    if the splits' classes differ."""
    splits, samples = find_splits(data_dir), {}
    for name, files in zip(("train", "val"), splits, strict=True):
        samples[name] = [
            {"cls": str(label).encode(), Path(path).suffix[1:].lower(): Path(path)}
            for path, label in zip(files.paths, files.labels, strict=True)
        ]
    return samples, splits[0].classes


def of_synthetic(count, size, seed):
    """The same of synthetic images, as PNG."""
    flags = [f"--synthetic-samples={count}", f"--image-size={size}", f"--seed={seed}"]
    sets = synthetic.build(load_config(Settings, argv=flags))
    samples = {}
    for split, dataset in zip(("train", "val"), sets, strict=True):
        samples[split] = []
        for pixels, label in zip(dataset.nhwc.numpy(), dataset.labels.tolist(), strict=True):
            png = io.BytesIO()
            Image.fromarray(pixels).save(png, "PNG")
            samples[split].append({"cls": str(label).encode(), "png": png.getvalue()})
    return samples, sets[0].classes


def of_text(path):
    """{split: [{"text": a paragraph}]}; every tenth is for validation, as in the text task."""
    paragraphs = re.split(r"\r?\n\s*\n", path.read_text(encoding="utf-8-sig"))
    values = [{"text": paragraph} for paragraph in paragraphs if len(paragraph) >= 2]
    return {"train": [v for i, v in enumerate(values, 1) if i % 10], "val": values[9::10]}


@report_errors
def main():
    parser = argparse.ArgumentParser(prog="python -m tools.shards", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", metavar="DEST", type=Path)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--images", metavar="DIR", help="a folder of images: docs/own-images.md")
    source.add_argument("--synthetic", metavar="N", type=int, help="how many to train with")
    source.add_argument("--text", metavar="FILE", type=Path)
    parser.add_argument("--per-shard", metavar="N", type=int, default=1000, help="(default: 1000)")
    parser.add_argument("--image-size", metavar="N", type=int, default=32, help="of --synthetic")
    parser.add_argument("--seed", metavar="N", type=int, default=0)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if found := next(args.folder.glob("train-*"), None):
        raise UserError(f"{found} exists: remove it, or name a different folder")
    if args.text:
        samples, classes, write = of_text(args.text), [], write_json_lines
    elif args.images:
        (samples, classes), write = of_folder(args.images), write_tars
    else:
        samples, classes = of_synthetic(args.synthetic, args.image_size, args.seed)
        write = write_tars
    for split, values in samples.items():
        random.Random(args.seed).shuffle(values)
        write(args.folder, split, values, args.per_shard)
    if classes:
        (args.folder / "classes.txt").write_text(
            "".join(f"{name}\n" for name in classes), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
