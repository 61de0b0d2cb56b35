"""Check a script that writes into files of its folder in many ways: all originals must stay.

    python -m check.tests.corpus.writes [--markdown FILE]

Each way is tried on a file that is copied for each run, on one that is too large for a copy and is
linked, and on the original by its absolute path. The exit code is 1 if an original was changed.
"""

import argparse
import json
import os
import platform
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
import torch

from check.mirror import changes, survey

CHECK = Path(__file__).parents[2]
# What the script does with the file at `path`. Some ways need what is in it: see write_file().
WAYS = {
    "open(path, 'w')": "open(path, 'w').write('x')",
    "open(path, 'r+')": "open(path, 'r+b').write(b'x')",
    "open(path, 'a')": "open(path, 'a').write('x')",
    "Path.write_bytes": "pathlib.Path(path).write_bytes(b'x')",
    "os.open, os.write": "os.write(os.open(path, os.O_WRONLY), b'x')",
    "os.truncate": "os.truncate(path, 1)",
    "os.posix_fallocate": "os.posix_fallocate(os.open(path, os.O_RDWR), 0, 9_000_000)",
    "open(2) of libc": "native_write(path)",
    "mmap": "write_mapped(path)",
    "torch.save, by name": "torch.save(torch.ones(2), path)",
    "torch.save, a Path": "torch.save(torch.ones(2), pathlib.Path(path))",
    "torch.save, a file": "torch.save(torch.ones(2), open(path, 'wb'))",
    "torch.jit.save": "torch.jit.script(torch.nn.Linear(2, 2)).save(path)",
    "torch.from_file": "torch.from_file(path, shared=True, size=9, dtype=torch.uint8).fill_(7)",
    "numpy.save": "numpy.save(open(path, 'wb'), numpy.ones(2))",
    "numpy.savez": "numpy.savez(open(path, 'wb'), a=numpy.ones(2))",
    "ndarray.tofile": "numpy.ones(2).tofile(path)",
    "numpy.memmap, 'r+'": "write_array(numpy.memmap(path, 'uint8', 'r+'))",
    "numpy.memmap, 'w+'": "write_array(numpy.memmap(path, 'uint8', 'w+', shape=9))",
    "open_memmap, 'r+'": "write_array(numpy.lib.format.open_memmap(path, 'r+'))",
    "pickle.dump": "pickle.dump('x', open(path, 'wb'))",
    "sqlite3": "write_database(path)",
    "zipfile, 'a'": "zipfile.ZipFile(path, 'a').writestr('x', 'x')",
    "tarfile, 'w'": "tarfile.open(path, 'w').close()",
    "gzip": "gzip.open(path, 'wb').write(b'x')",
    "logging.FileHandler": "logging.FileHandler(path).emit(logging.makeLogRecord({'msg': 'x'}))",
    "pyarrow.OSFile": "pyarrow.OSFile(path, 'w').write(b'x')",
    "pyarrow.parquet": "pyarrow.parquet.write_table(pyarrow.table({'a': [1]}), path)",
    "safetensors": "safetensors.torch.save_file({'a': torch.ones(2)}, path)",
    "a shell": "subprocess.run(f'echo x > {path}', shell=True, check=True)",
    "cp": "subprocess.run(['cp', 'new', path], check=True)",
    "dd": "subprocess.run(['dd', 'if=new', f'of={path}', 'conv=notrunc'], check=True)",
    "a Python without observers": "subprocess.run([sys.executable, '-I', '-c', PROGRAM, path], "
    "check=True)",
    "os.replace": "shutil.copy('new', 'new2'); os.replace('new2', path)",
    "os.rename to a different name": "os.rename(path, path + '.old')",
    "os.unlink": "os.unlink(path)",
    "os.link, then open": "os.link(path, 'hard'); open('hard', 'r+').write('x'); os.unlink('hard')",
    "shutil.copyfile": "shutil.copyfile('new', path)",
    "shutil.move": "shutil.copy('new', 'new3'); shutil.move('new3', path)",
    "os.sendfile": "os.sendfile(os.open(path, os.O_WRONLY), os.open('new', os.O_RDONLY), 0, 1)",
    "a new file beside it": "open(path + '.new', 'w').write('x')",
    "a folder beside it": "os.mkdir(path + '.folder')",
}
# The kernel's rules do not cover these.
MARKS = {
    "os.chmod": "os.chmod(path, 0o600)",
    "os.utime": "os.utime(path, (1, 1))",
}
SCRIPT = """
import ctypes, gzip, json, logging, mmap, os, pathlib, pickle, shutil, sqlite3
import subprocess, sys, tarfile, zipfile
import numpy, torch
try:
    import pyarrow, pyarrow.parquet
    import safetensors.torch
except ImportError:
    pass

WAYS = json.load(open("ways.json"))
PROGRAM = "import sys; open(sys.argv[1], 'w').write('x')"


def native_write(path):
    libc = ctypes.CDLL(None, use_errno=True)
    file = libc.open(path.encode(), os.O_WRONLY | os.O_TRUNC)
    if file < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    libc.write(file, b"x", 1)


def write_array(array):
    array[:5] = 1
    array.flush()


def write_mapped(path):
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 9) as mapped:
        mapped[:1] = b"x"


def write_database(path):
    with sqlite3.connect(path, timeout=0.1) as database:
        database.execute("create table x (x)")


def attempt(code, path):
    try:
        exec(code, globals() | {"path": path})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "written"


if not os.path.exists("last.pt"):
    open("new", "w").write("new")
    tried = {way: [attempt(code, path) for path in paths] for way, code, paths in WAYS}
    json.dump(tried, open("tried.json", "w"))
    for name in ("linked", os.environ["ORIGINAL"] + "/linked"):
        print(attempt("torch.save(1, path + '/tmp.pt'); os.replace(path + '/tmp.pt', path + "
                      "'/last.pt')", name))
        print(attempt("shutil.rmtree(path)", name))
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SIZES = {"copied": 8_000, "linked": 3_000_000}
COPY_LIMIT = 0.002  # GB: between all copied files together and one that is linked


def write_file(path, way, size):
    """A file in which this way of writing has something to change."""
    if way == "sqlite3":
        with sqlite3.connect(path) as database:
            database.execute("create table big as select zeroblob(?)", (size,))
        database.close()
    elif way.startswith("open_memmap"):
        with open(path, "wb") as file:
            numpy.save(file, numpy.zeros(size, "uint8"))
    else:
        path.write_bytes(b"U" * size)


def write_project(folder, ways):
    """A project with a file per way and size, and a folder that is a link. Returns its folder."""
    project = folder / "project"
    elsewhere = folder / "elsewhere"
    for each in (project, elsewhere):
        each.mkdir(parents=True)
    rows = []
    for number, (way, code) in enumerate(ways.items()):
        names = [f"{number:02}-{kind}" for kind in SIZES]
        for name, size in zip(names, SIZES.values(), strict=True):
            write_file(project / name, way, size)
        rows.append([way, code, [*names, str(project / names[0])]])
    torch.save({"epoch": 12}, elsewhere / "last.pt")
    os.symlink("../elsewhere", project / "linked")
    (project / "ways.json").write_text(json.dumps(rows), encoding="utf-8")
    (project / "train.py").write_text(SCRIPT, encoding="utf-8")
    return project


def check_writes(folder, ways=WAYS):
    """Check the script. Returns the exit code, its errors, {way: outcomes}, and what changed."""
    project = write_project(folder, ways)
    originals = survey(project, folder / "kept")
    before = originals.state()
    names = sorted(os.listdir(project))
    command = [sys.executable, CHECK, "--copy-limit", str(COPY_LIMIT)]
    command += ["--env", f"ORIGINAL={project}", "--keep", folder / "kept", "--", "train.py"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    changed = changes(before, originals.state(), is_protected=False)
    changed |= {name: "is new" for name in os.listdir(project) if name not in names}
    tried = folder / "kept" / "one" / "project" / "tried.json"
    outcomes = json.loads(tried.read_text(encoding="utf-8")) if tried.exists() else {}
    return done.returncode, done.stdout + done.stderr, outcomes, changed


def page(outcomes, changed):
    """What happened, as a page of lab/results/."""
    rows = [
        [f"`{way}`", *("written" if text == "written" else "refused" for text in texts)]
        for way, texts in outcomes.items()
    ]
    head = ["way", "on a copy", "on what is too large for one", "on the original, by its path"]
    table = "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])
    intact = "all originals are intact" if not changed else f"{len(changed)} originals changed"
    kernel = ".".join(platform.release().split(".")[:2])
    return f"""# Files that a checked script writes

`python -m check.tests.corpus.writes --markdown lab/results/check-writes.md` checks a script that
writes files of its folder in these {len(rows)} ways, on Linux {kernel} with Landlock. The bytes,
modes and times of all originals are compared before and after the check: **{intact}**.
*Written* means into the copy of the run; *refused*, that the script got an error.

{table}
"""


def main():
    """Try all ways. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--markdown", type=Path, help="write the page of results to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="writes-") as folder:
        code, output, outcomes, changed = check_writes(Path(folder).resolve())
    print(output, changed or "all originals are intact")
    if args.markdown:
        args.markdown.write_text(page(outcomes, changed), encoding="utf-8")
    return 1 if changed or code or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
