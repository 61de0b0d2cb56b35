"""What a check has found, and what it could not check."""

from typing import NamedTuple


class Finding(NamedTuple):
    """A finding. rule: a key of advice.ADVICE; place: (file, line) in the user's code, or None;
    observed: what happened, with numbers."""

    rule: str
    place: tuple[str, int] | None
    observed: str


class NotChecked(NamedTuple):
    """A promise that could not be checked, and the reason."""

    what: str
    why: str
