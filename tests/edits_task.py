"""A tiny task for tests of edited loops: BatchNorm, dropout by sample, a random transform, and
objects that edits of the loop bring along."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from utils.config import Config as Settings  # noqa: F401
from utils.data import describe_datasets as describe  # noqa: F401
from utils.sample_random import convert_dropout

BEST = ("accuracy", max)


class Points(Dataset):
    """(a point with noise, its class)."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.points = torch.randn(count, 6, generator=generator)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        point = self.points[index]
        return point + 0.1 * torch.randn(6), int(point.sum() > 0)


def build_datasets(cfg):
    return Points(64, 0), Points(17, 1)


def build_model(cfg, train_set):
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))
    return convert_dropout(model)


def blocks(model):
    return [model[0]]


def loss(outputs, targets):
    return cross_entropy(outputs, targets, reduction="sum")


def count(targets):
    return len(targets)


def measure(outputs, targets):
    return {"correct": (outputs.argmax(1) == targets).sum()}


def summarize(sums):
    return {"loss": sums["loss"] / sums["count"], "accuracy": sums["correct"] / sums["count"]}


class Coarse(torch.optim.Optimizer):
    """Momentum in bfloat16, and a counter in uint8 for each element."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p, dtype=torch.bfloat16)
                    state["steps"] = torch.zeros_like(p, dtype=torch.uint8)
                state["momentum"].mul_(0.9).add_(p.grad)
                state["steps"].add_(1)
                p.sub_(group["lr"] * (state["momentum"] + state["steps"] / 100))


class Warmth:
    """A hook of an optimizer that shrinks each step's rate, with a state of its own."""

    steps = 0

    def __call__(self, optimizer, *_):
        self.steps += 1
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / self.steps

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def shifted(module, inputs, outputs):
    """A forward hook."""
    return outputs * 1.5
