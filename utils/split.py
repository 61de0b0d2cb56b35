"""A validation set out of the training images, the same on every rank and after every restart."""

import hashlib
import json
import os
from pathlib import Path

from utils.distributed import UserError
from utils.images import choose


def split_images(files, cfg):
    """Files, all there are -> Files to train with, Files to validate with.

    cfg.val_fraction of each class, at least one image, chosen by the file's name and cfg.seed, so
    that the choice of one file does not hang on which others there are. A run that goes on keeps
    the choice it has written (write_split()): files that have come since are trained with.
    Raises UserError for a class of one image, or where a file of the written choice is gone.
    """
    if has_validation_images(cfg.data_dir):
        raise UserError(f"{cfg.data_dir} has a folder to validate with: pass --val-fraction 0")
    names = [os.path.relpath(path, cfg.data_dir) for path in files.paths]
    chosen = _written(cfg) if cfg.resume != "never" else None
    if chosen is None:
        chosen = _choose(files, names, cfg)
    elif gone := sorted(chosen - set(names)):
        raise UserError(
            f"{Path(cfg.data_dir) / gone[0]} is gone or broken, one of {len(gone)} that "
            f"{_path(cfg)} validates with: put it back, or pass --resume never to start anew"
        )
    return tuple(
        choose(files, [(name in chosen) == val for name in names]) for val in (False, True)
    )


def has_validation_images(data_dir):
    return any((Path(data_dir) / name).is_dir() for name in ("val", "valset"))


def write_split(cfg, val_set):
    """Keep the choice beside the run, in output_dir/split.json. For the main process alone."""
    names = [os.path.relpath(path, cfg.data_dir) for path in val_set.paths]
    facts = {"val_fraction": cfg.val_fraction, "seed": cfg.seed, "val": names}
    temporary = _path(cfg).with_suffix(".tmp")
    temporary.write_text(json.dumps(facts, indent=1) + "\n")
    os.replace(temporary, _path(cfg))


def _path(cfg):
    return Path(cfg.output_dir) / "split.json"


def _written(cfg):
    """The names in split.json, or None where there is none for these settings."""
    if not _path(cfg).exists():
        return None
    facts = json.loads(_path(cfg).read_text())
    same = (facts["val_fraction"], facts["seed"]) == (cfg.val_fraction, cfg.seed)
    return set(facts["val"]) if same else None


def _choose(files, names, cfg):
    def drawn(name):
        return hashlib.sha256(os.fsencode(f"{cfg.seed}/{name}")).digest()

    classes = [[] for _ in files.classes]
    for name, label in zip(names, files.labels, strict=True):
        classes[label].append(name)
    chosen = set()
    for title, own in zip(files.classes, classes, strict=True):
        if len(own) == 1:
            raise UserError(
                f"{files.folder / title} holds one image, too few to train and to validate with"
            )
        count = min(max(1, round(cfg.val_fraction * len(own))), len(own) - 1)
        chosen.update(sorted(own, key=drawn)[:count])
    return chosen
