"""Applies the pages of docs/recipes to copies of the scripts, and runs these."""

import importlib.util
import os
import subprocess
import sys

from tests.forked import FIVE_STEPS, fork_script
from tools.copy import ANY_TASK_LINE
from tools.lib.ladder import ROOT
from tools.verify.run import project_with_task, write_text
from utils.checkpoint import read_checkpoint

PAGES = sorted((ROOT / "docs" / "recipes").glob("[a-z]*.md"))
RUN = FIVE_STEPS | {"dtype": "float64", "epochs": 2, "save_steps": 0}

# A run of the text task, or of one with its settings, of five steps per epoch.
TEXT = {
    "context": 24,
    "layers": 2,
    "heads": 2,
    "width": 16,
    "padding": "longest",
    "dtype": "float64",
    "epochs": 2,
    "global_batch_size": 12,
    "lr": 0.01,
    "save_steps": 0,
    "device": "cpu",
}


def applied(name, folder):
    """A copy of the scripts and of their modules with a recipe. Returns its folder."""
    folder = project_with_task("images", folder)
    assert not apply(name, folder)
    return folder


def apply(name, folder, *options):
    """Apply a recipe to a copy of the project. Returns what git says against it, if anything."""
    command = ["git", "apply", *options, str(ROOT / "docs" / "recipes" / f"{name}.md")]
    # A repository around the folder would change what git applies.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True)
    return done.stderr if done.returncode else ""


def run_to_end(script, nproc, output_dir, before=None, **flags):
    """Returns the Run and its last checkpoint."""
    run = fork_script(script, nproc, before, output_dir=output_dir, **RUN | flags)
    assert run.code in (0, -9), run.stderr
    return run, read_checkpoint(output_dir / "last.pt")


def run_text_to_end(script, nproc, output_dir, before=None, **flags):
    """Like run_to_end(), for a task that has the settings of the text task."""
    text_file = write_text(output_dir.parent / "text.txt", train=65, val=7)
    settings = TEXT | {"text_file": text_file}
    run = fork_script(script, nproc, before, settings=settings, output_dir=output_dir, **flags)
    assert run.code in (0, -9), run.stderr
    return run, read_checkpoint(output_dir / "last.pt")


def import_new(name, folder, monkeypatch):
    """Import a module that a page adds, for this process and its forks. Returns it."""
    path = folder / f"{name.replace('.', '/')}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    # `import package.name as x` takes the package's attribute, which a test before may have set.
    package, _, child = name.rpartition(".")
    monkeypatch.setattr(importlib.import_module(package), child, module, raising=False)
    return module


def with_task(script, task):
    """The path of a copy of a script, beside it, that trains the module `task`."""
    text, count = ANY_TASK_LINE.subn(f"import {task} as task", script.read_text())
    assert count == 1
    path = script.with_name(f"{task.replace('.', '_')}_{script.name}")
    path.write_text(text)
    return path
