"""Finding image files, one folder per class, and splitting off a validation set."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

from tasks.images.decode import readable
from utils.distributed import is_main_process
from utils.errors import UserError, warn

FOLDERS = {
    "train": ("train", "trainset"),
    "val": ("val", "valset", "test", "testset"),  # the test split if there is no other
    "test": ("test", "testset"),
    "all": ("train", "trainset", ""),  # for val_fraction; data_dir itself may hold the classes
}
EXTENSIONS = (*IMG_EXTENSIONS, ".gif", ".jfif", ".jif", ".jpe", ".avif", ".jp2")
# Made by systems: macOS's archives; thumbnails and trash of NAS devices; Windows.
NOT_OURS = ("__MACOSX", "@eaDir", "@Recycle", "#recycle", "$RECYCLE.BIN", "Thumbs.db")
NOT_OURS += ("desktop.ini", "lost+found")


class Files(NamedTuple):
    """The image files of a split: paths[i] is an image of classes[labels[i]]."""

    folder: Path
    classes: list[str]
    paths: list[str]
    labels: list[int]

    def select(self, keep: Iterable[bool]) -> "Files":
        """The files for which `keep` is true."""
        kept = [i for i, take in enumerate(keep) if take]
        return self._replace(
            paths=[self.paths[i] for i in kept], labels=[self.labels[i] for i in kept]
        )

    def empty_classes(self) -> str:
        """The folders of the classes without files, as one string."""
        used = set(self.labels)
        names = (name for label, name in enumerate(self.classes) if label not in used)
        return ", ".join(str(self.folder / name) for name in names)


def find_images(data_dir: str | Path, split: str) -> Files:
    """The image files of a split (a key of FOLDERS), in sorted order.

    Hidden files and folders are ignored; others that are not images are, too, but the main process
    says so. Raises UserError if the split does not exist or a class has no images.
    """
    folders = [Path(data_dir) / name for name in FOLDERS[split]]
    folder = next((folder for folder in folders if folder.is_dir()), None)
    if folder is None:
        hint = ""
        if split == "train" and _class_folders(Path(data_dir)):
            hint = ", --val-fraction 0.2 if the folders of the classes are here"
        raise UserError(
            f"no {split} images: none of {', '.join(map(str, folders))} is a folder. Put one "
            f"folder of images per class there, or pass another --data-dir{hint}"
        )
    others = FOLDERS["test"] if folder == Path(data_dir) else ()
    classes = [name for name in _class_folders(folder) if name not in others]
    if not classes:
        raise UserError(f"{folder} has no class folders (expected {folder}/<class>/*.jpg)")
    ignored = []
    samples = make_dataset(
        folder,
        {name: label for label, name in enumerate(classes)},
        is_valid_file=lambda path: is_image(Path(path).relative_to(folder), ignored),
        allow_empty=True,
    )
    warn_of_ignored(folder, ignored)
    paths, labels = [path for path, _ in samples], [label for _, label in samples]
    real = {}
    for name in sorted({os.path.dirname(path) for path in paths}):
        if (other := real.setdefault(os.path.realpath(name), name)) != name:
            raise UserError(
                f"{name} is the same folder as {other}, whose images would count twice: remove the "
                f"symbolic link"
            )
    files = Files(folder, classes, paths, labels)
    if empty := files.empty_classes():
        raise UserError(f"no images in {empty} (expected files {', '.join(EXTENSIONS)})")
    return files


def find_splits(data_dir: str | Path) -> list[Files]:
    """The Files to train with and to validate with. Raises UserError if their classes differ, so
    that a label would mean two classes."""
    splits = [find_images(data_dir, name) for name in ("train", "val")]
    for one, other in permutations(splits, 2):
        if only := sorted(set(one.classes) - set(other.classes)):
            raise UserError(
                f"{one.folder} has classes that {other.folder} lacks: {', '.join(only)}"
            )
    return splits


def _class_folders(folder):
    if not folder.is_dir():
        return []
    return sorted(e.name for e in os.scandir(folder) if e.is_dir() and not _is_hidden(e.name))


def _is_hidden(name):
    return name[0] == "." or name in NOT_OURS


def is_image(path: Path, ignored: list[Path]) -> bool:
    """Whether the name is an image's. path: relative to the folder that was searched; hidden
    files, and files in hidden folders, do not count. Others that do not are added to `ignored`."""
    if any(map(_is_hidden, path.parts)):
        return False
    if path.suffix.lower() not in EXTENSIONS:
        ignored.append(path)
        return False
    return True


def warn_of_ignored(folder: str | Path, ignored: Iterable[Path]) -> None:
    """Print how many files of which kind have been ignored, if any, on the main process."""
    kinds = Counter(path.suffix.lower() or "without an extension" for path in ignored)
    if kinds and is_main_process():
        most_frequent = sorted(kinds, key=lambda kind: (-kinds[kind], kind))
        listed = ", ".join(f"{kinds[kind]} {kind}" for kind in most_frequent)
        what = f"{kinds.total()} files in {folder}, which cannot be read as images"
        if kinds.total() == 1:
            what = f"1 file in {folder}, which cannot be read as an image"
        warn(f"ignored {what}: {readable(listed)}")


def has_validation_images(data_dir: str | Path) -> bool:
    """Whether data_dir has a folder of validation images, so that val_fraction is not needed."""
    return any((Path(data_dir) / name).is_dir() for name in ("val", "valset"))


def split_images(
    files: Files, cfg: Any, saved: dict[str, Any] | None = None
) -> tuple[Files, Files]:
    """All Files -> the Files to train with, the Files to validate with.

    Takes cfg.val_fraction of each class, at least one image, ordered by a hash of file name and
    cfg.seed. saved: the "data" of the checkpoint that the run resumes from; its choice is kept if
    it was made with the same settings, and files that were added since are for training.
    Raises UserError if a class has a single image or a file of the saved choice is missing.
    """
    if has_validation_images(cfg.data_dir):
        raise UserError(f"{cfg.data_dir} already has validation images: pass --val-fraction 0")
    if cfg.val_fraction >= 1:
        raise UserError(f"--val-fraction {cfg.val_fraction} leaves nothing to train on")
    names, current = relative_names(files, cfg.data_dir), (cfg.val_fraction, cfg.seed)
    if saved and (saved.get("val_fraction"), saved.get("seed")) == current:
        chosen = set(saved["val_files"])
    else:
        chosen = _choose(files, names, cfg)
    if missing := sorted(chosen.difference(names)):
        raise UserError(
            f"{readable(str(Path(cfg.data_dir) / missing[0]))} is missing or cannot be decoded, "
            f"one of {len(missing)} such files that the run in {cfg.output_dir} validates with: "
            f"restore it, or start over with a different --output-dir"
        )
    train, val = (files.select([(name in chosen) == is_val for name in names]) for is_val in (0, 1))
    return train, val


def _choose(files, names, cfg):
    by_class = [[] for _ in files.classes]
    for name, label in zip(names, files.labels, strict=True):
        digest = hashlib.sha256(os.fsencode(f"{cfg.seed}/{name}")).digest()
        by_class[label].append((digest, name))
    classes = list(zip(files.classes, by_class, strict=True))
    if single := [str(files.folder / name) for name, members in classes if len(members) == 1]:
        raise UserError(
            f"only one image in {', '.join(single)}, but training and validation need one each: "
            f"add images, or remove these classes"
        )
    chosen = set()
    for members in by_class:
        count = min(max(1, round(cfg.val_fraction * len(members))), len(members) - 1)
        chosen.update(name for _, name in sorted(members)[:count])
    return chosen


def relative_names(files: Files, data_dir: str | Path) -> list[str]:
    return [os.path.relpath(path, data_dir) for path in files.paths]


def saved_data(cfg: Any) -> dict[str, Any] | None:
    """The "data" of the newest readable checkpoint of the run that is to be resumed, or None."""
    paths = Path(cfg.output_dir).glob("*.pt") if cfg.resume != "never" else ()
    for path in sorted(paths, key=os.path.getmtime, reverse=True):
        with suppress(Exception):  # damaged: Checkpointer.load() will resume from an older one, too
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)["data"]
    return None
