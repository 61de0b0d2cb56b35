"""predict and evaluate in tasks/images with the checkpoint of a run. More: test_own_images.py."""

import json

import pytest
import torch

from tasks.images import evaluate, predict
from tasks.images.inference import load_trained
from tests.forked import fork_script
from tests.images import photo
from utils.checkpoint_file import read_checkpoint, save_atomically
from utils.errors import UserError

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
    assert result["loss"] == pytest.approx(trained.rows[-1]["val_loss"], rel=1e-12)
    correct = [result["confusion"][label][label] for label in range(10)]
    assert correct == [row["correct"] for row in result["classes"]]
    assert sum(correct) == round(12 * result["accuracy"])
    call(evaluate, monkeypatch, checkpoint, "--split=train")
    assert "of 48 images)" in capsys.readouterr().out


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
    with pytest.raises(UserError, match=r"how its images were prepared \(image_size, resize, int"):
        load_trained(tmp_path / "text.pt")
