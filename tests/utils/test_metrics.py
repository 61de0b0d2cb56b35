"""Loss and metrics over all ranks, each sample counted once; and the log of the epochs."""

import copy
import json
import math
import os
import shutil
import time
from itertools import product
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, DistributedSampler, SequentialSampler

import tasks.images
from tests.any_batch import CASES, COUNT, make_task
from tests.forked import ROUNDING
from tests.processes import run_ranks
from utils import distributed
from utils.config import Config
from utils.data import build_loader
from utils.distributed import all_reduce, dp_rank, dp_world_size, mean_over_replicas
from utils.errors import UserError
from utils.hooks import Hook
from utils.metrics import History, Meter, MetricLogger, evaluate, read_metrics
from utils.sampler import EpochSampler

CPU = torch.device("cpu")
BATCH = 12
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


def eval_loader(dataset, batch_size, sampler=None):
    """A loader of this rank's share; batch_size: per rank."""
    cfg = Config(global_batch_size=batch_size * dp_world_size(), dtype="float64", num_workers=0)
    if sampler is None:
        sampler = DistributedSampler(dataset, dp_world_size(), dp_rank(), shuffle=False)
    return build_loader(dataset, sampler, batch_size, CPU, cfg)


def train_loader(dataset, micro_batches=None):
    cfg = Config(global_batch_size=BATCH, dtype="float64", num_workers=0)
    sampler = EpochSampler(dataset, seed=0)
    if dp_world_size() > 1:
        sampler = DistributedSampler(dataset, dp_world_size(), dp_rank(), seed=0, drop_last=True)
    batch_size = BATCH // dp_world_size()
    return build_loader(dataset, sampler, batch_size, CPU, cfg, True, micro_batches)


# evaluate()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_counts_every_sample_exactly_once(world_size):
    counts = (1, 2, 3, 5, 11)

    def body(rank):
        results = []
        for count in counts:
            model = Guess()
            result = evaluate(model, eval_loader(Numbered(count), 2), tasks.images)
            results.append(result | {"calls": model.calls})
        return results

    ranks = run_ranks(body, world_size) if world_size > 1 else [body(0)]
    for *results, count in zip(*ranks, counts, strict=True):
        images, labels = torch.arange(count).double()[:, None], torch.arange(count) % 3
        outputs = torch.cat([images * 0, images, images * 0], dim=1)
        for result in results:
            assert result["samples"] == count
            assert result["loss"] == pytest.approx(
                cross_entropy(outputs, labels).item(), rel=ROUNDING
            )
            correct = (outputs.argmax(1) == labels).sum().item()
            assert result["accuracy"] == pytest.approx(correct / count, abs=ROUNDING)
            # The same number on all ranks: a forward pass may communicate.
            assert result["calls"] == -(-max(1, -(-count // world_size)) // 2)


def test_counted_repeats_and_a_mean_of_means_would_be_wrong():
    """The test above would notice these mistakes."""

    def body(rank):
        loader = eval_loader(Numbered(5), 5)
        exact = evaluate(Guess(), loader, tasks.images)
        padded, model = Meter(tasks.images, loader), Guess().eval()
        with torch.no_grad():
            for index in loader.sampler:  # of which one is a repeated sample
                image, label = torch.tensor([[float(index)]]), torch.tensor([index % 3])
                outputs = model(image)
                padded.update(tasks.images.loss(outputs, label), outputs, label)
        own = [float(index % 3 == 1 and index > 0) for index in range(rank, 5, 2)]
        mean_of_means = all_reduce(torch.tensor(sum(own) / len(own))).item() / 2
        return exact, padded.compute(), mean_of_means

    exact, padded, mean_of_means = run_ranks(body, 2)[0]
    assert (exact["samples"], exact["accuracy"]) == (5, 0.6)
    assert abs(padded["accuracy"] - 0.6) > 0.01
    assert abs(mean_of_means - 0.4) > 0.01


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until a test moves it: clock.now."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


def test_evaluation_starts_its_own_clock(clock):
    class Slow(Guess):
        def forward(self, images):
            clock.now += 3.0
            return super().forward(images)

    loader = eval_loader(Numbered(4), 2)
    clock.now += 50.0  # saving a checkpoint, for example
    assert evaluate(Slow(), loader, tasks.images)["seconds"] == 6.0
    clock.now += 50.0
    assert evaluate(Slow(), loader, tasks.images)["seconds"] == 6.0


def test_sampler_that_leaves_samples_out_is_an_error():
    loader = eval_loader(Numbered(5), 2, sampler=range(4))
    with pytest.raises(RuntimeError, match="evaluated 4 of 5 samples"):
        evaluate(Guess(), loader, tasks.images)


# Any task


def whole(name):
    """The inputs and targets of a whole dataset, in one batch, and the model in float64."""
    dataset, model, _ = CASES[name]
    return next(iter(eval_loader(dataset, COUNT))), model.double()


@pytest.mark.parametrize("name", CASES)
def test_loss_that_is_trained_is_the_loss_that_is_evaluated(name):
    dataset, _, task = CASES[name]
    (inputs, targets), model = whole(name)
    with torch.no_grad():
        outputs = model(inputs)
        expected = task.loss(outputs, targets) / task.count(targets)
    result = evaluate(model, eval_loader(dataset, 7), task)
    assert result["loss"] == pytest.approx(expected.item(), rel=ROUNDING)
    assert result["samples"] == COUNT
    sampler = SequentialSampler(dataset)  # the same samples as in the evaluation
    cfg = Config(global_batch_size=8, dtype="float64", num_workers=0)
    loader = build_loader(dataset, sampler, 8, CPU, cfg, train=True)
    meter = Meter(task, loader)
    for inputs, targets in loader:
        outputs = model(inputs)
        meter.update(task.loss(outputs, targets), outputs, targets)
    trained = meter.compute()
    for metric in result.keys() - {"seconds"}:
        assert trained[metric] == pytest.approx(result[metric], rel=ROUNDING)


def test_means_are_those_of_a_loss_computed_by_hand():
    """With the L1 loss; evaluating with a different one would show."""
    (inputs, targets), model = whole("regression with an L1 loss")
    error = (inputs @ model.weight.detach())[:, 0] - targets
    dataset, _, task = CASES["regression with an L1 loss"]
    result = evaluate(model, eval_loader(dataset, 16), task)
    assert result["loss"] == pytest.approx(error.abs().mean().item(), rel=ROUNDING)
    assert result["squares"] == pytest.approx((error**2).mean().item(), rel=ROUNDING)
    assert abs(result["loss"] - result["squares"]) > 0.1


def train_one_epoch(name, micro_batches):
    """The gradients of the steps of an epoch, as every script computes them, averaged over the
    replicas as by DistributedDataParallel; the same with means of means; and the metrics."""
    dataset, model, task = CASES[name]
    model = model.double()
    gradients, means_of_means = [], []
    meter = Meter(task, loader := train_loader(dataset, micro_batches))
    for batch in loader:
        parts = batch if micro_batches else [batch]
        own = sum(task.count(targets) for _, targets in parts)
        count = mean_over_replicas(own)
        gradient = torch.zeros_like(model.weight)
        for inputs, targets in parts:
            outputs = model(inputs)
            loss_sum = task.loss(outputs, targets)
            gradient += torch.autograd.grad(loss_sum / count, model.weight)[0]
            meter.update(loss_sum, outputs, targets)
        gradients.append(all_reduce(gradient.clone()) / dp_world_size())
        means_of_means.append(all_reduce(gradient * count / own) / dp_world_size())
    result = meter.compute()
    del result["seconds"]
    return torch.stack(gradients), torch.stack(means_of_means), result


def test_ranks_and_micro_batches_change_neither_gradients_nor_metrics():
    """Whatever the task counts: samples, labels, tokens that are not ignored, or boxes."""

    def body(rank):
        return {
            name: (
                [train_one_epoch(name, micro_batches) for micro_batches in (None, 3)],
                evaluate(CASES[name][1], eval_loader(CASES[name][0], 13), CASES[name][2]),
            )
            for name in CASES
        }

    alone = body(0)
    for name in CASES:
        for trained in alone[name][0][1:]:
            torch.testing.assert_close(trained[0], alone[name][0][0][0])
    for found in run_ranks(body, 3):  # two of which run out of samples in the evaluation
        for name, (epochs, val) in found.items():
            (expected, _, metrics), expected_val = alone[name][0][0], alone[name][1]
            for gradients, means_of_means, result in epochs:
                torch.testing.assert_close(gradients, expected, rtol=ROUNDING, atol=ROUNDING)
                assert result == pytest.approx(metrics, rel=ROUNDING)
                if name in ("dicts", "boxes"):  # this test would notice the mistake
                    wrong = (means_of_means - expected).abs().max() / expected.abs().max()
                    assert wrong > 0.01
            del val["seconds"], expected_val["seconds"]
            assert val == pytest.approx(expected_val, rel=ROUNDING)
            expected_val["seconds"] = 0.0


# Meter

COUNTS_TENSORS = make_task(None, lambda targets: torch.tensor(len(targets)))
COUNTS_NUMBERS = make_task(
    None, measure=lambda outputs, targets: {"table": torch.ones(2, 3) * targets[0]}
)
COUNTS_NUMBERS.summarize = lambda sums: {
    "loss": sums["loss"] / sums["count"],
    "table": sums["table"].sum(),
}


def fake_loader(train=True):
    values = {"dataset": range(6), "counts": True, "samples": 0, "train": train}
    return SimpleNamespace(**values, started=time.perf_counter())


def fill(meter, *losses, samples=2):
    """Each loss is the sum of a batch."""
    for loss in losses:
        meter.loader.samples += samples
        meter.update(torch.tensor(float(loss)), torch.zeros(samples, 3), torch.ones(samples))
    return meter


@pytest.mark.parametrize("task", [COUNTS_NUMBERS, COUNTS_TENSORS], ids=["numbers", "tensors"])
def test_meter_restarts_after_each_epoch(task, clock):
    meter = fill(Meter(task, fake_loader()), 1.0, 2.0)
    clock.now += 2.5
    table = {"table": 12.0} if task is COUNTS_NUMBERS else {}
    assert meter.compute() == {"loss": 0.75, **table, "samples": 4, "seconds": 2.5}
    assert fill(meter, 8.0).compute()["loss"] == 4.0


def test_sums_have_the_shapes_that_the_task_measures():
    seen = {}
    task = make_task(None, measure=lambda outputs, targets: {"table": torch.eye(2), "n": outputs})
    task.summarize = lambda sums: seen.update(sums) or {"loss": 0.0}
    meter = Meter(task, fake_loader())
    for value in (1.0, 2.0):
        meter.update(torch.tensor(value), torch.tensor([value, 3.0]), torch.ones(5))
    meter.compute()
    assert {name: tensor.tolist() for name, tensor in seen.items()} == {
        "loss": 3.0,
        "table": [[2.0, 0.0], [0.0, 2.0]],
        "n": [3.0, 6.0],
        "count": 10.0,
    }
    assert {tensor.dtype for tensor in seen.values()} == {torch.float64}


def test_meter_leaves_the_gradients_alone():
    meter, loss = Meter(COUNTS_TENSORS, fake_loader()), torch.tensor(2.0, requires_grad=True)
    meter.update(loss, torch.zeros(1, 2), torch.tensor([0]))
    assert not meter.sums.requires_grad and meter.sums.dtype == torch.float64


def test_sums_are_exact_over_many_small_batches():
    """In float32, a million would swallow them."""
    meter = fill(Meter(COUNTS_NUMBERS, fake_loader()), 1e6, *[2.0**-10] * 1024)
    assert meter.compute()["loss"] * 2050 == 1e6 + 1.0


def test_batch_that_does_not_count_changes_nothing():
    for task in (COUNTS_NUMBERS, COUNTS_TENSORS):
        meter = fill(Meter(task, fake_loader(train=False)), 1.0)
        meter.loader.counts = False
        fill(meter, float("nan"), 5.0)
        assert meter.compute()["loss"] == 0.5


def test_clock_counts_over_a_resume(clock):
    meter = fill(Meter(COUNTS_NUMBERS, fake_loader()), 1.0)
    clock.now += 3.0
    state = meter.state_dict()
    assert state["ranks"][0][2] == 3.0
    clock.now += 50.0  # until the run is started again
    resumed = Meter(COUNTS_NUMBERS, fake_loader())
    resumed.load_state_dict(state)
    clock.now += 20.0  # loading
    resumed.loader.started = clock.now  # as Loader.__iter__ does
    clock.now += 4.0
    assert fill(resumed, 1.0).compute()["seconds"] == 7.0
    assert resumed.state_dict()["ranks"] == [[[], 0, 0.0]]  # at the end of an epoch


@pytest.mark.parametrize("names", [("loss", "b", "a"), ("loss", "a"), ("loss", "a", "c")])
def test_other_sums_do_not_continue_those_of_a_checkpoint(names):
    """Of an epoch within which measure() of the task was edited."""
    meter = Meter(COUNTS_NUMBERS, fake_loader())
    meter.add(dict.fromkeys(("loss", "a", "b"), torch.tensor(1.0)), torch.zeros(1))
    resumed = Meter(COUNTS_NUMBERS, fake_loader())
    resumed.load_state_dict(meter.state_dict())
    with pytest.raises(UserError, match="the same names"):
        resumed.add(dict.fromkeys(names, torch.tensor(1.0)), torch.zeros(1))


@pytest.mark.parametrize("task", [COUNTS_NUMBERS, COUNTS_TENSORS], ids=["numbers", "tensors"])
def test_epoch_is_counted_whole_after_a_resume_at_any_world_size(task):
    def body(rank, state, *losses):
        meter = Meter(task, fake_loader())
        if state:
            meter.load_state_dict(state)
            meter.loader.samples = 8 // dp_world_size()
        fill(meter, *losses)
        return meter.state_dict(), meter.compute()

    def on_two_ranks(rank):
        state, result = body(rank, None, 1.0 + rank, 3.0)
        return state, result, body(rank, state, 5.0)

    (state, result, (own, after)), other = run_ranks(on_two_ranks, 2)
    assert (result["loss"], result["samples"]) == (9 / 8, 8)
    assert (other[0]["ranks"], other[1]["loss"]) == (state["ranks"], 9 / 8)
    assert [row[0][0] for row in state["ranks"]] == [4.0, 5.0]
    assert [row[0][0] for row in own["ranks"]] == [9.0, 10.0]  # each rank takes its own sums
    assert after["loss"] == pytest.approx(19 / 12)
    assert body(0, state, 5.0)[1]["loss"] == pytest.approx(14 / 10)
    for again, result in run_ranks(body, 3, state, 5.0):
        assert result["loss"] == pytest.approx(24 / 14)
        assert sum(row[0][0] for row in again["ranks"]) == 24.0


def test_plain_counts_that_differ_between_the_ranks_are_refused():
    """Because mean_over_replicas() does not reduce them. However large they are."""

    def body(rank):
        outcomes = []
        large = 10**8 + 7  # its square is no float64
        for counts in ((2, 2, 2), (2, 3, 2), (large, large, large), (large, large, large + 1)):
            task = make_task(None, lambda targets, counts=counts: counts[rank])
            for train in (True, False):
                meter = fill(Meter(task, fake_loader(train)), 1.0)
                try:
                    outcomes.append(round(meter.compute()["loss"] * sum(counts)))
                except UserError as error:
                    outcomes.append(str(error))
        return outcomes

    for outcomes in run_ranks(body, 3):
        refused = [text for text in outcomes if isinstance(text, str)]
        assert outcomes == [3, 3, refused[0], 3, 3, 3, refused[1], 3]
        for text in refused:
            assert "count()" in text and "plain number" in text and "ranks" in text
            assert text.endswith(" a tensor")


@pytest.mark.parametrize("loss", ["nan", "inf", "-inf"])
def test_loss_that_is_not_finite_is_refused(loss):
    for train, kind in ((True, "training"), (False, "validation")):
        meter = fill(Meter(COUNTS_NUMBERS, fake_loader(train)), 1.0, float(loss), 2.0)
        text = f"{kind} loss is {loss}: .*--lr.* --clip-norm 1"
        with pytest.raises(UserError, match=text):
            meter.compute()


def test_ranks_that_hold_one_replica_count_their_samples_once():
    """Ranks 0 and 1, and ranks 2 and 3, compute the same samples, as with tensor parallelism."""

    def body(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        distributed.set_data_parallel_group(mesh.get_group("data"))
        place = dp_rank(), dp_world_size(), distributed.is_main_process()
        meter = Meter(COUNTS_TENSORS, fake_loader())
        saved = fill(meter, 1.0, samples=rank // 2 + 1).state_dict()
        assert len(saved["ranks"]) == 2
        result = meter.compute()
        losses = []
        for state in (saved, {"ranks": [*saved["ranks"], [[0.0, 0.0], 0, 0.0]]}):  # 3 replicas
            resumed = Meter(COUNTS_TENSORS, fake_loader())
            resumed.load_state_dict(state)
            losses.append(fill(resumed, 0.0, samples=0).compute()["loss"])
        samples = evaluate(Guess(), eval_loader(Numbered(7), 2), tasks.images)["samples"]
        return place, len(distributed.all_gather_object(0)), result["samples"], losses, samples

    thirds = [pytest.approx(2 / 3)] * 2
    assert run_ranks(body, 4) == [((rank // 2, 2, rank == 0), 4, 3, thirds, 7) for rank in range(4)]


def test_targets_follow_outputs_that_are_on_another_device():
    """Those of the last stage, if the model is spread over several devices."""
    devices = []
    task = make_task(lambda outputs, targets: devices.append(targets["label"].device) or 1 / 0)

    class Elsewhere(torch.nn.Module):
        def forward(self, inputs):
            return {"logits": inputs["x"].to("meta")}

    dataset = [{"x": torch.zeros(2), "label": 1}] * 4
    with pytest.raises(ZeroDivisionError):
        evaluate(Elsewhere(), eval_loader(dataset, 2), task)
    assert devices == [torch.device("meta")]


# The log


def config(folder, **settings):
    return Config(output_dir=str(folder), **settings)


def test_log_is_written_by_one_rank_and_continued(tmp_path, capfd):
    def body(rank, start, accuracies):
        metrics, best = MetricLogger(config(tmp_path), start), []
        for epoch, accuracy in enumerate(accuracies, start):
            metrics.log(epoch, RESULT, RESULT | {"accuracy": accuracy}, lr=0.1)
            best.append(metrics.is_best("accuracy", max))
        return best

    assert run_ranks(body, 2, 0, (0.3, 0.5, 0.4))[0] == [True, True, False]
    path = tmp_path / "metrics.jsonl"
    lines = capfd.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("epoch 1: ")]
    for name in ("train", "val"):
        assert f"{name} loss 1.0000 accuracy 0.5000" in line
    assert line.endswith(" 4 samples/s")
    with open(path, "a") as file:
        file.write('{"epoch": 3, "tr')  # a crash
    rows = read_metrics(path)
    assert len(rows) == 3
    first = rows[0]
    names = {f"{a}_{b}" for a, b in product(("train", "val"), RESULT)}
    assert first.keys() == {"epoch", "world_size", "lr"} | names
    assert first["world_size"] == 2
    assert first["lr"] == 0.1
    assert first["val_samples"] == 4
    assert body(0, 2, (0.45, 0.6)) == [False, True]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [0, 1, 2, 3]
    assert [row["val_accuracy"] for row in rows] == [0.3, 0.5, 0.45, 0.6]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_first_of_equal_epochs_is_the_best(tmp_path, capsys):
    """Even without a correct prediction. A metric may be one to minimize. The run ends by saying
    which epoch it is, and where its weights are."""
    metrics, best = MetricLogger(config(tmp_path, epochs=4)), []
    for epoch, (accuracy, error) in enumerate([(0.0, 9.0), (0.0, 7.0), (0.1, 8.0), (0.1, 7.0)]):
        val = RESULT | {"accuracy": accuracy, "error": error}
        metrics.log(epoch, RESULT, val, lr=0.1)
        best.append((metrics.is_best("accuracy", max), metrics.is_best("error", min)))
    assert best == [(True, True), (False, True), (True, False), (False, False)]
    *_, accuracy, error = capsys.readouterr().out.splitlines()
    assert accuracy.startswith(f"best: epoch 2, accuracy 0.1000, in {tmp_path / 'best.pt'}")
    assert error.startswith("best: epoch 1, error 7.0000,")


def test_file_that_cannot_be_written_is_named(tmp_path, capfd):
    """The run goes on: its checkpoints have the rows, too, and end it if they cannot be saved."""
    metrics = MetricLogger(config(tmp_path))
    shutil.rmtree(tmp_path)
    with pytest.raises(UserError, match=r"cannot write .*metrics\.jsonl: No such file"):
        MetricLogger(config(tmp_path))
    metrics.log(0, RESULT, RESULT, lr=0.1)
    warning = capfd.readouterr().err
    assert "metrics.jsonl: No such file" in warning and "the run continues" in warning
    assert metrics.is_best("accuracy", max)
    tmp_path.mkdir()
    metrics.log(1, RESULT, RESULT, lr=0.1)
    assert [row["epoch"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]


def test_damaged_rows_are_left_out_and_named(tmp_path, capsys):
    """But for one that was cut off when the run was killed."""
    path, good = tmp_path / "steps.jsonl", [b'{"epoch": 0}', b'{"epoch": 1}']
    for damaged in (b'\xff\x00\xfe{"epoch": 2}', b'{"epocH": 2}', b'["epoch"]', b"{}", b"", b"7"):
        path.write_bytes(b"\n".join([good[0], damaged, good[1], b'{"epoch": 3, "tr']))
        assert read_metrics(path) == [{"epoch": 0}, {"epoch": 1}]
        warning = capsys.readouterr().err
        assert str(path) in warning and warning.endswith(" 2\n")
    path.write_bytes(b"\n".join([*good, b""]))
    assert read_metrics(path) == [{"epoch": 0}, {"epoch": 1}]
    assert capsys.readouterr().err == ""
    assert read_metrics(tmp_path / "none.jsonl") == []
    with pytest.raises(UserError, match=r"^cannot read /.*: Is a directory$"):
        read_metrics(tmp_path)


@pytest.mark.parametrize("damage", ["removed", "empty", "a bit"])
def test_best_so_far_is_known_without_the_file(damage, tmp_path, capsys):
    """From the checkpoint: if only *.pt were moved, for example. The rows are restored, too."""
    path = tmp_path / "metrics.jsonl"

    def resume(state):
        history = History()
        if state:
            history.load_state_dict(state)
        return history, MetricLogger(config(tmp_path), 2 * bool(state), [history])

    history, metrics = resume(None)
    for epoch, accuracy in enumerate((0.3, 0.5, 0.7)):  # the last one is not saved
        metrics.log(epoch, RESULT, RESULT | {"accuracy": accuracy}, lr=0.1)
        if epoch == 1:
            state = copy.deepcopy(history.state_dict())
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(b"" if damage == "empty" else b"[" + path.read_bytes()[1:])
    history, metrics = resume(state)
    assert [row["val_accuracy"] for row in read_metrics(path)] == [0.3, 0.5]
    metrics.log(2, RESULT, RESULT | {"accuracy": 0.4}, lr=0.1)
    assert not metrics.is_best("accuracy", max)
    metrics.log(3, RESULT, RESULT | {"accuracy": 0.6}, lr=0.1)
    assert metrics.is_best("accuracy", max)
    assert len(history.state_dict()["rows"]) == 4
    assert capsys.readouterr().err == ""
    with pytest.raises(UserError, match="accuracies in BEST"):  # or there would be no best.pt
        metrics.is_best("accuracies", max)


def test_hooks_add_to_a_row_before_it_is_written(tmp_path):
    class Adds(Hook):
        def before_row(self, row):
            row["seen"] = numpy.float32(row["val_loss"])  # which JSON does not know

    MetricLogger(config(tmp_path), hooks=[Adds()]).log(0, RESULT, RESULT, lr=0.1)
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row["seen"] == pytest.approx(RESULT["loss"])


def test_closed_pipe_does_not_lose_the_epoch(tmp_path, monkeypatch):
    """As in  python train_1gpu.py | head -1: log() returns, so that the script can save."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", closefd=True) as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        metrics = MetricLogger(config(tmp_path))
        metrics.log(0, RESULT, RESULT, lr=0.1)
        monkeypatch.undo()
        assert metrics.is_best("accuracy", max)
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # for the flush at the end


def test_sums_of_different_names_are_not_added():
    """Nor are those of different shapes, which would be, element by element, if they fit."""
    task = make_task(lambda outputs, targets: outputs.sum(), measure=lambda outputs, _: outputs)
    meter, loss = Meter(task, fake_loader(train=False)), torch.zeros(2)
    meter.update(loss.sum(), {"right": torch.ones(2), "number": 3}, loss)
    for other, found in (
        ({"wrong": torch.ones(2), "number": 3}, r"wrong \(2,\), number \(\)"),
        ({"right": torch.ones(2, 1), "number": 3}, r"right \(2, 1\), number \(\)"),
    ):
        with pytest.raises(UserError, match=f"{found} after loss .*, right .2,., number ..: these"):
            meter.update(loss.sum(), other, loss)


def test_epoch_without_targets_is_named():
    task = make_task(lambda outputs, _: outputs.sum(), lambda targets: torch.tensor(0))
    meter = Meter(task, fake_loader(train=False))
    meter.loader.samples = 6
    meter.update(torch.tensor(0.0), torch.zeros(2), torch.zeros(2))
    with pytest.raises(UserError, match=r"validation loss .*nan: count\(\) .*no targets"):
        meter.compute()


def test_metric_that_is_nan_or_new_is_not_the_best(tmp_path):
    logger = MetricLogger(Config(output_dir=str(tmp_path)))
    answers = []
    logger.rows.append({"epoch": 0})  # of a version without this metric
    for epoch, value in enumerate((math.nan, 2.0, math.nan, 3.0, 1.0), 1):
        logger.rows.append({"epoch": epoch, "val_error": value})
        answers.append(logger.is_best("error", max))
    assert answers == [False, True, False, True, False]
