"""Every page of docs/recipes applies to copies: default, with a task of one's own, and plain."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.copies import copied, refused, run_alone
from tools.copy import texts
from tools.lib.closure import small_flags
from tools.lib.ladder import RUNGS
from tools.lib.prune import GUARDS
from tools.lib.recipes import NAMES, apply, diffs_of

TESTS = Path(__file__).parent.parent
SCRIPTS = {name: [d.path for d in diffs_of(name) if d.path in RUNGS] for name in NAMES}
SCRIPTS = {name: scripts or ["train_ddp.py"] for name, scripts in SCRIPTS.items()}
SCRIPTS["layer-wise-learning-rates"].append("train_fsdp.py")  # has no model.module
TEXT = ("hugging-face", "length-buckets", "lora", "mixtures")  # pages for the text task
OF_A_TASK = ("hugging-face", "lora", "mixup")  # pages that change a task of the project
OWN = ("gan", "large-models")  # pages that need more of the task
OFTEN = [("samplers", "own")]

# {page: the package that it needs}
PACKAGES = {"hugging-face": "transformers", "large-models": "safetensors"}
PACKAGES |= {"metrics": "torchmetrics", "sweeps": "optuna"}

WEIGHTS = """
from safetensors.torch import save_file
from my_task import Settings, build_model
save_file(build_model(Settings(), None).state_dict(), "model.safetensors")
"""


def task_of(name, kind):
    if kind == "own" or name in OWN:
        return "own"
    return "text" if name in TEXT else "images"


def make_copy(name, script, kind, folder):
    copied(script, folder, "--task", task_of(name, kind), *["--plain"] * (kind == "plain"))
    if task_of(name, kind) == "own":
        text = (TESTS / ("gan_task.py" if name == "gan" else "recipe_task.py")).read_text()
        text = text.replace("from tasks.images import", "from utils.config import Config as")
        (folder / "my_task.py").write_text(text)


CHANGED = [(name, "plain") for name in NAMES]
CHANGED += [(name, "own") for name in NAMES if name not in OF_A_TASK]
PAIRS = [(name, "default") for name in NAMES] + CHANGED


@pytest.mark.parametrize(("name", "kind"), CHANGED)
def test_page_applies_and_is_taken_back(name, kind):
    """To the scripts as they are, test_recipes.py applies it."""
    guards = GUARDS if kind == "plain" else ()
    for script in SCRIPTS[name]:
        files = texts({script: task_of(name, kind)}, [], guards)
        before = {path: text.decode() for path, text in files.items()}
        changed = apply(name, [script], before.get)
        assert changed.keys() >= {diff.path for diff in diffs_of(name) if diff.is_new}
        for path, text in changed.items():
            compile(text, path, "exec")
            assert max(map(len, text.splitlines())) <= 100
        after = before | changed
        again = apply(name, [script], after.get, undo=True)
        assert {path: before.get(path) for path in again} == again


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param(*pair, marks=[pytest.mark.rare] * (pair not in OFTEN)) for pair in PAIRS],
)
def test_copy_with_a_page_trains(name, kind, tmp_path):
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    for script in SCRIPTS[name]:
        folder = tmp_path / script
        make_copy(name, script, kind, folder)
        copied("--recipe", name, folder)
        flags = small_flags(folder / script, folder)
        if (folder / "tasks" / "images").exists():
            flags = [*flags, "--model=resnet20"]
        if name == "hugging-face":
            text = (folder / script).read_text()
            (folder / script).write_text(text.replace("tasks.text", "tasks.hugging_face"))
        if name == "large-models":
            subprocess.run([sys.executable, "-c", WEIGHTS], cwd=folder, check=True)
            flags.append(f"--pretrained={folder}")
        if name == "muon":
            flags.append("--optimizer=muon")
        run = run_alone(folder, script, flags)
        assert run.returncode == 0, run.stderr
        assert "epoch 0: train " in run.stdout


@pytest.mark.slow
def test_what_does_not_fit_is_named_and_nothing_changes(tmp_path):
    make_copy("ema", "train_ddp.py", "own", tmp_path)
    before = {path: path.read_text() for path in tmp_path.rglob("*.py")}
    assert "tasks/images/__init__.py" in refused("--recipe", "mixup", tmp_path)
    assert "train_ddp.py" in refused("--recipe", "large-models", tmp_path)
    assert "train_ddp.py" in refused("--recipe", "ema", tmp_path, "--undo")
    assert {path: path.read_text() for path in tmp_path.rglob("*.py")} == before
    assert "update" in refused("--recipe", "ema", tmp_path / "nothing")


def test_page_brings_what_it_imports_and_finds_its_place_in_an_edited_copy(tmp_path):
    make_copy("samplers", "train_ddp.py", "own", tmp_path)
    script = tmp_path / "train_ddp.py"
    line = "    train_set, val_set = task.build_datasets(cfg)\n"
    edited = script.read_text().replace(line, f"{line}    print(train_set)\n")
    script.write_text(edited)
    printed = copied("--recipe", "samplers", tmp_path)
    assert "sources/samplers.py" in printed and (tmp_path / "sources" / "samplers.py").exists()
    assert "WeightedRandomSampler" in script.read_text()
    assert "print(train_set)" in script.read_text()
    copied("--recipe", "samplers", "--undo", tmp_path)
    assert script.read_text() == edited
