"""Shards, files of many samples each, as a map-style dataset: an index says where each sample is.

For tasks: docs/streams.md.
"""

import hashlib
import json
import os
import tarfile
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from sources.lines import (
    parse_json,
    parse_text,
    scan_json_lines,
    scan_lines,
    scan_paragraphs,
    scan_texts,
)
from sources.reading import SmallSamples
from sources.scan import BadFile, Format, IndexedField, LeftOut
from sources.tar import parse_tar, scan_tar
from utils.cache_file import write_atomically
from utils.distributed import available_cores, is_main_process
from utils.errors import UserError, warn

PLACES = numpy.dtype([("offset", "i8"), ("size", "i8"), ("shard", "i4"), ("label", "i4")])
OPEN_FILES = 64  # at most, in each process
VERSION = 2  # of what the index holds: older indexes are not used


class Shards(SmallSamples):
    """The samples of many files, each of which is read where the index says that it is.

    The files are read once, by as many processes as there are cores, to make the index: 24 bytes
    per sample in a file in `cache_dir`, which all ranks and workers map into their memory. It is
    used again until a file has a different size or modification time. Create it in
    main_process_first(), so that one process per node does that.

    paths: the files, of one kind:
      .tar: uncompressed, in WebDataset's layout: 000017.jpg and 000017.cls, next to each other, are
        the sample {"__key__": "000017", "jpg": bytes, "cls": bytes}.
      .jsonl: a JSON value per line.
      .txt: a document per line or, with paragraphs=True, between blank lines, as a str.
    transform: makes of this what the dataset returns. Random numbers in it depend on nothing but
    (seed, epoch, index), as in any dataset; it must not keep what it has drawn (see SmallSamples).
    cache_dir: where the index is kept; empty: the folder .cache beside the first file.
    on_bad: for files that are missing, truncated or damaged, and samples that cannot be used.
    "stop" raises UserError; "skip" leaves them out, including everything after the damage in a tar
    file, and says what that was. Hidden files in a tar file are left out in any case.
    label: the member of a tar file ("cls") or the key of a JSON object ("label") that holds an
    integer, which becomes part of the index, for `labels`. length: instead of a label, the member
    of a tar file or the key of a JSON string whose size in bytes is stored, for `lengths`. For .txt
    files, any name: the size of the document.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        transform: Callable[[Any], Any] | None = None,
        cache_dir: str | Path = "",
        on_bad: str = "stop",
        label: str = "",
        paragraphs: bool = False,
        length: str = "",
    ) -> None:
        if label and length:
            raise UserError("an index has one integer per sample: pass label or length, not both")
        self.paths = [os.path.abspath(path) for path in paths]
        self.transform, self.on_bad, self.field = transform, on_bad, IndexedField(label, length)
        self.format = _format_of(self.formats(), self.paths, paragraphs)
        self.states = [state_of(path) for path in self.paths]
        folder = Path(cache_dir or Path(self.paths[0]).parent / ".cache")
        self.index_file = folder / f"shards-{self._fingerprint()}.npy"
        if (left_out := self._load()) is None:
            index, left_out = self._scan_all()
            self.checksum = self._checksum_of(index)
            report = json.dumps({"left_out": left_out, "checksum": self.checksum})
            _write(self.index_file.with_suffix(".json"), lambda file: file.write(report.encode()))
            _write(self.index_file, lambda file: numpy.save(file, index))
            self._map_index()
        if is_main_process():
            for line in left_out:
                warn(line)

    def formats(self) -> list[Format]:
        """The kinds of files that this class reads."""
        return FORMATS

    def _load(self):
        """Map the index of an earlier run. Returns lines about what it leaves out; None if there is
        no index, or it is damaged."""
        try:
            report = json.loads(self.index_file.with_suffix(".json").read_bytes())
            self._map_index()
            self.checksum = self._checksum_of(self.index)
            is_whole = (report["checksum"], PLACES) == (self.checksum, self.index.dtype)
            return report["left_out"] if is_whole else None
        except Exception:  # a damaged file raises anything, MemoryError for one
            return None

    def _map_index(self):
        # As a plain array, whose elements are read faster.
        self.index = numpy.load(self.index_file, mmap_mode="r").view(numpy.ndarray)
        self.open_file = lru_cache(OPEN_FILES)(_open)

    def __getstate__(self) -> dict[str, Any]:
        """What a spawned process gets: it maps the index and opens the files itself."""
        state = super().__getstate__()
        return {k: v for k, v in state.items() if k not in ("index", "open_file")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._map_index()

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, index: int) -> Any:
        offset, size, shard, _ = self.index[index].item()
        sample = self.sample(shard, offset, size)
        return sample if self.transform is None else self.transform(sample)

    def sample(self, shard: int, offset: int, size: int) -> Any:
        """The sample at a place of the index, not transformed. Raises UserError."""
        data = self._read(shard, offset, size)
        try:
            return self.format.parse(data)
        except (ValueError, tarfile.TarError) as error:
            raise UserError(
                f"{self.paths[shard]} is damaged at offset {offset} ({error}): restore it"
            ) from None

    def path_of(self, index: int) -> str:
        """The file of a sample."""
        return self.paths[self.index["shard"][index]]

    @property
    def labels(self) -> Tensor:
        """The integers that `label` names, int64 (samples,)."""
        return torch.from_numpy(self.index["label"].astype(numpy.int64))

    @property
    def lengths(self) -> Tensor:
        """What `length` names, in bytes, int64 (samples,); without it, the bytes in the file."""
        column = "label" if self.field.length else "size"
        return torch.from_numpy(self.index[column].astype(numpy.int64))

    @property
    def shard_sizes(self) -> list[int]:
        """The number of samples in each file. Their samples have ascending indices."""
        return numpy.bincount(self.index["shard"], minlength=len(self.paths)).tolist()

    def describe(self, name: str) -> dict[str, str]:
        """What a checkpoint stores about the data: the ranks compare it, and a resumed run refuses
        files with other names (without folders), sizes or places of samples.

        name: of the split, such as "train".
        """
        facts = f"{len(self.paths)} files, {len(self)} samples, checksum {self.checksum:08x}"
        return {f"{name}_shards": facts}

    def _checksum_of(self, index):
        files = [
            (os.path.basename(p), size)
            for p, (size, _) in zip(self.paths, self.states, strict=True)
        ]
        return zlib.crc32(index.view(numpy.uint8).data, zlib.crc32(repr(files).encode()))

    def _fingerprint(self):
        """Changes when a file is added, removed, renamed or rewritten."""
        facts = VERSION, self.format.name, self.on_bad, self.field, self.paths, self.states
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def _scan_all(self):
        """The index, and lines about what it leaves out. Raises UserError."""
        loader = DataLoader(
            self.paths,  # type: ignore[arg-type] # a list is a dataset
            batch_size=None,
            collate_fn=partial(_scan, self.format.scan, self.field),  # runs in the worker
            num_workers=available_cores() if len(self.paths) > 4 else 0,
            generator=torch.Generator(),  # leaves the global random state alone
        )
        parts, lines, ignored = [], [], []
        for shard, (path, result) in enumerate(zip(self.paths, loader, strict=True)):
            if isinstance(result, UserError):
                raise result
            part, left_out = result
            if left_out.first and self.on_bad != "skip":
                raise UserError(
                    f"{path} {left_out.first}: restore or correct the file. In a task of "
                    f'your own, Shards(..., on_bad="skip") leaves out what cannot be read'
                )
            if left_out.first:
                lines.append(f"{path} {left_out.first}: {left_out.summary(len(part))}")
            ignored += [(path, left_out)] if left_out.hidden else []
            part["shard"] = shard
            parts.append(part)
        if ignored:
            count = sum(each.hidden for _, each in ignored)
            path, first = ignored[0]
            lines.append(f"ignored {count} hidden files, such as {first.hidden_file} in {path}")
        index = numpy.concatenate(parts)
        if not len(index):
            raise UserError(
                "; ".join([f"there are no samples in {', '.join(self.paths[:3])}", *lines[:1]])
            )
        return index, lines

    def _read(self, shard, offset, size):
        path, data = self.paths[shard], b""
        try:
            file = self.open_file(path)
            # pread leaves the file's position alone, which a forked process shares.
            while len(data) < size and (more := file.read(size - len(data), offset + len(data))):
                data += more
            state = file.state()
        except OSError as error:
            raise UserError(
                f"cannot read {path} at offset {offset}: {error.strerror or error}"
            ) from None
        if state != self.states[shard] or len(data) < size:
            raise has_changed(path, offset)
        return data


class _File:
    """A file that is open as long as somebody has it: a different thread may still read what the
    cache of open files has dropped."""

    def __init__(self, descriptor):
        self.descriptor = descriptor

    def __del__(self):
        os.close(self.descriptor)

    def read(self, size, offset):
        return os.pread(self.descriptor, size, offset)

    def state(self):
        status = os.fstat(self.descriptor)
        return status.st_size, status.st_mtime_ns


def _open(path):
    return _File(os.open(path, os.O_RDONLY))


def has_changed(path: str, offset: int) -> UserError:
    """The error for a file that differs from the indexed one."""
    return UserError(
        f"{path} has changed since the run started, as reading at offset {offset} shows: start the "
        f"run again"
    )


def state_of(path: str) -> tuple[int, int]:
    """(size, modification time) of a file; (-1, -1) if there is none."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


# The index


def _scan(scan, field, path):
    """The index of a file, without its number, and what is LeftOut; or a UserError, which
    DataLoader would put into the worker's traceback if it were raised.

    scan: yields (offset, size, label) for an open file and an IndexedField, and adds to a LeftOut.
    """
    left_out = LeftOut()
    try:
        with open(path, "rb") as file:
            rows = _until_bad(scan(file, field, left_out), file, left_out)
            return numpy.fromiter(rows, PLACES), left_out
    except FileNotFoundError:
        return numpy.empty(0, PLACES), LeftOut("does not exist")
    except OSError as error:  # the file may be fine
        return UserError(f"cannot read {path}: {error.strerror or error}")


def _until_bad(places, file, left_out):
    try:
        for offset, size, integer in places:
            yield offset, size, 0, integer
    except BadFile as error:
        left_out.add_rest(*error.args, os.fstat(file.fileno()).st_size)


FORMATS = [
    Format(".tar", scan_tar, parse_tar),
    Format(".jsonl", scan_json_lines, parse_json),
    Format(".txt", partial(scan_texts, scan_lines), parse_text),
    Format(".txt paragraphs", partial(scan_texts, scan_paragraphs), parse_text),
]


def find_shards(folder: str | Path, split: str, kinds: Sequence[str]) -> list[Path]:
    """The files folder/SPLIT-* whose names end with one of the `kinds`, in sorted order. Warns of
    others, such as compressed ones."""
    paths = sorted(Path(folder).glob(f"{split}-*"))
    others = [path.name for path in paths if path.suffix not in kinds]
    if others and is_main_process():
        listed = f"{', '.join(others[:3])}{', ...' * (len(others) > 3)}"
        warn(f"ignored in {folder}, as they are no {' or '.join(kinds)}: {listed}")
    return [path for path in paths if path.suffix in kinds]


def _format_of(formats, paths, paragraphs):
    """The format of all files. Raises UserError if there is none, or several."""
    if not paths:
        raise UserError("there are no shards: check the folder and the pattern of their names")
    if len(set(paths)) < len(paths):
        raise UserError("a shard is named twice: its samples would count twice")
    names = {os.path.splitext(path)[1] + " paragraphs" * paragraphs for path in paths}
    known = {each.name: each for each in formats}
    suffixes = {each.name.split()[0]: None for each in formats}  # in their order
    if len(names) > 1 or not names <= known.keys():
        raise UserError(
            f"shards must be all of one kind, {', '.join(suffixes)}, and not compressed, because a "
            f"sample cannot be read from the middle of a compressed file; not "
            f"{', '.join(sorted(names))}"
        )
    return known[names.pop()]


def _write(path, save):
    write_atomically(path, save, "pass a folder that is writable as cache_dir")
