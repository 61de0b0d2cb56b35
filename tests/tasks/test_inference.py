"""predict, evaluate and export in tasks/images, with the checkpoint of a run."""

import json
from unittest.mock import Mock

import pytest
import torch

import tasks.images as task
from tasks.images import evaluate, export, predict
from tasks.images.decode import decode
from tasks.images.inference import load_trained
from tasks.images.models import build_classifier
from tests.forked import ROUNDING, fork_script
from tests.images import photo
from tests.processes import run_isolated
from utils.checkpoint import FORMAT, read_checkpoint, save_atomically
from utils.errors import UserError


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run in float64 that started from a checkpoint with a normalization of its own."""
    folder = tmp_path_factory.mktemp("runs")
    model = build_classifier(task.Settings(model="resnet20_gn"), 10)
    data = {"mean": [0.1, 0.2, 0.3], "std": [0.5, 0.6, 0.7], "image_size": 8}
    saved = {"format": FORMAT, "model": model.state_dict(), "optimizer": {}, "data": data}
    save_atomically(saved, folder / "weights.pt")
    flags = {"model": "resnet20_gn", "epochs": 1, "synthetic_samples": 48, "image_size": 8}
    flags |= {"weights": folder / "weights.pt", "dtype": "float64"}
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
    assert result["samples"] == 12
    assert result["accuracy"] == trained.rows[-1]["val_accuracy"]
    assert result["loss"] == pytest.approx(trained.rows[-1]["val_loss"], rel=ROUNDING)
    confusion = torch.tensor(result["confusion"])
    assert confusion.sum() == 12
    assert confusion.diagonal().sum() == round(12 * result["accuracy"])
    assert confusion.diagonal().tolist() == [row["correct"] for row in result["classes"]]
    call(evaluate, monkeypatch, checkpoint, "--split=train")
    assert "of 48 images)" in capsys.readouterr().out


def test_confusion_counts_each_image_once():
    """A batch that only fills up the batches of a rank does not count."""
    loader = Mock(counts=True, train=False, samples=8, started=0.0, dataset=range(8))
    counting = evaluate.WithConfusion(loader)
    targets = torch.tensor([0, 0, 0, 0, 5, 5, 9, 9])
    predicted = torch.tensor([0, 7, 7, 3, 5, 5, 0, 0])
    outputs = torch.nn.functional.one_hot(predicted, 10)
    counting.measure(outputs, targets)
    loader.counts = False
    counting.measure(outputs, targets)
    rows = list(evaluate.class_rows("abcdefghij", counting.counts()))
    assert rows[0] == ("a", 4, 1, "h")
    assert rows[1] == ("b", 0, 0, "")
    assert rows[5] == ("f", 2, 2, "")
    assert rows[9] == ("j", 2, 0, "a")


def test_confusion_is_drawn(trained, monkeypatch, capfd, tmp_path):
    pytest.importorskip("matplotlib")
    checkpoint, path = trained.output_dir / "last.pt", tmp_path / "c.png"
    call(evaluate, monkeypatch, checkpoint, "--confusion", path)
    assert path.exists()
    assert f"wrote {path}" in capfd.readouterr().out


def test_confusion_of_many_classes_is_left_out(trained, monkeypatch, capfd):
    """Its size is the square of their number."""
    monkeypatch.setattr(evaluate, "MOST_CLASSES", 9)
    checkpoint = trained.output_dir / "last.pt"
    with pytest.raises(SystemExit):
        call(evaluate, monkeypatch, checkpoint, "--confusion=c.png")
    assert "at most 9 classes, not 10" in capfd.readouterr().err
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
    image = decode(tmp_path / "new.png").double() / 255
    mean = torch.tensor([0.1, 0.2, 0.3]).double()[:, None, None]
    std = torch.tensor([0.5, 0.6, 0.7]).double()[:, None, None]
    outputs = loaded.model(((image - mean) / std)[None])
    probabilities, classes = outputs.softmax(1)[0].sort(descending=True)
    assert [p["class"] for p in row["predictions"]] == [f"pattern {i}" for i in classes]
    predicted = [p["probability"] for p in row["predictions"]]
    assert predicted == pytest.approx(probabilities.tolist())


def test_mistakes_are_one_line(trained, monkeypatch, capfd, tmp_path):
    checkpoint = trained.output_dir / "last.pt"
    photo(tmp_path / "test" / "horse" / "1.jpg")
    for module, arguments, message in (
        (predict, ["/no/best.pt", "x.jpg"], "no file /no/best.pt"),
        (evaluate, [checkpoint, "--data-dir", tmp_path, "--split=test"], "know: horse"),
        (export, [checkpoint, "--format=onnx", "--output=/no/x.onnx"], "no folder /no"),
    ):
        with pytest.raises(SystemExit) as caught:
            call(module, monkeypatch, *arguments)
        assert caught.value.code == 1
        error = capfd.readouterr().err
        assert message in error
        assert "Traceback" not in error


def test_predict_exits_with_1_without_predictions(trained, monkeypatch, capfd, tmp_path):
    checkpoint = trained.output_dir / "last.pt"
    good, bad, missing = tmp_path / "good.jpg", tmp_path / "bad.jpg", tmp_path / "missing"
    photo(good)
    bad.write_bytes(b"x")
    assert call(predict, monkeypatch, checkpoint, bad, missing) == 1
    assert f"{missing} cannot be read" in capfd.readouterr().err
    assert call(predict, monkeypatch, checkpoint, bad, good) == 0


@pytest.mark.slow
def test_exported_models_run_without_the_project(trained, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    checkpoint = trained.output_dir / "last.pt"
    loaded = load_trained(checkpoint)
    images = torch.randn(3, 3, 8, 8)
    with torch.no_grad():
        expected = loaded.model.float()(images)

    def run():
        export.export(checkpoint, "onnx", tmp_path / "a.onnx")
        export.export(checkpoint, "exported-program", tmp_path / "a.pt2")
        return torch.export.load(tmp_path / "a.pt2").module()(images).detach()

    torch.testing.assert_close(run_isolated(run), expected, rtol=1e-3, atol=1e-4)
    session = onnxruntime.InferenceSession(str(tmp_path / "a.onnx"))
    (outputs,) = session.run(["outputs"], {"images": images.numpy()})
    torch.testing.assert_close(torch.from_numpy(outputs), expected, rtol=1e-3, atol=1e-4)
    assert json.loads(session.get_modelmeta().custom_metadata_map["facts"]) == loaded.facts
    assert not list(tmp_path.glob(".export-*"))


@pytest.mark.slow
@pytest.mark.rare
def test_export_that_differs_is_not_written(trained, monkeypatch, tmp_path):
    """Planted: an exporter that changes a bias."""

    def lossy(model, images, path, facts, original=export.export_program):
        model.fc.bias.data.add_(1)
        original(model, images, path, facts)
        model.fc.bias.data.sub_(1)

    monkeypatch.setitem(export.FORMATS, "exported-program", (lossy, export.run_program))
    checkpoint = trained.output_dir / "last.pt"
    with pytest.raises(UserError, match="was not written"):
        run_isolated(lambda: export.export(checkpoint, "exported-program", tmp_path / "x.pt2"))
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_of_a_different_task_is_refused(trained, tmp_path):
    checkpoint = read_checkpoint(trained.output_dir / "last.pt")
    data = {"train_samples": 3, "val_samples": 1, "classes": ["a"]}
    save_atomically(checkpoint | {"data": data}, tmp_path / "text.pt")
    with pytest.raises(UserError, match=r"text\.pt .*\(image_size, resize, int"):
        load_trained(tmp_path / "text.pt")
