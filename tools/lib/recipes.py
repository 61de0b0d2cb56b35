"""Apply a page of docs/recipes to a copy, or take it back.

The lines of a hunk say where it belongs, not its numbers, so that it fits a copy with a different
task, without guards, or of a script that shares these lines with the one that the page names. Lines
around what changes may be missing, as long as the place is the only one.
"""

import ast
import re
from typing import NamedTuple

from tools.lib.closure import closure, modules_in
from tools.lib.ladder import ROOT, RUNGS

PAGES = ROOT / "docs" / "recipes"
NAMES = tuple(sorted(page.stem for page in PAGES.glob("[a-z]*.md")))


class CannotApply(Exception):
    """A hunk does not fit; the message names the file and the line."""


class Hunk(NamedTuple):
    """Lines, as texts: those that change, and one or two around them, if they are there."""

    before: str
    old: str
    new: str
    after: str


class Diff(NamedTuple):
    """What a page changes in a file."""

    path: str
    is_new: bool
    hunks: list[Hunk]


def diffs_of(name):
    """The Diffs of a page."""
    text, found = (PAGES / f"{name}.md").read_text(encoding="utf-8"), []
    for block in re.findall(r"```diff\n(.*?)```", text, re.DOTALL):
        head, *parts = re.split(r"^@@ .*\n", block, flags=re.MULTILINE)
        old, new = re.findall(r"^(?:---|\+\+\+) (?:[ab]/)?(.*)", head, re.MULTILINE)
        hunks = [_hunk(part.splitlines(keepends=True)) for part in parts]
        found.append(Diff(new, old == "/dev/null", hunks))
    return found


def _hunk(lines):
    lines = [line if line != "\n" else " \n" for line in lines]
    changed = [number for number, line in enumerate(lines) if line[0] != " "]
    first, last = changed[0], changed[-1] + 1
    before, after = (_side(" ", part) for part in (lines[:first], lines[last:]))
    return Hunk(before, _side("- ", lines[first:last]), _side("+ ", lines[first:last]), after)


def _side(marks, lines):
    return "".join(line[1:] for line in lines if line[0] in marks)


def apply(name, scripts, read, undo=False):
    """The files that a recipe changes, {path: text, or None if it goes}.

    scripts: of the copy. read(path): the text of one of its files, or None. Raises CannotApply.
    """
    changed = {}
    diffs = diffs_of(name)
    named = {diff.path: diff for diff in diffs if diff.path in RUNGS}
    targets = named.keys() & set(scripts) or set(scripts)
    for script in sorted(targets if named else ()):
        changed[script] = _patched(named[_nearest(script, named)], script, read(script), undo)
    for diff in diffs:
        if diff.path not in RUNGS:
            changed[diff.path] = _patched(diff, diff.path, read(diff.path), undo)
    return changed


def _nearest(script, named):
    """Which of the scripts of a page is the closest ancestor; the page's first if none is."""
    ancestor = script
    while ancestor and ancestor not in named:
        ancestor = RUNGS[ancestor].parent
    return ancestor or next(iter(named))


def _patched(diff, path, text, undo):
    if diff.is_new:
        new = diff.hunks[0].new
        if text not in ((new,) if undo else (None, new)):
            raise CannotApply(f"{path} is yours: rename it, or remove it")
        return None if undo else new
    if text is None:
        raise CannotApply(f"the recipe changes {path}, which is not there")
    for before, *sides, after in diff.hunks:
        old, new = reversed(sides) if undo else sides
        for lead, trail in ((before, after), ("", after), (before, ""), ("", "")):
            lines = lead + old + trail
            found = re.finditer(rf"^{re.escape(lines)}", text, re.MULTILINE)
            places = [match.start() for match in found]
            if lines.strip() and len(places) == 1:
                break
        else:
            line = (old.strip() or (before + after).strip()).splitlines()[0]
            raise CannotApply(f"{path} does not have, once, the line {line!r}: change it by hand")
        start = places[0] + len(lead)
        text = text[:start] + new + text[start + len(old) :]
    return text


def modules_for(texts):
    """The project's modules, as paths, that changed files import at module level, and theirs."""
    nodes = [node for text in texts for node in ast.parse(text).body]
    modules = modules_in(nodes, ROOT)
    return {*modules, *closure(*modules)}
