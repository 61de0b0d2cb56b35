"""Classify images with a trained model.

    python -m tasks.images.predict runs/x/best.pt IMAGE_OR_FOLDER ...

This needs only the checkpoint, which contains the model, its classes and how to prepare images.
Folders are searched recursively. An image that cannot be decoded is reported, and the others are
classified. The exit code is 1 if no image was classified.
"""

import argparse
import csv
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tasks.images.decode import BadImageError, readable
from tasks.images.files import is_image, warn_of_ignored
from tasks.images.inference import folder_set, load_trained
from utils.config import Config
from utils.distributed import available_cores, select_device
from utils.reports import report_errors
from utils.runtime import configure_torch

Result = list[tuple[str, float]] | BadImageError  # pairs (class, probability)


class Images(Dataset[Any]):
    """(path, uint8 image (3, size, size)), or (path, BadImageError)."""

    def __init__(self, paths: Sequence[str], facts: dict[str, Any]) -> None:
        self.paths, self.images = paths, folder_set(paths, [0] * len(paths), facts)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[str, Tensor | BadImageError]:
        try:
            return self.paths[index], self.images[index][0]
        except BadImageError as error:
            return self.paths[index], error


def find_files(names: Iterable[str]) -> list[str]:
    """The image files among `names`, and those in the folders among `names`, sorted per folder."""
    paths = []
    for name in names:
        if os.path.isdir(name):
            walk = os.walk(name, followlinks=True)
            files = [os.path.join(folder, file) for folder, _, files in walk for file in files]
            ignored = []
            paths += sorted(p for p in files if is_image(Path(p).relative_to(name), ignored))
            warn_of_ignored(name, ignored)
        else:
            paths.append(name)
    return paths


@torch.inference_mode()
def predict(
    model: nn.Module,
    facts: dict[str, Any],
    paths: Sequence[str],
    device: torch.device,
    batch_size: int = 64,
    top_k: int = 5,
    workers: int = 0,
) -> Iterator[tuple[str, Result]]:
    """Yield each path with its `top_k` pairs (class, probability), or with its BadImageError."""
    dataset = Images(paths, facts)
    loader = DataLoader(dataset, batch_size, num_workers=workers, collate_fn=list)
    dtype = next(model.parameters()).dtype
    for batch in loader:
        images = [image for _, image in batch if not isinstance(image, BadImageError)]
        rows = iter(())
        if images:
            pixels, _ = dataset.images.on_device((torch.stack(images).to(device), None), dtype)
            top = model(pixels).softmax(1).topk(min(top_k, len(facts["classes"])))
            rows = zip(top.values.tolist(), top.indices.tolist(), strict=True)
        for path, image in batch:
            if isinstance(image, BadImageError):
                yield path, image
            else:
                values, indices = next(rows)
                names = [facts["classes"][i] for i in indices]
                yield path, list(zip(names, values, strict=True))


class Table:
    """Lines for people. The other writers have the same methods."""

    def write(self, path: str, result: Result) -> None:
        if isinstance(result, BadImageError):
            print(f"error: {_description(result)}", file=sys.stderr)
        else:
            print(readable(path), *(f"{name} {p:.1%}" for name, p in result), sep="  ")

    def close(self) -> None:
        pass


class Json:
    """One list of {"path", "predictions": [{"class", "probability"}]} or {"path", "error"}."""

    comma = "["

    def write(self, path: str, result: Result) -> None:
        if isinstance(result, BadImageError):
            row = {"path": readable(path), "error": _description(result)}
        else:
            named = [{"class": name, "probability": p} for name, p in result]
            row = {"path": readable(path), "predictions": named}
        print(self.comma, json.dumps(row, ensure_ascii=False), sep="\n", end="")
        self.comma = ","

    def close(self) -> None:
        print("\n]" if self.comma == "," else "[]")


class Csv:
    """One line per image: path, error, class 1, probability 1, class 2, ..."""

    def __init__(self, top_k: int) -> None:
        self.lines = csv.writer(sys.stdout, lineterminator="\n")
        ranks = range(1, top_k + 1)
        self.lines.writerow(
            ["path", "error", *(f"{what} {i}" for i in ranks for what in ("class", "probability"))]
        )

    def write(self, path: str, result: Result) -> None:
        if isinstance(result, BadImageError):
            cells = [_description(result)]
        else:
            cells = ["", *(cell for pair in result for cell in pair)]
        self.lines.writerow([readable(path), *cells])

    def close(self) -> None:
        pass


def _description(error):
    return f"{readable(error.path)} {error.what} ({error.reason})"


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tasks.images.predict", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("checkpoint", help="such as runs/x/best.pt")
    parser.add_argument("images", nargs="+", metavar="image_or_folder")
    parser.add_argument("--top-k", type=int, default=5, help="classes per image (default: 5)")
    parser.add_argument("--batch-size", type=int, default=64, help="(default: 64)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 ...")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON instead of lines")
    form.add_argument("--csv", action="store_true", help="print CSV instead of lines")
    args = parser.parse_args()
    trained, paths = load_trained(args.checkpoint), find_files(args.images)
    device = select_device(args.device)
    workers = min(8, available_cores() // 2) if len(paths) > args.batch_size else 0
    configure_torch(Config(dtype=trained.config["dtype"], num_workers=workers))
    top_k = min(args.top_k, len(trained.facts["classes"]))
    model, bad = trained.model.to(device), 0
    results = predict(model, trained.facts, paths, device, args.batch_size, top_k, workers)
    out = Json() if args.json else Csv(top_k) if args.csv else Table()
    for path, result in results:
        out.write(path, result)
        bad += isinstance(result, BadImageError)
    out.close()
    if bad or not paths:
        print(f"{bad} of {len(paths)} images were not classified", file=sys.stderr)
    return bad == len(paths)


if __name__ == "__main__":
    sys.exit(main())
