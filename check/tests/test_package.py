"""The check without a clone: as a package, as a hook of pre-commit, and for agents."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

from check.advice import ADVICE

CHECK = Path(__file__).resolve().parents[1]
ROOT = CHECK.parent
TRAINS = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("tests", "build", "*.egg-info", "__pycache__")
    shutil.copytree(CHECK, folder / "check", ignore=ignored)
    build = ["wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", folder]
    build.append(folder / "check")
    subprocess.run([sys.executable, "-m", "pip", *build], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def run_in_project(folder, command, **more):
    """Run a command in a project outside of the clone, whose script has a bug, which it finds."""
    (folder / "train.py").write_text(TRAINS)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment.pop("VIRTUAL_ENV", None)
    done = subprocess.run(
        command, cwd=folder, env=environment | more, capture_output=True, text=True
    )
    assert done.returncode == 1 and "train.py:7: error: " in done.stdout, done.stderr
    assert "[no-zero-grad]" in done.stdout


def add_torch(venv):
    """That of the tests, which may itself be one of an environment without torch in its base."""
    (packages,) = (venv / "lib").glob("python*/site-packages")
    (packages / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return packages


@pytest.mark.slow
def test_wheel_runs_in_an_environment_that_has_torch(wheel, tmp_path):
    """Without a network. No name of it could hide a module of somebody else."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", venv], check=True)
    python = venv / "bin" / "python"
    install = ["-m", "pip", "install", "--no-deps", "--no-index", wheel]
    (packages,) = (venv / "lib").glob("python*/site-packages")
    before = {path.name for path in packages.iterdir()}
    subprocess.run([python, *install], check=True, capture_output=True)
    new = {path.name for path in packages.iterdir()} - before
    assert {name for name in new if not name.endswith(".dist-info")} == {"check_training"}
    add_torch(venv)
    project = tmp_path / "project"
    project.mkdir()
    command = venv / "bin" / "check-training"
    run_in_project(project, [command, "--", "train.py"])
    skill = subprocess.check_output([command, "--skill"], text=True)
    assert skill == (CHECK / "SKILL.md").read_text()
    found = "import importlib.util; print(importlib.util.find_spec('check'))"
    assert subprocess.check_output([python, "-c", found], cwd=project, text=True) == "None\n"


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("uv"), reason="uv is not installed")
def test_uv_runs_the_wheel_in_the_environment_of_a_project(wheel, tmp_path):
    """`uv run --with`, as docs/check.md has it, with a project that does not list the check."""
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "project"\nversion = "0"\nrequires-python = ">=3.11"\n'
    )
    offline = {"UV_OFFLINE": "1", "UV_CACHE_DIR": str(tmp_path / "cache")}
    make = ["uv", "venv", "--python", sys.executable, tmp_path / ".venv"]
    subprocess.run(make, check=True, capture_output=True, env=os.environ | offline)
    add_torch(tmp_path / ".venv")
    run = ["uv", "run", "--no-sync", "--with", wheel, "check-training", "--", "train.py"]
    run_in_project(tmp_path, run, **offline)


def test_package_has_all_modules():
    listed = re.findall(r'"(check_training[\w.]*)"', (CHECK / "pyproject.toml").read_text())
    folders = {path.parent.relative_to(CHECK) for path in CHECK.rglob("*.py")}
    own = {path for path in folders if path.parts[:1] not in (("tests",), ("package",), ("build",))}
    names = {".".join(["check_training", "check", *path.parts]) for path in own}
    assert names | {"check_training"} == set(listed)


def test_hook_of_pre_commit_starts_the_check():
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    entry = ROOT / hook["entry"]
    assert hook["language"] == "script" and not hook["pass_filenames"]
    assert os.access(entry, os.X_OK)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run([entry, "--help"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "--resume-args" in done.stdout


def test_skill_names_options_and_rules_that_there_are():
    text = (CHECK / "SKILL.md").read_text()
    assert text.startswith("---\nname: ") and "\ndescription: " in text
    source = (CHECK / "__main__.py").read_text() + (CHECK / "diff" / "command.py").read_text()
    of_others = {"--local-rank", "--nproc", "--at-a"}  # of torchrun; --at-{letter} in the source
    for option in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - of_others:
        assert f'"{option}"' in source, option
    quoted = set(re.findall(r"`([a-z]+(?:-[a-z]+)+)`", text)) - {"check-training"}
    assert quoted and quoted <= set(ADVICE)
