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


def make_loader(dataset, workers=0, train=True):
    cfg = Config(global_batch_size=4, num_workers=workers)
    return build_loader(dataset, EpochSampler(dataset, seed=0), 4, CPU, cfg, train=train)


def task_with(**changes):
    names = GOOD | changes
    return SimpleNamespace(**{name: value for name, value in names.items() if value is not None})


def check(**changes):
    task = task_with(**changes)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 4))
    before = copy.deepcopy(model.state_dict())
    check_task(task, model, make_loader(PAIRS))
    assert model.training and model[0].training
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("case", CASES)
def test_tasks_of_all_kinds_pass(case, capsys):
    """A sum whose targets vary in number, too."""
    dataset, model, task = CASES[case]
    loader, val_loader = make_loader(dataset), make_loader(dataset, train=False)
    check_task(task, copy.deepcopy(model).float(), loader, val_loader)  # shared by the tests
    assert capsys.readouterr().err == ""


def test_losses_that_are_not_means_pass():
    check()
    check(loss=lambda outputs, targets: outputs.sum() * 0)
    check(loss=lambda outputs, targets: cross_entropy(outputs, targets), count=lambda targets: 1)
    check(measure=lambda outputs, targets: {"correct": 0.0, "each": outputs.sum(0)})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"loss": cross_entropy}, r"^loss\(\) .* a sum .* a mean: .*reduction='sum'"),
        (
            {"loss": lambda o, t: (o[:, :1] - t).abs().sum()},
            r"^loss\(\) .* a sum .* all pairs .* \(n, 1\) and \(n,\)",
        ),
        (
            {"loss": lambda o, t: cross_entropy(o, t, reduction="none")},
            r"^loss\(\) .* tensor .* not float32 \(1,\)",
        ),
        ({"loss": lambda o, t: 1.0}, r"^loss\(\) .* tensor .* not float$"),
        ({"measure": lambda o, t: {"count": o.sum()}}, "names other than loss and count"),
        ({"measure": lambda o, t: {"mse": (o.sum(1) - 9).mean()}}, "'mse' .*same.* summarize"),
        ({"count": lambda t: None}, r"^count\(\) .* number, not NoneType"),
        ({"count": lambda t: t == 0}, r"^count\(\) .* number, not bool \(2,\)"),
        ({"measure": lambda o, t: None}, r"^measure\(\) .* a dict, .* not NoneType"),
        ({"measure": lambda o, t: {"best": "cat"}}, r"^measure\(\) .*tensors, not {'best': str"),
        ({"summarize": lambda sums: None}, r"^summarize\(\) .*number}, not NoneType"),
        ({"summarize": lambda s: {"loss": torch.ones(2)}}, r"number}, not {'loss': float32"),
        ({"summarize": lambda sums: {"f1": 1.0}}, r"^summarize\(\) .* 'loss', .* not \{'f1'"),
        ({"summarize": lambda sums: {"loss": 1.0}}, " 'accuracy', which BEST names, not {'loss'"),
        ({"BEST": (0, max)}, r"^BEST .*\(0, .* max or min"),
        ({"BEST": ("loss", "min")}, r"^BEST .*\('loss', 'min'\).* max or min"),
        ({"BEST": "accuracy"}, "^BEST .* accuracy.* max or min"),
        ({"summarize": None, "BEST": None}, "define summarize, BEST$"),
        ({"describe": None}, "define describe$"),
    ],
)
def test_what_a_task_lacks_is_named(changes, text):
    with pytest.raises(UserError, match=text) as caught:
        check(**changes)
    assert "\n" not in str(caught.value)


def test_validation_is_tried_too():
    val_set = [(torch.zeros(3), 9)] * 4
    task = task_with(measure=lambda outputs, targets: {"correct": torch.eye(4)[targets].sum()})
    model = nn.Linear(3, 10)
    check_task(task, model, make_loader(PAIRS))
    with pytest.raises(IndexError):
        check_task(task, model, make_loader(PAIRS), make_loader(val_set, train=False))


@pytest.mark.parametrize("workers", [0, 1])
def test_datasets_are_left_to_the_loader_processes(workers):
    """Each opens files at the first access: forks would share what this process has opened."""

    class Counting(list):
        reads = 0

        def __getitem__(self, index):
            self.reads += 1
            return super().__getitem__(index)

    sets = Counting(PAIRS), Counting(PAIRS)
    loader, val_loader = (make_loader(s, workers, train=s is sets[0]) for s in sets)
    check_task(task_with(), nn.Linear(3, 4), loader, val_loader)
    assert all((s.reads > 0) == (workers == 0) for s in sets)


# The model


class InitializedByData(nn.Module):
    """As ActNorm, codebooks by k-means, and whatever counts its calls."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.linear = nn.Linear(3, 4)
        self.register_buffer("codebook", torch.zeros(2, 3))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("adjacency", torch.ones(1, 1).to_sparse())
        self.is_initialized, self.calls, self.frozen = False, 0, nn.BatchNorm1d(3).eval()

    def forward(self, inputs):
        torch.sparse.mm(self.adjacency, inputs[:1])
        if not self.is_initialized:
            self.is_initialized = True
            self.scale.data.copy_(1 / (0.01 + inputs.std(0, correction=0)))
            self.codebook[:] = inputs[:1]
        self.calls += 1
        self.mean = self.mean * 0.9 + inputs.mean(0) * 0.1
        self.last = inputs
        return self.linear(inputs * self.scale)


def test_model_that_is_initialized_by_its_first_batch_is_not_by_the_trial():
    model = InitializedByData()
    state, buffer = copy.deepcopy(model.state_dict()), model.mean
    check_task(task_with(), model, make_loader(PAIRS), make_loader(PAIRS, train=False))
    now = {name: tensor.to_dense() for name, tensor in model.state_dict().items()}
    assert all(tensor.equal(state[name].to_dense()) for name, tensor in now.items())
    assert (model.is_initialized, model.calls) == (False, 0) and not hasattr(model, "last")
    assert model.training and not model.frozen.training and model.mean is buffer


def test_lazy_layers_get_their_shapes():
    """DistributedDataParallel needs them, and an optimizer does."""
    model = nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.Linear(5, 4))
    check_task(task_with(), model, make_loader(PAIRS))
    assert model.training and [type(layer) for layer in model[:2]] == [nn.Linear, nn.BatchNorm1d]
    assert model[0].in_features == 3 and model(torch.zeros(2, 3)).shape == (2, 4)


def test_models_that_need_two_samples_pass():
    model = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 4))
    check_task(task_with(), model, make_loader(PAIRS), make_loader(PAIRS, train=False))
    with pytest.raises(ValueError, match="a bug"):
        check_task(task_with(count=raise_bug), nn.Linear(3, 4), make_loader(PAIRS))


def raise_bug(targets):
    raise ValueError("a bug")


def test_outputs_may_be_of_any_class():
    class Gaussian(nn.Linear):
        def forward(self, inputs):
            return torch.distributions.Normal(super().forward(inputs)[:, 0], 1.0)

    task = task_with(
        loss=lambda outputs, targets: -outputs.log_prob(targets).sum(),
        measure=lambda outputs, targets: {"correct": (outputs.mean > targets).sum()},
    )
    check_task(task, Gaussian(3, 1), make_loader(PAIRS))


# Batches


def test_list_of_samples_is_no_pair():
    class Lists(list):
        def collate_fn(self, samples):
            return samples

    task = task_with(loss=lambda outputs, batch: outputs.sum(), measure=lambda *_: {})
    model = nn.Linear(3, 4)
    model.forward = lambda batch: torch.stack([inputs for inputs, _ in batch])
    with pytest.raises(UserError, match=r"collate_fn\(\) .*list.*tuple.*dict"):
        check_task(task, model, make_loader(Lists(PAIRS)))


def of_pairs(outputs, targets):
    """The loss of SigLIP: of all pairs in the batch."""
    signs = 2 * torch.eye(len(outputs)) - 1
    return -nn.functional.logsigmoid(signs * outputs.sum(1).outer(outputs.sum(1))).sum()


def test_loss_of_pairs_may_have_equal_logits_at_first(capsys):
    model = nn.Linear(3, 4)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    check_task(task_with(loss=of_pairs), model, make_loader(PAIRS))
    assert not model.weight.any() and not model.bias.any()
    assert "docs/recipes/contrastive-loss.md" in capsys.readouterr().err


def in_batch_negatives(outputs, targets):
    return cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)), reduction="sum")


@pytest.mark.parametrize(
    ("first", "loss"),
    [
        (nn.Identity(), in_batch_negatives),
        (nn.BatchNorm1d(3, track_running_stats=False), GOOD["loss"]),
    ],
    ids=["negatives", "statistics of a batch"],
)
def test_loss_that_couples_samples_is_a_warning(first, loss, capsys):
    model = nn.Sequential(first, nn.Linear(3, 4))
    nn.init.eye_(model[1].weight)
    check_task(task_with(loss=loss), model, make_loader(PAIRS))
    error = capsys.readouterr().err
    assert error.startswith("warning: ") and "docs/recipes/contrastive-loss.md" in error

    def on_purpose(outputs, targets):
        return loss(outputs, targets)

    on_purpose.compares_samples = True
    check_task(task_with(loss=on_purpose), model, make_loader(PAIRS))
    assert capsys.readouterr().err == ""


def test_random_numbers_in_the_model_couple_nothing(capsys):
    class Noisy(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs + torch.randn_like(inputs))

    for seed in range(20):  # for some, sums are the same by chance for a sample and for two
        torch.manual_seed(seed)
        check_task(task_with(), Noisy(3, 4), make_loader(PAIRS))
    assert capsys.readouterr().err == ""


def test_samples_that_cannot_be_combined_are_alone_in_their_batches():
    pairs = [(torch.ones(1 + i), i % 4) for i in range(8)]
    model = nn.Linear(1, 4)
    model.forward = lambda inputs: nn.functional.one_hot(inputs.long().sum(1), 4).float()
    check_task(task_with(), model, make_loader(pairs))


# Messages


def test_error_in_the_model_tells_its_inputs():
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        check_task(SimpleNamespace(**GOOD), nn.Linear(5, 4), make_loader(PAIRS))
    (note,) = caught.value.__notes__
    assert "inputs" in note and "float32 (1, 3)" in note


def test_model_without_parameters():
    with pytest.raises(UserError, match=r"build_model\(\) .* without parameters"):
        check_task(task_with(), nn.Flatten(), make_loader(PAIRS))


def test_name_of_the_task_is_that_of_its_module():
    task = make_task(lambda outputs, targets: outputs.mean())
    task.__name__ = "my_task"
    with pytest.raises(UserError, match=r"^loss\(\) .* my_task .* sum"):
        check_task(task, nn.Linear(3, 4), make_loader(PAIRS))
