"""tools.copy --update: a copy keeps its owner's edits, and gets what has changed since."""

import errno
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.copies import copied, copy, refused, run_alone
from tools.copy import texts, with_more
from tools.lib.closure import small_flags
from tools.lib.ladder import ROOT
from tools.lib.prune import GUARDS
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


def assert_lines(lines, *expected):
    """Each line contains all parts in its list."""
    assert len(lines) == len(expected)
    for line, parts in zip(lines, expected, strict=True):
        for part in parts:
            assert part in line


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone of this repository with this work tree as its last commit."""
    if not (ROOT / ".git").exists():
        pytest.skip("there is no history")
    if git(ROOT, "rev-parse", "--is-shallow-repository") == "true":
        pytest.skip("the history is incomplete")
    folder = tmp_path_factory.mktemp("clone") / "clone"
    git(ROOT, "clone", "--quiet", "--shared", str(ROOT), str(folder))
    git(folder, "rm", "-r", "--quiet", ".")
    for name in git(ROOT, "ls-files", "-z", "-co", "--exclude-standard").split("\0")[:-1]:
        if (ROOT / name).exists():  # or it is about to be removed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message=work tree")
    return folder


@pytest.fixture
def newer(clone, tmp_path):
    """A clone of the clone, for commits."""
    git(clone, "clone", "--quiet", "--shared", str(clone), str(tmp_path / "newer"))
    return tmp_path / "newer"


def append(text, *paths):
    for path in paths:
        with open(path, "a") as file:
            file.write(text)


def commit(project):
    git(project, "add", "--all")
    git(project, "commit", "--quiet", "--message=newer")


def update(project, folder, *options, code=0):
    """Returns what an update prints to stdout."""
    done = copy("--update", folder, *options, project=project)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def record_of(folder):
    return json.loads((folder / RECORD).read_text())


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
    (tmp_path / "once.py").write_bytes(b"a\r\n1\n2\n3\n")  # a single one does not count
    base = dict.fromkeys(("mine.py", "same.py", "once.py"), b"a\n1\n2\n3\n")
    assert plan(tmp_path, base, base, {}, LABELS) == []
    changes = plan(tmp_path, base, dict.fromkeys(base, b"a\n1\n2\nb\n"), {}, LABELS)
    apply(tmp_path, changes, b"")
    assert (tmp_path / "mine.py").read_bytes() == b"mine\r\n1\r\n2\r\nb\r\n"
    assert (tmp_path / "same.py").read_bytes() == b"a\r\n1\r\n2\r\nb\r\n"
    assert (tmp_path / "once.py").read_bytes() == b"a\n1\n2\nb\n"


def test_edits_follow_a_file_that_moves(tmp_path):
    """Applied, and as a patch."""
    lines = "".join(f"{number}\n" for number in range(20))
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils" / "old.py").write_text(lines.replace("3\n", "3 # mine\n", 1))
    (tmp_path / "utils" / "old.py").chmod(0o755)
    base, new = {"utils/old.py": lines.encode()}, {"sources/new.py": f"{lines}20\n".encode()}
    changes = plan(tmp_path, base, new, {"utils/old.py": "sources/new.py"}, LABELS)
    patched = tmp_path / "patched"
    shutil.copytree(tmp_path / "utils", patched / "utils")
    git(tmp_path, "init", "--quiet")
    diff = as_diff(tmp_path, [*changes, Change("added.py", "added", b"a\n")])
    command = ["git", "apply", "--directory=patched", "-"]
    subprocess.run(command, input=diff.encode(), cwd=tmp_path, check=True)
    apply(tmp_path, changes, b"")
    for folder in (tmp_path, patched):
        assert not (folder / "utils" / "old.py").exists()
        text = (folder / "sources" / "new.py").read_text()
        assert "3 # mine\n" in text and text.endswith("19\n20\n")
    assert (tmp_path / "sources" / "new.py").stat().st_mode & 0o777 == 0o755
    assert (patched / "added.py").read_text() == "a\n"


def test_imports_of_what_has_moved_or_is_gone_are_named():
    then = {
        "utils/moved.py": b"",
        "utils/gone.py": b"",
        "utils/stays.py": b"a = b = 1\n",
        "utils/errors.py": b"def report():\n    pass\n",
    }
    now = {
        "sources/new.py": b"",
        "utils/stays.py": b"a = 1\n",
        "utils/errors.py": b"",
        "utils/reports.py": then["utils/errors.py"],
    }
    own = {
        "research/own.py": b"from utils import (\n    stays,\n    gone,\n)\n"
        b"from utils.stays import a, b\nfrom utils.errors import report\n",
        "tasks/own.py": b"from utils.moved import x\nimport utils.stays\n",
    }
    assert_lines(
        stale_imports(now | own, then, now, {"utils/moved.py": "sources/new.py"}),
        ["research/own.py ", " utils/gone.py,"],
        ["research/own.py ", " b, ", " utils/stays.py "],
        ["research/own.py ", " report, ", " utils/errors.py ", "utils/reports.py "],
        ["tasks/own.py ", " utils/moved.py,", " sources/new.py "],
    )


def test_overrides_of_methods_that_are_gone_are_named():
    """Nothing would call them. The base class may have moved, or be the base of the owner's."""
    then = {
        "utils/options/__init__.py": b"class Hook:\n    def after_step(self): ...\n"
        b"    def is_due(self): ...\n    def write(self): ...\n",
    }
    now = {"utils/hooks.py": b"class Hook:\n    def after_step(self): ...\n"}
    own = {
        "own.py": b"from utils import hooks\n"
        b"class Mine(hooks.Hook):\n    def is_due(self): ...\n"
        b"class Other:\n    def is_due(self): ...\n",
        "team/more.py": b"class More(Mine):\n    def after_step(self): ...\n"
        b"    def write(self): ...\n",
    }
    assert_lines(
        stale_overrides(now | own, then, now),
        ["own.py: Mine.is_due ", " utils/hooks.py ", " Hook.is_due"],
        ["team/more.py: More.write ", " utils/hooks.py ", " Hook.write"],
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
    new = texts({"train_ddp.py": "own"}, [], ["hang"])
    paths = {"sources/samplers.py", "utils/guards/hang.py", "tasks/mine.py"}
    more = with_more(dict(new), paths)
    assert more.keys() - new.keys() == {"sources/samplers.py"}
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


def test_ctrl_c_changes_nothing_and_leftovers_of_a_kill_are_removed(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("old")
    (tmp_path / "a.py.copying").write_text("the owner's")
    (tmp_path / ".a.py.123.copying").write_text("half")
    os.utime(tmp_path / ".a.py.123.copying", (0, 0))
    replace = Path.replace

    def interrupt(path, target):
        if target.name == "c.py":
            raise KeyboardInterrupt
        replace(path, target)

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_files(tmp_path, dict.fromkeys(("a.py", "b.py", "c.py"), b"new"))
    texts = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert texts == {"a.py": "old", "a.py.copying": "the owner's"}


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


@pytest.mark.slow
def test_update_waits_until_conflicts_are_resolved(clone, newer, tmp_path):
    folder = tmp_path / "copy"
    copied("train_1gpu.py", folder, "--task", "text", project=clone)
    append("# ours\n", folder / "utils" / "seeds.py")
    append("# new\n", newer / "utils" / "seeds.py")
    commit(newer)
    assert "utils/seeds.py" in update(newer, folder, code=1)
    marked = (folder / "utils" / "seeds.py").read_bytes()
    assert "utils/seeds.py" in refused("--update", folder, project=newer)
    assert (folder / "utils" / "seeds.py").read_bytes() == marked
    (folder / "utils" / "seeds.py").write_text("# both\n")
    update(newer, folder)


def test_damaged_record_is_named(tmp_path):
    assert read_record(tmp_path) is None
    lists = json.dumps(new_record("a") | {"files": ["utils/seeds.py"]})
    for text in ("{", '{"commit": "a"}', lists):
        (tmp_path / RECORD).write_text(text)
        with pytest.raises(CannotUpdate, match=rf"{RECORD} .*--from"):
            read_record(tmp_path)


# Copies


def test_copy_that_is_updated(clone, newer, tmp_path):
    """From the commit before the last one, with a record, and an edit that is kept."""
    folder = tmp_path / "copy"
    utils = folder / "utils"
    copied("train_ddp.py", folder, project=clone)
    record = record_of(folder)
    assert record["commit"] == git(clone, "rev-parse", "HEAD")
    assert record["scripts"] == {"train_ddp.py": "images"} and record["options"] == []
    assert record["files"]["utils/seeds.py"] == checksum((utils / "seeds.py").read_bytes())
    (utils / "optim.py").write_text("# ours\n" + (utils / "optim.py").read_text())
    (utils / "guards" / "hang.py").unlink()
    append("# new\n", *(newer / "utils" / f"{n}.py" for n in ("optim", "seeds", "guards/hang")))
    assert "utils/optim.py" in refused("--update", folder, project=newer)  # not committed
    commit(newer)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    shown = copy("--update", folder, "--diff", project=newer)  # stdout is then a patch
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout[:4] == "diff" and "+# new" in shown.stdout
    assert re.search(r"^merged +utils/optim.py", shown.stderr, re.M)
    assert re.search(r"^deleted .* utils/guards/hang.py$", shown.stderr, re.M)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    update(newer, folder, "--with", "audit")
    optim = (utils / "optim.py").read_text()
    assert optim.startswith("# ours\n") and optim.endswith("# new\n")
    assert (utils / "seeds.py").read_text().endswith("# new\n")
    assert not (utils / "guards" / "hang.py").exists()
    assert (utils / "options" / "audit.py").exists()
    assert "this clone" in refused("--update", folder, project=clone)  # has no such commit yet
    assert record_of(folder)["options"] == ["audit"]


@pytest.mark.slow
def test_update_by_a_commit_keeps_what_the_record_says(clone, tmp_path):
    """--from and a copy made without git have no commit, but they know what was left out."""
    copied("train_1gpu.py", tmp_path, "--task", "own", "--plain", project=clone)
    script = (tmp_path / "train_1gpu.py").read_text()
    script = script.replace("import my_task", "# \xe9\nimport tasks.birds")
    (tmp_path / "train_1gpu.py").write_bytes(f"# coding: latin-1\n{script}".encode("latin-1"))
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    record = record_of(tmp_path)
    (tmp_path / RECORD).write_text(json.dumps(record | {"commit": None}))
    assert "--from" in refused("--update", tmp_path, project=clone)
    update(clone, tmp_path, "--from", "HEAD")
    assert record_of(tmp_path) == record
    assert files == {path: path.read_bytes() for path in tmp_path.rglob("*.*")}


def test_clone_that_lacks_files_updates_nothing(clone, newer, tmp_path):
    """git knows that they are there: a sparse checkout, or somebody has deleted them."""
    folder = tmp_path / "copy"
    copied("train_1gpu.py", folder, project=newer)
    git(newer, "sparse-checkout", "set", "--no-cone", "/*", "!/configs/")
    assert "configs/cifar10.yaml" in refused("--update", folder, project=newer)
    assert (folder / "configs" / "cifar10.yaml").exists()
    git(newer, "sparse-checkout", "disable")
    (newer / "utils" / "seeds.py").unlink()
    assert "utils/seeds.py" in refused("--update", folder, project=newer)


@pytest.mark.slow
@pytest.mark.rare
def test_clone_below_any_folder_with_any_line_ends_and_any_git(clone, tmp_path, monkeypatch):
    newer, folder = tmp_path / "images" / "tasks" / "clone", tmp_path / "copy"
    git(clone, "clone", "--quiet", "--shared", "--no-checkout", str(clone), str(newer))
    (newer / ".git" / "info" / "attributes").write_text("*.py text eol=crlf\n")
    git(newer, "checkout", "--quiet")
    assert b"\r" in (newer / "utils" / "seeds.py").read_bytes()
    git(tmp_path, "init", "--quiet", "different")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "different" / ".git"))
    copied("train_1gpu.py", folder, "--task", "own", "--with", "audit", project=newer)
    for path in folder.rglob("*.py"):
        assert b"\r" not in path.read_bytes()
    audit = folder / "utils" / "options" / "audit.py"
    audit.unlink()
    assert update(newer, folder).count("\n") == 1  # what was deleted long ago is not listed
    update(newer, folder, "--all")
    assert "loggers" in record_of(folder)["options"] and not audit.exists()
    assert (folder / "utils" / "options" / "loggers.py").exists()
    update(newer, folder, "--with", "audit")
    assert audit.exists()


@pytest.mark.slow
def test_what_is_left_out_stays_out_until_it_is_asked_for(clone, newer, tmp_path):
    folder = tmp_path / "copy"
    copied("train_ddp.py", folder, "--plain", project=clone)
    (folder / "train_ddp.py").write_text("# ours\n" + (folder / "train_ddp.py").read_text())
    append("# new\n", newer / "utils" / "distributed.py", newer / "utils" / "guards" / "hang.py")
    commit(newer)
    lines = [line.split() for line in update(newer, folder).splitlines()[:-1]]
    assert lines == [["replaced", "utils/distributed.py"]]
    update(newer, folder, "--with", "contract,hang")
    assert (folder / "utils" / "guards" / "hang.py").read_text().endswith("# new\n")
    script = (folder / "train_ddp.py").read_text()
    assert script.startswith("# ours\n") and "check_task(task" in script
    assert "hang.ShowHang()" in script and "CompareReplicas" not in script
    assert set(record_of(folder)["without"]) == GUARDS.keys() - {"contract", "hang"}
    update(newer, folder, "--without", "hang")
    assert not (folder / "utils" / "guards" / "hang.py").exists()
    assert not re.search(r"import .*\bhang\b|\bhang\.", (folder / "train_ddp.py").read_text())


@pytest.mark.slow
def test_option_that_has_moved_stays(clone, newer, tmp_path):
    folder = tmp_path / "copy"
    copied("train_1gpu.py", folder, "--task", "text", "--with", "text_folder", project=clone)
    own = folder / "tasks" / "own.py"
    own.write_text("from tasks.text_folder import packed_splits\n")
    append("# ours\n", folder / "tasks" / "text_folder.py")
    git(newer, "mv", "tasks/text_folder.py", "sources/texts.py")
    text = newer / "tasks" / "text.py"
    text.write_text(text.read_text().replace("tasks.text_folder", "sources.texts"))
    commit(newer)
    for _ in range(2):  # until it is changed
        printed = update(newer, folder, code=1)
        assert re.search("tasks/own.py .*tasks/text_folder.py, .*sources/texts.py ", printed)
    assert not (folder / "tasks" / "text_folder.py").exists()
    assert (folder / "sources" / "texts.py").read_text().endswith("# ours\n")
    assert record_of(folder)["options"] == ["texts"]
    own.write_text("from sources.texts import packed_splits\n")
    update(newer, folder)
    assert record_of(folder)["since"] is None


def test_option_is_added_to_an_edited_copy(clone, tmp_path):
    copied("train_1gpu.py", tmp_path, project=clone)
    append("# edited\n", tmp_path / "train_1gpu.py")
    copied("train_1gpu.py", tmp_path, "--with", "step_log", project=clone)
    assert (tmp_path / "utils" / "options" / "step_log.py").exists()
    assert (tmp_path / "train_1gpu.py").read_text().endswith("# edited\n")


@pytest.mark.slow
def test_updates_that_are_refused_are_one_line(clone, tmp_path):
    folder, damaged = tmp_path / "copy", tmp_path / "damaged"
    shallow, archive = tmp_path / "shallow", tmp_path / "archive"
    copied("train_1gpu.py", folder, project=clone)
    git(clone, "clone", "--quiet", "--depth=1", clone.as_uri(), str(shallow))
    archived(clone, "HEAD", archive)
    (tmp_path / "empty").mkdir()
    record = record_of(folder)
    (folder / RECORD).write_text(json.dumps(record | {"commit": "0" * 40}))
    shutil.copytree(folder, damaged)
    (damaged / RECORD).write_text("{")
    for project, target, options, words in (
        (clone, clone, [], ["git pull"]),
        (clone, folder, [], ["000000", "--from"]),
        (clone, damaged, [], [RECORD, "--from"]),
        (clone, folder, ["--from", "no-such-commit"], ["no-such-commit"]),
        (shallow, folder, [], ["git fetch --unshallow"]),
        (archive, folder, [], ["clone the repository"]),
        (clone, tmp_path / "empty", [], ["--from COMMIT"]),
        (clone, archive, ["--from", "HEAD"], [str(archive)]),
    ):
        line = refused("--update", target, *options, project=project)
        assert all(word in line for word in words), line
    update(clone, damaged, "--from", "HEAD")
    assert read_record(damaged)["scripts"] == {"train_1gpu.py": "images"}


def archived(project, name, folder):
    """The project's files at a commit."""
    folder.mkdir()
    tar = subprocess.run(["git", "-C", project, "archive", name], capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=tar.stdout, check=True)


def edit(folder, edits):
    for name, (old, new) in edits.items():
        text = (folder / name).read_text()
        assert text.count(old) == 1, name
        (folder / name).write_text(text.replace(old, new))


BEFORE_GUARDS = "4e7e158"  # the guards were modules in a table
EDITS_OF_DDP = {
    "train_ddp.py": (
        "        scheduler.step()\n",
        "        scheduler.step()\n        ours = scheduler.last_epoch  # ours\n",
    ),
    "utils/config.py": (
        "    seed: int = setting(0,",
        '    ours: int = setting(3, "ours")\n    seed: int = setting(0,',
    ),
}


@pytest.mark.slow
@pytest.mark.rare
def test_copy_of_the_time_before_guards_is_updated_and_trains(clone, tmp_path):
    """By the record; what it left out stays out, though its modules have different names now."""
    past, folder = tmp_path / "past", tmp_path / "copy"
    git(clone, "clone", "--quiet", "--shared", str(clone), str(past))
    git(past, "checkout", "--quiet", BEFORE_GUARDS)
    copied("train_ddp.py", folder, "--without", "watchdog,progress", project=past)
    edit(folder, EDITS_OF_DDP)
    line = "import tasks.images as task  # to train something else, change this line\n"
    edit(folder, {"train_ddp.py": (line, "import tasks.ours as task\n")})
    (folder / "tasks" / "ours.py").write_text("from tasks.images import *\n")
    update(clone, folder)
    text = (folder / "train_ddp.py").read_text()
    assert "# ours\n" in text and "import tasks.ours as task\n" in text
    assert "    ours: int" in (folder / "utils" / "config.py").read_text()
    guards = {path.stem for path in (folder / "utils" / "guards").glob("[a-z]*.py")}
    present = {path.stem for path in (ROOT / "utils" / "guards").glob("[a-z]*.py")}
    assert guards == present - {"hang", "progress"}
    flags = [*small_flags(folder / "train_ddp.py", folder), "--ours=4"]
    flags += ["--dataset=synthetic", "--synthetic-samples=64", "--image-size=16"]
    run = run_alone(folder, "train_ddp.py", flags)
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(c, marks=[pytest.mark.rare] * (c != "952ec81")) for c in PAST]
)
def test_copy_of_the_past_is_updated_and_trains(name, clone, tmp_path):
    """Without a record: copies did not have one."""
    past, folder = tmp_path / "past", tmp_path / "copy"
    archived(clone, name, past)
    copied("train_1gpu.py", folder, project=past)
    edit(folder, EDITS)
    (folder / "our_own.py").write_text("# ours\n")
    (folder / RECORD).unlink(missing_ok=True)
    update(clone, folder, "--from", name)
    for path, (_, new) in EDITS.items():
        assert new in (folder / path).read_text(), path
    assert (folder / "our_own.py").exists()
    run = run_alone(folder, "train_1gpu.py", small_flags(folder / "train_1gpu.py", folder))
    assert run.returncode == 0, run.stderr
    assert len(update(clone, folder).splitlines()) == 1


def test_commits_of_the_past_are_in_this_history(clone):
    for name in (*PAST, BEFORE_GUARDS):
        assert git(clone, "cat-file", "-t", name) == "commit"
