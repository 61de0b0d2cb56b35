"""The optimizer, and the learning rate of every step."""

import pytest
import torch
from torch import nn

from utils.config import Config
from utils.optim import build_optimizer, build_scheduler

KINDS = [
    ("sgd", torch.optim.SGD, {"momentum": 0.8}),
    ("sgd_nesterov", torch.optim.SGD, {"momentum": 0.8, "nesterov": True}),
    ("adam", torch.optim.Adam, {}),
    ("adamw", torch.optim.AdamW, {}),
]


@pytest.mark.parametrize(("name", "kind", "options"), KINDS, ids=[name for name, _, _ in KINDS])
def test_optimizer_is_pytorchs_with_the_settings(name, kind, options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 1))
    weights = [parameter.detach().clone() for parameter in model[1].parameters()]
    plain = kind([w.requires_grad_() for w in weights], lr=0.01, weight_decay=0.3, **options)
    cfg = Config(optimizer=name, lr=0.01, weight_decay=0.3, momentum=0.8)
    optimizer = build_optimizer(model, cfg)
    assert type(optimizer) is kind and optimizer.param_groups[0]["fused"]
    for _ in range(3):
        for parameter, weight in zip(model[1].parameters(), weights, strict=True):
            parameter.grad, weight.grad = torch.ones_like(weight), torch.ones_like(weight)
        optimizer.step()
        plain.step()
    assert optimizer.param_groups[0]["params"] == [*model[1].parameters()]
    for parameter, weight in zip(model[1].parameters(), weights, strict=True):
        torch.testing.assert_close(parameter, weight)


def test_sgd_without_momentum_has_no_state():
    for name in ("sgd", "sgd_nesterov"):
        optimizer = build_optimizer(nn.Linear(2, 2), Config(optimizer=name, momentum=0.0))
        assert not optimizer.state


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_optimizer_of_complex_parameters_steps(name):
    model = nn.ParameterList([torch.tensor([1 + 2j]), torch.ones(2)])
    optimizer = build_optimizer(model, Config(optimizer=name, lr=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        (model[0] - 3j).abs().square().sum().backward()
        optimizer.step()
    assert model[0].real.item() < 0.99 and model[0].imag.item() > 2.01


def test_skipped_first_step_leaves_clean_momentum():
    """Fused SGD under a GradScaler would step with uninitialized memory (torch 2.15)."""

    def train(optimizer, model):
        scaler = torch.amp.GradScaler("cpu")
        for factor in (float("inf"), 1.0, 1.0):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(4, 999)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**15  # halved once
        return model.weight.detach()

    ours, theirs = nn.Linear(999, 9), nn.Linear(999, 9)
    theirs.load_state_dict(ours.state_dict())
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    optimizer = build_optimizer(ours, Config(lr=0.1, weight_decay=0.0))
    torch.testing.assert_close(train(optimizer, ours), train(plain, theirs))


# The schedule


def make(steps_per_epoch=4, **settings):
    cfg = Config(**settings)
    return build_scheduler(build_optimizer(nn.Linear(1, 1), cfg), cfg, steps_per_epoch)


def rates(scheduler, steps):
    """The learning rate of each of the next steps."""
    found = []
    for _ in range(steps):
        found.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lr_schedule": "constant", "warmup_epochs": 0}, [1.0] * 8),
        ({"lr_schedule": "linear"}, [0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25]),
        ({"lr_schedule": "cosine"}, [0.25, 0.5, 0.75, 1, 1, 0.854, 0.5, 0.146]),
        (
            {"lr_schedule": "step", "warmup_epochs": 0.5, "epochs": 3},
            [0.5, 1, 1, 1, *[0.1] * 4, *[0.01] * 4],
        ),
    ],
    ids=str,
)
def test_learning_rate_of_every_step(settings, expected):
    scheduler = make(**{"epochs": 2, "lr": 1.0} | settings)
    assert rates(scheduler, len(expected)) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("lr", "steps"), [(0.5, 4), (1.0, 2), (0.0, 4)])
def test_schedule_resumes_at_the_same_place(lr, steps):
    """Also with a different peak, or a different number of steps per epoch."""
    saved = make(4, epochs=4, lr=1.0)
    rates(saved, 8)  # two epochs
    straight, resumed = make(steps, epochs=4, lr=lr), make(steps, epochs=4, lr=lr)
    rates(straight, 2 * steps)
    resumed.load_state_dict(saved.state_dict())
    assert rates(resumed, 2 * steps) == rates(straight, 2 * steps)
    assert resumed.get_last_lr() == straight.get_last_lr()
