"""predict and evaluate in tasks/images with the checkpoint of a run. More: test_own_images.py."""

import json
from unittest.mock import Mock

import pytest
import torch

import tasks.images as task
from tasks.images import evaluate, predict
from tasks.images.inference import load_trained
from tests.forked import ROUNDING, fork_script
from tests.images import photo
from utils.checkpoint import read_checkpoint, save_atomically
from utils.errors import UserError
from utils.metrics import Meter

FLAGS = {"model": "resnet20_gn", "epochs": 1, "synthetic_samples": 48, "image_size": 8}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run in float64 that started from a checkpoint with a normalization of its own."""
    folder = tmp_path_factory.mktemp("runs")
    first = fork_script("train_1gpu.py", output_dir=folder / "first", **FLAGS)
    assert first.code == 0, first.stderr
    checkpoint = read_checkpoint(first.output_dir / "last.pt")
    checkpoint["data"] |= {"mean": [0.1, 0.2, 0.3], "std": [0.5, 0.6, 0.7]}
    save_atomically(checkpoint, folder / "weights.pt")
    flags = FLAGS | {"weights": folder / "weights.pt", "dtype": "float64"}
    run = fork_script("train_1gpu.py", output_dir=folder / "run", **flags)
    assert run.code == 0, run.stderr
    (folder / "weights.pt").unlink()  # the checkpoint is all that is needed
    return run


def call(module, monkeypatch, *arguments):
    """Call the main() of a tool with these arguments."""
    monkeypatch.setattr("sys.argv", [module.__name__, *map(str, arguments)])
    return module.main()


def test_model_and_preprocessing_are_those_of_the_checkpoint(trained):
    loaded = load_trained(trained.output_dir / "last.pt")
    saved = read_checkpoint(trained.output_dir / "last.pt")
    assert saved["data"]["std"] == loaded.facts["std"] == [0.5, 0.6, 0.7]
    for name, value in loaded.model.state_dict().items():
        assert value.dtype == torch.float64 and torch.equal(value, saved["model"][name])
    assert not loaded.model.training


def test_evaluation_of_the_run_s_own_data_agrees_with_the_run(trained, monkeypatch, capsys):
    checkpoint = trained.output_dir / "last.pt"
    call(evaluate, monkeypatch, checkpoint, "--json", "--batch-size=7")
    result = json.loads(capsys.readouterr().out)
    assert result["samples"] == 12 == sum(map(sum, result["confusion"]))
    assert result["accuracy"] == trained.rows[-1]["val_accuracy"]
    assert result["loss"] == pytest.approx(trained.rows[-1]["val_loss"], rel=ROUNDING)
    correct = [result["confusion"][label][label] for label in range(10)]
    assert correct == [row["correct"] for row in result["classes"]]
    assert sum(correct) == round(12 * result["accuracy"])
    call(evaluate, monkeypatch, checkpoint, "--split=train")
    assert "of 48 images)" in capsys.readouterr().out


def test_memory_of_an_evaluation_is_linear_in_the_classes():
    classes = 20_000
    loader = Mock(counts=True, train=False, samples=8, started=0.0, dataset=range(8))
    counting = evaluate.WithConfusion(loader)
    meter = Meter(counting, loader)
    targets = torch.tensor([0, 0, 0, 0, 5, 5, 19_999, 19_999])
    predicted = torch.tensor([0, 7, 7, 3, 5, 5, 0, 0])
    for number in (0, 1):
        outputs = torch.zeros(8, classes).scatter_(1, predicted[:, None], 1)
        loader.counts = number == 0  # of the second batch, as of a rank without samples, nothing
        meter.update(task.loss(outputs, targets), outputs, targets)
        assert meter.vector.numel() < 100
    assert meter.compute()["accuracy"] == 3 / 8
    rows = list(evaluate.class_rows([str(label) for label in range(classes)], counting.counts()))
    assert rows[0] == ("0", 4, 1, "7") and rows[5] == ("5", 2, 2, "") and rows[1] == ("1", 0, 0, "")
    assert rows[19_999] == ("19999", 2, 0, "0")


def test_drawing_takes_any_names_of_classes(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    evaluate.draw(tmp_path / "a.png", ["a$^$", "$\\x$", "_"], torch.eye(3))
    assert (tmp_path / "a.png").exists() and capsys.readouterr().err == ""
    evaluate.draw(tmp_path / "b.png", ["\uffff", "\U0010ffff"], torch.eye(2))  # no font has them
    assert "set font.family" in capsys.readouterr().err


def test_confusion_is_drawn_and_said(trained, monkeypatch, capfd, tmp_path):
    pytest.importorskip("matplotlib")
    checkpoint, path = trained.output_dir / "last.pt", tmp_path / "c.png"
    call(evaluate, monkeypatch, checkpoint, "--confusion", path)
    assert path.exists() and f"wrote {path}" in capfd.readouterr().out
    monkeypatch.setattr(evaluate, "MOST_CLASSES", 9)
    with pytest.raises(SystemExit):
        call(evaluate, monkeypatch, checkpoint, "--confusion", path)
    error = capfd.readouterr().err
    assert "--confusion " in error and " 9 classes, not 10" in error
    call(evaluate, monkeypatch, checkpoint, "--json")
    assert json.loads(capfd.readouterr().out)["confusion"] is None


def test_folder_may_hold_a_subset_of_the_classes(trained, monkeypatch, capsys, tmp_path):
    photo(tmp_path / "test" / "pattern 3" / "1.jpg")
    arguments = ["--data-dir", tmp_path, "--split=test"]
    call(evaluate, monkeypatch, trained.output_dir / "last.pt", *arguments)
    assert "of 1 images" in capsys.readouterr().out


def test_predictions_are_those_of_the_model(trained, monkeypatch, capsys, tmp_path):
    photo(tmp_path / "new.png", (8, 8))
    checkpoint = trained.output_dir / "last.pt"
    call(predict, monkeypatch, checkpoint, tmp_path / "new.png", "--json", "--top-k=10")
    (row,) = json.loads(capsys.readouterr().out)
    loaded = load_trained(checkpoint)
    image = predict.Images([tmp_path / "new.png"], loaded.facts)[0][1].double() / 255
    mean, std = (torch.tensor(loaded.facts[n]).double()[:, None, None] for n in ("mean", "std"))
    expected = loaded.model(((image - mean) / std)[None]).softmax(1)[0].sort(descending=True)
    assert [p["probability"] for p in row["predictions"]] == pytest.approx(expected[0].tolist())
    assert [p["class"] for p in row["predictions"]] == [f"pattern {i}" for i in expected[1]]


def test_checkpoint_of_a_different_task_is_refused(trained, tmp_path):
    checkpoint = read_checkpoint(trained.output_dir / "last.pt")
    data = {"train_samples": 3, "val_samples": 1, "classes": ["a"]}
    save_atomically(checkpoint | {"data": data}, tmp_path / "text.pt")
    with pytest.raises(UserError, match=r"text\.pt .*\(image_size, resize, int"):
        load_trained(tmp_path / "text.pt")
