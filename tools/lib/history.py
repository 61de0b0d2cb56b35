"""The project's files at a commit, from the history of this clone. Needs git."""

import io
import os
import subprocess
from functools import cache

from tools.lib.ladder import ROOT

_contents = {}  # {id: bytes}: most files are the same at the next commit
OF_ANOTHER_REPOSITORY = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR")


class NoHistory(Exception):
    """The history that is needed is not here; the message says what to do about it."""


def git(*arguments, input=None):
    """What a git command prints, in this clone: text, or bytes if it is given bytes as `input`.
    Raises NoHistory if it fails."""
    environment = {k: v for k, v in os.environ.items() if k not in OF_ANOTHER_REPOSITORY}
    options = dict(cwd=ROOT, env=environment, capture_output=True, input=input, text=input is None)
    try:
        done = subprocess.run(["git", *arguments], **options)
    except FileNotFoundError:
        raise NoHistory("git is not installed: it merges your changes with new ones") from None
    if done.returncode:
        error = done.stderr if input is None else done.stderr.decode()
        raise NoHistory(f"git {arguments[0]}: {' '.join(error.split()) or 'it failed'}")
    return done.stdout


def require():
    """Raise NoHistory unless this is a clone made by git, not an archive without history."""
    if not (ROOT / ".git").exists():
        raise NoHistory(f"{ROOT} has no history (is it an archive?): clone the repository with git")


def head():
    """The commit of this clone, 40 hexadecimal digits; None without git or history."""
    try:
        require()
        return git("rev-parse", "HEAD").strip()
    except NoHistory:
        return None


def resolve(name):
    """The commit of that name. Raises NoHistory if it is not in this clone."""
    require()
    try:
        return git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}").strip()
    except NoHistory:
        shallow = git("rev-parse", "--is-shallow-repository").strip() == "true"
        remedy = "git fetch --unshallow" if shallow else "git fetch, or pass --from COMMIT"
        raise NoHistory(f"the commit {name} is not in this clone: {remedy}") from None


def is_ancestor(older, newer):
    """Whether a commit is among the ancestors of another one."""
    try:
        git("merge-base", "--is-ancestor", older, newer)
    except NoHistory:
        return False
    return True


def changed_files():
    """The files of this clone that differ from its commit, or are new, relative to its root."""
    options = "--porcelain", "-z", "--no-renames", "--untracked-files=all"
    return [entry[3:] for entry in git("status", *options).split("\0")[:-1]]


@cache
def tree(commit):
    """{path: the id of its contents} of all files at a commit."""
    entries = {}
    for line in git("ls-tree", "-r", "-z", commit).split("\0")[:-1]:
        facts, _, path = line.partition("\t")
        entries[path] = facts.split()[2]
    return entries


def _read_blobs(ids):
    """Add the contents with these ids to _contents, by one process for all of them."""
    output = io.BytesIO(git("cat-file", "--batch", input="\n".join(ids).encode()))
    for blob in ids:
        size = int(output.readline().split()[2])
        _contents[blob] = output.read(size)
        output.read(1)  # a newline


def read(commit, path):
    """The contents of a file at a commit, as bytes; None if it was not there."""
    blob = tree(commit).get(path)
    if blob is not None and blob not in _contents:
        _read_blobs(set(tree(commit).values()) - _contents.keys())
    return _contents.get(blob)


@cache
def renamed(old, new):
    """{old path: new path} of the files that git takes for renamed between two commits."""
    # A module that moves may also lose half of its code to a different one, as utils/shards.py did.
    options = "-M40%", "-l0", "-O/dev/null", "--diff-filter=R", "--name-status", "-z"
    fields = git("diff", *options, old, new).split("\0")
    return dict(zip(fields[1::3], fields[2::3], strict=False))
