"""A copy of the script's folder for each run: no run sees or overwrites the files of another.

What is too much for a copy is a link to the original. A run must not write there: see
inside/check_inside/landlock.py. Where the kernel cannot prevent that, nothing is linked unless the
user has said so, or may not write it either.
"""

import contextlib
import fcntl
import fnmatch
import os
import shutil
import zlib
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

SKIPPED = (".git", "__pycache__", ".venv", "venv", "node_modules", ".mypy_cache", ".ruff_cache")
MOST_BYTES = 1_000_000_000  # of the files that are copied
MOST_FILES = 20_000
CLONE = 0x40049409  # of ioctl, FICLONE: a copy that shares its blocks, as XFS and Btrfs have it


@dataclass
class Originals:
    """What the folder of a script holds, and how each run gets it. Keys are relative paths."""

    source: Path
    folders: list = field(default_factory=list)
    copies: dict = field(default_factory=dict)  # -> the file that is copied
    links: dict = field(default_factory=dict)  # -> the file or folder that is linked
    inner: dict = field(default_factory=dict)  # links of the user, within the folder -> the target
    unseen: list = field(default_factory=list)  # files and folders that the script does not see
    reached: set = field(default_factory=set)  # the folder, and what links in it lead to

    def copy_to(self, target):
        """Make the copy of a run."""
        for folder in self.folders:
            (target / folder).mkdir(parents=True, exist_ok=True)
        for name, path in self.copies.items():
            copy(path, target / name)
        for name, path in self.links.items():
            os.symlink(path, target / name)
        for name, path in self.inner.items():
            os.symlink(os.path.relpath(path, name.parent), target / name)

    def state(self):
        """What shows that a file has been changed: {path: (its stat, a checksum or None)}."""
        files = dict.fromkeys(self.copies.values(), True)
        for path in [*self.links.values(), *self.unseen]:
            files |= dict.fromkeys(_files_in(path), False)
        found = {}
        for path, is_read in files.items():
            with contextlib.suppress(OSError):
                found[path] = (os.stat(path), _checksum(path) if is_read else None)
        return found


def survey(source, work, hidden=(), linked=(), most_bytes=MOST_BYTES):
    """Decide what of a folder is copied for each run. Returns Originals.

    work: where the copies will be; it is left out, if it is in the folder. hidden: patterns of
    names that the script must not see, such as the checkpoints of a real run. linked: patterns of
    names that are linked in any case.
    """
    found = Originals(source, reached={source})
    room = MOST_FILES
    seen = {os.path.realpath(source): Path()}  # folders, by their real paths
    pending = deque([Path()])
    while pending:
        relative = pending.popleft()
        folder = source / relative
        entries = _entries(folder)
        room -= len(entries) + 1
        if room < 0 and relative.parts:
            found.links[relative] = folder.resolve()
            continue
        found.folders.append(relative)
        for entry in entries:
            name, path = relative / entry.name, folder / entry.name
            real = Path(os.path.realpath(path))  # resolve() fails for a link in a circle
            is_folder = path.is_dir()
            if not path.exists() or real == work or (is_folder and _is_skipped(path)):
                continue
            if _matches(entry.name, hidden):
                found.unseen.append(real)
                continue
            if entry.is_symlink() and (inner := _within(real, seen)) is not None:
                found.inner[name] = inner
                continue
            if entry.is_symlink():
                found.reached.add(real)
            if _matches(entry.name, linked) or not _is_copied(path, source):
                found.links[name] = real
            elif is_folder:
                seen[str(real)] = name
                pending.append(name)
            elif path.is_file():
                found.copies[name] = real
    _leave_out_the_largest(found, work, most_bytes)
    return found


def _entries(folder):
    try:
        return sorted(os.scandir(folder), key=lambda entry: entry.name)
    except PermissionError:
        return []


def _matches(name, patterns):
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _is_skipped(folder):
    return folder.name in SKIPPED or (folder / "pyvenv.cfg").exists()


def _is_copied(path, source):
    """Whether a path can be read, and is not a folder that contains the copied one."""
    return os.access(path, os.R_OK) and not source.is_relative_to(path.resolve())


def _within(real, seen):
    """The relative path of what a link leads to, if it is in a folder that is copied, or None."""
    for parent in (real, *real.parents):
        if str(parent) in seen:
            return seen[str(parent)] / real.relative_to(parent)
    return None


def _leave_out_the_largest(found, work, most_bytes):
    """Link the largest files, so that the others are no more than `most_bytes`."""
    sizes = {name: path.stat().st_size for name, path in found.copies.items()}
    left = min(most_bytes, shutil.disk_usage(_existing(work)).free // 10)
    if not found.copies or _can_clone(max(found.copies.values(), key=os.path.getsize), work):
        return
    for name in sorted(sizes, key=sizes.get):
        left -= sizes[name]
        if left < 0:
            found.links[name] = found.copies.pop(name)


def _existing(folder):
    return next(path for path in (folder, *folder.parents) if path.exists())


def _can_clone(path, work):
    trial = _existing(work) / ".clone"
    try:
        return _clone(path, trial)
    finally:
        trial.unlink(missing_ok=True)


def _clone(source, target):
    """Copy a file without reading it. Returns whether the file system can do that."""
    with open(source, "rb") as old, open(target, "wb") as new:
        try:
            fcntl.ioctl(new, CLONE, old.fileno())
        except OSError:
            return False
    return True


def copy(source, target):
    """Copy a file with its times and mode."""
    if not _clone(source, target):
        shutil.copyfile(source, target)
    shutil.copystat(source, target)


def writable_links(originals, linked=()):
    """The links to what the user may write, and has not asked for: [(bytes, name)], sorted."""
    return sorted(
        (sum(os.path.getsize(file) for file in _files_in(path)), str(name))
        for name, path in originals.links.items()
        if os.access(path, os.W_OK) and not _matches(name.name, linked)
    )


def _files_in(path):
    """A file, or the first files of a folder."""
    if not path.is_dir():
        return [path]
    found = []
    for folder, _, files in os.walk(path):
        found += [Path(folder) / name for name in files if os.path.exists(f"{folder}/{name}")]
        if len(found) > MOST_FILES:
            break
    return found


def _checksum(path):
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc


def changes(before, after, is_protected):
    """What happened to files between two states: {path: text}.

    is_protected: the script could not open them for writing, so what they hold now is the work of
    somebody else; but it could change their modes and times.
    """
    found = {}
    for path, (old, crc) in before.items():
        if path not in after:
            if not is_protected:
                found[path] = "it is gone"
            continue
        new, new_crc = after[path]
        contents = {
            "size": (old.st_size, new.st_size),
            "inode": (old.st_ino, new.st_ino),
            "checksum": (crc, new_crc),
        }
        marks = {
            "mode": (oct(old.st_mode), oct(new.st_mode)),
            "owner": (old.st_uid, new.st_uid),
            "time": (old.st_mtime_ns, new.st_mtime_ns),
        }
        texts = [_differing(values) for values in (contents, marks)]
        if texts[0] and is_protected:
            continue
        if any(texts):
            found[path] = ", ".join(filter(None, texts))
    return found


def put_back(before, changed):
    """Give files their modes, owners and times again."""
    for path in changed:
        old, crc = before[path]
        with contextlib.suppress(OSError):  # a file of somebody else
            new = os.stat(path)
            os.chown(path, old.st_uid, old.st_gid)
            os.chmod(path, old.st_mode & 0o7777)
            # Where there is no checksum, somebody else may have written something of the same size,
            # which sets both times alike.
            if crc is not None or new.st_mtime_ns != new.st_ctime_ns:
                os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))


def _differing(values):
    return ", ".join(f"{name} {a} -> {b}" for name, (a, b) in values.items() if a != b)
