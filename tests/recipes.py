"""Applies the pages of docs/recipes to copies of the scripts, and runs these."""

import os
import subprocess

from tests.forked import FIVE_STEPS, fork_script
from tools.lessons import ROOT
from tools.verify.run import project_with_task
from utils.checkpoint_file import read_checkpoint

PAGES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
RUN = FIVE_STEPS | {"dtype": "float64", "epochs": 2, "save_steps": 0}
EXACT = 1e-9


def applied(name, folder):
    """A copy of the scripts, utils/ and tasks/ with a recipe. Returns its folder."""
    folder = project_with_task("images", folder)
    command = ["git", "apply", str(ROOT / "docs" / "recipes" / f"{name}.md")]
    # A repository around the folder would change what git applies.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return folder


def run_to_end(script, nproc, output_dir, before=None, **flags):
    """Returns the Run and its last checkpoint."""
    run = fork_script(script, nproc, before, output_dir=output_dir, **RUN | flags)
    assert run.code in (0, -9), run.stderr
    return run, read_checkpoint(output_dir / "last.pt")


def with_task(script, task):
    """The path of a copy of a script, beside it, that trains the module `task`."""
    text, line = script.read_text(), "import tasks.images as task"
    assert text.count(line) == 1
    path = script.with_name(f"{task.replace('.', '_')}_{script.name}")
    path.write_text(text.replace(line, f"import {task} as task"))
    return path
