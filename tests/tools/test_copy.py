"""tools.copy: a script runs its own default command in an empty folder, with each task."""

import subprocess
import sys

import pytest
import yaml

from tests.copies import copied, copy, refused, run_alone
from tests.verifying import marks_of
from tools.copy import TASKS, files_to_copy, task_module, texts, with_task
from tools.lib.closure import options, small_flags
from tools.lib.ladder import LADDER, ROOT
from tools.verify.cases import SUITES, scripts_of

SCRIPTS = [rung.script for rung in LADDER]
FAST = ("train_ddp.py", "images")
OFTEN = ("train_fsdp_tp.py", "text")  # in CI, besides
PAIRS = [
    (script, task) for script in SCRIPTS for task in TASKS if script in scripts_of(SUITES[task])
]


@pytest.mark.parametrize(
    ("script", "task"),
    [pytest.param(*pair, marks=marks_of(pair, {FAST}, {*PAIRS} - {OFTEN})) for pair in PAIRS],
)
def test_copy_runs_its_default_command(script, task, tmp_path):
    folder = tmp_path / "mine"
    copied(script, folder, "--task", task)
    assert "MIT License" in (folder / "utils" / "LICENSE").read_text()
    flags = small_flags(folder / script, tmp_path)
    if script == "train_fsdp_tp.py":
        flags.append("--fsdp-size=1")
    run = run_alone(folder, script, flags)
    assert run.returncode == 0, run.stderr
    assert "epoch 0: train loss" in run.stdout
    of_slow_machines = ("epoch 0: step ", "warning: this CPU has no instructions for bfloat16")
    others = [line for line in run.stderr.splitlines() if not line.startswith(of_slow_machines)]
    assert others == []


@pytest.mark.slow
@pytest.mark.rare
def test_copy_without_an_option_names_the_module(tmp_path):
    copied("train_1gpu.py", tmp_path)
    flags = [*small_flags(tmp_path / "train_1gpu.py", tmp_path), "--dataset=imagefolder"]
    run = run_alone(tmp_path, "train_1gpu.py", flags)
    assert run.returncode == 1 and "tasks.images.folder" in run.stderr


def test_reader_that_ends_first_is_no_error(tmp_path):
    command = f"{sys.executable} -m tools.copy train_1gpu.py {tmp_path} | true"
    subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, check=True)
    assert (tmp_path / "train_1gpu.py").exists()


def test_files_of_others_are_not_overwritten(tmp_path):
    script = tmp_path / "train_1gpu.py"
    script.write_text("# mine\n")
    assert "train_1gpu.py" in copy("train_1gpu.py", tmp_path).stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train_1gpu.py"]
    copied("train_1gpu.py", tmp_path, "--force")
    assert "def main" in script.read_text()
    script.write_text("# edited\n")
    assert "train_1gpu.py" in copied("train_1gpu.py", tmp_path, "--with", "audit").splitlines()[-1]
    assert (tmp_path / "utils" / "options" / "audit.py").exists()
    assert script.read_text() == "# edited\n"
    copied("train_1gpu.py", tmp_path, "--force")
    assert "def main" in script.read_text()


def test_copy_keeps_its_task(tmp_path):
    """The script's import of the user's own task would become that of the images task."""
    copied("train_ddp.py", tmp_path, "--plain", "--task", "own")
    copied("train_ddp.py", tmp_path)
    copied("train_1gpu.py", tmp_path)
    for script in ("train_ddp.py", "train_1gpu.py"):
        assert "import my_task as task" in (tmp_path / script).read_text()
    assert not (tmp_path / "tasks").exists()
    assert "--task own" in copy("train_ddp.py", tmp_path, "--task", "text").stderr


def test_commands_that_make_no_sense_are_refused(tmp_path):
    assert copy("one_file/train_ddp.py", tmp_path).returncode == 2
    assert copy("train_1gpu.py", tmp_path, "--with", "nonsense").returncode == 2
    assert copy("train_1gpu.py", tmp_path, "--dry-run").returncode == 2
    assert list(tmp_path.iterdir()) == []
    assert str(ROOT) in refused("train_1gpu.py", ROOT)
    assert str(tmp_path / "nothing") in refused("--update", tmp_path / "nothing")


def test_script_of_the_clone_whose_task_has_been_changed_is_refused(tmp_path):
    """Or it would be copied, or verified, with a different task than it is asked for."""
    script = tmp_path / "train_ddp.py"
    script.write_text("import my_task as task\n")
    with pytest.raises(SystemExit, match=r"import tasks\.images as task: restore it"):
        with_task(script, "text")


def test_file_that_a_folder_would_hide_is_refused(tmp_path):
    (tmp_path / "utils.py").touch()
    assert "utils.py" in refused("train_1gpu.py", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["utils.py"]


def test_copy_brings_its_task_and_what_a_task_of_ones_own_may_import():
    """And what these modules import, but nothing of the other tasks."""
    files = files_to_copy(ROOT / "train_ddp.py", "text")
    assert task_module("text") in files
    parts = {part for path in files for part in path.relative_to(ROOT).parts}
    assert not parts & {"images", "segmentation", "diffusion"}
    files = texts({"train_ddp.py": "text"}, ["shards"])
    assert "sources/shards.py" in files and "sources/tar.py" in files
    assert "sources/parquet.py" not in files
    assert "tasks/images/shards.py" in texts({"train_ddp.py": "images"}, ["shards"])


@pytest.mark.parametrize("script", ["train_ddp.py", "train_pp.py"])
def test_copy_for_a_task_of_ones_own_has_no_other(script):
    files = texts({script: "own"}, ["streams"])
    assert b"\nimport my_task as task" in files[script]
    assert {path.partition("/")[0] for path in files} == {script, "utils", "tools", "sources"}
    for text in files.values():
        assert b"import torchvision" not in text


def test_example_of_the_help_needs_no_option_that_a_copy_lacks():
    files = texts({"train_ddp.py": "images"}, [])
    given = [option.setting for option in options(ROOT / "train_ddp.py").values()]
    names = {setting.removeprefix("--").replace("-", "_") for setting in given}
    assert "log_steps" in names
    assert not names & yaml.safe_load(files["configs/quickstart.yaml"]).keys()
