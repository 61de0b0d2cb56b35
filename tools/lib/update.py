"""Merge what has changed in this clone into a copy that tools.copy has made.

A copy records where it comes from in copied.json: the commit, what was copied, and the checksum of
each file. A file that its owner has not edited is replaced; an edited one is merged, three ways,
with the version that was copied. Nothing is written before all of this has been computed.
"""

import difflib
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tools.lib import history
from tools.lib.ladder import RUNGS

RECORD = "copied.json"
OWN = "own"  # in place of a task: the user's module
FOLDERS = ("utils", "tasks", "sources", "tools", "configs")  # of a copy, besides the scripts
SOURCES = {"utils/LICENSE": "LICENSE"}  # {path in a copy: path in the project}, where they differ


# Prints {path: text}.
AS_MADE = """
import json, sys
from tools.copy import texts
print(json.dumps({path: text.decode() for path, text in texts(*json.loads(sys.argv[1])).items()}))
"""


class CannotUpdate(Exception):
    """The copy cannot be updated; the message says why, and what to do."""


@dataclass
class Change:
    """What happens to a file of a copy. contents: the new bytes; None: it is removed, or stays."""

    path: str
    kind: str
    contents: bytes | None = None
    conflicts: int = 0
    old_path: str | None = None  # if it moves


def checksum(contents):
    """The checksum of a file's bytes, for a record."""
    return hashlib.sha256(contents).hexdigest()


def new_record(commit):
    """The record of a copy that holds nothing yet.

    since: None, or an older commit, if what it had and `commit` has not is still used.
    """
    record = {"commit": commit, "since": None, "scripts": {}, "options": [], "without": []}
    return record | {"files": {}}


def read_record(folder):
    """The record of a copy as a dict, or None. Raises CannotUpdate if it is not JSON, as where git
    has marked conflicts in it."""
    path = Path(folder) / RECORD
    try:
        return {"without": [], "since": None} | json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CannotUpdate(
            f"{path} cannot be read ({error}): pass --update {folder} --from COMMIT"
        ) from None


def text_of_record(commit, since, scripts, options, guards, sums):
    """A record as bytes. since: see new_record(); scripts: {name: task}; options: names; guards:
    names of what is left out; sums: {path: checksum of what was copied}."""
    record = new_record(commit) | {"since": since, "scripts": scripts, "options": sorted(options)}
    record |= {"without": sorted(guards), "files": dict(sorted(sums.items()))}
    return (json.dumps(record, indent=1) + "\n").encode()


def write_files(folder, files):
    """Write {path in a folder: bytes}. If that fails for one of them, as on a full disk, nothing
    has changed: raises CannotUpdate. Nor has it after Ctrl-C."""
    targets = {(folder / path).resolve(): contents for path, contents in files.items()}
    before = {target: read(target) for target in targets}
    ending = f".{os.getpid()}.copying"
    written = {target: target.with_name(f".{target.name}{ending}") for target in targets}
    replaced = []
    try:
        for target, contents in targets.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            written[target].write_bytes(contents)
            if before[target] is not None:
                shutil.copymode(target, written[target])
        for target, each in written.items():
            each.replace(target)
            replaced.append(target)
    except (OSError, KeyboardInterrupt) as error:
        for each in replaced:
            if before[each] is None:
                each.unlink()
            else:
                each.write_bytes(before[each])
        for each in written.values():
            with suppress(OSError):
                each.unlink()
        if isinstance(error, KeyboardInterrupt):
            raise
        raise CannotUpdate(
            f"cannot write {target}: {error.strerror}; nothing has changed"
        ) from None


def merge(mine, base, theirs, names, path=""):
    """(merged bytes, the number of conflicts). names: of the three versions, for the markers.
    path: of the file, for an error."""
    with tempfile.TemporaryDirectory() as folder:
        versions = [Path(folder) / name for name in ("yours", "copied", "new")]
        for version, contents in zip(versions, (mine, base, theirs), strict=True):
            version.write_bytes(contents)
        labels = [word for name in names for word in ("-L", name)]
        command = ["git", "merge-file", "-p", "--diff3", *labels, *map(str, versions)]
        done = subprocess.run(command, capture_output=True)
    if not 0 <= done.returncode < 128:
        reason = done.stderr.decode(errors="replace").strip()
        raise CannotUpdate(f"cannot merge {path}, which must be text in UTF-8: {reason}")
    return done.stdout, done.returncode


def require_resolved(folder, paths):
    """Raise CannotUpdate if files of a copy still have conflicts that merge() has marked."""
    marked = re.compile(rb"^<<<<<<< yours$.*^>>>>>>> new ", re.MULTILINE | re.DOTALL)
    texts = {path: read(Path(folder) / path) or b"" for path in sorted(paths)}
    left = [path for path, text in texts.items() if marked.search(text)]
    if left:
        raise CannotUpdate(
            f"resolve the conflicts in {', '.join(left)} first: <<<<<<< yours ... >>>>>>> new"
        )


def base_of(record, commit, of_task):
    """{path: bytes as they were copied} of the files of a record, from the history.

    of_task(text, task): the text of a script as a copy has it. Raises CannotUpdate if they are not
    what was copied.
    """
    base = {}
    for path in record["files"]:
        base[path] = history.read(commit, SOURCES.get(path, path))
        if base[path] is None:
            base[path] = b""  # the __init__.py of a package that has none
        if path in record["scripts"]:
            base[path] = of_task(base[path].decode(), record["scripts"][path]).encode()
    if record["without"]:
        pruned = made_by(record, commit)
        base |= {path: pruned[path] for path in base.keys() & pruned.keys()}
    different = [
        path
        for path, expected in record["files"].items()
        if expected is not None and checksum(base[path]) != expected
    ]
    if different:
        raise CannotUpdate(
            f"{', '.join(different)} were copied from a clone with changes that are in no commit: "
            f"pass --from with the commit from which they differ least"
        )
    return base


def made_by(record, commit):
    """{path: bytes} of the copy that the tool of that commit makes, because the form of what can be
    left out has changed since. Raises CannotUpdate if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        archive = io.BytesIO(history.git("archive", commit, input=b""))
        with tarfile.open(fileobj=archive) as tar:
            tar.extractall(folder, filter="data")
        arguments = [record[name] for name in ("scripts", "options", "without")]
        command = [sys.executable, "-c", AS_MADE, json.dumps(arguments)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise CannotUpdate(
            f"the tool of commit {commit[:12]} cannot leave out {', '.join(record['without'])}: "
            f"{done.stderr.strip()[-200:]}"
        )
    return {path: text.encode() for path, text in json.loads(done.stdout).items()}


def plan(folder, base, new, moved, labels):
    """The Changes that turn a copy of `base` into one of `new`, with the edits of its owner.

    base, new: {path: bytes}. moved: {old path: new path}. labels: names of the old and of the new
    version. Reads only.
    """
    folder, changes, reached = Path(folder), [], set()
    for old_path, old in base.items():
        path = moved.get(old_path, old_path)
        path = path if path in new else old_path
        reached.add(path)
        mine = read(folder / old_path)
        if mine is None:
            if path in new and new[path] != old:
                changes.append(Change(path, "deleted by you: not restored"))
            continue
        if path not in new:
            kind = "removed" if mine == old else "kept, although it is gone"
            changes.append(Change(old_path, kind))
            continue
        place = None if path == old_path else old_path
        if place and read(folder / path) not in (None, new[path]):
            raise CannotUpdate(
                f"{folder / path} is yours, but {old_path} is moved there: rename your file"
            )
        if old == new[path] and not place:
            continue
        if mine == old:
            contents, kind, conflicts = new[path], "replaced", 0
        elif old == new[path]:
            contents, kind, conflicts = mine, "moved", 0
        else:
            names = ("yours", f"copied ({labels[0]})", f"new ({labels[1]})")
            contents, conflicts = merge(mine, old, new[path], names, folder / old_path)
            kind = "conflict" if conflicts else "merged"
        if place or contents != mine:
            changes.append(Change(path, kind, contents, conflicts, place))
    for path in sorted(new.keys() - reached):
        mine = read(folder / path)
        if mine is None:
            changes.append(Change(path, "added", new[path]))
        elif mine != new[path]:
            changes.append(Change(path, "in the way: yours is kept"))
    return changes


def read(path):
    """The bytes of a file, or None if there is none."""
    return path.read_bytes() if path.is_file() else None


def apply(folder, changes, record):
    """Write Changes, and a record as bytes. Raises CannotUpdate, as write_files() does."""
    folder = Path(folder)
    files = {change.path: change.contents for change in changes if change.contents is not None}
    write_files(folder, files | {RECORD: record})
    for change in changes:
        if change.kind == "removed":
            (folder / change.path).unlink()
        if change.old_path:
            shutil.copymode(folder / change.old_path, folder / change.path)
            (folder / change.old_path).unlink()


def python_files(folder, changes):
    """{path: bytes} of the Python files of a copy after Changes, its owner's included, but not
    those of other repositories and copies in it."""
    folder = Path(folder)
    others = {path.parent for name in (".git", RECORD) for path in folder.rglob(name)} - {folder}
    files = [file for file in folder.rglob("*.py") if others.isdisjoint(file.parents)]
    found = {file.relative_to(folder) for file in files}
    found = {p.as_posix() for p in found if not any(map(_is_not_ours, p.parts))}
    found -= {change.path for change in changes if change.kind == "removed"}
    found -= {change.old_path for change in changes}
    files = {path: read(folder / path) or b"" for path in found}
    new = {change.path: change.contents for change in changes if change.contents is not None}
    return files | {path: text for path, text in new.items() if path.endswith(".py")}


def _is_not_ours(part):
    return part.startswith(".") or part in ("site-packages", "runs")


def as_diff(folder, changes):
    """The Changes as a unified diff."""
    lines = []
    for change in changes:
        if change.contents is None and change.kind != "removed":
            continue
        old_path = change.old_path or change.path
        old = (read(Path(folder) / old_path) or b"").decode(errors="replace")
        new = (change.contents or b"").decode(errors="replace")
        names = [f"a/{old_path}", f"b/{change.path}"]
        lines.append(f"diff --git {names[0]} {names[1]}\n")
        if change.old_path:
            lines.append(f"rename from {old_path}\nrename to {change.path}\n")
        elif change.kind == "added":
            lines.append("new file mode 100644\n")
            names[0] = "/dev/null"
        elif change.kind == "removed":
            lines.append("deleted file mode 100644\n")
            names[1] = "/dev/null"
        pieces = difflib.unified_diff(old.splitlines(True), new.splitlines(True), *names)
        lines += [line if line.endswith("\n") else line + "\n" for line in pieces]
    return "".join(lines)


def project_files(commit):
    """{path: bytes} of the Python files of the project at a commit, of which copies are made."""
    known = history.tree(commit)
    return {p: history.read(commit, p) for p in known if p.endswith(".py") and _is_copied(p)}


def _is_copied(path):
    return path in RUNGS or path.partition("/")[0] in FOLDERS


# Copies without a record


def files_in(folder, commit):
    """The paths in a folder that the project has, too, at a commit: what may have been copied."""
    known, found = history.tree(commit), []
    for path in sorted([*folder.glob("train_*.py"), *folder.glob("[a-z]*/**/*")]):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and _is_copied(name) and SOURCES.get(name, name) in known:
            found.append(name)
    return found


def guessed_record(folder, commit, record=None):
    """A record of a copy that has none, or whose record, which is passed, is of a different commit.
    The files have no checksums."""
    files, scripts = files_in(folder, commit), {}
    if "tools/copy.py" in files:
        raise CannotUpdate(f"{folder} is the whole project, not a copy of a script")
    if record:
        known = history.tree(commit)
        files += [path for path in record["files"] if SOURCES.get(path, path) in known]
        return record | {"commit": commit, "since": None, "files": dict.fromkeys(files)}
    for name in files:
        if name in RUNGS:
            text = (folder / name).read_text(encoding="utf-8", errors="replace")
            scripts[name] = _task_of(text, files)
    if not scripts:
        raise CannotUpdate(f"{folder} has none of the scripts: {', '.join(RUNGS)}")
    return new_record(commit) | {"scripts": scripts, "files": dict.fromkeys(files)}


def _task_of(text, files):
    """The task that a script trains, by its text and the project's files beside it."""
    tasks = [path.split("/")[1].removesuffix(".py") for path in files if path[:6] == "tasks/"]
    tasks = [task for task in tasks if task != "__init__"]
    if found := re.search(r"^import ([\w.]+) as task\b", text, re.MULTILINE):
        task = found[1].removeprefix("tasks.")
        return task if task in tasks else OWN
    return (tasks or ["images"])[0]
