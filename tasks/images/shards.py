"""dataset=shards: images in tar files, data_dir/train-*.tar and data_dir/val-*.tar.

In WebDataset's layout: 000017.jpg and 000017.cls, the number of its class, are an image. The names
of the classes are the lines of data_dir/classes.txt, if there is such a file.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from sources.shards import Shards, find_shards
from tasks.images.cache import cache_folder, in_parallel, kept_list
from tasks.images.decode import BadImageError, decode_bytes, readable
from tasks.images.files import EXTENSIONS
from tasks.images.folder import FolderDataset, preprocessing_of
from tasks.images.settings import Settings
from utils.distributed import is_main_process
from utils.errors import UserError, say


def build(cfg: Settings) -> tuple["ShardDataset", "ShardDataset"]:
    """The training set and the validation set.

    Call it in main_process_first(): one process per node reads the headers of all files and, with
    on_bad_sample=skip, all images. Raises UserError if the labels do not fit the classes.
    """
    if cfg.val_fraction:
        raise UserError("val_fraction is for dataset=imagefolder; make val-*.tar of some images")
    on_bad = "skip" if cfg.on_bad_sample == "skip" else "stop"
    splits = []
    for name in ("train", "val"):
        paths = find_shards(cfg.data_dir, name, [".tar"])
        if not paths:
            raise UserError(f"there are no files {cfg.data_dir}/{name}-*.tar: pass --data-dir")
        splits.append(Shards(paths, cache_dir=cache_folder(cfg), on_bad=on_bad, label="cls"))
    classes = _classes(Path(cfg.data_dir) / "classes.txt", splits)
    facts = splits[0].describe("train") | splits[1].describe("val")
    options: dict[str, Any] = {"preprocessing": preprocessing_of(cfg), "cache": cache_folder(cfg)}
    kept = [_decodable(s, cfg) if on_bad == "skip" else torch.arange(len(s)) for s in splits]
    train_set = ShardDataset(splits[0], kept[0], classes, augment=cfg.augment, **options)
    return train_set, ShardDataset(splits[1], kept[1], classes, split=facts, **options)


class ShardDataset(FolderDataset):
    """Images in tar files, decoded when they are read. See FolderDataset.

    kept: the indices of the images in `shards`, int64 (samples,).
    """

    def __init__(
        self, shards: Shards, kept: Tensor, classes: Sequence[str], **options: Any
    ) -> None:
        self.shards, self.kept = shards, kept
        super().__init__(shards.paths, shards.labels[self.kept].tolist(), classes, **options)

    @property
    def shard_sizes(self) -> list[int]:
        """The number of images in each file, for sources.samplers.ShardOrder."""
        shards = self.shards.index["shard"][self.kept.numpy()]
        return numpy.bincount(shards, minlength=len(self.paths)).tolist()

    def original(self, index: int) -> Tensor:
        """The image as it is in its file, uint8 (3, height, width). Raises BadImageError."""
        return _image(self.shards, int(self.kept[index]))


def _image(shards, index):
    sample = shards[index]
    name = f"{sample['__key__']} in {shards.path_of(index)}"
    for extension, data in sample.items():
        if f".{extension.rpartition('.')[2].lower()}" in EXTENSIONS:
            return decode_bytes(data, name)
    raise BadImageError(name, f"no file with an extension such as {', '.join(EXTENSIONS[:3])}")


def _classes(path, splits):
    """The names of the classes. Raises UserError if a label is not among them."""
    low = min(int(shards.labels.min()) for shards in splits)
    high = max(int(shards.labels.max()) for shards in splits)
    names = [str(number) for number in range(high + 1)]
    if path.exists():
        names = path.read_text(encoding="utf-8").splitlines()
    if low < 0 or high >= len(names):
        raise UserError(f"the labels are from {low} to {high}, but there are {len(names)} classes")
    return names


def _decodable(shards, cfg):
    """The indices of the images that can be decoded; all are read once, and the list is kept."""
    listed = cache_folder(cfg) / f"bad-{shards.index_file.stem}.json"
    find_all = partial(in_parallel, partial(_undecodable, shards), range(len(shards)))
    bad = dict(kept_list(listed, find_all))
    if bad and is_main_process():
        names = readable("; ".join(list(bad.values())[:10]))
        say(f"skipping {len(bad)} of {len(shards)} images: {names}", sys.stderr)
    return torch.tensor([index for index in range(len(shards)) if index not in bad])


def _undecodable(shards, indices):
    bad = []
    for index in indices:
        try:
            _image(shards, index)
        except BadImageError as error:
            bad.append([index, f"{error.path} ({error.reason})"])
    return bad
