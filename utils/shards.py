"""Shards, files of many samples each, as a map-style dataset: an index says where each sample is.

Not imported by any script: docs/streams.md adds it.
"""

import hashlib
import io
import json
import operator
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
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
from utils.errors import UserError

PLACES = numpy.dtype([("offset", "i8"), ("size", "i8"), ("shard", "i4"), ("label", "i4")])
OPEN_FILES = 64  # at most, in each process
BLOCK = 512  # bytes: the parts of a tar file are multiples of it


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
    on_bad: for files that are missing, truncated or damaged. "stop" raises UserError; "skip" leaves
    out what cannot be read, which for a tar file is all that follows, and says what that was.
    label: the member of a tar file ("cls") or the key of a JSON object ("label") that holds an
    integer, which becomes part of the index, for `labels`. length: instead of a label, the member
    whose size, or the key of the string whose number of bytes in UTF-8, does, for `lengths`; of a
    .txt file, with any name, the document's.
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
        report = self.index_file.with_suffix(".json")
        if not self.index_file.exists():
            index, left_out = self._scan_all()
            _write(report, lambda file: file.write(json.dumps(left_out).encode()))
            _write(self.index_file, lambda file: numpy.save(file, index))
        if is_main_process():
            for line in json.loads(report.read_text()):
                print(line)
        self._map_index()

    def formats(self) -> list["Format"]:
        """The kinds of files that this class reads."""
        return FORMATS

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
        files = [
            (os.path.basename(p), size)
            for p, (size, _) in zip(self.paths, self.states, strict=True)
        ]
        checksum = zlib.crc32(self.index.view(numpy.uint8).data, zlib.crc32(repr(files).encode()))
        facts = f"{len(self.paths)} files, {len(self)} samples, checksum {checksum:08x}"
        return {f"{name}_shards": facts}

    def _fingerprint(self):
        """Changes when a file is added, removed, renamed or rewritten."""
        facts = self.format.name, self.on_bad, self.number, PLACES.descr, self.paths, self.states
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
        parts, left_out = [], []
        for shard, (path, result) in enumerate(zip(self.paths, loader, strict=True)):
            if isinstance(result, UserError):
                raise result
            places, faults = result
            if faults and self.on_bad != "skip":
                raise UserError(
                    f"{_describe(path, faults[0])}: restore it, or leave out what cannot be read "
                    f'(on_bad="skip")'
                )
            if faults:
                left_out.append(_what_is_lost(path, places, faults))
            part = numpy.empty(len(places), PLACES)
            part["offset"], part["size"], part["label"] = places.T
            part["shard"] = shard
            parts.append(part)
        index = numpy.concatenate(parts)
        if not len(index):
            raise UserError(f"there are no samples in {', '.join(self.paths[:3])}")
        return index, left_out

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

    def of(self, value: Any) -> int | None:
        """The integer of a value; None if it has none. Bytes are the text of a label."""
        if self.length:
            data = value.encode() if isinstance(value, str) else value
            return len(data) if isinstance(data, bytes) else None
        return integer_or_none(value)


class Fault(NamedTuple):
    """Bytes that hold no sample: how many, and where."""

    offset: int
    lost: int
    reason: str


_MISSING = "there is no such file"


class Broken(Exception):
    """A file cannot be read from an offset on: (offset, reason)."""


def _scan(scan, number, path):
    """(offset, size, label) of the samples in a file, int64 (n, 3), and its faults; or a UserError,
    which DataLoader would put into the worker's traceback if it were raised.

    scan: yields such rows for an open file and a Number, and appends to a list of faults.
    """
    places, faults = [], []
    try:
        with open(path, "rb") as file:
            try:
                for place in scan(file, number, faults):
                    places.append(place)
            except Broken as error:
                offset, reason = error.args
                faults.append(Fault(offset, os.fstat(file.fileno()).st_size - offset, reason))
    except FileNotFoundError:
        faults.append(Fault(0, 0, _MISSING))
    except OSError as error:  # the file may be fine
        return UserError(f"cannot read {path}: {error.strerror or error}")
    return numpy.array(places, numpy.int64).reshape(-1, 3), faults


def _describe(path, fault):
    if fault.reason == _MISSING:
        return f"{path} does not exist"
    return f"{path} is damaged at offset {fault.offset} ({fault.reason})"


def _what_is_lost(path, places, faults):
    lost = sum(fault.lost for fault in faults)
    about = max(len(faults), round(lost / places[:, 1].mean())) if len(places) else "all"
    return (
        f"{_describe(path, faults[0])}: skipping {lost} bytes, about {about} samples; "
        f"{len(places)} are left"
    )


def _scan_tar(file, number, faults):
    keys = set()
    for key, group in groupby(_members(file), lambda member: _split_name(member.name)[0]):
        members = list(group)
        start, end = members[0].offset, _end(members[-1])
        if key in keys:
            raise Broken(start, f"{key} is in two places: archive the files sorted by name")
        keys.add(key)
        integer = -1
        if number.name:
            texts = [
                os.pread(file.fileno(), member.size, member.offset_data)
                for member in members
                if _split_name(member.name)[1] == number.name
            ]
            integer = number.of(texts[0]) if texts else None
        if integer is None:
            faults.append(Fault(start, end - start, f"{key}.{number.name} is no label"))
        else:
            yield start, end - start, integer


def _members(file):
    """The TarInfo of each file in an archive. Raises Broken."""
    size, end = os.fstat(file.fileno()).st_size, 0
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            while member := archive.next():
                archive.members.clear()  # type: ignore[attr-defined] # it would keep all
                if _end(member) > size:
                    raise Broken(member.offset, "truncated")
                end = _end(member)
                if member.isreg():
                    yield member
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


def _end(member):
    blocks = -(-member.size // BLOCK) if member.isreg() else 0
    return member.offset_data + blocks * BLOCK


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
        sample["__key__"], extension = _split_name(name.decode("utf-8", "surrogateescape"))
        sample[extension] = data[start : start + size]
        end = start + -(-size // BLOCK) * BLOCK
    if end != len(data):
        raise ValueError("the size of a file is wrong")
    return sample


def _is_plain(header):
    """Whether this is the header of a file with a short name, which takes tarfile several times as
    long to read."""
    kind, prefix, size = header[156:157], header[345:346], header[124:125]
    if kind != b"0" or prefix != b"\0" or size >= b"\x80":  # that is no octal number
        return False
    checksum = sum(header) - sum(header[148:156]) + 8 * ord(" ")
    return checksum == _octal(header[148:156])


def _octal(field):
    """The value of a number in a header. Raises ValueError."""
    return int(field.rstrip(b"\0 "), 8)


def _parse_any_tar(data):
    sample, end = {}, 0
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        for member in archive:
            sample["__key__"], extension = _split_name(member.name)
            sample[extension] = data[member.offset_data :][: member.size]
            end = _end(member)
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


def _scan_json_lines(file, number, faults):
    for offset, size, _ in _scan_lines(file, number, faults):
        line = os.pread(file.fileno(), size, offset)
        try:
            value = json.loads(line)
        except ValueError as error:
            faults.append(Fault(offset, size, f"no JSON: {error}"))
            continue
        integer = -1
        if number.name:
            integer = number.of(value.get(number.name)) if isinstance(value, dict) else None
        if integer is None:
            kind = "string" if number.length else "integer"
            faults.append(Fault(offset, size, f"no {kind} {number.name!r}"))
        else:
            yield offset, size, integer


def _scan_lines(file, number, faults):
    offset = 0
    for line in file:
        if line.strip():
            yield offset, len(line), -1
        offset += len(line)


def _scan_paragraphs(file, number, faults):
    start = end = 0
    for offset, size, _ in _scan_lines(file, number, faults):
        if offset > end and end > start:  # blank lines are between them
            yield start, end - start, -1
        start = offset if offset > end else start
        end = offset + size
    if end > start:
        yield start, end - start, -1


def _scan_texts(scan, file, number, faults):
    """The documents of a scan, with the length of each, if it is to be part of the index."""
    for offset, size, integer in scan(file, number, faults):
        if number.length:
            try:
                integer = number.of(_parse_text(os.pread(file.fileno(), size, offset)))
            except ValueError as error:
                faults.append(Fault(offset, size, f"no UTF-8: {error}"))
                continue
        yield offset, size, integer


def _parse_text(data):
    return data.decode().strip("\r\n")


class Format(NamedTuple):
    """How to find the samples in a file, and to make a value of the bytes of one."""

    name: str
    scan: Callable[..., Iterator[tuple[int, int, int]]]
    parse: Callable[[bytes], Any]


FORMATS = [
    Format(".tar", _scan_tar, _parse_tar),
    Format(".jsonl", _scan_json_lines, json.loads),
    Format(".txt", partial(_scan_texts, _scan_lines), _parse_text),
    Format(".txt paragraphs", partial(_scan_texts, _scan_paragraphs), _parse_text),
]


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
    utils.shares.ShareOf divides it among the ranks. Draws from torch's global generator.

    shard_sizes: the number of samples in each file, whose indices are consecutive (of Shards:
    shard_sizes); interleave, buffer: larger ones mix better, and read in more places at a time.
    """

    def __init__(
        self, shard_sizes: Sequence[int], interleave: int = 16, buffer: int = 10_000
    ) -> None:
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
