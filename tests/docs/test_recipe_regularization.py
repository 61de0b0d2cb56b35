"""docs/recipes: mixup, early stopping and layer-wise learning rates do what they promise."""

import importlib
import os
import sys
from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy

import utils.metrics
from tests.forked import ROUNDING, killed_at, largest_difference
from tests.processes import SMALL
from tests.recipes import RUN, applied, run_to_end
from utils.checkpoint import read_checkpoint
from utils.seeds import set_seed


@pytest.fixture
def mixing(tmp_path, monkeypatch):
    """The folder of a copy with mixup, whose tasks/ this process imports until the test ends."""
    folder = applied("mixup", tmp_path / "copy")
    for name in [name for name in sys.modules if name.split(".")[0] == "tasks"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "tasks"]:
        del sys.modules[name]


def images_task(**settings):
    """The module tasks.images of the copy, the settings of its runs, and its datasets."""
    task = importlib.import_module("tasks.images")
    cfg = task.Settings(**SMALL | RUN | settings)
    return task, cfg, *task.build_datasets(cfg)


@pytest.mark.slow
def test_mixed_runs(mixing, tmp_path):
    """On one rank; and on two with loader processes, killed and continued by one without."""
    train = partial(run_to_end, mixing / "train_ddp.py")
    one, end = train(1, tmp_path / "one")
    workers = {"loader": "workers", "num_workers": 1}
    train(2, tmp_path / "killed", killed_at(1, 3), save_steps=2, **workers)
    run, checkpoint = train(1, tmp_path / "killed")
    assert largest_difference(checkpoint["model"], end["model"]) < ROUNDING
    for name in ("train_loss", "train_accuracy", "val_loss"):
        values = [row[name] for row in one.rows]
        assert [row[name] for row in run.rows] == pytest.approx(values, rel=ROUNDING)

    task, cfg, train_set, val_set = images_task()
    model = task.build_model(cfg, train_set).double().eval()
    model.load_state_dict(end["model"])
    images, labels = val_set.get_batch(torch.arange(len(val_set)), 0, 0)
    images, labels = val_set.on_device((images, labels), torch.float64)
    loss = cross_entropy(model(images), labels).item()
    assert one.rows[-1]["val_loss"] == pytest.approx(loss, rel=ROUNDING)


def test_mixed_samples(mixing):
    """No pixel of an image is the same in another, so that it tells which one it is from."""
    task, _, plain, _ = images_task(augment="none")
    _, _, train_set, _ = images_task()
    train_set.dataset = plain
    everything = torch.arange(len(plain))

    def mixed(indices, epoch=1):
        return train_set.on_device(train_set.get_batch(indices, epoch, 0), torch.float64)

    images, targets = mixed(everything)
    partners, weights, cut = train_set.partners, train_set.draws[1], train_set.draws[0] > 0
    assert sorted(partners.tolist()) == everything.tolist()
    assert 0 < cut.sum() < len(cut)
    own, labels = plain.on_device(plain.get_batch(everything, 1, 0), torch.float64)
    others = own[partners]

    blended = torch.lerp(others, own, weights.view(-1, 1, 1, 1))
    assert torch.allclose(images[~cut], blended[~cut], rtol=0, atol=ROUNDING)
    is_own, is_other = (images == own).all(1), (images == others).all(1)
    assert (is_own | is_other)[cut].all()
    left = is_own.double().mean((1, 2))
    assert 0.3 < left[cut].mean() < 0.8
    assert (left[cut] >= weights[cut] - 0.25).all()

    outputs = torch.randn(targets.shape, dtype=torch.float64)
    smoothed = partial(cross_entropy, outputs, label_smoothing=0.1, reduction="none")
    losses = torch.lerp(smoothed(labels[partners]), smoothed(labels), left.where(cut, weights))
    assert task.loss(outputs, targets).item() == pytest.approx(losses.sum().item(), rel=ROUNDING)
    assert task.count(targets) == len(targets)

    part = torch.tensor([7, 30, 2])  # in any batch, the same
    part_images, part_targets = mixed(part)
    assert torch.equal(part_images, images[part])
    assert torch.equal(part_targets, targets[part])
    mixed(part, epoch=2)
    assert not torch.equal(train_set.partners, partners)


def logged_by(folder):
    """For fork_script(before=...): each rank writes its results of evaluate() to a file."""

    def before():
        real = utils.metrics.MetricLogger.log

        def log(metrics, epoch, train, val, lr):
            with (folder / f"rank-{os.environ['RANK']}").open("a") as file:
                print(val["loss"].hex(), val["accuracy"].hex(), file=file)
            real(metrics, epoch, train, val, lr)

        utils.metrics.MetricLogger.log = log

    return before


@pytest.mark.slow
@pytest.mark.rare
def test_early_stopping(tmp_path):
    script = applied("early-stopping", tmp_path / "copy") / "train_ddp.py"
    flags = {"model": "resnet20_gn", "epochs": 30, "lr_schedule": "constant", "seed": 1}
    train = partial(run_to_end, script, save_epochs=4, **flags)
    one, end = train(1, tmp_path / "one")
    values = [row["val_accuracy"] for row in one.rows]
    epochs = len(values)
    best = epochs - 1 - 5
    assert values.index(max(values)) == best > 0
    assert max(values[best + 1 :]) == max(values)  # the same again is no improvement
    assert end["epoch"] == epochs and epochs % 4 > 0  # saved although save_epochs leaves it out
    last = one.stdout.splitlines()[-1]
    assert last.startswith("stopped: ") and "accuracy" in last and "5 epochs" in last

    # Killed while it waits for an improvement; all ranks get the same bits from evaluate().
    logs, folder = tmp_path / "logs", tmp_path / "killed"
    logs.mkdir()
    train(2, folder, killed_at(epochs - 2, 3), save_steps=2)
    train(2, folder, logged_by(logs))
    first, second = (log.read_text() for log in logs.iterdir())
    assert first == second
    assert first.count("\n") == 2
    files = {path: path.stat().st_mtime_ns for path in folder.glob("*.pt")}
    again, checkpoint = train(1, folder)
    assert files == {path: path.stat().st_mtime_ns for path in folder.glob("*.pt")}
    assert (again.code, again.stderr, checkpoint["epoch"]) == (0, "", epochs)
    assert [row["val_accuracy"] for row in again.rows] == values
    assert largest_difference(checkpoint["model"], end["model"]) < ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "epoch"), [pytest.param("sgd", 0, marks=pytest.mark.rare), ("adamw", 1)]
)
def test_layer_wise_learning_rates(optimizer, epoch, tmp_path):
    script = applied("layer-wise-learning-rates", tmp_path / "copy") / "train_ddp.py"
    train = partial(run_to_end, script, model="vit_tiny", optimizer=optimizer, lr=1e-3)
    _, end = train(1, tmp_path / "one")
    train(2, tmp_path / "two", killed_at(epoch, 3), save_steps=2)
    _, two = train(2, tmp_path / "two")
    assert largest_difference(two["model"], end["model"]) < ROUNDING

    # The first layers keep their initial bits in the first epoch.
    task, cfg, train_set, _ = images_task(model="vit_tiny")
    set_seed(cfg.seed)
    model = task.build_model(cfg, train_set)
    first = read_checkpoint(tmp_path / "two" / "epoch-0001.pt")["model"]
    initial = model.double().state_dict()
    same = {name for name in initial if torch.equal(first[name], initial[name])}
    outside = [name for name in initial if "encoder.layers." not in name]
    assert same == set(outside[: len(same)])
    assert 0 < len(same) < len(outside)
    for name in outside:
        assert not torch.equal(end["model"][name], first[name])
    rates = [group["initial_lr"] for group in end["optimizer"]["param_groups"]]
    layers = len(task.blocks(model)) + 2
    assert rates == pytest.approx([1e-3 * 0.75**distance for distance in range(layers)])
