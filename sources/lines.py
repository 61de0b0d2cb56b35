"""JSON lines and texts: where their samples are, and what their bytes hold."""

import codecs
import json
import os
from collections.abc import Callable
from typing import Any, BinaryIO

from sources.scan import IndexedField, LeftOut, Places


def scan_json_lines(file: BinaryIO, field: IndexedField, left_out: LeftOut) -> Places:
    """The lines that are JSON."""
    for offset, size, _ in scan_lines(file, field, left_out):
        integer = -1
        try:
            value = parse_json(os.pread(file.fileno(), size, offset))
            if field.name:
                integer = field.of(value.get(field.name)) if isinstance(value, dict) else None
        except ValueError as error:  # also of half a surrogate pair in a text
            left_out.add(f"at offset {offset}", f"no JSON in UTF-8: {error}")
            continue
        if integer is None:
            left_out.add(f"at offset {offset}", f"no {field.kind} {field.name!r}")
        else:
            yield offset, size, integer


def parse_json(data: bytes) -> Any:
    """The value of a line. Raises ValueError."""
    return json.loads(_decode(data))  # of bytes, it would guess the encoding


def scan_lines(file: BinaryIO, field: IndexedField, left_out: LeftOut) -> Places:
    """The lines that are not blank, without their integers."""
    offset = 0
    for line in file:
        if line.strip():
            yield offset, len(line), -1
        offset += len(line)


def scan_paragraphs(file: BinaryIO, field: IndexedField, left_out: LeftOut) -> Places:
    """The lines between blank lines, without their integers."""
    start = end = 0
    for offset, size, _ in scan_lines(file, field, left_out):
        if offset > end and end > start:  # blank lines are between them
            yield start, end - start, -1
        start = offset if offset > end else start
        end = offset + size
    if end > start:
        yield start, end - start, -1


def scan_texts(
    scan: Callable[..., Places], file: BinaryIO, field: IndexedField, left_out: LeftOut
) -> Places:
    """The documents of a scan, with the length of each, if it is to be part of the index."""
    for offset, size, integer in scan(file, field, left_out):
        if field.length:
            try:
                integer = len(parse_text(os.pread(file.fileno(), size, offset)).encode())
            except ValueError as error:
                left_out.add(f"at offset {offset}", f"no UTF-8: {error}")
                continue
        yield offset, size, integer


def parse_text(data: bytes) -> str:
    """The text of a document. Raises ValueError."""
    return _decode(data).strip("\r\n")


def _decode(data):
    """The text without a byte order mark; the codec utf-8-sig takes ten times as long."""
    return data.removeprefix(codecs.BOM_UTF8).decode()
