"""sources/reading.py: samples without seeds, and batches that loader processes pass on."""

import random

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from sources.reading import SmallSamples, passed_on
from utils.data import fetch_samples
from utils.errors import UserError

DRAWS = {
    "torch": lambda: torch.rand(()).item(),
    "random": random.random,
    "numpy": numpy.random.rand,
    "initial_seed": lambda: torch.initial_seed() % 999,
}


class Numbers(SmallSamples):
    """index, and a random number of the samples from `first` on."""

    def __init__(self, draw=None, first=0):
        self.draw, self.first, self.reads = draw, first, 0

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.reads += 1
        drawn = self.draw() if self.draw and index >= self.first else 0.0
        return torch.tensor([index, drawn], dtype=torch.float64)


def batches(dataset):
    return [dataset.get_batch(indices, 3, 5) for indices in torch.arange(40).split(8)]


@pytest.mark.parametrize(
    ("name", "first"),
    [("torch", 0), ("torch", 20), ("random", 20), ("numpy", 20), ("initial_seed", 0)],
)
def test_random_samples_get_their_seeds(name, first):
    """Also if the first ones are not random."""
    made = batches(Numbers(DRAWS[name], first))
    plain = Numbers(DRAWS[name], first)
    for batch, indices in zip(made, torch.arange(40).split(8), strict=True):
        assert torch.equal(batch, fetch_samples(plain, indices, 3, 5))


def test_other_samples_are_read_without_seeds(monkeypatch):
    dataset = Numbers()
    state = torch.get_rng_state()
    first, *_ = batches(dataset)
    assert first.tolist() == [[index, 0] for index in range(8)]
    assert dataset.reads == 48  # the first batch twice
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr("sources.reading.fetch_samples", None)
    dataset.get_batch(torch.arange(8), 4, 5)


def unpicklable(_):
    return passed_on(number for number in ())


def test_loader_process_passes_batches_on():
    """Of any size and dtype; what cannot be pickled is named."""
    sent = [
        torch.arange(6).view(2, 3).T,
        {"x": (torch.ones(2, dtype=torch.bfloat16),)},
        torch.arange(10**5),
        torch.ones(2, dtype=torch.complex64).conj() * 1j,
    ]
    loader = DataLoader(sent, batch_size=None, collate_fn=passed_on, num_workers=1)
    torch.testing.assert_close(list(loader), sent, rtol=0, atol=0)
    assert passed_on(sent[2]) is sent[2]  # in the process of the rank
    loader = DataLoader([0], batch_size=None, collate_fn=unpicklable, num_workers=1)
    with pytest.raises(UserError, match="collate_fn"):
        list(loader)
