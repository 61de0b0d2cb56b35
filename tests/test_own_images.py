"""The walk-through of docs/own-images.md as a user types it, and the tools that follow training."""

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
from PIL import Image

import tools.export
from tests.launch import SMALL, run_script
from tests.test_data import break_file, photo
from tests.test_weights import pretrained
from tools import evaluate, export, predict
from tools.inference import load_trained
from tools.runs import ROOT
from utils.checkpoint import read_checkpoint
from utils.distributed import UserError
from utils.images import find_images
from utils.metrics import read_metrics
from utils.weights import find_weights

CLASSES = ("cat", "dog", "图")


def odd_folder(root, count=12):
    """Three classes that are easy to tell apart, with odd and broken files among them."""
    for split in ("train", "test"):
        for label, name in enumerate(CLASSES):
            for i in range(count):
                path = root / split / name / f"{i}.jpg"
                photo(path, (40, 36))
                colour = Image.new("RGB", (40, 36), [(200, 0, 0), (0, 200, 0), (0, 0, 200)][label])
                Image.blend(Image.open(path), colour, 0.8).save(path)
    cat = root / "train" / "cat"
    break_file(cat / "3.jpg")
    (cat / "notes.txt").write_text("not an image")
    (cat / ".hidden.jpg").write_text("nor is this one")
    first = Image.open(cat / "0.jpg")
    for name, mode in (("a.PNG", "RGBA"), ("b.webp", "RGB"), ("c.jpg", "CMYK"), ("d.gif", "P")):
        first.convert(mode).save(cat / name)
    (root / "test" / "dog" / "broken.png").write_bytes(b"\x89PNG")
    return root


def commands():
    text = (ROOT / "docs" / "own-images.md").read_text()
    lines = [
        line for block in re.findall(r"```sh\n(.*?)```", text, re.S) for line in block.split("\n")
    ]
    return [line for line in lines if line]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone with an environment in it, a small folder, and the weights in the usual cache.

    configs/finetune.yaml as it is, but for the size of everything.
    """
    root = tmp_path_factory.mktemp("clone")
    for name in ("Makefile", "train_ddp.py", "utils", "tools"):
        (root / name).symlink_to(ROOT / name)
    text = (ROOT / "configs" / "finetune.yaml").read_text()
    for line, instead in (
        ("model: resnet50", "model: resnet18"),
        ("image_size: 0", "image_size: 32"),
        ("epochs: 10", "epochs: 2"),
        ("global_batch_size: 64", "global_batch_size: 8"),
    ):
        assert text.count(f"\n{line}\n") == 1
        text = text.replace(line, instead)
    (root / "configs").mkdir()
    (root / "configs" / "finetune.yaml").write_text(text + "device: cpu\n")
    bin = root / ".venv" / "bin"
    bin.mkdir(parents=True)
    for name, starts in (("python", ""), ("torchrun", "-m torch.distributed.run ")):
        (bin / name).write_text(f'#!/bin/sh\nexec {sys.executable} {starts}"$@"\n')
        (bin / name).chmod(0o755)
    odd_folder(root / "my_images")
    photo(root / "new.jpg", (50, 40))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_HOME", str(root / "torch"))
        path = find_weights("resnet18", "DEFAULT").path
    path.parent.mkdir(parents=True)
    pretrained(path)
    return root


def shell(clone, command):
    environment = os.environ | {
        "TORCH_HOME": str(clone / "torch"),
        "PYTHON": ".venv/bin/python",  # for make: no other environment
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("COVERAGE_PROCESS_CONFIG", None)  # or every command would take twice as long
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
def said(clone):
    """What each command of the page printed, in its order."""
    assert [line.split()[0] for line in commands()[:2]] == ["git", "cd"]
    assert len(commands()) == 12
    (train, *others), results = commands()[2:], {}
    with ThreadPoolExecutor(2) as pool:  # all others start from what the first leaves behind
        ended = [shell(clone, train), *pool.map(lambda command: shell(clone, command), others)]
    for command, result in zip(commands()[2:], ended, strict=True):
        results[command] = result
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return results


def test_every_command_of_the_walk_through_works(clone, said):
    first = next(iter(said.values())).stdout
    assert "left out: 2 of 77 files" not in first  # test/ is not trained with
    assert "left out: 1 of 40 files" in first and "cat/3.jpg" in first
    assert "from DEFAULT" in first and "3 classes" in first
    split = json.loads((clone / "runs" / "finetune" / "split.json").read_text())
    assert split["val_fraction"] == 0.2 and len(split["val"]) == 3 + 2 + 2
    checkpoint = read_checkpoint(clone / "runs" / "finetune" / "best.pt")
    assert checkpoint["data"]["classes"] == list(CLASSES)
    assert checkpoint["config"]["weights"] == "DEFAULT"
    again = shell(clone, commands()[2])
    assert again.returncode == 0 and "nothing left to do" in again.stdout


def test_the_frozen_backbone_is_the_weights_file(clone, said):
    weights = torch.load(next((clone / "torch").rglob("*.pth")))
    for name, value in read_checkpoint(clone / "runs" / "head" / "best.pt")["model"].items():
        assert torch.equal(value, weights[name]) != name.startswith("fc."), name


def test_the_predictions(clone, said):
    files = len(find_images(clone / "my_images", "test").paths)
    assert files == 37
    with open(clone / "predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == files
    assert sum(float(rows[0][f"probability {i}"]) for i in (1, 2, 3)) == pytest.approx(1)
    (bad,) = [row for row in rows if row["error"]]
    assert bad["path"].endswith("broken.png") and bad["class 1"] is None
    found = json.loads((clone / "predictions.json").read_text())
    assert len(found) == files + 1 and found[-1]["path"] == "new.jpg"
    for row, other in zip(rows, found, strict=False):
        assert row["path"] == other["path"]
        assert row["error"] or row["class 1"] == other["predictions"][0]["class"]
    table = next(s for command, s in said.items() if "--top-k 3" in command)
    assert len(table.stdout.splitlines()) == files - 1
    assert "broken.png cannot be decoded" in table.stderr
    assert "1 of 37 images cannot be decoded" in table.stderr


def test_the_evaluation_agrees_with_the_predictions_and_with_training(clone, said):
    alone, two = (s.stdout for command, s in said.items() if "tools.evaluate" in command)
    with open(clone / "predictions.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if not row["error"]]
    right = sum(f"/{row['class 1']}/" in row["path"] for row in rows)
    assert f"({right} of 36 images)" in alone and "图" in alone
    assert (clone / "confusion.png").read_bytes().startswith(b"\x89PNG")
    elsewhere = clone / "elsewhere"  # the split goes along
    shutil.copytree(clone / "runs" / "finetune", elsewhere)
    photo(clone / "my_images" / "train" / "cat" / "later.jpg")
    args = "--data-dir my_images --on-bad-sample skip"
    moved = shell(clone, f".venv/bin/python -m tools.evaluate elsewhere/best.pt {args}")
    assert moved.stdout.splitlines()[-1] == two.splitlines()[-1]
    rows = read_metrics(clone / "runs" / "finetune" / "metrics.jsonl")
    best = max(rows, key=lambda row: row["val_accuracy"])
    assert f"of 7 images), loss {best['val_loss']:.4f}" in two
    assert f"accuracy {best['val_accuracy']:.2%}" in two


def test_the_exported_models_run_without_the_project(clone, said):
    folder = clone / "runs" / "finetune"
    model, _, facts = load_trained(folder / "best.pt", torch.device("cpu"))
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        expected = model(images)
    session = onnxruntime.InferenceSession(str(folder / "best.onnx"))
    (outputs,) = session.run(["outputs"], {"images": images.numpy()})
    torch.testing.assert_close(torch.from_numpy(outputs), expected, rtol=1e-3, atol=1e-4)
    kept = json.loads(session.get_modelmeta().custom_metadata_map["facts"])
    assert kept == facts and kept["classes"] == list(CLASSES)
    program = torch.export.load(folder / "best.pt2").module()
    torch.testing.assert_close(program(images), expected, rtol=1e-3, atol=1e-4)
    assert not list(folder.glob(".export-*"))


def test_an_export_that_differs_is_not_left_in_place(clone, said, monkeypatch, tmp_path):
    """Planted: an exporter that loses a bias."""

    def lossy(model, images, path, facts, real=export.export_program):
        model.fc.bias.data.add_(1)
        real(model, images, path, facts)
        model.fc.bias.data.sub_(1)

    monkeypatch.setitem(tools.export.FORMATS, "exported-program", (lossy, export.run_program))
    checkpoint = clone / "runs" / "finetune" / "best.pt"
    with pytest.raises(UserError, match="is not written"):
        export.export(checkpoint, "exported-program", tmp_path / "x.pt2")
    assert list(tmp_path.iterdir()) == []


def run(module, monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", [module.__name__, *map(str, arguments)])
    return module.main()


def test_mistakes_are_one_line(clone, said, monkeypatch, capfd, tmp_path):
    best = clone / "runs" / "finetune" / "best.pt"
    photo(tmp_path / "test" / "horse" / "1.jpg")
    (tmp_path / "bad.jpg").write_bytes(b"x")
    for module, arguments, message in (
        (predict, ["/no/best.pt", "x.jpg"], "there is no file /no/best.pt"),
        (predict, [tmp_path / "bad.jpg", "x.jpg"], "bad.jpg cannot be read as a checkpoint"),
        (predict, [best, "x.jpg", "--device=tpu"], "device 'tpu' is not one of"),
        (evaluate, [best, "--data-dir", tmp_path, "--split=test"], "does not know: horse"),
        (evaluate, [best, "--data-dir", tmp_path, "--split=train"], "holds no class folders"),
        (export, [best, "--format=onnx", "--output=/no/x.onnx"], "there is no folder /no"),
    ):
        with pytest.raises(SystemExit) as caught:
            run(module, monkeypatch, *arguments)
        assert caught.value.code == 1
        error = capfd.readouterr().err
        assert message in error and "Traceback" not in error
    assert run(predict, monkeypatch, best, tmp_path / "bad.jpg") == 1  # none was left
    assert run(predict, monkeypatch, best, tmp_path / "test" / "empty") == 1
    assert run(predict, monkeypatch, best, tmp_path / "bad.jpg", clone / "new.jpg") == 0
    capfd.readouterr()
    (tmp_path / "none").mkdir()
    assert run(predict, monkeypatch, best, tmp_path / "none", "--json") == 1
    assert json.loads(capfd.readouterr().out) == []


def test_a_run_on_another_kind_of_set(monkeypatch, capsys, tmp_path):
    """Synthetic images, another norm; a folder that has some of the classes only."""
    out = run_script("train_1gpu.py", output_dir=tmp_path / "first", norm="group")
    checkpoint = torch.load(out.output_dir / "last.pt")
    checkpoint["data"] |= {"mean": [0.1, 0.2, 0.3], "std": [0.5, 0.6, 0.7]}
    torch.save(checkpoint, tmp_path / "other.pt")
    flags = {"norm": "group", "weights": tmp_path / "other.pt", "epochs": 1}
    out = run_script("train_1gpu.py", output_dir=tmp_path / "run", **flags)
    assert read_checkpoint(out.output_dir / "last.pt")["data"]["std"] == [0.5, 0.6, 0.7]
    run(evaluate, monkeypatch, out.output_dir / "last.pt", "--json", "--batch-size=7")
    found = json.loads(capsys.readouterr().out)
    assert found["samples"] == SMALL["synthetic_samples"] // 4 == sum(map(sum, found["confusion"]))
    assert found["accuracy"] == out.rows[-1]["val_accuracy"]
    assert found["loss"] == pytest.approx(out.rows[-1]["val_loss"], rel=1e-5)
    photo(tmp_path / "images" / "test" / "pattern 3" / "1.jpg")
    data = ["--data-dir", tmp_path / "images", "--split=test"]
    run(evaluate, monkeypatch, out.output_dir / "last.pt", *data)
    assert "of 1 images" in capsys.readouterr().out
