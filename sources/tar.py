"""Tar files in WebDataset's layout: where their samples are, and what their bytes hold."""

import io
import os
import tarfile
from functools import partial
from itertools import groupby
from typing import Any, BinaryIO

from sources.scan import BadFile, IndexedField, LeftOut, Places, integer_or_none

BLOCK = 512  # bytes: the parts of a tar file are multiples of it


def scan_tar(file: BinaryIO, field: IndexedField, left_out: LeftOut) -> Places:
    """The samples: files next to each other whose names differ in their extensions only."""
    keys = set()
    for key, group in groupby(_members(file, left_out), lambda each: _split_name(each[0].name)[0]):
        members, ends = zip(*group, strict=True)
        start = members[0].offset
        if key in keys:
            raise BadFile(start, f"{key} is in two places: archive the files sorted by name")
        keys.add(key)
        try:
            yield start, ends[-1] - start, _integer_of(file, key, members, field)
        except ValueError as error:
            left_out.add(f"at offset {start}", str(error))


def _members(file, left_out):
    """(TarInfo, its end) of what an archive holds besides folders. Raises BadFile."""
    size, end = os.fstat(file.fileno()).st_size, 0
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            while member := archive.next():
                archive.members.clear()  # type: ignore[attr-defined] # it would keep all
                # Where the next header is: the size of a sparse file is not what is stored of it.
                if archive.offset > size:
                    raise BadFile(member.offset, "truncated")
                end = archive.offset
                if member.isdir():
                    continue
                if _is_hidden(member.name):
                    left_out.ignore(member.name)
                else:
                    yield member, end
    except tarfile.TarError as error:
        raise BadFile(end, str(error)) from None
    # tarfile takes what is not a header, or nothing at all, for the end of the archive.
    file.seek(end)
    first, rest = file.read(BLOCK), iter(partial(file.read, 1 << 20), b"")
    if len(first) < BLOCK:
        raise BadFile(end, "truncated: the end of the archive is missing")
    if any(first):
        raise BadFile(end, "no header of a tar file")
    if any(map(any, rest)):
        raise BadFile(end, "more data after the end of the archive")


def _is_hidden(name):
    """Whether a file is hidden, such as the ._ files of macOS, or is in a hidden folder."""
    return "/." in f"/{name}" and any(p[:1] == "." and p.strip(".") for p in name.split("/"))


def _integer_of(file, key, members, field):
    """The integer of a sample; -1: there is none. Raises ValueError if it cannot be used."""
    parts = {}
    for member in members:
        _, extension = _split_name(member.name)
        if not member.isreg():
            raise ValueError(
                f"{member.name} is a link, or no file: archive with tar --hard-dereference -h"
            )
        if member.issparse():
            raise ValueError(f"{member.name} is stored with holes: archive without tar -S")
        if extension in parts:
            raise ValueError(f"{member.name} is there twice")
        parts[extension] = member
    if not field.name:
        return -1
    if field.name not in parts:
        raise ValueError(f"{key} has no .{field.name}, only .{', .'.join([*parts][:5])}")
    member = parts[field.name]
    size, offset = member.size, member.offset_data
    integer = integer_or_none(size if field.length else os.pread(file.fileno(), size, offset))
    if integer is None:
        raise ValueError(f"{member.name} is no {field.kind}")
    return integer


def _split_name(name):
    """folder/17.left.jpg -> (folder/17, left.jpg)."""
    folder, slash, name = name.rpartition("/")
    key, _, extension = name.partition(".")
    return f"{folder}{slash}{key}", extension


def parse_tar(data: bytes) -> dict[str, Any]:
    """The files of a sample. Raises ValueError or tarfile.TarError."""
    sample: dict[str, Any] = {}
    end = 0
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
