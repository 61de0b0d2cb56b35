"""Shards, files of many samples each, as a map-style dataset: an index says where each sample is.

For tasks: docs/streams.md.
"""

import hashlib
import io
import json
import operator
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from utils.cache_file import write_atomically
from utils.distributed import available_cores, is_main_process
from utils.errors import UserError, warn

PLACES = numpy.dtype([("offset", "i8"), ("size", "i8"), ("shard", "i4"), ("label", "i4")])
OPEN_FILES = 64  # at most, in each process
BLOCK = 512  # bytes: the parts of a tar file are multiples of it
VERSION = 2  # of what the index holds: those of older versions are not used


class Shards(Dataset[Any]):
    """The samples of many files, each of which is read where the index says that it is.

    The files are read once, by as many processes as there are cores, to make the index: 24 bytes
    per sample in a file in `cache_dir`, which all ranks and workers map into their memory, and
    which is used again until a file has a different size or modification time. Create it in
    main_process_first(), so that one process per node does that.

    paths: the files, of one kind:
      .tar: uncompressed, in WebDataset's layout: 000017.jpg and 000017.cls, next to each other, are
        the sample {"__key__": "000017", "jpg": bytes, "cls": bytes}.
      .jsonl: a JSON value per line.
      .txt: a document per line or, with paragraphs=True, between blank lines, as a str.
    transform: makes of this what the dataset returns. Random numbers in it depend on nothing but
    (seed, epoch, index), as those of any dataset.
    cache_dir: where the index is kept; empty: the folder .cache beside the first file.
    on_bad: for files that are missing, truncated or damaged, and samples that cannot be used.
    "stop" raises UserError; "skip" leaves them out, which for a damaged tar file is all that
    follows, and says what that was. Hidden files in a tar file are left out in any case.
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
        self.transform, self.on_bad, self.number = transform, on_bad, Number(label, length)
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

    def formats(self) -> list["Format"]:
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
        """For a process that is spawned, which maps the index and opens the files itself."""
        return {k: v for k, v in vars(self).items() if k not in ("index", "open_file")}

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
        except (ValueError, RecursionError, tarfile.TarError) as error:
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
        column = "label" if self.number.length else "size"
        return torch.from_numpy(self.index[column].astype(numpy.int64))

    @property
    def shard_sizes(self) -> list[int]:
        """The number of samples in each file. Their samples have ascending indices."""
        return numpy.bincount(self.index["shard"], minlength=len(self.paths)).tolist()

    def describe(self, name: str) -> dict[str, str]:
        """For the data that a checkpoint describes: the ranks compare it, and a resumed run refuses
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
        facts = VERSION, self.format.name, self.on_bad, self.number, self.paths, self.states
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def _scan_all(self):
        """The index, and lines about what it leaves out. Raises UserError."""
        loader = DataLoader(
            self.paths,  # type: ignore[arg-type] # a list is a dataset
            batch_size=None,
            collate_fn=partial(_scan, self.format.scan, self.number),  # runs in the worker
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
                    f"{path} {left_out.first}: restore or correct the file, or leave out what "
                    f'cannot be read (on_bad="skip")'
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
    """The error of a file that is not the one of the index."""
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


class Number(NamedTuple):
    """The member or the key that holds a sample's label, or the one whose length counts."""

    label: str
    length: str

    @property
    def name(self) -> str:
        """Either of them; empty: there is none."""
        return self.label or self.length

    @property
    def kind(self) -> str:
        """What a value must be."""
        return "string" if self.length else "integer"

    def of(self, value: Any) -> int | None:
        """The integer of a value; None if it has none. Bytes are the text of a label."""
        if self.length:
            data = value.encode() if isinstance(value, str) else value
            value = len(data) if isinstance(data, bytes) else None
        return integer_or_none(value)


@dataclass
class LeftOut:
    """What a file holds that does not become part of the index."""

    first: str = ""  # where the first fault is, and what; it follows the name of the file
    samples: int = 0  # that cannot be used
    lost: int = 0  # bytes at the end that cannot be read
    hidden: int = 0  # files in an archive
    hidden_file: str = ""  # the first of them

    def add(self, place: str, reason: str, samples: int = 1) -> None:
        """Leave out a sample, or several. place: such as "at offset 0"."""
        self.first = self.first or f"{place}: {reason}"
        self.samples += samples

    def add_rest(self, offset: int, reason: str, size: int) -> None:
        """Leave out all that follows an offset, of a file of this size."""
        self.first = self.first or f"is damaged at offset {offset} ({reason})"
        self.lost = size - offset

    def ignore(self, hidden_file: str) -> None:
        """Leave out a file of an archive, which is not a fault."""
        self.hidden_file = self.hidden_file or hidden_file
        self.hidden += 1

    def summary(self, left: int) -> str:
        """How much is left out. left: the number of samples that are not."""
        parts = [f"{self.samples} samples"] if self.samples else []
        parts += [f"{self.lost} bytes"] if self.lost or not parts else []
        return f"skipping {' and '.join(parts)}; {left} samples are left"


class Broken(Exception):
    """A file cannot be read from an offset on: (offset, reason)."""


def _scan(scan, number, path):
    """The index of a file, without its number, and what is LeftOut; or a UserError, which
    DataLoader would put into the worker's traceback if it were raised.

    scan: yields (offset, size, label) for an open file and a Number, and adds to a LeftOut.
    """
    left_out = LeftOut()
    try:
        with open(path, "rb") as file:
            rows = _until_broken(scan(file, number, left_out), file, left_out)
            return numpy.fromiter(rows, PLACES), left_out
    except FileNotFoundError:
        return numpy.empty(0, PLACES), LeftOut("does not exist")
    except OSError as error:  # the file may be fine
        return UserError(f"cannot read {path}: {error.strerror or error}")


def _until_broken(places, file, left_out):
    try:
        for offset, size, integer in places:
            yield offset, size, 0, integer
    except Broken as error:
        left_out.add_rest(*error.args, os.fstat(file.fileno()).st_size)


def _scan_tar(file, number, left_out):
    keys = set()
    for key, group in groupby(_members(file, left_out), lambda each: _split_name(each[0].name)[0]):
        members, ends = zip(*group, strict=True)
        start = members[0].offset
        if key in keys:
            raise Broken(start, f"{key} is in two places: archive the files sorted by name")
        keys.add(key)
        try:
            yield start, ends[-1] - start, _integer_of(file, key, members, number)
        except ValueError as error:
            left_out.add(f"at offset {start}", str(error))


def _members(file, left_out):
    """(TarInfo, its end) of what an archive holds besides folders. Raises Broken."""
    size, end = os.fstat(file.fileno()).st_size, 0
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            while member := archive.next():
                archive.members.clear()  # type: ignore[attr-defined] # it would keep all
                # Where the next header is: the size of a sparse file is not what is stored of it.
                if archive.offset > size:
                    raise Broken(member.offset, "truncated")
                end = archive.offset
                if member.isdir():
                    continue
                if _is_hidden(member.name):
                    left_out.ignore(member.name)
                else:
                    yield member, end
    except tarfile.TarError as error:
        raise Broken(end, str(error)) from None
    # tarfile takes what is no header, or nothing at all, for the end of the archive.
    file.seek(end)
    first, rest = file.read(BLOCK), iter(partial(file.read, 1 << 20), b"")
    if len(first) < BLOCK:
        raise Broken(end, "truncated: the end of the archive is missing")
    if any(first):
        raise Broken(end, "no header of a tar file")
    if any(map(any, rest)):
        raise Broken(end, "more data after the end of the archive")


def _is_hidden(name):
    """Whether a file is hidden, such as the ._ files of macOS, or is in a hidden folder."""
    return "/." in f"/{name}" and any(p[:1] == "." and p.strip(".") for p in name.split("/"))


def _integer_of(file, key, members, number):
    """The integer of a sample; -1: there is none. Raises ValueError if it cannot be used."""
    parts = {}
    for member in members:
        _, extension = _split_name(member.name)
        if member.islnk() or member.issym():
            raise ValueError(
                f"{member.name} is a link, and has no data: archive with tar --hard-dereference -h"
            )
        if member.issparse():
            raise ValueError(f"{member.name} is stored with holes: archive without tar -S")
        if not member.isreg():
            raise ValueError(f"{member.name} is no file")
        if extension in parts:
            raise ValueError(f"{member.name} is there twice")
        parts[extension] = member
    if not number.name:
        return -1
    if number.name not in parts:
        raise ValueError(f"{key} has no .{number.name}, only .{', .'.join([*parts][:5])}")
    member = parts[number.name]
    size, offset = member.size, member.offset_data
    integer = integer_or_none(size if number.length else os.pread(file.fileno(), size, offset))
    if integer is None:
        raise ValueError(f"{member.name} is no {number.kind}")
    return integer


def _split_name(name):
    """folder/17.left.jpg -> (folder/17, left.jpg)."""
    folder, slash, name = name.rpartition("/")
    key, _, extension = name.partition(".")
    return f"{folder}{slash}{key}", extension


def _parse_tar(data):
    sample, end = {}, 0
    while end < len(data):
        header, start = data[end : end + BLOCK], end + BLOCK
        if not _is_plain(header):
            return _parse_any_tar(data)
        name, size = header[:100].partition(b"\0")[0], _octal(header[124:136])
        _add(sample, name.decode("utf-8", "surrogateescape"), data[start : start + size])
        end = start + -(-size // BLOCK) * BLOCK
    if end != len(data):
        raise ValueError("the size of a file is wrong")
    return sample


def _add(sample, name, data):
    key, extension = _split_name(name)
    if _is_hidden(name):
        return
    if sample.setdefault("__key__", key) != key:
        raise ValueError(f"{name} is not of the sample {sample['__key__']}")
    sample[extension] = data


def _is_plain(header):
    """Whether this is the header of a file with a short name, which takes tarfile several times as
    long to read."""
    kind, prefix, size = header[156:157], header[345:346], header[124:125]
    if kind != b"0" or prefix != b"\0" or size >= b"\x80":  # not an octal number
        return False
    checksum = sum(header) - sum(header[148:156]) + 8 * ord(" ")
    return checksum == _octal(header[148:156])


def _octal(field):
    """The value of a number in a header. Raises ValueError."""
    return int(field.rstrip(b"\0 "), 8)


def _parse_any_tar(data):
    sample, end = {}, 0
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        while member := archive.next():
            if member.isreg():
                _add(sample, member.name, data[member.offset_data :][: member.size])
            end = archive.offset
    if end != len(data):
        raise ValueError("no header of a tar file")
    return sample


def integer_or_none(value: Any) -> int | None:
    """The value, or the text in bytes, as an integer of 32 bits, if it is one."""
    try:
        number = int(value) if isinstance(value, bytes) else operator.index(value)
    except (TypeError, ValueError):
        return None
    return number if -(2**31) <= number < 2**31 else None


def _scan_json_lines(file, number, left_out):
    for offset, size, _ in _scan_lines(file, number, left_out):
        integer = -1
        try:
            value = _parse_json(os.pread(file.fileno(), size, offset))
            if number.name:
                integer = number.of(value.get(number.name)) if isinstance(value, dict) else None
        except (ValueError, RecursionError) as error:  # also of half a surrogate pair in a text
            left_out.add(f"at offset {offset}", f"no JSON in UTF-8: {error}")
            continue
        if integer is None:
            left_out.add(f"at offset {offset}", f"no {number.kind} {number.name!r}")
        else:
            yield offset, size, integer


def _parse_json(data):
    return json.loads(data.decode("utf-8-sig"))  # of bytes, it would guess the encoding


def _scan_lines(file, number, left_out):
    offset = 0
    for line in file:
        if line.strip():
            yield offset, len(line), -1
        offset += len(line)


def _scan_paragraphs(file, number, left_out):
    start = end = 0
    for offset, size, _ in _scan_lines(file, number, left_out):
        if offset > end and end > start:  # blank lines are between them
            yield start, end - start, -1
        start = offset if offset > end else start
        end = offset + size
    if end > start:
        yield start, end - start, -1


def _scan_texts(scan, file, number, left_out):
    """The documents of a scan, with the length of each, if it is to be part of the index."""
    for offset, size, integer in scan(file, number, left_out):
        if number.length:
            try:
                integer = number.of(_parse_text(os.pread(file.fileno(), size, offset)))
            except ValueError as error:
                left_out.add(f"at offset {offset}", f"no UTF-8: {error}")
                continue
        yield offset, size, integer


def _parse_text(data):
    return data.decode("utf-8-sig").strip("\r\n")


class Format(NamedTuple):
    """How to find the samples in a file, and to make a value of the bytes of one."""

    name: str
    scan: Callable[..., Iterator[tuple[int, int, int]]]
    parse: Callable[[bytes], Any]


FORMATS = [
    Format(".tar", _scan_tar, _parse_tar),
    Format(".jsonl", _scan_json_lines, _parse_json),
    Format(".txt", partial(_scan_texts, _scan_lines), _parse_text),
    Format(".txt paragraphs", partial(_scan_texts, _scan_paragraphs), _parse_text),
]


def find_shards(folder: str | Path, split: str, kinds: Sequence[str]) -> list[Path]:
    """The files folder/SPLIT-* whose names end with one of the `kinds`, in sorted order. Says how
    many others there are, such as compressed ones."""
    paths = sorted(Path(folder).glob(f"{split}-*"))
    others = [path.name for path in paths if path.suffix not in kinds]
    if others and is_main_process():
        listed = f"{', '.join(others[:3])}{', ...' * (len(others) > 3)}"
        what = f"{len(others)} files in {folder}, which are no {' or '.join(kinds)}: {listed}"
        warn(f"ignored {what}")
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


# The order


class ShardOrder(Sampler[int]):
    """An order that reads files from their starts to their ends, and mixes what it reads.

    In each epoch, the files are permuted and read in turns, a sample of each, `interleave` of them
    at a time; and each `buffer` samples in a row are permuted. The order is that of one process;
    sources.samplers.ShareOf divides it among the ranks. Draws from torch's global generator.

    shard_sizes: the number of samples in each file, whose indices are consecutive (of Shards:
    shard_sizes); interleave, buffer: larger ones mix better, and read in more places at a time.
    """

    def __init__(
        self, shard_sizes: Sequence[int], interleave: int = 16, buffer: int = 10_000
    ) -> None:
        if min(interleave, buffer) < 1:
            raise UserError(
                f"interleave is {interleave}, buffer is {buffer}: both must be 1 at least"
            )
        self.sizes = numpy.asarray(shard_sizes)
        self.interleave, self.buffer = interleave, buffer

    def __len__(self) -> int:
        return int(self.sizes.sum())

    def __iter__(self) -> Iterator[int]:
        starts = self.sizes.cumsum() - self.sizes
        shards = torch.randperm(len(self.sizes)).numpy()
        parts = []
        for first in range(0, len(shards), self.interleave):
            group = shards[first : first + self.interleave]
            positions = numpy.concatenate([numpy.arange(self.sizes[shard]) for shard in group])
            indices = positions + numpy.repeat(starts[group], self.sizes[group])
            parts.append(indices[positions.argsort(kind="stable")])  # first those at position 0
        for block in torch.from_numpy(numpy.concatenate(parts)).split(self.buffer):
            yield from block[torch.randperm(len(block))].tolist()
