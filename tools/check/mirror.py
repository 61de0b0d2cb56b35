"""A copy of the script's folder for each run: no run sees or overwrites the files of another."""

import fnmatch
import os
import shutil
from pathlib import Path

LARGE = 5 << 20  # bytes; larger files are links
SKIPPED = (".git", "__pycache__", ".venv", "venv", "node_modules", ".mypy_cache", ".ruff_cache")
MOST_FILES = 20_000  # of a folder; one with more is a link


def mirror(source, target, hidden=()):
    """Copy a folder. Large files, and folders with very many, become links to the original.

    hidden: patterns of names that the script must not see, such as the checkpoints of a real run.
    Returns the number of links to folders, whose files the script could overwrite.
    """
    links = 0
    for folder, folders, files in os.walk(source):
        relative = Path(folder).relative_to(source)
        folders[:] = [
            name
            for name in folders
            if name not in SKIPPED
            and not (Path(folder) / name / "pyvenv.cfg").exists()
            and not any(fnmatch.fnmatch(name, pattern) for pattern in hidden)
            and not target.is_relative_to(Path(folder) / name)
        ]
        (target / relative).mkdir(parents=True, exist_ok=True)
        for name in list(folders):
            path = Path(folder) / name
            if path.is_symlink() or _is_huge(path):
                folders.remove(name)
                os.symlink(path.resolve(), target / relative / name)
                links += 1
        for name in files:
            path = Path(folder) / name
            if any(fnmatch.fnmatch(name, pattern) for pattern in hidden) or not path.exists():
                continue
            if path.stat().st_size > LARGE:
                os.symlink(path.resolve(), target / relative / name)
            elif path.is_file():
                shutil.copy2(path, target / relative / name)
    return links


def _is_huge(folder):
    """Whether there are too many files in a folder for a copy."""
    count = 0
    for _, _, files in os.walk(folder):
        count += len(files)
        if count > MOST_FILES:
            return True
    return False
