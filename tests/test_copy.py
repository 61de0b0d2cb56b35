"""tools.copy: a script trains in an empty folder with nothing but its closure."""

import os
import subprocess
import sys

import pytest

from tools import copy
from tools.closure import closure, options
from tools.lessons import ROOT, RUNGS
from tools.runs import finish_run, start_run
from tools.verify.cases import WITHOUT_TORCHRUN

DATA = {
    "dataset": "fake",
    "synthetic_samples": 32,
    "image_size": 16,
    "model": "resnet18",
    "epochs": 1,
    "global_batch_size": 8,
    "lr": 0.01,
    "device": "cpu",
}
BARE = {"sync_bn": False, "check_replicas_every": -1}  # without options, on a CPU
NEEDED = {
    "train_fsdp.py": ("sync_batchnorm",),  # FSDP refuses BatchNorm per rank
    "train_tp.py": ("small_models",),  # torchvision has no small transformer
    "train_fsdp_tp.py": ("small_models", "sync_batchnorm"),
    "train_pp.py": ("model_layers", "sharded"),
}
FLAGS = {
    "train_ddp_spawn.py": {"spawn_processes": 2},
    "train_ddp_amp.py": {"image_size": 32},  # see "Limits" of its page
    "train_tp.py": {"model": "vit_tiny"},
    "train_fsdp_tp.py": {"model": "vit_tiny", "fsdp_size": 1},
    "train_mp.py": {"devices": "cpu,cpu"},
    "train_ddp_mp.py": {"devices": "cpu,cpu"},
}
FAST = ("train_ddp.py", "train_fsdp.py")


def slow(script):
    return pytest.param(script, marks=pytest.mark.slow)


def run_copy(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["copy", *map(str, arguments)])
    copy.main()


def train(folder, script, **flags):
    nproc = None if script in WITHOUT_TORCHRUN else 2
    flags = DATA | flags | FLAGS.get(script, {}) | {"output_dir": folder / "run"}
    environment = {"PYTHONPATH": ""}
    return finish_run(
        start_run(script, nproc, flags, environment, cwd=folder), folder / "run", limit=90
    )


@pytest.mark.parametrize("script", [s if s in FAST else slow(s) for s in RUNGS])
def test_script_trains_with_its_closure_alone(script, tmp_path, monkeypatch, capsys):
    options = ["--with", *NEEDED[script]] if script in NEEDED else []
    run_copy(monkeypatch, script, tmp_path, *options)
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.py")}
    expected = {str(path.relative_to(ROOT)) for path in closure(ROOT / script)}
    expected |= {f"utils/{name}.py" for name in NEEDED.get(script, ())}
    assert files == expected | {script, "utils/__init__.py"}
    assert "code lines" in capsys.readouterr().out
    run = train(tmp_path, script, **(BARE | {"sync_bn": script in NEEDED}))
    assert run.code == 0, run.stderr
    assert run.rows[0]["train_samples"] == 32


def test_missing_option_is_named(tmp_path, monkeypatch):
    run_copy(monkeypatch, "train_ddp.py", tmp_path)
    run = train(tmp_path, "train_ddp.py", model="resnet18")
    assert run.code == 1
    assert "--sync-bn (pass --no-sync-bn" in run.stderr and "utils/sync_batchnorm.py" in run.stderr


def test_options_bring_their_imports(tmp_path, monkeypatch, capsys):
    names = sorted(options(ROOT / "train_ddp.py"))
    assert {"image_folder", "weights", "small_models", "resident", "sharded"} <= set(names)
    run_copy(monkeypatch, "train_ddp.py", tmp_path, "--with", *names)
    assert "not copied" not in capsys.readouterr().out
    code = "import sys; sys.path.insert(0, '.'); "
    code += "; ".join(f"import utils.{name}" for name in names)
    subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, check=True, timeout=60)


def test_copy_lists_the_options_left_behind(tmp_path, monkeypatch, capsys):
    run_copy(monkeypatch, "train_1gpu.py", tmp_path, "--with", "audit")
    output = capsys.readouterr().out
    copied, left_out = output.split("Options that were not copied")
    assert "utils/audit.py" in copied and "MIT" in output
    assert "sharded: --save-sharded" in left_out and "audit: " not in left_out


def test_existing_files_are_kept(tmp_path, monkeypatch):
    (tmp_path / "utils").mkdir()
    mine = tmp_path / "utils" / "models.py"
    mine.write_text("mine")
    with pytest.raises(SystemExit, match=r"already has utils/models\.py.*--force"):
        run_copy(monkeypatch, "train_ddp.py", tmp_path)
    assert mine.read_text() == "mine" and os.listdir(tmp_path) == ["utils"]
    run_copy(monkeypatch, "train_ddp.py", tmp_path, "--force")
    assert mine.read_text() == (ROOT / "utils" / "models.py").read_text()


def test_module_that_the_copy_would_hide_is_named(tmp_path, monkeypatch):
    (tmp_path / "utils.py").write_text("mine")
    with pytest.raises(SystemExit, match=r"the folder utils would hide .*utils\.py"):
        run_copy(monkeypatch, "train_ddp.py", tmp_path, "--force")
    assert os.listdir(tmp_path) == ["utils.py"]


def test_script_may_be_a_path_and_the_destination_must_be_a_folder(tmp_path, monkeypatch):
    run_copy(monkeypatch, "./train_ddp.py", tmp_path / "new")
    assert (tmp_path / "new" / "train_ddp.py").exists()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SystemExit, match=r"cannot copy to .*file: "):
        run_copy(monkeypatch, "train_ddp.py", tmp_path / "file")


@pytest.mark.parametrize(
    "flag", ["--dataset=imagefolder", "--weights=DEFAULT", "--per-process-batch-size=8"]
)
def test_settings_of_a_file_that_was_not_copied_name_it(flag, tmp_path, monkeypatch):
    run_copy(monkeypatch, "train_1gpu.py", tmp_path)
    run = subprocess.run(
        [sys.executable, "train_1gpu.py", flag], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 1 and len(run.stderr.splitlines()) == 1
    assert "which is missing: copy that file, too" in run.stderr


def test_unknown_option_lists_the_options(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run_copy(monkeypatch, "train_ddp.py", tmp_path, "--with", "telepathy")
    error = capsys.readouterr().err
    assert "unknown option telepathy: choose from array_data, audit, image_folder" in error
    assert not list(tmp_path.iterdir())
