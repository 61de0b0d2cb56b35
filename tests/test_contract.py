"""A task that does not keep its part is named before the first epoch."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.any_batch import CASES, make_task
from utils.config import Config
from utils.contract import check_task
from utils.data import build_loader
from utils.errors import UserError
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


def make_loader(dataset):
    cfg = Config(global_batch_size=4, num_workers=0)
    return build_loader(dataset, EpochSampler(dataset, seed=0), 4, CPU, cfg, train=True)


def check(**changes):
    names = GOOD | changes
    task = SimpleNamespace(**{name: value for name, value in names.items() if value is not None})
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 4))
    before = copy.deepcopy(model.state_dict())
    check_task(task, model, make_loader(PAIRS))
    assert model.training and model[0].training
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("case", CASES)
def test_tasks_of_all_kinds_pass(case):
    """A sum whose targets vary in number, too."""
    dataset, model, task = CASES[case]
    check_task(task, copy.deepcopy(model).float(), make_loader(dataset))  # shared by the tests


def test_losses_that_are_not_means_pass():
    check()
    check(loss=lambda outputs, targets: outputs.sum() * 0)
    check(loss=lambda outputs, targets: cross_entropy(outputs, targets), count=lambda targets: 1)
    check(measure=lambda outputs, targets: {"correct": 0.0, "each": outputs.sum(0)})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"loss": cross_entropy}, "must return a sum over the targets, not a mean: it is"),
        (
            {"loss": lambda o, t: (o[:, :1] - t).abs().sum()},
            r"a sum over the targets, not over all pairs .* shapes such as \(n, 1\) and \(n,\)",
        ),
        (
            {"loss": lambda o, t: cross_entropy(o, t, reduction="none")},
            r"must return a tensor with one number, .* not float32 \(1,\)",
        ),
        ({"loss": lambda o, t: 1.0}, "must return a tensor with one number, .* not float"),
        ({"measure": lambda o, t: {"count": o.sum()}}, "returns count, which"),
        ({"measure": lambda o, t: {"mse": (o.sum(1) - 9).mean()}}, "'mse' is the same for"),
        ({"count": lambda t: None}, r"count\(\) .* must return one number, not NoneType"),
        ({"count": lambda t: t == 0}, r"count\(\) .* must return one number, not bool \(2,\)"),
        ({"measure": lambda o, t: None}, r"measure\(\) .* must return a dict, .* not NoneType"),
        ({"summarize": lambda sums: None}, "must return {name: number}, not NoneType"),
        ({"summarize": lambda s: {"loss": torch.ones(2)}}, "number}, not {'loss': float32"),
        ({"summarize": lambda sums: {"f1": 1.0}}, "returns f1, but not 'loss', which every task"),
        ({"summarize": lambda sums: {"loss": 1.0}}, "returns loss, but not 'accuracy', which BEST"),
        ({"BEST": (0, max)}, "must be the name of a metric and the function max or min"),
        ({"BEST": ("loss", "min")}, "must be the name of a metric and the function max or min"),
        ({"BEST": "accuracy"}, "must be the name of a metric and the function max or min"),
        ({"summarize": None, "BEST": None}, "does not define summarize, BEST"),
        ({"describe": None}, "does not define describe"),
    ],
)
def test_what_a_task_lacks_is_named(changes, text):
    with pytest.raises(UserError, match=text) as caught:
        check(**changes)
    assert "\n" not in str(caught.value)


def test_error_in_the_model_tells_its_inputs():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        check_task(SimpleNamespace(**GOOD), nn.Linear(5, 4), make_loader(PAIRS))
    assert caught.value.__notes__ == ["The model got inputs as of one sample: float32 (1, 3)."]


def test_name_of_the_task_is_that_of_its_module():
    task = make_task(lambda outputs, targets: outputs.mean())
    task.__name__ = "my_task"
    with pytest.raises(UserError, match=r"^loss\(\) of the task my_task must return a sum"):
        check_task(task, nn.Linear(3, 4), make_loader(PAIRS))
