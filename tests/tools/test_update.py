"""tools.copy --update: a copy keeps its owner's edits, and gets what has changed since."""

import errno
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.copies import contents_of, copied, copy, refused, run_alone
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

CONFLICT = """\
<<<<<<< yours
mine
||||||| copied (old)
a
=======
b
>>>>>>> new (new)
"""


@pytest.mark.parametrize(
    ("mine", "old", "new", "kind", "result"),
    [
        ("a\n", "a\n", "b\n", "replaced", "b\n"),
        ("mine\n", "a\n", "a\n", None, "mine\n"),
        ("mine\n1\n2\n3\n", "a\n1\n2\n3\n", "a\n1\n2\nb\n", "merged", "mine\n1\n2\nb\n"),
        ("b\n", "a\n", "b\n", None, "b\n"),  # the same edit on both sides
        ("mine\n", "a\n", "b\n", "conflict", CONFLICT),
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
    file = tmp_path / "x.py"
    if mine:
        file.write_text(mine)
    base = {"x.py": old.encode()} if old else {}
    ours = {"x.py": new.encode()} if new else {}
    changes = plan(tmp_path, base, ours, {}, LABELS)
    assert [change.kind for change in changes] == ([kind] if kind else [])
    apply(tmp_path, changes, b"")
    assert (file.read_text() if file.exists() else None) == result


def test_edits_follow_a_file_that_moves(tmp_path):
    """Applied, and as a patch, which adds a file besides."""
    lines = "".join(f"{number}\n" for number in range(20))
    mine = tmp_path / "applied" / "utils" / "old.py"
    mine.parent.mkdir(parents=True)
    mine.write_text(lines.replace("3\n", "3 # mine\n", 1))
    mine.chmod(0o755)
    shutil.copytree(tmp_path / "applied", tmp_path / "patched")
    base, new = {"utils/old.py": lines.encode()}, {"sources/new.py": f"{lines}20\n".encode()}
    moved = {"utils/old.py": "sources/new.py"}
    changes = plan(tmp_path / "applied", base, new, moved, LABELS)
    changes.append(Change("added.py", "added", b"a\n"))
    diff = as_diff(tmp_path / "applied", changes)
    apply(tmp_path / "applied", changes, b"")
    git(tmp_path / "patched", "init", "--quiet")
    command = ["git", "apply", "-"]
    subprocess.run(command, input=diff.encode(), cwd=tmp_path / "patched", check=True)
    for folder in (tmp_path / "applied", tmp_path / "patched"):
        assert not (folder / "utils" / "old.py").exists()
        text = (folder / "sources" / "new.py").read_text()
        assert "3 # mine\n" in text and text.endswith("19\n20\n")
        assert (folder / "sources" / "new.py").stat().st_mode & 0o777 == 0o755
        assert (folder / "added.py").read_text() == "a\n"


def test_imports_of_what_has_moved_or_is_gone_are_named():
    then = {"utils/moved.py": b"", "utils/gone.py": b"", "utils/stays.py": b"a = b = 1\n"}
    now = {"sources/new.py": b"", "utils/stays.py": b"a = 1\n"}
    own = {
        "research/own.py": b"from utils import (\n    stays,\n    gone,\n)\n"
        b"from utils.stays import a, b\n",
        "tasks/own.py": b"from utils.moved import x\nimport utils.stays\n",
    }
    assert_lines(
        stale_imports(now | own, then, now, {"utils/moved.py": "sources/new.py"}),
        ["research/own.py ", " utils/gone.py,"],
        ["research/own.py ", " b, ", " utils/stays.py "],
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
    head = b"@dataclass(frozen=True)\nclass Config:\n"
    peak = b"    @property\n    def peak_lr(self): ...\n"
    then = {"utils/config.py": head + b"    lr: float = 1.0\n    audit: bool = False\n" + peak}
    now = {"utils/config.py": head + b"    lr: float = 1.0\n"}
    own = {"own.py": b"lr = min(cfg.lr, cfg.peak_lr)\nother.audit\n", "train.py": b"self.cfg.audit"}
    assert_lines(
        stale_settings(now | own, then, now),
        ["own.py:1 ", " cfg.peak_lr,"],
        ["train.py:1 ", " cfg.audit,"],
    )


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


def test_ctrl_c_changes_nothing(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("old")
    replace = Path.replace

    def interrupt(path, target):
        if target.name == "c.py":
            raise KeyboardInterrupt
        replace(path, target)

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_files(tmp_path, dict.fromkeys(("a.py", "b.py", "c.py"), b"new"))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.py": "old"}


def test_repositories_and_copies_in_a_copy_are_not_searched(tmp_path):
    for name in ("own", "clone", "copy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.py").touch()
    (tmp_path / "clone" / ".git").touch()
    (tmp_path / "copy" / RECORD).touch()
    assert python_files(tmp_path, []).keys() == {"own/x.py"}


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


def test_record_with_conflicts_of_git_is_named(tmp_path):
    (tmp_path / RECORD).write_text("<<<<<<< HEAD\n{")
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
    for name in ("optim", "seeds", "guards/hang"):
        append("# new\n", newer / "utils" / f"{name}.py")
    assert "utils/optim.py" in refused("--update", folder, project=newer)  # not committed
    commit(newer)
    before = contents_of(folder)
    shown = copy("--update", folder, "--diff", project=newer)  # stdout is then a patch
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout[:4] == "diff" and "+# new" in shown.stdout
    assert re.search(r"^merged +utils/optim.py", shown.stderr, re.M)
    assert re.search(r"^deleted .* utils/guards/hang.py$", shown.stderr, re.M)
    assert contents_of(folder) == before
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
    edit(tmp_path, {"train_1gpu.py": ("import my_task", "import tasks.birds")})
    files = contents_of(tmp_path)
    record = record_of(tmp_path)
    (tmp_path / RECORD).write_text(json.dumps(record | {"commit": None}))
    assert "--from" in refused("--update", tmp_path, project=clone)
    update(clone, tmp_path, "--from", "HEAD")
    assert record_of(tmp_path) == record
    assert contents_of(tmp_path) == files


def test_clone_that_lacks_files_updates_nothing(clone, newer, tmp_path):
    """git knows that they are there, and says nothing of a sparse checkout."""
    folder = tmp_path / "copy"
    copied("train_1gpu.py", folder, project=newer)
    git(newer, "sparse-checkout", "set", "--no-cone", "/*", "!/configs/")
    assert "configs/cifar10.yaml" in refused("--update", folder, project=newer)
    assert (folder / "configs" / "cifar10.yaml").exists()


@pytest.mark.slow
@pytest.mark.rare
def test_option_that_was_deleted_stays_so_until_it_is_named(clone, tmp_path, monkeypatch):
    """By a command that a hook of a different repository starts, where git has set GIT_DIR."""
    git(tmp_path, "init", "--quiet", "different")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "different" / ".git"))
    folder = tmp_path / "copy"
    copied("train_1gpu.py", folder, "--task", "own", "--with", "audit", project=clone)
    options = folder / "utils" / "options"
    (options / "audit.py").unlink()
    assert update(clone, folder).count("\n") == 1  # what was deleted long ago is not listed
    update(clone, folder, "--all")
    assert (options / "loggers.py").exists() and not (options / "audit.py").exists()
    update(clone, folder, "--with", "audit")
    assert (options / "audit.py").exists()


@pytest.mark.slow
@pytest.mark.rare
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
@pytest.mark.rare
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


@pytest.mark.slow
def test_updates_that_are_refused_are_one_line(clone, tmp_path):
    folder, shallow, archive = tmp_path / "copy", tmp_path / "shallow", tmp_path / "archive"
    copied("train_1gpu.py", folder, project=clone)
    git(clone, "clone", "--quiet", "--depth=1", clone.as_uri(), str(shallow))
    archived(clone, "HEAD", archive)
    (folder / RECORD).write_text(json.dumps(record_of(folder) | {"commit": "0" * 40}))
    assert "--from" in refused("--update", folder, project=clone)
    assert "git fetch --unshallow" in refused("--update", folder, project=shallow)
    assert "clone the repository" in refused("--update", folder, project=archive)
    # Most files of the whole project would be removed, as those that the script does not need.
    assert str(archive) in refused("--update", archive, "--from", "HEAD", project=clone)
    (folder / RECORD).write_text("{")
    update(clone, folder, "--from", "HEAD")
    assert read_record(folder)["scripts"] == {"train_1gpu.py": "images"}


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


BEFORE_GUARDS = "4e7e158"  # the guards were modules in a table, with other names


@pytest.mark.slow
@pytest.mark.rare
def test_copy_of_the_time_before_guards_is_updated_and_trains(clone, tmp_path):
    """By its record: what it left out stays out."""
    past, folder = tmp_path / "past", tmp_path / "copy"
    git(clone, "clone", "--quiet", "--shared", str(clone), str(past))
    git(past, "checkout", "--quiet", BEFORE_GUARDS)
    copied("train_ddp.py", folder, "--without", "watchdog,progress", project=past)
    seed = "    seed: int = setting(0,"
    edit(folder, {"utils/config.py": (seed, f'    ours: int = setting(3, "ours")\n{seed}')})
    update(clone, folder)
    guards = {path.stem for path in (folder / "utils" / "guards").glob("[a-z]*.py")}
    present = {path.stem for path in (ROOT / "utils" / "guards").glob("[a-z]*.py")}
    assert guards == present - {"hang", "progress"}
    flags = small_flags(folder / "train_ddp.py", folder)
    run = run_alone(folder, "train_ddp.py", [*flags, "--ours=4"])
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("name", PAST)
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
