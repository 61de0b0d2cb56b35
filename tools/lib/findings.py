"""What a check of tools.doctor has found, in one line."""

from typing import NamedTuple

GB = 1e9


class Finding(NamedTuple):
    """The result of a check. level: ok, warning or FAILED."""

    level: str
    text: str
    advice: str = ""

    def __str__(self):
        return f"{self.level:8} {self.text}{': ' if self.advice else ''}{self.advice}"


def check(passed, text, advice, level="FAILED"):
    """A Finding: ok with `text`, or `level` with `text` and `advice`."""
    return Finding("ok", text) if passed else Finding(level, text, advice)
