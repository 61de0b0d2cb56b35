"""A task that does not keep its part is refused before the first epoch."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

import utils.contract
from tests.any_batch import CASES, WholeBatches
from tests.forked import same_bits
from utils.config import Config
from utils.contract import check_task
from utils.data import build_loader
from utils.errors import UserError
from utils.sample_random import require_order
from utils.sampler import EpochSampler

CPU = torch.device("cpu")
PAIRS = [(torch.full((3,), float(i)), i % 4) for i in range(8)]
GOOD = {
    "loss": lambda outputs, targets: cross_entropy(outputs, targets, reduction="sum"),
    "count": len,
    "measure": lambda outputs, targets: {"correct": (outputs.argmax(1) == targets).sum()},
    "summarize": lambda sums: {"loss": sums["loss"] / sums["count"], "accuracy": sums["correct"]},
    "describe": lambda train_set, val_set: {},
    "BEST": ("accuracy", max),
}


def counts(targets):
    return torch.tensor([len(targets), 2 * len(targets)])


def make_loader(dataset):
    cfg = Config(global_batch_size=4, num_workers=0)
    return build_loader(dataset, EpochSampler(dataset, 0), 4, CPU, cfg, train=True)


def check(dataset=PAIRS, model=None, **changes):
    check_task(SimpleNamespace(**GOOD | changes), model or nn.Linear(3, 4), make_loader(dataset))


@pytest.mark.parametrize("name", CASES)
def test_tasks_of_all_kinds_pass(name):
    dataset, model, task = CASES[name]
    check_task(task, model, make_loader(dataset))


def test_sums_pass():
    check()
    check(loss=lambda outputs, targets: outputs.sum() * 0)
    check(loss=cross_entropy, count=lambda targets: 1)  # the mean of a batch, on purpose
    check(measure=lambda outputs, targets: {"correct": 0.0, "each": outputs.sum(0)})


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"loss": cross_entropy}, "loss .*sum"),
        ({"loss": lambda o, t: cross_entropy(o, t, reduction="none")}, r"loss\(\)"),
        ({"loss": lambda o, t: o[:, 0], "count": torch.ones_like}, r"loss\(\)"),
        ({"loss": lambda o, t: torch.stack([o.sum(), o.mean()]), "count": counts}, "loss .*sum"),
        ({"measure": lambda o, t: {"correct": 0, "mse": (o.sum(1) - 9).square().mean()}}, "mse"),
        ({"measure": lambda o, t: {"correct": 0, "count": o.sum()}}, r"measure\(\)"),
        ({"summarize": lambda sums: {"loss": 1.0}}, "accuracy"),
    ],
)
def test_what_is_no_sum_is_named(changes, found):
    with pytest.raises(UserError, match=found):
        check(**changes)


def test_missing_names_are_listed():
    task = SimpleNamespace(**GOOD)
    del task.summarize, task.BEST
    with pytest.raises(UserError, match=r"summarize.*BEST"):
        check_task(task, nn.Linear(3, 4), make_loader(PAIRS))


# The model


class Initialized(nn.Module):
    """Initialized by its first batch, as ActNorm is; counts in a dict, a list and a buffer."""

    def __init__(self):
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(3)), nn.Linear(3, 4)
        self.register_buffer("mean", torch.zeros(3))
        self.flags, self.seen, self.frozen = {"done": False}, [], nn.BatchNorm1d(3).eval()

    def forward(self, inputs):
        if not self.flags["done"]:
            self.flags["done"] = True
            self.scale.data.mul_(2)
        self.seen.append(len(inputs))
        self.mean = self.mean * 0.9 + inputs.mean(0)
        return self.linear(self.frozen(inputs) * self.scale)


def test_model_is_unchanged():
    model = Initialized()
    buffer, state = model.mean, copy.deepcopy(model.state_dict())
    check(model=model)
    assert same_bits(model.state_dict(), state)
    assert (model.flags, model.seen) == ({"done": False}, []) and model.mean is buffer
    assert model.training and not model.frozen.training


class Penalized(nn.Module):
    """Has a term in training that does not depend on the number of samples."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.dropout = dropout

    def forward(self, inputs):
        assert not torch.is_grad_enabled()
        outputs = self.layers(nn.functional.dropout(inputs, self.dropout, self.training))
        return outputs, 1.0 if self.training else 0.0


def test_terms_that_appear_in_training_alone_are_tried():
    def loss(outputs, targets):
        return GOOD["loss"](outputs[0], targets) + outputs[1]

    def measure(outputs, targets):
        return GOOD["measure"](outputs[0], targets)

    with pytest.raises(UserError, match=r"loss .*sum"):
        check(model=Penalized(), loss=loss, measure=measure)
    check(model=Penalized(), loss=lambda o, t: loss(o, t) - o[1], measure=measure)
    check(model=Penalized(0.5), loss=loss, measure=measure)  # random, and so not compared


class Caching(nn.Module):
    """Keeps what remember(the old value, inputs) returns in a buffer that is not saved."""

    def __init__(self, remember):
        super().__init__()
        self.layer, self.remember = nn.Linear(3, 4), remember
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, inputs):
        self.cache = self.remember(self.cache, inputs)
        return self.layer(inputs)


def test_state_that_no_checkpoint_holds_is_refused():
    check(model=Caching(lambda old, inputs: torch.arange(3.0)))  # the same for each batch
    check(model=Caching(lambda old, inputs: old.new_ones(len(inputs), 3)))  # a function of shapes
    with pytest.raises(UserError, match=r"cache.*persistent=True"):
        check(model=Caching(lambda old, inputs: old.lerp(inputs.mean(0), 0.1)))


def test_hooks_on_the_gradients_of_one_rank_are_named(monkeypatch, capsys):
    model = nn.Linear(3, 4)
    model.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    check(model=model)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("WORLD_SIZE", "2")
    check(model=model)
    (line,) = capsys.readouterr().err.splitlines()
    assert "weight" in line and "backward()" in line


def test_loss_that_compares_samples_says_so():
    def loss(outputs, targets):
        return (outputs @ outputs.T).sum() + outputs.sum()

    with pytest.raises(UserError, match=r"loss .*sum"):
        check(loss=loss)
    loss.compares_samples = True
    check(loss=loss)


def test_model_without_weights_is_not_tried():
    check(model=nn.Linear(3, 4, device="meta"), loss=cross_entropy)


# The samples


def numbers_of(dataset, monkeypatch, theirs=None):
    """Check a dataset on a rank 0 to which rank 1 sends these numbers, or the same ones. Returns
    the numbers that rank 0 sends."""
    sent = []

    def gather(mine):
        sent.append(mine)
        return [mine, theirs or mine]

    monkeypatch.setattr(utils.contract, "all_gather_object", gather)
    check(dataset)
    return sent[0]


def test_ranks_with_different_samples_are_refused(monkeypatch):
    numbers = numbers_of(PAIRS, monkeypatch)
    for index in (0, 3, 7):
        other = list(PAIRS)
        other[index] = other[index][0] + 1, other[index][1]
        with pytest.raises(UserError, match="rank 1"):
            numbers_of(other, monkeypatch, numbers)
    numbers_of(PAIRS, monkeypatch, [1.01 * number for number in numbers])  # rounding


class First(nn.Linear):
    """Uses a part of its inputs alone."""

    def forward(self, inputs):
        return super().forward(inputs[0])


def with_extra(extra):
    """PAIRS, with a tensor that the model does not use."""
    return [((inputs, extra), label) for inputs, label in PAIRS]


def test_identifiers_that_the_dtype_of_the_run_cannot_hold_are_named(capsys):
    for harmless in (2.0**24, 0.1, math.nan, 100_000_001):
        check(with_extra(torch.tensor(harmless)), First(3, 4))
    assert capsys.readouterr().err == ""
    check(with_extra(torch.tensor(100_000_001.0, dtype=torch.float64)), First(3, 4))
    err = capsys.readouterr().err
    assert "100000001.0" in err and "100000000.0" in err


class Sentences(list):
    """(words, label), of different lengths; padded, and sorted if `key` says by what."""

    def __init__(self, key=lambda sample: 0):
        super().__init__((torch.ones(1 + index // 2), index % 4) for index in range(8))
        self.key = key

    def collate_fn(self, samples):
        words, labels = zip(*sorted(samples, key=self.key), strict=True)
        words = pad_sequence(list(words), batch_first=True).sum(1, keepdim=True)
        return words, torch.tensor(labels)


def test_collate_fn_that_sorts_is_refused_with_random_numbers_by_sample(monkeypatch):
    by_length = Sentences(lambda sample: -len(sample[0]))
    monkeypatch.setattr(utils.contract, "on_check", [])
    check(by_length, nn.Linear(1, 4))
    monkeypatch.setattr(utils.contract, "on_check", [require_order])
    check(Sentences(), nn.Linear(1, 4))
    with pytest.raises(UserError, match="collate_fn"):
        check(by_length, nn.Linear(1, 4))


def test_stream_is_not_compared(monkeypatch):
    monkeypatch.setattr(utils.contract, "all_gather_object", None)
    dataset = WholeBatches()
    dataset.in_order = True
    check(dataset)


def test_samples_may_have_any_dtype_and_be_empty_or_nan():
    extras = [torch.tensor([True, False]), torch.zeros(0, 4)]
    extras += [torch.tensor([1.0, torch.nan]), torch.tensor([1 + 2j])]
    for extra in extras:
        check(with_extra(extra), First(3, 4))
