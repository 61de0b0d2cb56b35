"""tools.copy --update: a copy keeps its owner's edits, and gets what has changed since."""

import errno
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.test_copy import run_alone
from tools.copy import texts, with_more
from tools.lib.closure import small_flags
from tools.lib.ladder import ROOT
from tools.lib.stale import stale_imports, stale_overrides, stale_settings
from tools.lib.update import (
    RECORD,
    CannotUpdate,
    Change,
    apply,
    as_diff,
    checksum,
    merge,
    new_record,
    plan,
    python_files,
    read_record,
    write_files,
)

LABELS = "old", "new"
# Commits that changed utils/, a few days apart: what a copy made then would be updated from.
PAST = {
    "952ec81": "what is trained becomes a module of its own",
    "3cebb91": "reports",
    "42e5d7e": "the checker",
    "fffd127": "the last commit before a round of fixes",
    "02a0c4b": "exit codes",
}
EDITS = {  # what teams edit
    "train_1gpu.py": (
        "    optimizer = build_optimizer(model, cfg)\n",
        "    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=0.01)\n",
    ),
    "tasks/images/__init__.py": (
        '    return {"correct": ',
        '    # our metric\n    return {"correct": ',
    ),
}


def git(folder, *arguments):
    settings = ["-c", "user.name=x", "-c", "user.email=x@x", "-c", "safe.directory=*"]
    command = ["git", "-C", str(folder), *settings, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def tools_copy(project, *arguments):
    """Run tools.copy of a clone, or of a tree, as a user does."""
    command = [sys.executable, "-m", "tools.copy", *map(str, arguments)]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)


def assert_lines(lines, *expected):
    """Each line contains all parts in its list."""
    assert len(lines) == len(expected)
    for line, parts in zip(lines, expected, strict=True):
        for part in parts:
            assert part in line


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone of this repository at its last commit, without changes."""
    if not (ROOT / ".git").exists():
        pytest.skip("there is no history")
    if git(ROOT, "rev-parse", "--is-shallow-repository") == "true":
        pytest.skip("the history is incomplete")
    folder = tmp_path_factory.mktemp("clone") / "clone"
    git(ROOT, "clone", "--quiet", "--shared", str(ROOT), str(folder))
    return folder


# One file at a time


@pytest.mark.parametrize(
    ("mine", "old", "new", "kind", "result"),
    [
        ("a\n", "a\n", "b\n", "replaced", "b\n"),
        ("mine\n", "a\n", "a\n", None, "mine\n"),
        ("a\n", "a\n", "a\n", None, "a\n"),
        ("mine\n1\n2\n3\n", "a\n1\n2\n3\n", "a\n1\n2\nb\n", "merged", "mine\n1\n2\nb\n"),
        ("b\n", "a\n", "b\n", None, "b\n"),  # the same edit on both sides
        (None, "a\n", "b\n", "deleted by you: not restored", None),
        ("a\n", "a\n", None, "removed", None),
        ("mine\n", "a\n", None, "kept, although it is gone", "mine\n"),
        (None, None, "b\n", "added", "b\n"),
        ("mine\n", None, "b\n", "in the way: yours is kept", "mine\n"),
        (None, "a\n", "a\n", None, None),
        (None, "a\n", None, None, None),
    ],
)
def test_what_happens_to_a_file(mine, old, new, kind, result, tmp_path):
    base, ours = ({"x.py": text.encode()} if text else {} for text in (old, new))
    if mine:
        (tmp_path / "x.py").write_text(mine)
    changes = plan(tmp_path, base, ours, {}, LABELS)
    assert [change.kind for change in changes] == ([kind] if kind else [])
    apply(tmp_path, changes, b"")
    assert (tmp_path / "x.py").exists() == (result is not None)
    assert result is None or (tmp_path / "x.py").read_text() == result


def test_line_ends_of_windows_stay(tmp_path):
    (tmp_path / "mine.py").write_bytes(b"mine\r\n1\r\n2\r\n3\r\n")
    (tmp_path / "same.py").write_bytes(b"a\r\n1\r\n2\r\n3\r\n")
    base = dict.fromkeys(("mine.py", "same.py"), b"a\n1\n2\n3\n")
    changes = plan(tmp_path, base, base, {}, LABELS)
    assert changes == []
    changes = plan(tmp_path, base, dict.fromkeys(base, b"a\n1\n2\nb\n"), {}, LABELS)
    assert [change.kind for change in changes] == ["merged", "replaced"]
    apply(tmp_path, changes, b"")
    assert (tmp_path / "mine.py").read_bytes() == b"mine\r\n1\r\n2\r\nb\r\n"
    assert (tmp_path / "same.py").read_bytes() == b"a\r\n1\r\n2\r\nb\r\n"


def test_single_line_end_of_windows_does_not_change_a_file(tmp_path):
    (tmp_path / "a.py").write_bytes(b"1\r\n2\n3\n")
    assert plan(tmp_path, {"a.py": b"1\n2\n3\n"}, {"a.py": b"1\n2\n3\n"}, {}, LABELS) == []
    (change,) = plan(tmp_path, {"a.py": b"1\n2\n3\n"}, {"a.py": b"1\n2\n4\n"}, {}, LABELS)
    assert change.contents == b"1\n2\n4\n"


def test_edits_follow_a_file_that_moves(tmp_path):
    lines = "".join(f"{number}\n" for number in range(20))
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils" / "old.py").write_text(lines.replace("3\n", "3 # mine\n", 1))
    (tmp_path / "utils" / "old.py").chmod(0o755)
    base, new = {"utils/old.py": lines.encode()}, {"sources/new.py": f"{lines}20\n".encode()}
    changes = plan(tmp_path, base, new, {"utils/old.py": "sources/new.py"}, LABELS)
    assert (tmp_path / "utils" / "old.py").exists()  # nothing has been written
    applied = tmp_path / "applied"
    shutil.copytree(tmp_path / "utils", applied / "utils")
    command = ["git", "apply", "--directory=applied", "-"]
    git(tmp_path, "init", "--quiet")
    diff = as_diff(tmp_path, [*changes, Change("added.py", "added", b"a\n")])
    subprocess.run(command, input=diff.encode(), cwd=tmp_path, check=True)
    apply(tmp_path, changes, b"")
    assert not (tmp_path / "utils" / "old.py").exists()
    assert not (applied / "utils" / "old.py").exists()
    assert (applied / "added.py").read_text() == "a\n"
    moved = (applied / "sources" / "new.py").read_text()
    assert moved == (tmp_path / "sources" / "new.py").read_text()
    assert (tmp_path / "sources" / "new.py").stat().st_mode & 0o777 == 0o755
    text = (tmp_path / "sources" / "new.py").read_text()
    assert "3 # mine\n" in text and text.endswith("19\n20\n")


def test_imports_of_what_has_moved_or_is_gone_are_named(tmp_path):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "utils").mkdir()
    for name in ("moved", "gone", "stays"):
        (tmp_path / "utils" / f"{name}.py").write_text("a = b = 1\n")
    (tmp_path / "tasks" / "own.py").write_text(
        "from utils.moved import x\nimport utils.stays\nimport utils.option\n"
    )
    (tmp_path / "research").mkdir()
    (tmp_path / "research" / "own.py").write_text(
        "try:\n    from utils import (\n        stays,\n        gone,\n    )\nfinally:\n    pass\n"
        "from utils.stays import a, b\n"
    )
    then = {f"utils/{name}.py": b"a = b = 1\n" for name in ("moved", "gone", "stays", "option")}
    now = {f"{name}.py": b"a = 1\n" for name in ("sources/new", "utils/stays", "utils/option")}
    base = then.keys() - {"utils/option.py"}
    new = now.keys() - {"utils/option.py"}  # not copied
    moved = {"utils/moved.py": "sources/new.py"}
    base, new = ({p: files[p] for p in paths} for files, paths in ((then, base), (now, new)))
    changes = plan(tmp_path, base, new, moved, LABELS)
    lines = stale_imports(python_files(tmp_path, changes), then, now, moved)
    assert_lines(
        lines,
        ["research/own.py ", " b, ", " utils/stays.py "],
        ["research/own.py ", " utils/gone.py,"],
        ["tasks/own.py ", " utils/moved.py,", " sources/new.py "],
    )
    apply(tmp_path, changes, b"")
    assert stale_imports(python_files(tmp_path, []), then, now, moved) == lines


def test_overrides_of_methods_that_are_gone_are_named():
    """Nothing would call them. The base class may have moved, or be the base of the owner's."""
    hook = "class Hook:\n    def __init__(self): ...\n    def after_step(self): ...\n"
    then = {
        "utils/options/__init__.py": f"{hook}    def is_due(self): ...\n    def write(self): ...\n",
        "utils/timing.py": "class Timing(Hook):\n    def is_due(self): ...\n",
    }
    timing = "class Timing(FileForm):\n    def write(self): ...\n"  # a method of its own
    now = {
        "utils/hooks.py": f"{hook}class FileForm(Hook):\n    def to_file(self): ...\n",
        "utils/timing.py": timing,
    }
    own = {
        "own.py": "from utils import hooks\n"
        "class Mine(hooks.Hook):\n    def __init__(self): ...\n    def is_due(self): ...\n"
        "class Other:\n    def is_due(self): ...\n",
        "team/more.py": "class More(Mine):\n    def after_step(self): ...\n"
        "    def write(self): ...\n",
        "utils/timing.py": f"{timing}    def is_due(self): ...\n",
    }
    then, now, own = ({p: t.encode() for p, t in files.items()} for files in (then, now, own))
    assert_lines(
        stale_overrides(now | own, then, now),
        ["own.py: Mine.is_due ", " utils/hooks.py ", " Hook.is_due"],
        ["team/more.py: More.write ", " utils/hooks.py ", " Hook.write"],
        ["utils/timing.py: Timing.is_due ", " utils/hooks.py ", " Hook.is_due"],
    )


def test_lines_that_read_settings_that_are_gone_are_named():
    head = "@dataclass(frozen=True)\nclass Config:\n"
    options = f"{head}    lr: float = 1.0\n    audit: bool = False\n    ours: int = 0\n"
    peak = "    @property\n    def peak_lr(self): ...\n"
    then = {"utils/options/__init__.py": (options + peak).encode()}
    now = {"utils/config.py": f"{head}    lr: float = 1.0\n".encode()}
    own = {
        "own.py": b"lr = min(cfg.lr, cfg.peak_lr)\nother.audit\n",
        "tasks/own.py": f"{head}    ours: int = 1\n".encode(),
        "train.py": b"<<<<<<< yours\n1\n||||||| copied\n2\n=======\n3\n>>>>>>> new (x)\n"
        b"self.cfg.audit + cfg.ours\n",
    }
    assert_lines(
        stale_settings(now | own, then, now),
        ["own.py:1 ", " cfg.peak_lr,"],
        ["train.py:8 ", " cfg.audit,"],
    )


def test_names_of_a_file_with_conflicts_are_known(tmp_path):
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils" / "x.py").write_text("a = 0\nb = 3\nd = 1\n")
    (tmp_path / "own.py").write_text("from utils.x import a, b, c, d\n")
    then, now = {"utils/x.py": b"a = 0\nb = 1\nc = 1\n"}, {"utils/x.py": b"a = 0\nb = 2\n"}
    changes = plan(tmp_path, then, now, {}, LABELS)
    assert changes[0].conflicts == 1
    lines = stale_imports(python_files(tmp_path, changes), then, now, {})
    assert_lines(lines, ["own.py ", " c, ", " utils/x.py "])


def test_module_that_an_owner_has_copied_besides_is_updated():
    """Recipes import modules that no script does."""
    new = texts({"train_ddp.py": "images"}, [], ["watchdog"])
    more = with_more(dict(new), {"sources/samplers.py", "utils/watchdog.py", "tasks/mine.py"})
    assert more.keys() - new.keys() == {"sources/__init__.py", "sources/samplers.py"}
    assert more["sources/samplers.py"] == (ROOT / "sources" / "samplers.py").read_bytes()


def test_module_does_not_move_to_where_the_owner_has_a_file(tmp_path):
    (tmp_path / "old.py").write_text("a\n")
    (tmp_path / "new.py").write_text("mine\n")
    base, new = {"old.py": b"a\n"}, {"new.py": b"a\n"}
    with pytest.raises(CannotUpdate, match=r"new\.py is yours, .*old\.py.* rename"):
        plan(tmp_path, base, new, {"old.py": "new.py"}, LABELS)


def test_nothing_is_written_if_a_folder_is_in_the_way(tmp_path):
    (tmp_path / "a.py").write_text("a\n")
    (tmp_path / "b.py").mkdir()
    with pytest.raises(CannotUpdate, match=r"b\.py is a folder"):
        plan(tmp_path, {"a.py": b"a\n"}, {"a.py": b"b\n", "b.py": b"b\n"}, {}, LABELS)


def test_nothing_is_written_if_the_disk_is_full(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("old")
    (tmp_path / "gone.py").write_text("old")
    changes = [Change(path, "replaced", b"new") for path in ("a.py", "b.py")]
    changes.append(Change("gone.py", "removed"))
    write = Path.write_bytes

    def write_on_full_disk(path, contents):
        write(path, contents[:1])
        if "b.py" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_on_full_disk)
    with pytest.raises(CannotUpdate, match=r"b\.py: No space left .* nothing has changed"):
        apply(tmp_path, changes, b"record")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "a.py": "old",
        "gone.py": "old",
    }


def test_nothing_has_changed_if_a_file_cannot_be_replaced(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("old")
    (tmp_path / "c.py").write_text("old")
    (tmp_path / "a.py.copying").write_text("the owner's")
    replace = Path.replace

    def replace_some(path, target):
        if target.name == "c.py":
            raise OSError(errno.EPERM, "Operation not permitted")
        replace(path, target)

    monkeypatch.setattr(Path, "replace", replace_some)
    with pytest.raises(CannotUpdate, match=r"c\.py: Operation not .* nothing has changed"):
        write_files(tmp_path, dict.fromkeys(("a.py", "b.py", "c.py", "d.py"), b"new"))
    texts = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert texts == {"a.py": "old", "a.py.copying": "the owner's", "c.py": "old"}


def test_repositories_and_copies_in_a_copy_are_not_searched(tmp_path):
    for name in ("own", "clone", "copy"):
        (tmp_path / name / "utils").mkdir(parents=True)
        (tmp_path / name / "utils" / "x.py").touch()
    (tmp_path / RECORD).touch()
    (tmp_path / "clone" / ".git").touch()
    (tmp_path / "copy" / RECORD).touch()
    assert python_files(tmp_path, []).keys() == {"own/utils/x.py"}


def test_conflicts_are_marked_as_git_marks_them(tmp_path):
    merged, conflicts = merge(b"mine\n", b"a\n", b"b\n", ("yours", "copied (old)", "new (new)"))
    assert conflicts == 1
    marks = ["<<<<<<< yours", "mine", "||||||| copied (old)", "a", "=======", "b"]
    assert merged.decode().splitlines() == [*marks, ">>>>>>> new (new)"]


def test_update_waits_until_conflicts_are_resolved(clone, tmp_path):
    copy, newer = tmp_path / "copy", tmp_path / "newer"
    assert tools_copy(clone, "train_1gpu.py", copy, "--task", "text").returncode == 0
    git(clone, "clone", "--quiet", "--shared", str(clone), str(newer))
    for folder, line in ((copy, "# ours\n"), (newer, "# new\n")):
        with open(folder / "utils" / "seeds.py", "a") as file:
            file.write(line)
    git(newer, "commit", "--quiet", "--all", "--message=newer")
    first = tools_copy(newer, "--update", copy)
    assert first.returncode == 1 and "conflicts in utils/seeds.py" in first.stdout, first.stderr
    marked = (copy / "utils" / "seeds.py").read_bytes()
    for options in ([], ["--dry-run"], ["--from", "HEAD~1"]):
        again = tools_copy(newer, "--update", copy, *options)
        assert again.returncode == 1 and "conflicts in utils/seeds.py" in again.stderr
        assert (copy / "utils" / "seeds.py").read_bytes() == marked
    (copy / "utils" / "seeds.py").write_text("# both\n")
    assert tools_copy(newer, "--update", copy).returncode == 0


def test_update_that_was_undone_is_noticed(clone, tmp_path):
    """git brings the files back, but not a record that it does not know."""
    copy, newer = tmp_path / "copy", tmp_path / "newer"
    assert tools_copy(clone, "train_1gpu.py", copy, "--task", "text").returncode == 0
    (copy / RECORD).unlink()
    with open(copy / "utils" / "optim.py", "a") as file:
        file.write("# ours\n")
    git(copy, "init", "--quiet")
    git(copy, "add", "--all")
    git(copy, "commit", "--quiet", "--message=ours")
    git(clone, "clone", "--quiet", "--shared", str(clone), str(newer))
    for name in ("optim", "seeds"):
        text = (newer / "utils" / f"{name}.py").read_text()
        (newer / "utils" / f"{name}.py").write_text(f"# new\n{text}")
    git(newer, "commit", "--quiet", "--all", "--message=newer")
    old, new = (git(folder, "rev-parse", "HEAD")[:12] for folder in (clone, newer))
    assert tools_copy(newer, "--update", copy).returncode == 0
    git(copy, "checkout", "--quiet", ".")
    for options in ([], ["--dry-run"]):
        again = tools_copy(newer, "--update", copy, *options)
        assert again.returncode == 1, again.stdout
        assert again.stderr.startswith("error: utils/seeds.py ")  # optim.py is of no commit
        assert f"--from {old}" in again.stderr and f"--from {new}" in again.stderr
    redone = tools_copy(newer, "--update", copy, "--from", old)
    assert redone.returncode == 0 and (copy / "utils" / "seeds.py").read_text()[:5] == "# new"
    assert (copy / "utils" / "optim.py").read_text()[:5] == "# new"
    git(copy, "stash", "--include-untracked")  # as docs/copy.md says
    assert "by its contents" in tools_copy(newer, "--update", copy, "--dry-run").stdout


def test_damaged_record_is_named(tmp_path):
    assert read_record(tmp_path) is None
    lists = json.dumps(new_record("a") | {"files": ["utils/seeds.py"]})
    for text in ("{", "[]", '{"commit": "a"}', lists):
        (tmp_path / RECORD).write_text(text)
        with pytest.raises(CannotUpdate, match=rf"{RECORD} cannot be read .*--from COMMIT"):
            read_record(tmp_path)


# Copies


def test_copy_that_is_updated(clone, tmp_path):
    """From the commit before the last one, with a record, and an edit that is kept."""
    copy = tmp_path / "copy"
    assert tools_copy(clone, "train_ddp.py", copy).returncode == 0
    record = json.loads((copy / RECORD).read_text())
    assert record["commit"] == git(clone, "rev-parse", "HEAD")
    assert record["scripts"] == {"train_ddp.py": "images"} and record["options"] == []
    text = (copy / "utils" / "seeds.py").read_bytes()
    assert record["files"]["utils/seeds.py"] == checksum(text)
    (copy / "utils" / "optim.py").write_text("# ours\n" + (copy / "utils" / "optim.py").read_text())
    (copy / "utils" / "watchdog.py").unlink()
    newer = tmp_path / "newer"
    git(clone, "clone", "--quiet", "--shared", str(clone), str(newer))
    for name in ("optim", "seeds", "watchdog"):
        with open(newer / "utils" / f"{name}.py", "a") as file:
            file.write("# new\n")
    dirty = tools_copy(newer, "--update", copy)
    assert dirty.returncode == 1 and "utils/optim.py" in dirty.stderr and "stash" in dirty.stderr
    git(newer, "commit", "--quiet", "--all", "--message=newer")
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    for option in ("--dry-run", "--diff"):
        shown = tools_copy(newer, "--update", copy, option)
        assert shown.returncode == 0, shown.stderr
        is_diff = option == "--diff"  # stdout is then a patch
        listed = shown.stderr if is_diff else shown.stdout
        assert re.search(r"^merged +utils/optim.py", listed, re.M)
        assert re.search(r"^deleted .* utils/watchdog.py$", listed, re.M)
        assert "up to date" not in listed
        assert not is_diff or (shown.stdout[:4] == "diff" and "+# new" in shown.stdout)
    nothing = tools_copy(clone, "--update", copy, "--dry-run")
    assert nothing.returncode == 0, nothing.stderr  # it does not list what was deleted long ago
    assert nothing.stdout.count("\n") == 1 and "up to date" in nothing.stdout
    assert str(copy) in nothing.stdout and record["commit"][:12] in nothing.stdout
    assert before == {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    refused = tools_copy(newer, "train_ddp.py", copy, "--with", "audit")
    assert refused.returncode == 1 and "--update" in refused.stderr
    done = tools_copy(newer, "--update", copy, "--with", "audit")
    assert done.returncode == 0, done.stderr
    optim = (copy / "utils" / "optim.py").read_text()
    assert optim.startswith("# ours\n") and optim.endswith("# new\n")
    assert (copy / "utils" / "seeds.py").read_text().endswith("# new\n")
    assert not (copy / "utils" / "watchdog.py").exists()
    assert (copy / "utils" / "options" / "audit.py").exists()
    older = tools_copy(clone, "--update", copy)  # the commit is not there, or not yet pulled
    assert older.returncode == 1 and "this clone" in older.stderr
    git(newer, "checkout", "--quiet", "HEAD~1")
    older = tools_copy(newer, "--update", copy)
    assert older.returncode == 1 and "git pull" in older.stderr
    git(newer, "checkout", "--quiet", "-")
    typo = tools_copy(newer, "--update", copy, "--with", "adit")
    assert typo.returncode == 2 and "unknown option adit" in typo.stderr
    again = tools_copy(newer, "--update", copy)
    assert again.returncode == 0 and "utils/optim.py" not in again.stdout
    assert json.loads((copy / RECORD).read_text())["options"] == ["audit"]


def test_update_by_a_commit_keeps_what_the_record_says(clone, tmp_path):
    """--from and a copy made without git have no commit, but they know what was left out."""
    copied = tools_copy(clone, "train_1gpu.py", tmp_path, "--task", "own", "--plain")
    assert copied.returncode == 0, copied.stderr
    script = (tmp_path / "train_1gpu.py").read_text()
    script = script.replace("import my_task", "# \xe9\nimport tasks.birds")
    (tmp_path / "train_1gpu.py").write_bytes(f"# coding: latin-1\n{script}".encode("latin-1"))
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    record = json.loads((tmp_path / RECORD).read_text())
    (tmp_path / RECORD).write_text(json.dumps(record | {"commit": None}))
    for options in ([], ["--from", "HEAD"]):
        done = tools_copy(clone, "--update", tmp_path, *options)
        assert done.returncode == 0, done.stderr
        assert json.loads((tmp_path / RECORD).read_text()) == record
        assert files == {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    (tmp_path / RECORD).unlink()
    done = tools_copy(clone, "--update", tmp_path)  # it has the guards, but no other task
    assert json.loads((tmp_path / RECORD).read_text())["scripts"] == record["scripts"], done.stderr
    assert not (tmp_path / "tasks").exists()


def test_clone_that_lacks_files_updates_nothing(clone, tmp_path):
    """git knows that they are there: a sparse checkout, or somebody has deleted them."""
    newer, copy = tmp_path / "newer", tmp_path / "copy"
    git(clone, "clone", "--quiet", "--shared", str(clone), str(newer))
    assert tools_copy(newer, "train_1gpu.py", copy).returncode == 0
    git(newer, "sparse-checkout", "set", "--no-cone", "/*", "!/configs/")
    refused = tools_copy(newer, "--update", copy)
    assert refused.returncode == 1 and "configs/cifar10.yaml" in refused.stderr
    assert (copy / "configs" / "cifar10.yaml").exists()
    git(newer, "sparse-checkout", "disable")
    (newer / "utils" / "seeds.py").unlink()
    refused = tools_copy(newer, "--update", copy)
    assert refused.returncode == 1 and "utils/seeds.py" in refused.stderr
    assert "utils/seeds.py" in tools_copy(newer, "train_1gpu.py", tmp_path / "other").stderr


def test_clone_below_any_folder_with_any_line_ends_and_any_git(clone, tmp_path, monkeypatch):
    newer, copy = tmp_path / "images" / "tasks" / "clone", tmp_path / "copy"
    git(clone, "clone", "--quiet", "--shared", "--no-checkout", str(clone), str(newer))
    (newer / ".git" / "info" / "attributes").write_text("*.py text eol=crlf\n")
    git(newer, "checkout", "--quiet")
    assert b"\r" in (newer / "utils" / "seeds.py").read_bytes()
    git(tmp_path, "init", "--quiet", "different")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "different" / ".git"))
    done = tools_copy(newer, "train_1gpu.py", copy, "--task", "own", "--with", "audit")
    assert done.returncode == 0 and done.stderr == "" and "Write my_task.py" in done.stdout
    assert b"\r" not in (copy / "utils" / "seeds.py").read_bytes()
    assert b"\r" not in (copy / "train_1gpu.py").read_bytes()
    (copy / "utils" / "options" / "audit.py").unlink()
    done = tools_copy(newer, "--update", copy)
    assert done.returncode == 0 and done.stdout.count("\n") == 1, done.stderr
    done = tools_copy(newer, "--update", copy, "--all")
    names = json.loads((copy / RECORD).read_text())["options"]
    assert "loggers" in names and (copy / "utils" / "options" / "loggers.py").exists()
    assert not (copy / "utils" / "options" / "audit.py").exists()
    done = tools_copy(newer, "--update", copy, "--with", "audit")
    assert done.returncode == 0 and (copy / "utils" / "options" / "audit.py").exists()


def test_guard_that_is_renamed_stays_out(clone, tmp_path):
    newer, copy = tmp_path / "newer", tmp_path / "copy"
    assert tools_copy(clone, "train_1gpu.py", copy, "--plain").returncode == 0
    git(clone, "clone", "--quiet", "--shared", str(clone), str(newer))
    git(newer, "mv", "utils/progress.py", "utils/bar.py")
    for name in ("utils/options/__init__.py", "tools/lib/prune.py"):
        text = (newer / name).read_text().replace("utils.progress", "utils.bar")
        (newer / name).write_text(text)
    git(newer, "commit", "--quiet", "--all", "--message=newer")
    done = tools_copy(newer, "--update", copy)
    assert done.returncode == 0 and not (copy / "utils" / "bar.py").exists(), done.stderr


@pytest.mark.slow
def test_what_is_left_out_stays_out_until_it_is_asked_for(clone, tmp_path):
    copy, newer = tmp_path / "copy", tmp_path / "newer"
    assert tools_copy(clone, "train_ddp.py", copy, "--plain").returncode == 0
    (copy / "train_ddp.py").write_text("# ours\n" + (copy / "train_ddp.py").read_text())
    git(clone, "clone", "--quiet", "--shared", str(clone), str(newer))
    for name in ("distributed", "watchdog"):
        with open(newer / "utils" / f"{name}.py", "a") as file:
            file.write("# new\n")
    git(newer, "commit", "--quiet", "--all", "--message=newer")
    done = tools_copy(newer, "--update", copy)
    assert done.returncode == 0, done.stderr
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()[:-1]]
    assert lines == [["replaced", "utils/distributed.py"]]
    done = tools_copy(newer, "--update", copy, "--with", "contract,watchdog")
    assert done.returncode == 0, done.stderr
    assert (copy / "utils" / "watchdog.py").read_text().endswith("# new\n")
    assert "    watch(store" in (copy / "utils" / "distributed.py").read_text()
    script = (copy / "train_ddp.py").read_text()
    assert script.startswith("# ours\n") and "check_task(task" in script
    assert "CompareReplicas" not in script
    assert (copy / "utils" / "reports.py").exists()  # which the watchdog needs
    left_out = ["finite", "preemption", "progress", "replicas", "run_folder"]
    assert json.loads((copy / RECORD).read_text())["without"] == left_out
    done = tools_copy(newer, "--update", copy, "--without", "watchdog")
    assert done.returncode == 0 and "removed       utils/watchdog.py" in done.stdout
    assert "watch(" not in (copy / "utils" / "distributed.py").read_text()


def test_place_of_a_name_that_has_moved_is_named():
    then = {"utils/errors.py": b"def report():\n    pass\n"}
    now = {"utils/errors.py": b"", "utils/reports.py": then["utils/errors.py"]}
    own = {"own.py": b"from utils.errors import report\n"}
    lines = stale_imports(now | own, then, now, {})
    assert_lines(lines, ["own.py imports report, which utils/errors.py no", "utils/reports.py has"])


def test_own_files_that_use_what_an_update_leaves_out_are_named(clone, tmp_path):
    assert tools_copy(clone, "train_ddp.py", tmp_path).returncode == 0
    (tmp_path / "own.py").write_text(
        "from utils.preemption import Interrupts\n\nprint(Interrupts, cfg.save_minutes)\n"
    )
    done = tools_copy(clone, "--update", tmp_path, "--plain")
    assert done.returncode == 1
    named = [line for line in done.stdout.splitlines() if line.startswith("own.py")]
    assert_lines(named, ["utils/preemption.py", "left out"], ["own.py:3 ", "cfg.save_minutes"])


@pytest.mark.slow
def test_option_that_has_moved_stays(clone, tmp_path):
    copy, newer = tmp_path / "copy", tmp_path / "newer"
    flags = ["--task", "text", "--with", "text_folder"]
    assert tools_copy(clone, "train_1gpu.py", copy, *flags).returncode == 0
    (copy / "tasks" / "own.py").write_text("from tasks.text_folder import packed_splits\n")
    with open(copy / "tasks" / "text_folder.py", "a") as file:
        file.write("# ours\n")
    git(clone, "clone", "--quiet", "--shared", str(clone), str(newer))
    git(newer, "mv", "tasks/text_folder.py", "sources/texts.py")
    text = (newer / "tasks" / "text.py").read_text()
    (newer / "tasks" / "text.py").write_text(text.replace("tasks.text_folder", "sources.texts"))
    git(newer, "commit", "--quiet", "--all", "--message=newer")
    done = tools_copy(newer, "--update", copy)
    assert done.returncode == 1, done.stderr
    assert re.search("tasks/own.py .*tasks/text_folder.py, .*sources/texts.py ", done.stdout)
    assert not (copy / "tasks" / "text_folder.py").exists()
    assert (copy / "sources" / "texts.py").read_text().endswith("# ours\n")
    assert json.loads((copy / RECORD).read_text())["options"] == ["texts"]
    again = tools_copy(newer, "--update", copy)  # until it is changed
    assert again.returncode == 1 and "sources/texts.py" in again.stdout
    (copy / "tasks" / "own.py").write_text("from sources.texts import packed_splits\n")
    assert tools_copy(newer, "--update", copy).returncode == 0
    assert json.loads((copy / RECORD).read_text())["since"] is None


def test_option_is_added_to_an_edited_copy(clone, tmp_path):
    assert tools_copy(clone, "train_1gpu.py", tmp_path).returncode == 0
    with open(tmp_path / "train_1gpu.py", "a") as file:
        file.write("# edited\n")
    added = tools_copy(clone, "train_1gpu.py", tmp_path, "--with", "step_log")
    assert added.returncode == 0, added.stderr
    assert (tmp_path / "utils" / "options" / "step_log.py").exists()
    assert (tmp_path / "train_1gpu.py").read_text().endswith("# edited\n")


def test_updates_that_are_refused_are_one_line(clone, tmp_path):
    copy, damaged = tmp_path / "copy", tmp_path / "damaged"
    shallow, archive = tmp_path / "shallow", tmp_path / "archive"
    assert tools_copy(clone, "train_1gpu.py", copy).returncode == 0
    git(clone, "clone", "--quiet", "--depth=1", clone.as_uri(), str(shallow))
    archive.mkdir()
    tar = subprocess.run(["git", "-C", clone, "archive", "HEAD"], capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(archive)], input=tar.stdout, check=True)
    (tmp_path / "empty").mkdir()
    record = json.loads((copy / RECORD).read_text())
    (copy / RECORD).write_text(json.dumps(record | {"commit": "0" * 40}))
    shutil.copytree(copy, damaged)
    (damaged / RECORD).write_text("{")
    for project, target, options, words in (
        (clone, clone, [], ["git pull"]),
        (clone, copy, [], ["000000", "not in this clone", "--from"]),
        (clone, damaged, [], ["cannot be read", "--from"]),
        (clone, copy, ["--from", "no-such-commit"], ["no-such-commit"]),
        (shallow, copy, [], ["git fetch --unshallow"]),
        (archive, copy, [], ["no history", "clone the repository"]),
        (clone, tmp_path / "empty", [], ["--from COMMIT"]),
        (clone, archive, [], ["the whole project"]),
    ):
        refused = tools_copy(project, "--update", target, *options)
        assert refused.returncode == 1, refused.stdout
        assert refused.stderr.count("\n") == 1 and refused.stderr.startswith("error: ")
        assert all(word in refused.stderr for word in words), refused.stderr
    done = tools_copy(clone, "--update", damaged, "--from", "HEAD")
    assert done.returncode == 0 and read_record(damaged)["scripts"] == {"train_1gpu.py": "images"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "commit", [pytest.param(c, marks=[pytest.mark.rare] * (c != "952ec81")) for c in PAST]
)
def test_copy_of_the_past_is_updated_and_trains(commit, clone, tmp_path):
    """Without a record: copies did not have one. Its commit is found by what was not edited."""
    past, copy = tmp_path / "past", tmp_path / "copy"
    past.mkdir()
    tar = subprocess.run(["git", "-C", clone, "archive", commit], capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(past)], input=tar.stdout, check=True)
    copied = tools_copy(past, "train_1gpu.py", copy)
    assert copied.returncode == 0, copied.stderr
    for name, (old, new) in EDITS.items():
        text = (copy / name).read_text()
        assert text.count(old) == 1, (commit, name)
        (copy / name).write_text(text.replace(old, new))
    (copy / "our_own.py").write_text("# ours\n")
    updated = tools_copy(clone, "--update", copy)
    assert updated.returncode == 0, updated.stdout + updated.stderr
    for name, (_, new) in EDITS.items():
        assert new in (copy / name).read_text(), (commit, name)
    assert (copy / "our_own.py").exists()
    run = run_alone(copy, "train_1gpu.py", small_flags(copy / "train_1gpu.py", tmp_path))
    assert run.returncode == 0, run.stderr
    again = tools_copy(clone, "--update", copy)
    assert again.returncode == 0 and len(again.stdout.splitlines()) == 1, again.stdout


def test_commits_of_the_past_are_in_this_history(clone):
    for commit in PAST:
        assert git(clone, "cat-file", "-t", commit) == "commit"
