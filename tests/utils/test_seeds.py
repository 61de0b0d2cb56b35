"""Seeds: the same numbers everywhere, from nothing but settings and positions."""

import random

import numpy
import pytest
import torch

from utils import seeds
from utils.seeds import SampleSeeds, derive_seed, seed_step, set_seed, start_batch

# The first two are half of the first outputs of SplitMix64 for the seeds 0 and 1, as published.
GOLDEN = {
    (0,): 16294208416658607535 // 2,
    (1,): 10451216379200822465 // 2,
    (0, 0): 6017775124710473527,
    (0, 1): 1534736266818221247,
    (1, 0): 3395948882924712079,
    (3, 2, 1): 7716143592125757362,
    (2**32 - 1, 5, 2**40): 4292958386952880906,
}


def draws():
    """One number of each generator of the CPU."""
    return torch.rand(()).item(), random.random(), numpy.random.rand()


def states():
    numbers = numpy.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), numbers[1].tolist(), numbers[2]


def assert_all_differ(found):
    """In each of the generators."""
    for generator in zip(*found, strict=True):
        assert len(set(generator)) == len(found)


# derive_seed()


def test_mix_never_changes():
    """Or resumed runs and published results would: augmentation and synthetic images use it."""
    assert {numbers: derive_seed(*numbers) for numbers in GOLDEN} == GOLDEN


# The generators


def test_run_is_seeded():
    found = []
    for seed in (0, 1, 2**32 - 1, 0):
        set_seed(seed)
        found.append(draws())
    assert found.pop() == found[0]
    assert_all_differ(found)


def test_sample_is_seeded_by_seed_epoch_and_index():
    found = []
    for seed, epoch, index in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**32 - 1, 9, 10**9)):
        with SampleSeeds(seed, epoch) as samples:
            for _ in range(2):
                draws()
                samples.seed(index)
                found.append(draws())
        assert found.pop() == found[-1]
    assert_all_differ(found)


def test_generators_are_restored_after_the_samples():
    before = states()
    with pytest.raises(ValueError, match="a bug"), SampleSeeds(0, 0) as samples:
        samples.seed(4)
        draws()
        raise ValueError("a bug")
    assert states() == before


def test_step_is_seeded_by_seed_epoch_step_and_rank():
    found = []
    for numbers in ((0, 0, 0, 0), (0, 1, 0, 0), (1, 0, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)):
        for _ in range(2):
            seed_step(*numbers)
            found.append(draws())
        assert found.pop() == found[-1]
    assert_all_differ(found)


def test_step_seeds_an_accelerator_once_it_is_used(monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    seed_step(0, 0, 0, 0)
    assert seeded == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    seed_step(0, 0, 0, 0)
    seed_step(0, 0, 1, 0)
    assert len(set(seeded)) == 2


def test_batches_are_announced(monkeypatch):
    heard = []
    monkeypatch.setattr(seeds, "on_batch", [lambda *facts: heard.append(facts)])
    start_batch(3, 2, [7])
    set_seed(5)
    assert heard == [(3, 2, [7]), (5, 0, None)]
