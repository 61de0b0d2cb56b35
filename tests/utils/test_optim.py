"""The optimizer, and the learning rate of every step."""

import importlib

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.processes import run_ranks
from utils.config import Config
from utils.errors import UserError
from utils.optim import build_optimizer, build_scheduler
from utils.options.step_log import full_tensor
from utils.rungs.tensor_parallel import update_by_mesh


def rates(epochs=2, **options):
    """The learning rates of epochs of 4 steps."""
    cfg = Config(epochs=epochs, lr=1.0, **options)
    optimizer = build_optimizer(torch.nn.Linear(1, 1), cfg)
    scheduler = build_scheduler(optimizer, cfg, steps_per_epoch=4)
    found = []
    for _ in range(4 * epochs):
        found.append(round(optimizer.param_groups[0]["lr"], 3))
        optimizer.step()
        scheduler.step()
    return found


def test_learning_rate_of_every_step():
    assert rates(lr_schedule="constant", warmup_epochs=0) == [1.0] * 8
    assert rates(lr_schedule="constant") == [0.25, 0.5, 0.75, *[1.0] * 5]
    assert rates(lr_schedule="linear") == [0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25]
    assert rates(lr_schedule="cosine") == [0.25, 0.5, 0.75, 1, 1, 0.854, 0.5, 0.146]
    steps = rates(epochs=3, lr_schedule="step", warmup_epochs=0.5)
    assert steps == [0.5, 1, 1, 1, *[0.1] * 4, *[0.01] * 4]
    assert rates(lr_schedule="cosine", warmup_epochs=5)[-1] == 0.4  # all epochs warm up


def test_learning_rate_is_a_function_of_the_step():
    cfg = Config(epochs=2, lr=1.0)
    schedulers = []
    for _ in range(2):
        optimizer = build_optimizer(torch.nn.Linear(1, 1), cfg)
        schedulers.append(build_scheduler(optimizer, cfg, steps_per_epoch=4))
    for _ in range(5):
        schedulers[0].optimizer.step()
        schedulers[0].step()
    schedulers[1].load_state_dict(schedulers[0].state_dict())
    for scheduler in schedulers:
        scheduler.optimizer.step()
        scheduler.step()
    assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr() == [pytest.approx(0.5)]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_optimizer_of_mixed_tensors_steps_on_cuda(optimizer, monkeypatch):
    """Where foreach is the default. With tensor parallelism, one optimizer has both kinds."""
    module = importlib.import_module("torch.optim.optimizer")  # torch.optim deletes the name
    monkeypatch.setattr(module, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])

    def body(rank):
        mesh = init_device_mesh("cpu", (1,))
        model = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
        parallelize_module(model[0], mesh, ColwiseParallel())
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        built = build_optimizer(model, Config(optimizer=optimizer))
        update_by_mesh(built)
        built.step()
        assert len(built.param_groups) == 1
        after = model.parameters()
        pairs = zip(map(full_tensor, after), map(full_tensor, before), strict=True)
        return [bool((a != b).any()) for a, b in pairs]

    assert run_ranks(body, 1) == [[True] * 4]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_optimizer_of_complex_parameters_steps(optimizer):
    """For which no fused kernel exists."""
    weight = torch.nn.Parameter(torch.tensor([1 + 2j]))
    model = torch.nn.ParameterList([weight, torch.nn.Parameter(torch.ones(2))])
    built = build_optimizer(model, Config(optimizer=optimizer, lr=0.1))
    for _ in range(2):
        built.zero_grad()
        (weight - 3j).abs().square().sum().backward()
        built.step()
    assert weight.real.item() < 0.99 and weight.imag.item() > 2.01


@pytest.mark.parametrize("layer", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_layers_with_sparse_gradients_are_refused(layer):
    """Fused SGD, DDP's first pass and FSDP fail with messages that do not name them."""
    build_optimizer(torch.nn.ModuleDict({"words": layer(5, 2)}), Config())
    with pytest.raises(UserError, match=r"words .*sparse=False"):
        build_optimizer(torch.nn.ModuleDict({"words": layer(5, 2, sparse=True)}), Config())


def test_schedule_resumes_at_the_same_place_with_other_steps_and_another_peak():
    """As a run does that had 4 steps per epoch and now has 2, or 8."""

    def make(lr, steps_per_epoch):
        cfg = Config(epochs=4, lr=lr)
        optimizer = build_optimizer(torch.nn.Linear(1, 1), cfg)
        return build_scheduler(optimizer, cfg, steps_per_epoch)

    saved = make(1.0, 4)
    for _ in range(8):  # two epochs
        saved.optimizer.step()
        saved.step()
    for lr, steps_per_epoch in ((1.0, 4), (0.5, 4), (1.0, 2), (0.25, 8), (0.0, 4)):
        straight, resumed = make(lr, steps_per_epoch), make(lr, steps_per_epoch)
        for _ in range(2 * steps_per_epoch):
            straight.optimizer.step()
            straight.step()
        resumed.load_state_dict(saved.state_dict())
        for _ in range(2 * steps_per_epoch):
            now, expected = (s.optimizer.param_groups[0]["lr"] for s in (resumed, straight))
            assert now == expected and (lr == 0) == (now == 0)
            for scheduler in (straight, resumed):
                scheduler.optimizer.step()
                scheduler.step()
            assert resumed.get_last_lr() == straight.get_last_lr()


@pytest.mark.parametrize(
    ("name", "kind", "nesterov"),
    [
        ("sgd", torch.optim.SGD, False),
        ("sgd_nesterov", torch.optim.SGD, True),
        ("adam", torch.optim.Adam, None),
        ("adamw", torch.optim.AdamW, None),
    ],
)
def test_optimizer_is_pytorchs_with_the_settings(name, kind, nesterov):
    cfg = Config(optimizer=name, lr=0.01, weight_decay=0.3, momentum=0.8)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    model[0].requires_grad_(False)
    optimizer = build_optimizer(model, cfg)
    group = optimizer.param_groups[0]
    assert type(optimizer) is kind and group["params"] == [*model[1].parameters()]
    assert group["fused"] and group["weight_decay"] == 0.3
    options = {"lr": 0.01, "weight_decay": 0.3}
    options |= {} if nesterov is None else {"momentum": 0.8, "nesterov": nesterov}
    weights = [p.detach().clone().requires_grad_() for p in group["params"]]
    plain = kind(weights, **options)
    for _ in range(3):
        for parameter, weight in zip(group["params"], weights, strict=True):
            parameter.grad = torch.ones_like(parameter)
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        plain.step()
    for parameter, weight in zip(group["params"], weights, strict=True):
        torch.testing.assert_close(parameter, weight)


def test_sgd_without_momentum_has_no_state():
    optimizer = build_optimizer(torch.nn.Linear(2, 2), Config(momentum=0.0))
    assert not optimizer.state


def test_skipped_first_step_leaves_clean_momentum():
    """Fused SGD under a GradScaler would step with uninitialized memory (torch 2.15)."""

    def train(optimizer, model):
        scaler = torch.amp.GradScaler("cpu")
        for factor in (float("inf"), 1.0, 1.0):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(4, 999)).sum() * factor).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**15  # halved once
        return model.weight.detach()

    models = [torch.nn.Linear(999, 9) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    plain = torch.optim.SGD(models[1].parameters(), lr=0.1, momentum=0.9)
    expected = train(plain, models[1])
    cfg = Config(lr=0.1, weight_decay=0.0)
    torch.testing.assert_close(train(build_optimizer(models[0], cfg), models[0]), expected)
