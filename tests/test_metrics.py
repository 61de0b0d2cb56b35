"""Loss and accuracy over all ranks, each sample counted once; and the log of the epochs."""

import json
import os
import shutil
import time
from itertools import product

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tests.launch import run_ranks
from utils import distributed
from utils.distributed import all_reduce
from utils.errors import UserError
from utils.metrics import Meter, MetricLogger, evaluate, read_metrics

CPU = torch.device("cpu")
RESULT = {"loss": 1.0, "accuracy": 0.5, "samples": 4, "seconds": 1.0}


class Numbered(Dataset):
    """Sample i shows i; its label is i % 3."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return torch.tensor([float(i)]), i % 3


class Guess(torch.nn.Module):
    """Predicts class 1, with more confidence for larger sample numbers; counts its calls."""

    calls = 0

    def forward(self, images):
        assert not self.training and not torch.is_grad_enabled()
        self.calls += 1
        return torch.cat([images * 0, images, images * 0], dim=1)


# evaluate()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_evaluation_counts_every_sample_exactly_once(world_size):
    counts = (1, 2, 3, 5, 11)

    def body(rank):
        results = []
        for count in counts:
            dataset, model = Numbered(count), Guess()
            sampler = DistributedSampler(dataset, world_size, rank, shuffle=False)
            result = evaluate(model, DataLoader(dataset, 2, sampler=sampler), Meter(CPU))
            results.append(result | {"calls": model.calls})
        return results

    for ranks in zip(*run_ranks(body, world_size), counts, strict=True):
        *results, count = ranks
        images, labels = torch.arange(count).float()[:, None], torch.arange(count) % 3
        outputs = torch.cat([images * 0, images, images * 0], dim=1)
        for result in results:
            assert result["samples"] == count
            assert result["loss"] == pytest.approx(cross_entropy(outputs, labels).item(), rel=1e-5)
            correct = (outputs.argmax(1) == labels).sum().item()
            assert result["accuracy"] == pytest.approx(correct / count, abs=1e-12)
            # The same number on all ranks: a forward pass may communicate.
            assert result["calls"] == -(-max(1, -(-count // world_size)) // 2)


def test_counted_repeats_and_a_mean_of_means_would_be_wrong():
    """The test above would notice these mistakes."""

    def body(rank):
        dataset = Numbered(5)
        sampler = DistributedSampler(dataset, shuffle=False)
        padded, model = Meter(CPU), Guess().eval()
        with torch.no_grad():
            for images, labels in DataLoader(dataset, 5, sampler=sampler):
                outputs = model(images)
                padded.update(cross_entropy(outputs, labels), outputs, labels)
                left = len(range(rank, 5, 2))
                correct = (outputs.argmax(1) == labels)[:left].float().mean()
        exact = evaluate(model, DataLoader(dataset, 5, sampler=sampler), Meter(CPU))
        return exact, padded.compute(), all_reduce(correct).item() / 2

    exact, padded, mean_of_means = run_ranks(body, 2)[0]
    assert (exact["samples"], exact["accuracy"]) == (5, 0.6)
    assert (padded["samples"], padded["accuracy"]) != (5, 0.6)
    assert abs(mean_of_means - 0.6) > 0.01


def test_evaluation_starts_its_own_clock():
    meter = Meter(CPU)
    time.sleep(0.3)  # saving a checkpoint, for example
    assert evaluate(Guess(), DataLoader(Numbered(2), 2), meter)["seconds"] < 0.25


def test_sampler_that_leaves_samples_out_is_an_error():
    dataset = Numbered(5)
    with pytest.raises(RuntimeError, match="evaluated 4 of 5 samples"):
        evaluate(Guess(), DataLoader(dataset, 2, drop_last=True), Meter(CPU))


# Meter


def fill(meter, *losses):
    """Each loss is that of a batch of 2, of which one is predicted correctly."""
    outputs = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    for loss in losses:
        meter.update(torch.tensor(loss), outputs, torch.tensor([1, 1]))
    return meter


def test_meter_restarts_after_each_epoch():
    meter = fill(Meter(CPU), 1.0, 2.0)
    assert meter.compute() | {"seconds": 0} == RESULT | {"loss": 1.5, "seconds": 0}
    assert fill(meter, 4.0).compute()["loss"] == 4.0


def test_meter_leaves_the_gradients_alone():
    meter, loss = Meter(CPU), torch.tensor(2.0, requires_grad=True)
    meter.update(loss, torch.zeros(1, 2), torch.tensor([0]))
    assert not meter.sums.requires_grad and meter.sums.dtype == torch.float64


def test_clock_counts_from_start_and_over_a_resume():
    meter = Meter(CPU)
    time.sleep(0.2)
    meter.start()
    fill(meter, 1.0)
    time.sleep(0.1)
    state = meter.state_dict()
    assert 0.1 <= state["ranks"][0][3] < 0.2
    resumed = Meter(CPU)
    resumed.load_state_dict(state)
    time.sleep(0.2)  # loading
    resumed.start()
    assert 0.1 <= resumed.compute()["seconds"] < 0.25
    assert Meter(CPU).state_dict() == {"ranks": [[0.0, 0.0, 0, 0.0]]}  # at the end of an epoch


def test_epoch_is_counted_whole_after_a_resume_at_any_world_size():
    def body(rank, state, *losses):
        meter = Meter(CPU)
        if state:
            meter.load_state_dict(state)
        fill(meter, *losses)
        return meter.state_dict(), meter.compute()

    ranks = run_ranks(lambda rank: body(rank, None, 1.0 + rank, 3.0), 2)
    state, result = ranks[0]
    for _, result in ranks:
        assert (result["loss"], result["accuracy"], result["samples"]) == (2.25, 0.5, 8)
    assert state == ranks[1][0] and [row[0] for row in state["ranks"]] == [8.0, 10.0]
    for world_size in (1, 2, 3):
        after = run_ranks(lambda rank: body(rank, state, 5.0), world_size)
        samples = 8 + 2 * world_size
        for _, result in after:
            assert result["samples"] == samples
            assert result["loss"] == pytest.approx((18 + 10 * world_size) / samples)
        if world_size == 2:  # each rank takes its own sums
            assert [row[0] for row in after[0][0]["ranks"]] == [18.0, 20.0]


# The log


def test_ranks_that_hold_one_replica_count_their_samples_once():
    """Ranks 0 and 1, and ranks 2 and 3, compute the same samples, as with tensor parallelism."""

    def body(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        distributed.dp_group = mesh.get_group("data")
        place = distributed.dp_rank(), distributed.dp_world_size(), distributed.is_main_process()
        meter = Meter(CPU)
        outputs, labels = torch.eye(3)[: rank // 2 + 1], torch.zeros(rank // 2 + 1, dtype=int)
        meter.update(torch.tensor(1.0), outputs, labels)
        saved = meter.state_dict()
        assert len(saved["ranks"]) == 2
        result = meter.compute()
        resumed = Meter(CPU)
        resumed.load_state_dict(saved)
        other = Meter(CPU)  # of a run on three replicas
        other.load_state_dict({"ranks": [*saved["ranks"], [0.0, 0.0, 0, 0.0]]})
        loader = DataLoader(Numbered(7), 2, sampler=DistributedSampler(Numbered(7), *place[1::-1]))
        samples = [m.compute()["samples"] for m in (resumed, other)]
        samples.append(evaluate(Guess(), loader, Meter(CPU))["samples"])
        return place, len(distributed.all_gather_object(0)), result["samples"], *samples

    assert run_ranks(body, 4) == [((rank // 2, 2, rank == 0), 4, 3, 3, 3, 7) for rank in range(4)]


def test_log_is_written_by_one_rank_and_continued(tmp_path, capfd):
    def body(rank, start, accuracies):
        metrics = MetricLogger(tmp_path, start)
        return [
            metrics.log(start + i, RESULT, RESULT | {"accuracy": accuracy}, lr=0.1)
            for i, accuracy in enumerate(accuracies)
        ]

    assert run_ranks(body, 2, 0, (0.3, 0.5, 0.4))[0] == [True, True, False]
    path = tmp_path / "metrics.jsonl"
    assert capfd.readouterr().out.count("epoch 1: train loss 1.0000 accuracy 50.00%") == 1
    with open(path, "a") as file:
        file.write('{"epoch": 3, "tr')  # a crash
    rows = read_metrics(path)
    assert len(rows) == 3
    names = {f"{a}_{b}" for a, b in product(("train", "val"), RESULT)}
    assert rows[0].keys() == {"epoch", "world_size", "lr"} | names
    assert (rows[0]["world_size"], rows[0]["lr"], rows[0]["val_samples"]) == (2, 0.1, 4)
    assert run_ranks(body, 2, 2, (0.45, 0.6))[0] == [False, True]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    accuracies = [(row["epoch"], row["val_accuracy"]) for row in rows]
    assert accuracies == [(0, 0.3), (1, 0.5), (2, 0.45), (3, 0.6)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_first_epoch_is_the_best_even_without_a_correct_prediction(tmp_path):
    metrics = MetricLogger(tmp_path)
    assert metrics.log(0, RESULT, RESULT | {"accuracy": 0.0}, lr=0.1)
    assert not metrics.log(1, RESULT, RESULT | {"accuracy": 0.0}, lr=0.1)


@pytest.mark.parametrize("losses", [("nan", 1.0), ("inf", 1.0), (1.0, "nan"), ("inf", "-inf")])
def test_loss_that_is_not_finite_is_refused(losses, tmp_path):
    train, val = (RESULT | {"loss": float(loss)} for loss in losses)
    text = "training loss is {}, the validation loss {}: try a smaller --lr".format(*losses)
    with pytest.raises(UserError, match=text):
        MetricLogger(tmp_path).log(4, train, val, lr=0.1)
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_file_that_cannot_be_written_is_named(tmp_path):
    metrics = MetricLogger(tmp_path)
    shutil.rmtree(tmp_path)
    with pytest.raises(UserError, match=r"cannot write .*metrics\.jsonl: No such file"):
        metrics.log(0, RESULT, RESULT, lr=0.1)


def test_closed_pipe_does_not_lose_the_epoch(tmp_path, monkeypatch):
    """As in  python train_1gpu.py | head -1: log() returns, so that the script can save."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", closefd=True) as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        assert MetricLogger(tmp_path).log(0, RESULT, RESULT, lr=0.1)
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # for the flush at the end
