"""Evaluate a trained model on every image of a split, each counted once.

    python -m tasks.images.evaluate runs/x/best.pt --data-dir my_images --split test
    torchrun --standalone --nproc_per_node=4 -m tasks.images.evaluate runs/x/best.pt

Prints accuracy, loss and a table of the classes; --confusion draws the confusion matrix (with
matplotlib, from requirements/extras.txt), of at most 1,000 classes.
"""

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DistributedSampler, SequentialSampler

import tasks.images as task
from tasks.images.cache import bad_files, cache_folder
from tasks.images.decode import readable
from tasks.images.files import find_images, has_validation_images, relative_names
from tasks.images.inference import Trained, folder_set, load_trained
from tasks.images.pixels import PixelDataset
from utils.data import build_loader
from utils.distributed import (
    all_gather_object,
    dp_world_size,
    init_distributed,
    is_main_process,
    main_process_first,
    select_device,
)
from utils.errors import UserError
from utils.metrics import evaluate
from utils.reports import report_errors
from utils.runtime import configure_torch

MOST_CLASSES = 1000  # of a confusion matrix, whose size is the square of their number
Counts = Mapping[tuple[int, int], int]  # {(true class, predicted class): images}


class WithConfusion:
    """The images task, which also keeps the true and the predicted class of each image.

    A matrix of 20,000 classes would take gigabytes. loader: the one that is evaluated.
    """

    loss, count = staticmethod(task.loss), staticmethod(task.count)
    summarize = staticmethod(task.summarize)
    BEST = task.BEST

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.pairs = []  # of this rank: int64 (2, n)

    def measure(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        if self.loader.counts:
            self.pairs.append(torch.stack([targets, outputs.argmax(1)]))
        return task.measure(outputs, targets)

    def counts(self) -> Counts:
        """The numbers of images over all ranks, which call this together."""
        own = torch.cat(self.pairs, 1) if self.pairs else torch.empty(2, 0, dtype=torch.int64)
        own = Counter(zip(*own.tolist(), strict=True))
        return sum(all_gather_object(own), Counter())


def run_settings(trained: Trained, **changes: Any) -> task.Settings:
    """The settings of the run that trained a model, as far as the images task has them."""
    known = {field.name for field in fields(task.Settings)}
    kept = {name: value for name, value in trained.config.items() if name in known}
    # As weights, the checkpoint itself says what its images must look like.
    return task.Settings(**kept | {"weights": str(trained.path), "resume": "never"} | changes)


def evaluation_set(
    trained: Trained, data_dir: str | None, split: str, *, skip_bad: bool = False
) -> PixelDataset:
    """The images of a split: of a folder, or (data_dir=None) of the data of the training run."""
    cfg = run_settings(trained, augment="none", loader="workers")  # one pass: nothing to keep
    if data_dir is None and cfg.dataset != "imagefolder":
        train_set, val_set = task.build_datasets(cfg)  # there is no test set
        return train_set if split == "train" else val_set
    cfg = replace(cfg, data_dir=data_dir or cfg.data_dir)
    data_dir = cfg.data_dir
    chosen = trained.data.get("val_files", [])  # the validation files that the run split off
    if chosen and split != "test" and not has_validation_images(data_dir):
        files = find_images(data_dir, "all")
        names = relative_names(files, data_dir)
        _check_present(chosen, names, data_dir)
        files = files.select([(name in set(chosen)) == (split == "val") for name in names])
    else:
        files = find_images(data_dir, split)
    classes = trained.facts["classes"]
    unknown = sorted(set(files.classes) - set(classes))
    if unknown:
        raise UserError(
            f"{files.folder} has classes that the model does not know: {', '.join(unknown)} "
            f"(it knows {', '.join(classes)})"
        )
    if skip_bad:
        with main_process_first():
            bad = bad_files(files.paths, cache_folder(cfg))
        if len(bad) == len(files.paths):
            raise UserError(f"none of the {len(bad)} images in {files.folder} can be decoded")
        files = files.select([path not in bad for path in files.paths])
    labels = [classes.index(files.classes[label]) for label in files.labels]
    return folder_set(files.paths, labels, trained.facts)


def _check_present(chosen, names, data_dir):
    missing = sorted(set(chosen) - set(names))
    if missing:
        raise UserError(
            f"{data_dir} lacks {len(missing)} of the {len(chosen)} files that the run validated "
            f"with, such as {readable(missing[0])}: restore them, or pass another --data-dir"
        )


def class_rows(classes: Sequence[str], counts: Counts) -> Iterator[tuple[str, int, int, str]]:
    """A row per class: its name, images, correct predictions, and the most frequent wrong one."""
    rows = [{} for _ in classes]
    for (label, predicted), images in sorted(counts.items()):
        rows[label][predicted] = images
    for label, (name, row) in enumerate(zip(classes, rows, strict=True)):
        wrong = {other: images for other, images in row.items() if other != label}
        most = classes[max(wrong, key=lambda other: wrong[other])] if wrong else ""
        yield name, sum(row.values()), row.get(label, 0), most


def matrix(classes: Sequence[str], counts: Counts) -> Tensor:
    """The counts as int64 (classes, classes): a row per true class."""
    dense = torch.zeros(len(classes), len(classes), dtype=torch.int64)
    for (label, predicted), images in counts.items():
        dense[label, predicted] = images
    return dense


def draw(path: str | Path, classes: Sequence[str], counts: Tensor) -> None:
    """Draw the confusion matrix as a PNG: one row per true class, as fractions of the row."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--confusion needs matplotlib: pip install matplotlib") from None
    side = min(20, 3 + 0.45 * len(classes))
    figure = Figure((side + 1, side), layout="constrained")
    axes = figure.add_subplot()
    fractions = counts / counts.sum(1, keepdim=True).clamp_min(1)
    image = axes.imshow(fractions.numpy(), cmap="Blues", vmin=0, vmax=1)
    ticks = range(len(classes))
    names = [readable(name) for name in classes]
    axes.set_xticks(ticks, names, rotation=90)
    axes.set_yticks(ticks, names)
    axes.set(xlabel="predicted", ylabel="true")
    if len(classes) <= 25:
        for row, column in ((r, c) for r in ticks for c in ticks if counts[r, c]):
            color = "white" if fractions[row, column] > 0.5 else "black"
            text = str(int(counts[row, column]))
            axes.text(column, row, text, ha="center", va="center", color=color, fontsize=8)
    figure.colorbar(image, label="fraction of the class")
    figure.savefig(path, dpi=120)


def report(
    args: argparse.Namespace, classes: Sequence[str], result: dict[str, float], counts: Counts
) -> None:
    """Print the result, as a table or as JSON, and draw the confusion matrix if asked to."""
    rows = list(class_rows(classes, counts))
    if args.json:
        per_class = [
            {"class": name, "images": images, "correct": correct, "most_often_mistaken_for": most}
            for name, images, correct, most in rows
        ]
        kept = {key: result[key] for key in ("accuracy", "loss", "samples")}
        dense = matrix(classes, counts).tolist() if len(classes) <= MOST_CLASSES else None
        print(json.dumps(kept | {"classes": per_class, "confusion": dense}))
    else:
        width = max(len(readable(name)) for name in [*classes, "class"])
        print(f"{'class':{width}}  images  accuracy  most often mistaken for")
        for name, images, correct, most in rows:
            accuracy = f"{correct / images:.2%}" if images else ""
            line = f"{readable(name):{width}}  {images:6d}  {accuracy:>8}  {readable(most)}"
            print(line.rstrip())
        correct = round(result["accuracy"] * result["samples"])
        print(
            f"accuracy {result['accuracy']:.2%} ({correct} of {result['samples']} images), "
            f"loss {result['loss']:.4f}"
        )
    if args.confusion:
        draw(args.confusion, classes, matrix(classes, counts))
        if not args.json:
            print(f"wrote {args.confusion}")


@report_errors
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tasks.images.evaluate", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("checkpoint", help="such as runs/x/best.pt")
    parser.add_argument("--data-dir", help="a folder of images (default: the run's)")
    parser.add_argument("--split", choices=("train", "val", "test"), default="val")
    parser.add_argument("--batch-size", type=int, default=256, help="per process (default: 256)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 ...")
    parser.add_argument("--on-bad-sample", choices=("error", "skip"), default="error")
    parser.add_argument("--confusion", metavar="PNG", help="draw the confusion matrix")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    args = parser.parse_args()
    launched = "WORLD_SIZE" in os.environ
    trained = load_trained(args.checkpoint)
    classes = trained.facts["classes"]
    if args.confusion and len(classes) > MOST_CLASSES:
        raise UserError(
            f"--confusion draws at most {MOST_CLASSES:,} classes, not {len(classes):,}: leave it "
            f"out, and read the table"
        )
    cfg = run_settings(trained, device=args.device, num_threads=0)
    device = init_distributed(cfg.device, cfg.timeout) if launched else select_device(cfg.device)
    configure_torch(cfg)
    skip_bad = args.on_bad_sample == "skip"
    images = evaluation_set(trained, args.data_dir, args.split, skip_bad=skip_bad)
    sampler = DistributedSampler(images, shuffle=False) if launched else SequentialSampler(images)
    batch_size = args.batch_size * dp_world_size()
    cfg = replace(cfg, global_batch_size=batch_size)
    loader = build_loader(images, sampler, args.batch_size, device, cfg)
    counting = WithConfusion(loader)
    result = evaluate(trained.model.to(device), loader, counting)
    counts = counting.counts()
    if is_main_process():
        report(args, classes, result, counts)


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
