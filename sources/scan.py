"""Scans of files, of all kinds: the places of the samples, their integers, and what is left out."""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

Places = Iterator[tuple[int, int, int]]  # (offset, size, integer) of each sample of a file


class Format(NamedTuple):
    """How to find the samples in a file, and to make a value of the bytes of one."""

    name: str
    scan: Callable[..., Places]
    parse: Callable[[bytes], Any]


class IndexedField(NamedTuple):
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
        """Leave out everything after an offset, of a file of this size."""
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


class BadFile(Exception):
    """A file cannot be read from an offset on: (offset, reason)."""


def integer_or_none(value: Any) -> int | None:
    """The value, or the text in bytes, as an integer of 32 bits, if it is one."""
    try:
        number = int(value) if isinstance(value, bytes) else operator.index(value)
    except (TypeError, ValueError):
        return None
    return number if -(2**31) <= number < 2**31 else None
