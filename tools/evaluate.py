"""python -m tools.evaluate runs/x/best.pt --data-dir my_images --split test: how good is it?

Accuracy and loss over every image of a split, each counted once, on one process or many (torchrun
--standalone --nproc_per_node=4 -m tools.evaluate ...); a table of the classes; on request the
confusion matrix as a picture (matplotlib, from requirements-extras.txt).
"""

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, SequentialSampler

from tools.inference import folder_set, load_trained, prepare_alike
from utils.datasets import bad_files, build_datasets
from utils.distributed import (
    UserError,
    all_reduce,
    get_device,
    get_world_size,
    init_distributed,
    is_main_process,
    main_process_first,
    report_errors,
)
from utils.images import cache_folder, find_images, readable
from utils.loaders import build_loader
from utils.metrics import Meter, evaluate
from utils.split import has_validation_images


class ConfusionMeter(Meter):
    """A Meter that also counts, for each class, what its images were taken for."""

    def __init__(self, device, classes):
        super().__init__(device)
        self.counts = torch.zeros(classes, classes, dtype=torch.int64, device=device)

    def update(self, loss, outputs, labels):
        """As Meter.update()."""
        super().update(loss, outputs, labels)
        classes = len(self.counts)
        pairs = labels * classes + outputs.argmax(1)
        self.counts += pairs.bincount(minlength=classes**2).view(classes, classes)


def evaluation_set(cfg, facts, data_dir, split, skip_bad):
    """The images to evaluate with: of a folder, or of the data that the model was trained with."""
    if data_dir is None and cfg.dataset != "imagefolder":
        return prepare_alike(build_datasets(cfg)[split != "train"], facts)  # there is no third set
    cfg = replace(cfg, data_dir=data_dir or cfg.data_dir, dataset="imagefolder", resume="auto")
    if cfg.val_fraction and split != "test" and not has_validation_images(cfg.data_dir):
        return prepare_alike(build_datasets(cfg)[split != "train"], facts)
    files = find_images(cfg.data_dir, split)
    unknown = sorted(set(files.classes) - set(facts["classes"]))
    if unknown:
        raise UserError(
            f"{files.folder} has classes that the model does not know: {', '.join(unknown)} "
            f"(it knows {', '.join(facts['classes'])})"
        )
    with main_process_first():
        bad = bad_files(files.paths, cache_folder(cfg)) if skip_bad else ()
    number = [facts["classes"].index(name) for name in files.classes]
    kept = [i for i, path in enumerate(files.paths) if path not in bad]
    labels = [number[files.labels[i]] for i in kept]
    return folder_set([files.paths[i] for i in kept], labels, facts)


def class_rows(classes, counts):
    """(class, images, correct, the class that its other images were mostly taken for) a class."""
    for label, (name, row) in enumerate(zip(classes, counts.tolist(), strict=True)):
        others = [0 if other == label else n for other, n in enumerate(row)]
        most = classes[others.index(max(others))] if max(others) else ""
        yield name, sum(row), row[label], most


def draw(path, classes, counts):
    """The confusion matrix as a PNG: a row a true class, as fractions of the row."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--confusion needs matplotlib: pip install matplotlib") from None
    side = min(20, 3 + 0.45 * len(classes))
    figure = Figure((side + 1, side), layout="constrained")
    axes = figure.add_subplot()
    fractions = counts / counts.sum(1, keepdim=True).clamp_min(1)
    image = axes.imshow(fractions.tolist(), cmap="Blues", vmin=0, vmax=1)
    ticks = range(len(classes))
    names = [readable(name) for name in classes]
    axes.set_xticks(ticks, names, rotation=90)
    axes.set_yticks(ticks, names)
    axes.set(xlabel="predicted", ylabel="true")
    if len(classes) <= 25:
        for row, column in ((r, c) for r in ticks for c in ticks if counts[r, c]):
            colour = "white" if fractions[row, column] > 0.5 else "black"
            text = int(counts[row, column])
            axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=8)
    figure.colorbar(image, label="fraction of the class")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:  # no such folder; no such format
        raise UserError(f"cannot write {path}: {error}") from None


def report(args, classes, result, counts):
    rows = list(class_rows(classes, counts))
    if args.json:
        per_class = [
            {"class": name, "images": images, "correct": correct, "mostly_taken_for": most}
            for name, images, correct, most in rows
        ]
        kept = {key: result[key] for key in ("accuracy", "loss", "samples")}
        print(json.dumps(kept | {"classes": per_class, "confusion": counts.tolist()}))
    else:
        width = max(len(readable(name)) for name in [*classes, "class"])
        print(f"{'class':{width}}  images  accuracy  mostly taken for")
        for name, images, correct, most in rows:
            accuracy = f"{correct / images:.2%}" if images else ""
            line = f"{readable(name):{width}}  {images:6d}  {accuracy:>8}  {readable(most)}"
            print(line.rstrip())
        right = round(result["accuracy"] * result["samples"])
        print(
            f"accuracy {result['accuracy']:.2%} ({right} of {result['samples']} images), "
            f"loss {result['loss']:.4f}"
        )
    if args.confusion:
        draw(args.confusion, classes, counts)


@report_errors
def main():
    parser = argparse.ArgumentParser(prog="python -m tools.evaluate", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("checkpoint", help="such as runs/x/best.pt")
    parser.add_argument("--data-dir", help="a folder of images; default: the data trained with")
    parser.add_argument("--split", choices=("train", "val", "test"), default="val")
    parser.add_argument("--batch-size", type=int, default=256, help="a process (default: 256)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 ...")
    parser.add_argument("--on-bad-sample", choices=("error", "skip"), default="error")
    parser.add_argument("--confusion", metavar="PNG", help="draw the confusion matrix")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    args = parser.parse_args()
    if args.batch_size < 1:
        parser.error("--batch-size must be at least 1")
    launched = "WORLD_SIZE" in os.environ
    device = init_distributed(args.device) if launched else get_device(args.device)
    model, cfg, facts = load_trained(args.checkpoint, device)
    skip = args.on_bad_sample == "skip"
    # Where the split lies that the run has made, if it has made one.
    folder = str(Path(args.checkpoint).parent)
    cfg = replace(cfg, on_bad_sample=args.on_bad_sample, output_dir=folder)
    images = evaluation_set(cfg, facts, args.data_dir, args.split, skip)
    sampler = DistributedSampler(images, shuffle=False) if launched else SequentialSampler(images)
    cfg = replace(
        cfg,
        loader="workers",  # one pass: nothing worth keeping decoded
        per_process_batch_size=0,
        global_batch_size=args.batch_size * get_world_size(),
    )
    loader = build_loader(images, sampler, cfg, device)
    meter = ConfusionMeter(device, len(facts["classes"]))
    result = evaluate(model, loader, device, meter)
    counts = all_reduce(meter.counts).cpu()
    if is_main_process():
        report(args, facts["classes"], result, counts)


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
