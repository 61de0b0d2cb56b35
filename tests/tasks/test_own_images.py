"""docs/own-images.md as a user types it, and predict, evaluate and export in tasks/images."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import onnxruntime
import pytest
import torch
import torchvision
from PIL import Image

from tasks.images import evaluate, export, predict
from tasks.images.files import find_images
from tasks.images.inference import load_trained
from tasks.images.weights import find_weights
from tests.images import break_file, photo
from tests.processes import run_isolated
from tools.lib.runs import ROOT, read_rows
from utils.checkpoint import read_checkpoint
from utils.errors import UserError

pytestmark = pytest.mark.slow  # the page trains seven times
CLASSES = ("cat", "dog", "图")


def write_images(root, count=12):
    """Three classes that are easy to distinguish, with unusual and broken files among them: a
    folder for each, a test folder, and a folder to predict."""
    for split in ("", "test"):
        for label, name in enumerate(CLASSES):
            for i in range(count):
                path = root / split / name / f"{i}.jpg"
                photo(path, (40, 36))
                color = Image.new("RGB", (40, 36), [(200, 0, 0), (0, 200, 0), (0, 0, 200)][label])
                Image.blend(Image.open(path), color, 0.8).save(path)
    cat = root / "cat"
    break_file(cat / "3.jpg")
    (cat / "notes.txt").write_text("not an image")
    (cat / ".hidden.jpg").write_text("not an image either")
    first = Image.open(cat / "0.jpg")
    for name, mode in (("a.PNG", "RGBA"), ("b.webp", "RGB"), ("c.jpg", "CMYK"), ("d.gif", "P")):
        first.convert(mode).save(cat / name)
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
    for line, small in (
        ("model: resnet50", "model: resnet18"),
        ("image_size: 0", "image_size: 32"),
        ("epochs: 10", "epochs: 2"),
        ("global_batch_size: 64", "global_batch_size: 8"),
    ):
        assert text.count(f"\n{line}\n") == 1
        text = text.replace(line, small)
    (root / "configs").mkdir()
    (root / "configs" / "finetune.yaml").write_text(text + "device: cpu\n")
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
    assert [line.split()[0] for line in commands()[:2]] == ["git", "cd"]
    assert len(commands()) == 13
    # Not everybody has test images, so they come last, after other ways to evaluate.
    assert ["my_images/test" in line or "--split test" in line for line in commands()].count(1) == 1
    train, *others = commands()[2:]
    with ThreadPoolExecutor(2) as pool:  # the others need nothing but the first one's checkpoint
        ended = [shell(clone, train), *pool.map(lambda command: shell(clone, command), others)]
    for command, result in zip(commands()[2:], ended, strict=True):
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return dict(zip(commands()[2:], ended, strict=True))


def test_training_skips_bad_files_and_stores_the_split(clone, results):
    output = next(iter(results.values())).stderr
    assert "skipping 1 of 40 files" in output and "cat/3.jpg" in output
    assert "ignored 1 file in my_images" in output and ": 1 .txt" in output
    checkpoint = read_checkpoint(clone / "runs" / "finetune" / "best.pt")
    assert checkpoint["data"]["classes"] == list(CLASSES)
    assert len(checkpoint["data"]["val_files"]) == 3 + 2 + 2
    assert checkpoint["config"]["weights"] == "DEFAULT"


def test_same_command_resumes(clone, results):
    again = shell(clone, commands()[2])
    assert again.returncode == 0 and "nothing left" in again.stdout


def test_frozen_backbone_keeps_the_pretrained_weights(clone, results):
    weights = torch.load(next((clone / "torch").rglob("*.pth")))
    for name, value in read_checkpoint(clone / "runs" / "head" / "best.pt")["model"].items():
        assert torch.equal(value, weights[name]) != name.startswith("fc."), name


def test_predictions_agree_in_all_formats(clone, results):
    files = len(find_images(clone / "my_images", "test").paths)
    assert files == 37
    with open(clone / "predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == files
    assert sum(float(rows[0][f"probability {i}"]) for i in (1, 2, 3)) == pytest.approx(1)
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
    assert "1 of 37 images" in table.stderr


def test_evaluation_agrees_with_predictions_and_training(clone, results):
    one, val, test = (
        r.stdout for command, r in results.items() if "tasks.images.evaluate" in command
    )
    assert one.splitlines() == [*val.splitlines(), "wrote confusion.png"]
    with open(clone / "predictions.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if not row["error"]]
    correct = sum(f"/{row['class 1']}/" in row["path"] for row in rows)
    assert f"({correct} of 36 images)" in test and "图" in test
    assert (clone / "confusion.png").read_bytes().startswith(b"\x89PNG")
    rows = read_rows(clone / "runs" / "finetune")
    best = max(rows, key=lambda row: row["val_accuracy"])
    assert f"of 7 images), loss {best['val_loss']:.4f}" in val
    assert f"accuracy {best['val_accuracy']:.2%}" in val


def test_validation_split_moves_with_the_checkpoint(clone, results):
    val = next(r.stdout for command, r in results.items() if "--split val" in command)
    (clone / "elsewhere").mkdir()
    shutil.copy(clone / "runs" / "finetune" / "best.pt", clone / "elsewhere")
    photo(clone / "my_images" / "cat" / "later.jpg")
    flags = "--data-dir my_images --on-bad-sample skip"
    moved = shell(clone, f".venv/bin/python -m tasks.images.evaluate elsewhere/best.pt {flags}")
    assert moved.stdout.splitlines()[-1] in val.splitlines()


def test_exported_models_run_without_the_project(clone, results):
    folder = clone / "runs" / "finetune"
    trained = load_trained(folder / "best.pt")
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        expected = trained.model(images)
    session = onnxruntime.InferenceSession(str(folder / "best.onnx"))
    (outputs,) = session.run(["outputs"], {"images": images.numpy()})
    torch.testing.assert_close(torch.from_numpy(outputs), expected, rtol=1e-3, atol=1e-4)
    facts = json.loads(session.get_modelmeta().custom_metadata_map["facts"])
    assert facts == trained.facts and facts["classes"] == list(CLASSES)
    outputs = run_isolated(lambda: torch.export.load(folder / "best.pt2").module()(images).detach())
    torch.testing.assert_close(outputs, expected, rtol=1e-3, atol=1e-4)
    assert not list(folder.glob(".export-*"))


def test_export_that_differs_is_not_written(clone, results, monkeypatch, tmp_path):
    """Planted: an exporter that changes a bias."""

    def lossy(model, images, path, facts, original=export.export_program):
        model.fc.bias.data.add_(1)
        original(model, images, path, facts)
        model.fc.bias.data.sub_(1)

    monkeypatch.setitem(export.FORMATS, "exported-program", (lossy, export.run_program))
    checkpoint = clone / "runs" / "finetune" / "best.pt"
    with pytest.raises(UserError, match="was not written"):
        run_isolated(lambda: export.export(checkpoint, "exported-program", tmp_path / "x.pt2"))
    assert list(tmp_path.iterdir()) == []


def test_export_says_what_it_wrote(clone, results):
    said = next(result.stdout for command, result in results.items() if "onnx" in command)
    assert said.startswith("wrote runs/finetune/best.onnx") and "differs" not in said


def run(module, monkeypatch, *arguments):
    """Call the main() of a tool with these arguments."""
    monkeypatch.setattr("sys.argv", [module.__name__, *map(str, arguments)])
    return module.main()


def test_mistakes_are_one_line(clone, results, monkeypatch, capfd, tmp_path):
    best = clone / "runs" / "finetune" / "best.pt"
    photo(tmp_path / "test" / "horse" / "1.jpg")
    (tmp_path / "bad.jpg").write_bytes(b"x")
    name = read_checkpoint(best)["data"]["classes"][0]
    (tmp_path / ".other" / "test" / name).mkdir(parents=True)
    (tmp_path / ".other" / "test" / name / "1.jpg").write_bytes(b"x")
    bad_folder = [best, "--data-dir", tmp_path / ".other", "--split=test", "--on-bad-sample=skip"]
    for module, arguments, message in (
        (predict, ["/no/best.pt", "x.jpg"], "no file /no/best.pt"),
        (predict, [tmp_path / "bad.jpg", "x.jpg"], "bad.jpg cannot be read"),
        (predict, [best, "x.jpg", "--device=tpu"], "--device tpu"),
        (evaluate, [best, "--data-dir", tmp_path, "--split=test"], "know: horse"),
        (evaluate, [best, "--data-dir", tmp_path, "--split=train"], "no class folders"),
        (evaluate, bad_folder, "none of the 1 images in"),
        (export, [best, "--format=onnx", "--output=/no/x.onnx"], "no folder /no"),
    ):
        with pytest.raises(SystemExit) as caught:
            run(module, monkeypatch, *arguments)
        assert caught.value.code == 1
        error = capfd.readouterr().err
        assert message in error and "Traceback" not in error


def test_predict_exits_with_1_without_predictions(clone, results, monkeypatch, capfd, tmp_path):
    best = clone / "runs" / "finetune" / "best.pt"
    (tmp_path / "bad.jpg").write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    assert run(predict, monkeypatch, best, tmp_path / "bad.jpg") == 1
    assert run(predict, monkeypatch, best, tmp_path / "missing") == 1
    assert f"{tmp_path / 'missing'} cannot be read" in capfd.readouterr().err
    assert run(predict, monkeypatch, best, tmp_path / "bad.jpg", clone / "new.jpg") == 0
    capfd.readouterr()
    assert run(predict, monkeypatch, best, tmp_path / "empty", "--json") == 1
    assert json.loads(capfd.readouterr().out) == []


def test_predictions_end_quietly_when_nobody_reads_them(clone, results):
    module = ["-m", "tasks.images.predict"]
    command = [sys.executable, *module, "runs/finetune/best.pt", "new.jpg", "--csv"]
    reader, writer = os.pipe()
    os.close(reader)
    run = subprocess.run(command, cwd=clone, stdout=writer, stderr=subprocess.PIPE, text=True)
    assert (run.returncode, run.stderr) == (0, "")
