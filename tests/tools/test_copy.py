"""tools.copy: a script runs its own default command in an empty folder, with each task."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.processes import free_port
from tools.copy import TASKS, files_to_copy, task_module, texts
from tools.lib.closure import closure, loaded, options, small_flags
from tools.lib.ladder import LADDER, ONE_PROCESS, ROOT, RUNGS
from tools.lib.update import read_record
from tools.verify.cases import SUITES, scripts_of

SCRIPTS = [rung.script for rung in LADDER]
FAST = [("train_ddp.py", "images"), ("train_1gpu.py", "text"), ("train_fsdp.py", "segmentation")]
PAIRS = [
    (script, task) for script in SCRIPTS for task in TASKS if script in scripts_of(SUITES[task])
]


def copy(*arguments):
    """Run tools.copy as a user does; returns what it has printed."""
    command = [sys.executable, "-m", "tools.copy", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def run_alone(folder, script, flags):
    """Run a script as the only process of a job. Returns the CompletedProcess."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if script not in (*ONE_PROCESS, "train_ddp_spawn.py"):
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, script, *flags]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def marks_of(pair):
    if pair in FAST:
        return []
    return [pytest.mark.slow] if pair[1] == "images" else [pytest.mark.slow, pytest.mark.rare]


@pytest.mark.parametrize(
    ("script", "task"), [pytest.param(*pair, marks=marks_of(pair)) for pair in PAIRS]
)
def test_copy_runs_its_default_command(script, task, tmp_path):
    copied = copy(script, tmp_path / "mine", "--task", task)
    assert copied.returncode == 0, copied.stderr
    assert "MIT licensed" in copied.stdout
    assert "MIT License" in (tmp_path / "mine" / "utils" / "LICENSE").read_text()
    flags = small_flags(tmp_path / "mine" / script, tmp_path)
    if script == "train_fsdp_tp.py":
        flags.append("--fsdp-size=1")
    run = run_alone(tmp_path / "mine", script, flags)
    assert run.returncode == 0, run.stderr
    assert "epoch 0: train loss" in run.stdout
    of_slow_machines = ("epoch 0: step ", "warning: this CPU has no instructions for bfloat16")
    others = [line for line in run.stderr.splitlines() if not line.startswith(of_slow_machines)]
    assert others == []


@pytest.mark.slow
def test_copy_without_an_option_names_the_file(tmp_path):
    """Only the setting that needs the file fails; --with brings it."""
    for _ in range(2):  # the second time, over the same files
        assert copy("train_1gpu.py", tmp_path / "text", "--task", "text").returncode == 0
    assert copy("train_1gpu.py", tmp_path / "mine").returncode == 0
    for flags, file in (
        (["--audit"], "utils/options/audit.py"),
        (["--dataset=imagefolder"], "tasks/images/folder.py"),
        (["--dataset=shards"], "tasks/images/shards.py"),
    ):
        base = ["--dataset=synthetic", "--synthetic-samples=16", "--device=cpu", "--epochs=1"]
        base.append("--global-batch-size=8")
        run = run_alone(tmp_path / "mine", "train_1gpu.py", [*base, *flags])
        assert run.returncode == 1
        assert f"needs {file}, which is missing" in run.stderr
        assert f"tools.copy train_1gpu.py DEST --with {Path(file).stem}`" in run.stderr
    added = copy("train_1gpu.py", tmp_path / "mine", "--with", "audit")
    assert added.returncode == 0 and (tmp_path / "mine/utils/options/audit.py").exists()


def test_reader_that_ends_first_is_no_error(tmp_path):
    command = f"{sys.executable} -m tools.copy train_1gpu.py {tmp_path} | true"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == "" and (tmp_path / "train_1gpu.py").exists()


def test_files_of_others_are_not_overwritten(tmp_path):
    (tmp_path / "train_1gpu.py").write_text("# mine\n")
    refused = copy("train_1gpu.py", tmp_path)
    assert refused.returncode == 1 and "has different files train_1gpu.py" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train_1gpu.py"]
    forced = copy("train_1gpu.py", tmp_path, "--force")
    assert forced.returncode == 0 and "def main" in (tmp_path / "train_1gpu.py").read_text()
    with open(tmp_path / "train_1gpu.py", "a") as file:
        file.write("# edited\n")
    again = copy("train_1gpu.py", tmp_path)
    assert again.returncode == 0 and again.stdout.endswith("edited them: train_1gpu.py\n")
    assert (tmp_path / "train_1gpu.py").read_text().endswith("# edited\n")
    assert copy("train_1gpu.py", tmp_path, "--force").returncode == 0
    assert not (tmp_path / "train_1gpu.py").read_text().endswith("# edited\n")
    unknown = copy("train_1gpu.py", tmp_path / "other", "--with", "nonsense")
    assert unknown.returncode == 2 and "option nonsense: choose" in unknown.stderr


def test_copy_keeps_its_task(tmp_path):
    """The script's import of the user's own task would become that of the images task."""
    assert copy("train_ddp.py", tmp_path, "--plain", "--task", "own").returncode == 0
    assert copy("train_ddp.py", tmp_path).returncode == 0
    assert copy("train_1gpu.py", tmp_path).returncode == 0
    for script in ("train_ddp.py", "train_1gpu.py"):
        assert "import my_task as task" in (tmp_path / script).read_text()
    assert not (tmp_path / "tasks").exists()
    refused = copy("train_ddp.py", tmp_path, "--task", "text")
    assert refused.returncode == 1 and "--task own" in refused.stderr


def test_scripts_that_need_no_copy_are_refused(tmp_path):
    refused = copy("one_file/train_ddp.py", tmp_path / "mine")
    assert refused.returncode == 2 and "one_file/train_ddp.py needs no other" in refused.stderr
    assert not (tmp_path / "mine").exists()
    assert copy("--update", tmp_path, "--force").returncode == 2
    assert copy("--update", tmp_path, "--task", "text").returncode == 2
    here = copy("train_1gpu.py", ROOT)
    assert here.returncode == 1 and "is this clone" in here.stderr
    refused = copy("--update", tmp_path / "nothing")
    assert refused.returncode == 1 and f"no folder {tmp_path / 'nothing'}" in refused.stderr


def test_files_that_modules_would_hide_are_refused(tmp_path):
    (tmp_path / "utils.py").touch()
    refused = copy("train_1gpu.py", tmp_path)
    assert refused.returncode == 1 and "would hide" in refused.stderr
    (tmp_path / "utils.py").unlink()
    assert copy("train_1gpu.py", tmp_path, "--plain").returncode == 0
    refused = copy("train_1gpu.py", tmp_path, "--with", "progress")
    assert refused.returncode == 1 and "--update" in refused.stderr
    assert copy("train_ddp.py", tmp_path, "--plain").returncode == 0  # it has more to leave out
    record = read_record(tmp_path)
    assert {"replicas", "watchdog"} < {*record["without"]}
    (tmp_path / "utils" / "LICENSE").unlink()
    (tmp_path / "utils" / "LICENSE").mkdir()
    refused = copy("train_ddp.py", tmp_path)
    assert refused.returncode == 1 and "utils/LICENSE is a folder" in refused.stderr
    (tmp_path / "sources.py").touch()
    (tmp_path / "utils" / "LICENSE").rmdir()
    refused = copy("train_ddp.py", tmp_path, "--with", "streams")
    assert refused.returncode == 1 and "would hide" in refused.stderr


@pytest.mark.slow
def test_default_run_loads_what_its_imports_say():
    """No module that a default run loads hides where the closure does not see it."""
    script = ROOT / "train_ddp.py"
    files = set(loaded(script))
    assert files <= {script, *closure(script)}
    assert not files & {option.path for option in options(script).values()}


def test_a_copied_task_brings_nothing_of_the_others():
    files = files_to_copy(ROOT / "train_ddp.py", "text")
    assert task_module("text") in files
    parts = {part for path in files for part in path.relative_to(ROOT).parts}
    assert not parts & {"images", "segmentation", "diffusion"}


def test_names_are_separated_by_commas_everywhere():
    shown = copy("--help").stdout
    assert "--with NAME,..." in shown and "NAME ..." not in shown
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    text = "\n".join([shown, *(page.read_text(encoding="utf-8") for page in pages)])
    assert "--with sharded,weights" in text
    assert (
        re.findall(r"tools\.copy .*--with(?:out)? [\w,]+ \w+|`--with(?:out)? \w+ .*`", text) == []
    )


def test_copy_brings_what_a_task_of_ones_own_may_import():
    """And what these modules import."""
    files = texts({"train_ddp.py": "text"}, ["streams", "samplers", "shards"])
    for name in ("streams", "samplers", "shards", "tar"):
        assert f"sources/{name}.py" in files
    assert "sources/parquet.py" not in files
    assert "tasks/images/shards.py" in texts({"train_ddp.py": "images"}, ["shards"])


@pytest.mark.parametrize("script", SCRIPTS)
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
