"""What a run of a script can reach, and that the files of the user stay."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from check import confinement, mirror, scenarios
from check.inside.check_inside import landlock
from check.mirror import changes, put_back, survey
from check.processes import INSIDE
from check.report import written_outside
from check.scenarios import CannotRun, Options, OriginalsChanged, run_all
from check.tests.corpus.writes import MARKS, WAYS, check_writes, write_project

needs_landlock = pytest.mark.skipif(
    not landlock.is_available(), reason="the kernel has no Landlock, or an old one"
)


def folder_of(tmp_path):
    """A project with what is copied, linked, hidden and left out."""
    source = tmp_path / "source"
    for folder in (".git", "package", "elsewhere", "venv"):
        (source / folder).mkdir(parents=True)
    (source / "package" / "train.py").write_text("pass")
    (source / "last.pt").write_text("weights of a real run")
    (source / "large.bin").write_bytes(bytes(6 << 20))
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "epoch.bin").write_text("of a real run, too")
    os.symlink("../scratch", source / "checkpoints")
    os.symlink("package", source / "latest")
    os.symlink("no such file", source / "broken")
    os.symlink("circle", source / "circle")
    os.symlink(source, source / "elsewhere" / "up")
    return source


def names_in(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_copy_holds_what_links_lead_to(tmp_path):
    source, copy = folder_of(tmp_path), tmp_path / "copy"
    survey(source, tmp_path / "work", hidden=["*.pt"]).copy_to(copy)
    assert names_in(copy) == {
        *("checkpoints", "checkpoints/epoch.bin", "elsewhere", "elsewhere/up"),
        *("large.bin", "latest", "package", "package/train.py"),
    }
    links = {path.name for path in copy.rglob("*") if path.is_symlink()}
    assert links == {"latest", "up"}
    assert (copy / "latest").resolve() == copy / "package"  # a link within the copy
    assert (copy / "elsewhere" / "up").resolve() == copy


def test_largest_files_are_linked_and_the_user_may_link_more(tmp_path):
    source = folder_of(tmp_path)
    found = survey(source, tmp_path / "work", linked=["package"], most_bytes=1000)
    assert {str(name) for name in found.links} == {"large.bin", "package"}
    assert {str(name) for name in found.copies} == {"last.pt", "checkpoints/epoch.bin"}
    assert found.reached == {source, tmp_path / "scratch"}
    (size, name), *others = mirror.writable_links(found, ["package"])
    assert (size, name, others) == (6 << 20, "large.bin", [])


def test_folders_with_very_many_files_are_linked(tmp_path, monkeypatch):
    source = tmp_path / "source"
    for folder in ("a", "b"):
        (source / folder).mkdir(parents=True)
        for number in range(6):
            (source / folder / str(number)).touch()
    monkeypatch.setattr(mirror, "MOST_FILES", 12)
    found = survey(source, tmp_path / "work")
    assert [str(name) for name in found.links] == ["b"] and len(found.copies) == 6


def test_folder_that_keeps_the_copies_is_not_copied(tmp_path):
    """Otherwise, a --keep within the project would have no end."""
    source = folder_of(tmp_path)
    (source / "kept" / "one").mkdir(parents=True)
    survey(source, source / "kept").copy_to(source / "kept" / "one")
    assert "kept" not in names_in(source / "kept" / "one")


def test_changes_are_named_and_modes_and_times_put_back(tmp_path):
    source = folder_of(tmp_path)
    found = survey(source, tmp_path / "work", hidden=["*.pt"])
    before = found.state()
    large, epoch = source / "large.bin", tmp_path / "scratch" / "epoch.bin"
    assert changes(before, found.state(), is_protected=False) == {}
    epoch.write_text("of a toy run, or of")  # as long as before
    os.utime(epoch, ns=(before[epoch][0].st_atime_ns, before[epoch][0].st_mtime_ns))
    large.chmod(0o600)
    (source / "last.pt").unlink()
    found_changes = changes(before, found.state(), is_protected=False)
    assert set(found_changes) == {epoch, large, source / "last.pt"}
    assert "checksum" in found_changes[epoch] and "mode" in found_changes[large]
    # If nothing could be opened for writing, what has different contents is somebody else's work.
    protected = changes(before, found.state(), is_protected=True)
    assert set(protected) == {large}
    put_back(before, protected)
    assert large.stat().st_mode == before[large][0].st_mode
    # A link has no checksum: a new time may be that of somebody's write, of the same size.
    unknown = before | {large: (before[large][0], None)}
    for is_write in (True, False):
        os.utime(large, ns=(1, 1))
        if is_write:
            with open(large, "r+b") as file:
                file.write(b"x")
        put_back(unknown, [large])
        assert (large.stat().st_mtime_ns == before[large][0].st_mtime_ns) != is_write


@needs_landlock
def test_native_code_and_children_write_in_named_folders_only(tmp_path):
    source = """
import os, subprocess, sys
from check_inside import landlock
landlock.restrict(sys.argv[1:])
for folder in ("free", "kept"):
    subprocess.run(f"echo x > {folder}/new; rm {folder}/old; mkdir {folder}/made", shell=True)
subprocess.run("mkdir free/deep; mv free/new free/deep/new", shell=True)
try:
    os.truncate("kept/old", 0)
except PermissionError:
    print("refused")
open("file", "w").write("x")
"""
    for folder in ("free", "kept"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "old").write_text("old")
    (tmp_path / "file").touch()
    done = subprocess.run(
        [sys.executable, "-c", source, "free", "file"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(INSIDE), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "refused\n", done.stderr
    assert names_in(tmp_path / "free") == {"made", "deep", "deep/new"}
    assert names_in(tmp_path / "kept") == {"old"}
    assert (tmp_path / "kept" / "old").read_text() == "old" and (tmp_path / "file").read_text()


@needs_landlock
def test_folder_of_the_script_is_in_none_that_may_be_written(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "models"))
    for folder in (".cache", ".hidden/source", "models", "work", "named", "data"):
        (tmp_path / folder).mkdir(parents=True)
    found = survey(tmp_path / ".hidden" / "source", tmp_path / "work")
    named = [str(tmp_path / "named")]
    writable = confinement.writable_folders(found, named, tmp_path / "work")
    inside = {os.path.relpath(path, tmp_path) for path in writable if str(tmp_path) in path}
    assert inside == {".cache", "models", "work", "named"}
    assert str(tmp_path.parents[1]) not in writable and "/dev" in writable
    assert confinement.is_protected(found, named)
    assert not confinement.is_protected(found, [str(tmp_path)])


TRAINS = """
import os, sys, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_script_that_reaches_an_original_is_told_so(tmp_path, monkeypatch):
    """On a kernel that cannot prevent it: large files are refused, and changes are noticed."""
    monkeypatch.setattr(landlock, "is_available", lambda: False)
    project = write_project(tmp_path, {})
    (project / "big.bin").write_bytes(bytes(3_000_000))
    script = TRAINS + "torch.save(1, sys.argv[1])\n"
    (project / "train.py").write_text(script)
    options = Options(["train.py", str(project / "model.pt")], project, most_bytes=1_000_000)
    with pytest.raises(CannotRun) as error:
        run_all(options, tmp_path / "work")
    for word in ("big.bin", "0.003 GB", "--copy-limit", "--hide", "--link"):
        assert word in str(error.value)
    options.linked = ["big.bin"]
    (project / "model.pt").write_text("weights of a real run")
    (tmp_path / "work").mkdir()
    with pytest.raises(OriginalsChanged) as error:
        run_all(options, tmp_path / "work")
    assert f"{project}/model.pt: size 21 -> " in str(error.value)


@needs_landlock
@pytest.mark.slow
def test_no_way_of_writing_changes_an_original(tmp_path):
    code, output, outcomes, changed = check_writes(tmp_path, WAYS)
    assert changed == {} and code == 0, output
    assert set(outcomes) == set(WAYS) and len(WAYS) > 40
    for way, (copied, _, by_path) in outcomes.items():
        assert "No module" in copied or "NameError" in copied or copied == "written", (way, copied)
        assert by_path != "written", way
    assert "outside" not in output  # all of these attempts were refused


@needs_landlock
@pytest.mark.slow
def test_modes_and_times_of_originals_are_put_back(tmp_path):
    code, output, _, changed = check_writes(tmp_path, MARKS)
    assert changed == {} and code == 2, output
    assert "00-linked: mode 0o100644 -> 0o100600" in output and "01-linked: time" in output


def test_target_of_a_rename_is_written_outside(tmp_path):
    """A temporary file in the folder of checkpoints, which becomes one of them."""
    scratch = str(tmp_path / "scratch")
    events = [
        {"kind": "save", "path": f"{scratch}/tmp.pt"},
        {"kind": "rename", "source": f"{scratch}/tmp.pt", "path": f"{scratch}/last.pt"},
        {"kind": "rename", "source": "/root/a", "path": "/root/cache"},
    ]
    for event, by_user in zip(events, (None, True, False), strict=True):
        event["by_user"] = by_user
    run = SimpleNamespace(
        root=tmp_path / "copy", any=lambda *kinds: [e for e in events if e["kind"] in kinds]
    )
    checked = scenarios.Checked(Options([], tmp_path), {"one": run}, {}, "torchrun")
    assert list(written_outside(checked)) == [f"{scratch}/last.pt"]
    checked.writable = [str(tmp_path / "copy")]
    assert list(written_outside(checked)) == []


def test_services_are_offline_or_in_the_copy(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://team.example")
    options = Options(["train.py"], source=None, environment={"NEPTUNE_MODE": "async"})
    variables = scenarios._environment(options, "/copy")
    assert variables["WANDB_MODE"] == "offline" and not variables["HF_TOKEN"]
    assert variables["MLFLOW_TRACKING_URI"] == "sqlite:////copy/mlflow.db"
    assert variables["NEPTUNE_MODE"] == "async"  # of --env
    assert "secret" not in json.dumps(variables)
