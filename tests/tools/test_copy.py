"""tools.copy: a script runs its own default command in an empty folder, with each task."""

import subprocess
import sys

import pytest
import yaml

from tests.copies import copied, copy, refused, run_alone
from tools.copy import TASKS, files_to_copy, task_module, texts
from tools.lib.closure import options, small_flags
from tools.lib.ladder import LADDER, ROOT, RUNGS
from tools.verify.cases import SUITES, scripts_of

SCRIPTS = [rung.script for rung in LADDER]
FAST = ("train_ddp.py", "images")
# The others import what one of these does, or those above, and at most one module more.
OFTEN = [("train_1gpu.py", "text"), ("train_fsdp_tp.py", "images"), ("train_pp.py", "images")]
OFTEN += [("train_fsdp.py", "segmentation")]
PAIRS = [
    (script, task) for script in SCRIPTS for task in TASKS if script in scripts_of(SUITES[task])
]


def marks_of(pair):
    if pair == FAST:
        return []
    is_rare = pair not in OFTEN
    return [pytest.mark.slow, *[pytest.mark.rare] * is_rare]


@pytest.mark.parametrize(
    ("script", "task"), [pytest.param(*pair, marks=marks_of(pair)) for pair in PAIRS]
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
    """Only the setting that needs it fails; --with brings it."""
    copied("train_1gpu.py", tmp_path)
    copied("train_1gpu.py", tmp_path)  # over the same files
    for flags, module in (
        (["--audit"], "utils.options.audit"),
        (["--dataset=imagefolder"], "tasks.images.folder"),
        (["--dataset=shards"], "tasks.images.shards"),
    ):
        base = small_flags(tmp_path / "train_1gpu.py", tmp_path)
        run = run_alone(tmp_path, "train_1gpu.py", [*base, *flags])
        assert run.returncode == 1 and module in run.stderr
    copied("train_1gpu.py", tmp_path, "--with", "audit")
    assert (tmp_path / "utils" / "options" / "audit.py").exists()


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
    whole = script.read_text()
    assert "def main" in whole
    script.write_text(f"{whole}# edited\n")
    assert "train_1gpu.py" in copied("train_1gpu.py", tmp_path).splitlines()[-1]
    assert script.read_text() == f"{whole}# edited\n"
    copied("train_1gpu.py", tmp_path, "--force")
    assert script.read_text() == whole


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
    for words in (
        ["one_file/train_ddp.py", tmp_path / "mine"],
        ["train_1gpu.py", tmp_path / "mine", "--with", "nonsense"],
        ["--update", tmp_path, "--force"],
        ["--update", tmp_path, "--task", "text"],
        ["--recipe", "nonsense", tmp_path],
    ):
        assert copy(*words).returncode == 2, words
    assert list(tmp_path.iterdir()) == []
    assert str(ROOT) in refused("train_1gpu.py", ROOT)
    assert str(tmp_path / "nothing") in refused("--update", tmp_path / "nothing")


def test_files_that_modules_would_hide_are_refused(tmp_path):
    (tmp_path / "utils.py").touch()
    assert "utils.py" in copy("train_1gpu.py", tmp_path).stderr
    (tmp_path / "utils.py").unlink()
    (tmp_path / "utils" / "LICENSE").mkdir(parents=True)
    assert "utils/LICENSE" in copy("train_1gpu.py", tmp_path).stderr
    assert [path.name for path in tmp_path.iterdir()] == ["utils"]


def test_copy_brings_its_task_and_what_a_task_of_ones_own_may_import():
    """And what these modules import, but nothing of the other tasks."""
    files = files_to_copy(ROOT / "train_ddp.py", "text")
    assert task_module("text") in files
    parts = {part for path in files for part in path.relative_to(ROOT).parts}
    assert not parts & {"images", "segmentation", "diffusion"}
    files = texts({"train_ddp.py": "text"}, ["streams", "samplers", "shards"])
    assert {f"sources/{name}.py" for name in ("streams", "samplers", "shards", "tar")} <= {*files}
    assert "sources/parquet.py" not in files
    assert "tasks/images/shards.py" in texts({"train_ddp.py": "images"}, ["shards"])


@pytest.mark.parametrize("script", ["train_ddp.py", "train_pp.py"])
def test_copy_for_a_task_of_ones_own_has_no_other(script):
    files = texts({script: "own"}, ["streams"])
    assert b"\nimport my_task as task" in files[script]
    folders = {path.partition("/")[0] for path in files} - {script}
    assert folders == {"utils", "tools", "sources"}
    assert not any(b"import torchvision" in text for text in files.values())


def test_example_of_the_help_needs_no_option_that_a_copy_lacks():
    files = texts({"train_ddp.py": "images"}, [])
    given = [option.setting for option in options(ROOT / "train_ddp.py").values()]
    names = {setting.removeprefix("--").replace("-", "_") for setting in given}
    assert "log_steps" in names
    assert not names & yaml.safe_load(files["configs/quickstart.yaml"]).keys()


def test_every_script_is_a_rung():
    assert RUNGS.keys() == {path.name for path in ROOT.glob("train_*.py")}
