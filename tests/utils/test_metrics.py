"""Loss and metrics over all ranks, each sample counted once; and the log of the epochs."""

import copy
import json
import math
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torch.utils.data import DistributedSampler

import tasks.images
import utils.metrics
from tests.any_batch import CASES, COUNT, make_task
from tests.processes import run_ranks
from utils import distributed
from utils.config import Config
from utils.data import build_loader
from utils.distributed import dp_rank, dp_world_size, mean_over_replicas
from utils.errors import UserError
from utils.metrics import Meter, MetricLogger, evaluate, mean_loss

CPU = torch.device("cpu")
ROUNDING = 1e-9  # float64; the order of a sum changes about 1e-15
RESULT = {"loss": 1.0, "accuracy": 0.5, "samples": 4, "seconds": 1.0}


def make_loader(dataset, batch_size, train=False, micro_batches=None):
    """A loader of this rank's share. batch_size: per rank."""
    size = batch_size * dp_world_size()
    cfg = Config(global_batch_size=size, dtype="float64", num_workers=0)
    sampler = DistributedSampler(
        dataset, dp_world_size(), dp_rank(), shuffle=train, drop_last=train
    )
    return build_loader(dataset, sampler, batch_size, CPU, cfg, train, micro_batches)


def without_seconds(result):
    assert result.pop("seconds") >= 0
    return result


# Any task, on any number of ranks


def train_and_evaluate(rank, micro_batches=None):
    """The metrics of an epoch without steps, and of an evaluation, for each kind of task."""
    results = {}
    for name, (dataset, model, task) in CASES.items():
        model = copy.deepcopy(model).double()
        loader = make_loader(dataset, 12 // dp_world_size(), True, micro_batches)
        meter = Meter(task, loader)
        for batch in loader:
            for inputs, targets in batch if micro_batches else [batch]:
                outputs = model(inputs)
                meter.update(task.loss(outputs, targets), outputs, targets)
            loader.advance()
        trained, evaluated = meter.compute(), evaluate(model, make_loader(dataset, 7), task)
        results[name] = without_seconds(trained), without_seconds(evaluated)
    return results


def test_metrics_are_the_same_on_any_number_of_ranks():
    alone = train_and_evaluate(0)
    results = [train_and_evaluate(0, 3), *run_ranks(train_and_evaluate, 3)]
    for result in results:
        for name in CASES:
            trained, evaluated = result[name]
            assert trained == pytest.approx(alone[name][0], rel=ROUNDING)
            assert evaluated == pytest.approx(alone[name][1], rel=ROUNDING)
            assert (trained["samples"], evaluated["samples"]) == (36, COUNT)


def gradient_of(terms, counts):
    """Of a parameter by which the sum of each term is multiplied."""
    parameter = torch.ones((), requires_grad=True)
    loss = mean_loss(torch.tensor(terms) * parameter, counts)
    loss.backward()
    assert loss.dim() == 0
    return parameter.grad.item()


def test_batch_without_targets_has_gradients_of_0():
    assert gradient_of(6.0, 3) == gradient_of(6.0, torch.tensor(3)) == 2.0
    assert gradient_of(0.0, 0) == gradient_of(0.0, torch.tensor(0)) == 0.0
    assert gradient_of(6.0, torch.tensor(0.5)) == 12.0  # targets with weights


def test_each_term_is_divided_by_its_own_count():
    def body(rank):
        return gradient_of(*sums[rank](mean_over_replicas))

    alone = 9.0 / 3 + 4.0 / 8
    assert gradient_of([9.0, 4.0, 0.0], torch.tensor([3, 8, 0])) == alone
    sums = [  # one rank has no targets of the first term, none has any of the last
        lambda mean: ([0.0, 3.0, 0.0], mean(torch.tensor([0, 6, 0]))),
        lambda mean: ([9.0, 1.0, 0.0], mean(torch.tensor([3, 2, 0]))),
    ]
    assert sum(run_ranks(body, 2)) / 2 == alone  # as DistributedDataParallel averages


class Guess(nn.Module):
    """Predicts class 1, with more confidence for larger inputs; counts its calls."""

    def __init__(self):
        super().__init__()
        self.calls, self.trained, self.frozen = 0, nn.Dropout(), nn.Dropout().eval()

    def forward(self, inputs):
        assert not torch.is_grad_enabled()
        assert not any(module.training for module in self.modules())
        self.calls += 1
        return torch.cat([inputs * 0, inputs, inputs * 0], 1)


def pairs(count):
    return [(torch.tensor([float(i)]), i % 3) for i in range(count)]


def test_each_sample_is_evaluated_once():
    def body(rank):
        for count, batches in ((1, 1), (2, 1), (5, 1), (11, 2)):
            model = Guess()
            result = evaluate(model, make_loader(pairs(count), 2), tasks.images)
            inputs, labels = torch.arange(count).double()[:, None], torch.arange(count) % 3
            outputs = torch.cat([inputs * 0, inputs, inputs * 0], 1)
            loss = cross_entropy(outputs, labels).item()
            assert result["samples"] == count
            assert result["loss"] == pytest.approx(loss, rel=ROUNDING)
            assert result["accuracy"] * count == (outputs.argmax(1) == labels).sum()
            assert model.calls == batches  # on each rank: a share may be padding alone

    assert run_ranks(body, 3) == [None] * 3


def test_evaluation_restores_the_mode_of_each_module():
    model = Guess()
    evaluate(model, make_loader(pairs(4), 2), tasks.images)
    assert (model.training, model.trained.training, model.frozen.training) == (True, True, False)
    assert torch.is_grad_enabled()


def test_evaluation_that_leaves_samples_out_is_an_error():
    cfg = Config(global_batch_size=2, num_workers=0)
    loader = build_loader(pairs(5), range(4), 2, CPU, cfg)
    with pytest.raises(RuntimeError, match=r"\b4\b.*\b5\b"):
        evaluate(Guess(), loader, tasks.images)


def test_targets_follow_outputs_to_their_device():
    class Elsewhere(nn.Module):
        def forward(self, inputs):
            return {"logits": inputs["x"].to("meta")}

    devices = []
    task = make_task(lambda outputs, targets: devices.append(targets["x"].device) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        evaluate(Elsewhere(), make_loader([{"x": torch.zeros(2)}] * 4, 2), task)
    assert devices == [torch.device("meta")]


# Meter

TENSORS = make_task(None, lambda targets: torch.tensor(len(targets)))
NUMBERS = make_task(None)


def fake_loader(train=True):
    values = {"dataset": range(6), "counts": True, "samples": 0, "train": train}
    return SimpleNamespace(**values, started=time.perf_counter())


def fill(meter, *losses, samples=2):
    """Each loss is the sum of a batch."""
    for loss in losses:
        meter.loader.samples += samples
        meter.update(torch.tensor(float(loss)), torch.zeros(samples, 3), torch.ones(samples))
    return meter


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until a test moves it: clock.now."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


@pytest.mark.parametrize("task", [NUMBERS, TENSORS], ids=["numbers", "tensors"])
def test_meter_counts_from_the_start_of_an_epoch(task, clock):
    meter = fill(Meter(task, fake_loader()), 1.0, 2.0)
    clock.now += 2.5
    assert meter.summarize() == {"loss": 0.75}
    assert meter.compute() == {"loss": 0.75, "samples": 4, "seconds": 2.5}
    fill(meter, 8.0)
    meter.loader.counts = False  # of a batch that is computed only because other ranks have one
    assert fill(meter, math.nan, 5.0).compute()["loss"] == 4.0


def test_sums_have_the_shapes_that_the_task_measures():
    seen, task = {}, make_task(None, measure=lambda x, y: {"table": torch.eye(2) * x, "n": x})
    task.summarize = lambda sums: seen.update(sums) or {"loss": 0.0}
    meter = Meter(task, fake_loader())
    for value in (1.0, 2.0):
        x = torch.tensor([value, 3.0])
        meter.update(x.sum(), x, torch.ones(5))
    meter.compute()
    assert seen["table"].tolist() == [[3.0, 0.0], [0.0, 6.0]]
    assert seen["n"].tolist() == [3.0, 6.0]
    assert (seen["loss"].item(), seen["count"].item()) == (9.0, 10.0)
    assert {tensor.dtype for tensor in seen.values()} == {torch.float64}


def test_sums_belong_to_their_names():
    meter, one = Meter(NUMBERS, fake_loader()), torch.tensor(1.0)
    meter.add({"loss": one, "a": 2 * one}, torch.ones(1))
    meter.add({"a": 2 * one, "loss": one}, torch.ones(1))
    assert meter.summarize() == {"loss": 1.0, "a": 2.0}
    for sums in ({"loss": one}, {"loss": one, "b": one}, {"loss": one, "a": torch.ones(1)}):
        with pytest.raises(UserError, match="measure"):
            meter.add(sums, torch.ones(1))


def test_meter_keeps_no_graph():
    meter, loss = Meter(TENSORS, fake_loader()), torch.tensor(2.0, requires_grad=True)
    meter.update(loss, torch.zeros(1), torch.zeros(1))
    assert not meter.vector.requires_grad


def test_sums_are_exact_over_many_small_batches():
    meter = fill(Meter(NUMBERS, fake_loader()), 1e6, *[2.0**-10] * 1024)  # lost in float32
    assert meter.compute()["loss"] * 2050 == 1e6 + 1.0


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_training_loss_that_is_not_finite_is_refused(loss):
    with pytest.raises(UserError, match=str(loss)):
        fill(Meter(NUMBERS, fake_loader()), 1.0, loss, 2.0).compute()
    evaluated = fill(Meter(NUMBERS, fake_loader(train=False)), 1.0, loss, 2.0).compute()
    assert str(evaluated["loss"]) == str(loss)  # the epoch is saved


def test_clock_counts_over_a_resume(clock):
    meter = fill(Meter(NUMBERS, fake_loader()), 1.0)
    clock.now += 3.0
    state = meter.state_dict()
    clock.now += 50.0
    resumed = Meter(NUMBERS, fake_loader())
    resumed.load_state_dict(state)
    clock.now += 4.0
    assert fill(resumed, 1.0).compute()["seconds"] == 7.0
    resumed.load_state_dict(resumed.state_dict())  # between epochs
    assert resumed.seconds == 0.0


@pytest.mark.parametrize("task", [NUMBERS, TENSORS], ids=["numbers", "tensors"])
def test_epoch_resumes_on_any_number_of_ranks(task):
    """Losses are sums over the two samples of a batch: 1 and 3 on rank 0, 2 and 3 on rank 1."""

    def save(rank):
        meter = fill(Meter(task, fake_loader()), 1.0 + rank, 3.0)
        state, result = meter.state_dict(), meter.compute()
        assert (result["loss"], result["samples"]) == (9 / 8, 8)
        return state

    def resume(rank, state):
        meter = Meter(task, fake_loader())
        meter.load_state_dict(state)
        assert meter.compute()["loss"] == 9 / 8  # if no batch of the epoch is left
        meter.load_state_dict(state)
        fill(meter, 5.0)
        sums = [vector[-1] for vector, *_ in meter.state_dict()["ranks"]]
        return sums, meter.compute()["loss"]

    state, same = run_ranks(save, 2)
    assert state == same
    # Each rank adds a batch whose loss is 5: on one rank, 9 + 5, of 8 + 2 samples.
    assert run_ranks(resume, 1, state) == [([14.0], 14 / 10)]
    assert run_ranks(resume, 2, state) == [([9.0, 10.0], 19 / 12)] * 2  # each has its own
    assert run_ranks(resume, 3, state) == [([14.0, 5.0, 5.0], 24 / 14)] * 3


def test_ranks_that_share_a_replica_count_its_samples_once():
    def body(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        distributed.set_data_parallel_group(mesh.get_group("data"))
        meter = fill(Meter(TENSORS, fake_loader()), 1.0 + dp_rank())
        saved, result = meter.state_dict(), meter.compute()
        resumed = Meter(TENSORS, fake_loader())
        resumed.load_state_dict(saved)
        evaluated = evaluate(Guess(), make_loader(pairs(7), 2), tasks.images)
        numbers = len(saved["ranks"]), result["samples"], evaluated["samples"]
        return numbers, result["loss"], resumed.summarize()["loss"]

    expected = [((2, 4, 7), 3 / 4, (1.0 + replica) / 2) for replica in (0, 0, 1, 1)]
    assert run_ranks(body, 4) == expected


# The log


def make_logger(folder, **settings):
    return MetricLogger(Config(output_dir=str(folder), **settings))


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_rows_go_through_a_checkpoint(tmp_path):
    metrics = make_logger(tmp_path)
    for epoch, accuracy in enumerate((0.3, 0.5)):
        metrics.log(epoch, RESULT, RESULT | {"accuracy": accuracy}, lr=0.1)
    state = copy.deepcopy(metrics.state_dict())
    metrics.log(2, RESULT, RESULT | {"accuracy": 0.9}, lr=0.1)  # not saved
    (tmp_path / "metrics.jsonl").write_text("damaged")
    resumed, best = make_logger(tmp_path), []
    resumed.load_state_dict(state)
    for epoch, accuracy in ((2, 0.4), (3, 0.6)):
        resumed.log(epoch, RESULT, RESULT | {"accuracy": accuracy}, lr=0.1)
        best.append(resumed.is_best("accuracy", max))
    assert best == [False, True]
    rows = rows_of(tmp_path)
    assert [row["epoch"] for row in rows] == [0, 1, 2, 3]
    assert [row["val_accuracy"] for row in rows] == [0.3, 0.5, 0.4, 0.6]
    names = {f"{split}_{name}" for split in ("train", "val") for name in RESULT}
    assert rows[0].keys() == {"epoch", "world_size", "lr"} | names
    assert resumed.state_dict() == {"rows": rows}


def test_row_is_written_and_printed_by_one_rank(tmp_path, monkeypatch, capsys):
    metrics = make_logger(tmp_path)
    metrics.columns.append(lambda row: row.update(double=2 * row["val_loss"]))
    metrics.log(7, RESULT, RESULT, lr=0.1)
    assert rows_of(tmp_path)[0]["double"] == 2.0
    out = capsys.readouterr().out
    assert "epoch 7" in out and "accuracy 0.5000" in out and "4 samples/s" in out
    (tmp_path / "metrics.jsonl").unlink()
    monkeypatch.setattr(utils.metrics, "is_main_process", lambda: False)
    metrics.log(8, RESULT, RESULT | {"accuracy": 0.6}, lr=0.1)
    assert metrics.is_best("accuracy", max)
    assert capsys.readouterr().out == "" and not list(tmp_path.iterdir())


def test_first_of_equal_epochs_is_the_best(tmp_path, capsys):
    metrics, best = make_logger(tmp_path, epochs=4), []
    for epoch, (accuracy, error) in enumerate([(0.0, 9.0), (0.0, 7.0), (0.1, 8.0), (0.1, 7.0)]):
        metrics.log(epoch, RESULT, RESULT | {"accuracy": accuracy, "error": error}, lr=0.1)
        best.append((metrics.is_best("accuracy", max), metrics.is_best("error", min)))
    assert best == [(True, True), (False, True), (True, False), (False, False)]
    *_, accuracy, error = capsys.readouterr().out.splitlines()
    assert "epoch 2" in accuracy and str(tmp_path / "best.pt") in accuracy
    assert "epoch 1" in error and "7.0000" in error


def test_epoch_without_a_finite_metric_is_never_the_best(tmp_path, capsys):
    metrics, highest, lowest = make_logger(tmp_path, epochs=7), [], []
    for epoch, error in enumerate((None, math.nan, 2.0, math.inf, -math.inf, 3.0, None)):
        val = {} if error is None else {"error": error}
        metrics.log(epoch, RESULT, val, lr=0.1)
        if metrics.is_best("error", max):
            highest.append(epoch)
        if metrics.is_best("error", min):
            lowest.append(epoch)
    assert (highest, lowest) == ([2, 5], [2])
    assert "val_error" not in rows_of(tmp_path)[0]
    first, *_, best_of_max, best_of_min = capsys.readouterr().out.splitlines()
    assert "val" not in first and "epoch 5" in best_of_max and "epoch 2" in best_of_min
