"""docs/own-images.md as a user types it."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
import torchvision
import yaml
from PIL import Image

from tasks.images import evaluate
from tasks.images.files import find_images
from tasks.images.weights import find_weights
from tests.images import break_file, photo
from tools.lib.runs import ROOT, read_rows
from utils.checkpoint import read_checkpoint

# The page takes minutes; test_inference.py tests the same functions.
pytestmark = [pytest.mark.slow, pytest.mark.rare]
CLASSES = ("cat", "dog", "图")


def write_images(root, count=12):
    """Three classes that are easy to distinguish, with unusual and broken files among them: a
    folder for each, a test folder, and a folder to predict."""
    for split in ("", "test"):
        for name, color in zip(CLASSES, ("red", "green", "blue"), strict=True):
            for i in range(count):
                path = root / split / name / f"{i}.jpg"
                photo(path, (40, 36))
                plain = Image.new("RGB", (40, 36), color)
                Image.blend(Image.open(path), plain, 0.8).save(path)
    cat = root / "cat"
    break_file(cat / "3.jpg")
    (cat / "notes.txt").touch()
    (cat / ".hidden.jpg").touch()
    first = Image.open(cat / "0.jpg")
    first.convert("RGBA").save(cat / "a.PNG")
    first.save(cat / "b.webp")
    first.convert("CMYK").save(cat / "c.jpg")
    first.convert("P").save(cat / "d.gif")
    (root / "test" / "dog" / "broken.png").write_bytes(b"\x89PNG")
    root.with_name("new_images").symlink_to(root / "test")


def commands():
    """The lines of the page's shell blocks."""
    text = (ROOT / "docs" / "own-images.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone with an environment, images, and pretrained weights in torch.hub's folder.

    configs/finetune.yaml is as published, except for the sizes.
    """
    root = tmp_path_factory.mktemp("clone")
    for name in ("Makefile", "train_ddp.py", "utils", "tasks", "sources", "tools"):
        (root / name).symlink_to(ROOT / name)
    text = (ROOT / "configs" / "finetune.yaml").read_text()
    small = {"model": "resnet18", "image_size": 32, "epochs": 2, "global_batch_size": 8}
    settings = yaml.safe_load(text) | small | {"device": "cpu"}
    (root / "configs").mkdir()
    (root / "configs" / "finetune.yaml").write_text(yaml.safe_dump(settings))
    programs = root / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, module in (("python", ""), ("torchrun", "-m torch.distributed.run ")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module}"$@"\n')
        (programs / name).chmod(0o755)
    write_images(root / "my_images")
    photo(root / "new.jpg", (50, 40))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_HOME", str(root / "torch"))
        path = find_weights("resnet18", "DEFAULT").path
    path.parent.mkdir(parents=True)
    torch.manual_seed(7)
    torch.save(torchvision.models.resnet18(weights=None).state_dict(), path)
    return root


def shell(clone, command):
    """Run a command in the clone, on two cores."""
    environment = os.environ | {
        "TORCH_HOME": str(clone / "torch"),
        "PYTHON": ".venv/bin/python",  # make must not set up an environment
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("COVERAGE_PROCESS_CONFIG", None)  # every command would take twice as long
    return subprocess.run(
        command,
        shell=True,
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        preexec_fn=lambda: os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2]),
    )


@pytest.fixture(scope="module")
def results(clone):
    """{command: completed process} of the page's commands; each has succeeded."""
    clone_it, enter, *steps = commands()
    assert clone_it.startswith("git clone")
    assert enter.startswith("cd ")
    assert len(steps) == 11
    ended = {command: shell(clone, command) for command in steps}
    for command, result in ended.items():
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return ended


def test_training_skips_bad_files_and_stores_the_split(clone, results):
    output = next(iter(results.values())).stderr
    assert "skipping 1 of 40 files" in output and "cat/3.jpg" in output
    assert "ignored 1 file in my_images" in output and ": 1 .txt" in output
    checkpoint = read_checkpoint(clone / "runs" / "finetune" / "best.pt")
    assert checkpoint["data"]["classes"] == list(CLASSES)
    assert len(checkpoint["data"]["val_files"]) == 3 + 2 + 2
    assert checkpoint["config"]["weights"] == "DEFAULT"


def test_predictions_agree_in_all_formats(clone, results):
    files = len(find_images(clone / "my_images", "test").paths)
    assert files == 37
    with open(clone / "predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == files
    (bad,) = [row for row in rows if row["error"]]
    assert bad["path"].endswith("broken.png") and bad["class 1"] is None
    predictions = json.loads((clone / "predictions.json").read_text())
    assert len(predictions) == files + 1 and predictions[-1]["path"] == "new.jpg"
    for row, other in zip(rows, predictions, strict=False):
        assert row["path"] == other["path"]
        assert row["error"] or row["class 1"] == other["predictions"][0]["class"]
    table = next(result for command, result in results.items() if "--top-k 3" in command)
    assert len(table.stdout.splitlines()) == files - 1
    assert "broken.png cannot be decoded" in table.stderr


def test_evaluation_agrees_with_predictions_and_training(clone, results):
    one, val, test = (
        r.stdout for command, r in results.items() if "tasks.images.evaluate" in command
    )
    assert one.splitlines() == [*val.splitlines(), "wrote confusion.png"]
    assert (clone / "confusion.png").read_bytes().startswith(b"\x89PNG")
    with open(clone / "predictions.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if not row["error"]]
    correct = sum(f"/{row['class 1']}/" in row["path"] for row in rows)
    assert f"({correct} of 36 images)" in test and "图" in test
    rows = read_rows(clone / "runs" / "finetune")
    best = max(rows, key=lambda row: row["val_accuracy"])
    assert f"accuracy {best['val_accuracy']:.2%}" in val


def test_validation_split_moves_with_the_checkpoint(clone, results, monkeypatch, capsys):
    val = next(r.stdout for command, r in results.items() if "--split val" in command)
    (clone / "elsewhere").mkdir()
    moved = shutil.copy(clone / "runs" / "finetune" / "best.pt", clone / "elsewhere")
    photo(clone / "my_images" / "cat" / "later.jpg")
    flags = ["--data-dir", clone / "my_images", "--on-bad-sample", "skip"]
    run(evaluate, monkeypatch, moved, *flags)
    assert capsys.readouterr().out.splitlines()[-1] in val.splitlines()


def run(module, monkeypatch, *arguments):
    """Call the main() of a tool with these arguments."""
    monkeypatch.setattr("sys.argv", [module.__name__, *map(str, arguments)])
    return module.main()
