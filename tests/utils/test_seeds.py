"""Seeds: the same numbers everywhere, from nothing but settings and positions."""

import random
from itertools import permutations, product

import numpy
import pytest
import torch

from utils.seeds import SampleSeeds, derive_seed, seed_step, set_seed

# The first two are half of the first outputs of SplitMix64 for the seeds 0 and 1, as published.
GOLDEN = {
    (0,): 16294208416658607535 // 2,
    (1,): 10451216379200822465 // 2,
    (0, 0): 6017775124710473527,
    (0, 1): 1534736266818221247,
    (1, 0): 3395948882924712079,
    (1, 2, 3): 3851293329796251419,
    (3, 2, 1): 7716143592125757362,
    (2**32 - 1, 5, 2**40): 4292958386952880906,
}


def draws():
    """One number of each generator of the CPU."""
    return torch.rand(()).item(), random.random(), numpy.random.rand()


def states():
    kind, *numbers = numpy.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), kind, [str(n) for n in numbers]


# derive_seed()


def test_mix_never_changes():
    """Or resumed runs and published results would: augmentation and synthetic images use it."""
    assert {numbers: derive_seed(*numbers) for numbers in GOLDEN} == GOLDEN


def test_mix_differs_for_permuted_and_neighboring_numbers():
    for numbers in ((1, 2, 3), (0, 1, 7), (3, 100, 10**6)):
        assert len({derive_seed(*permuted) for permuted in permutations(numbers)}) == 6
    found = [derive_seed(*numbers) for numbers in product(range(20), repeat=3)]
    found += [derive_seed(*numbers) for numbers in product(range(20), repeat=2)]
    assert len(set(found)) == 20**3 + 20**2
    assert all(0 <= seed < 2**63 for seed in found)
    for bit in range(63):  # each is one in about half of the seeds
        ones = sum(seed >> bit & 1 for seed in found)
        assert 0.45 < ones / len(found) < 0.55


def test_neighboring_samples_draw_unrelated_numbers():
    with SampleSeeds(seed=0, epoch=0) as seeds:
        found = []
        for index in range(500):
            seeds.seed(index)
            found.append(draws())
    numbers = numpy.array(found).T
    assert all(len(set(row)) == 500 for row in numbers.tolist())
    assert all(abs(row.mean() - 0.5) < 0.05 for row in numbers)
    following = [numpy.corrcoef(row[:-1], row[1:])[0, 1] for row in numbers]
    assert max(map(abs, following)) < 0.2


# The generators


def test_set_seed_seeds_all_generators():
    found = []
    for seed in (0, 1, 0, 2**32 - 1):
        set_seed(seed)
        found.append(draws())
    assert found[0] == found[2] and len(set(found)) == 3


def test_sample_is_seeded_by_seed_epoch_and_index():
    found = {}
    for numbers in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**32 - 1, 9, 10**9)):
        with SampleSeeds(*numbers[:2]) as seeds:
            draws()  # of what came before
            seeds.seed(numbers[2])
            found[numbers] = draws()
            seeds.seed(numbers[2] + 5)
            seeds.seed(numbers[2])
            assert draws() == found[numbers]
    for generator in zip(*found.values(), strict=True):
        assert len(set(generator)) == len(found)


def test_generators_are_restored_after_the_samples():
    set_seed(3)
    before = states()
    with SampleSeeds(0, 0) as seeds:
        seeds.seed(4)
        draws()
    assert states() == before
    with pytest.raises(ValueError, match="a bug"), SampleSeeds(0, 0) as seeds:
        seeds.seed(4)
        raise ValueError("a bug")
    assert states() == before


def test_step_has_random_numbers_by_seed_epoch_step_and_rank():
    found = []
    for numbers in ((0, 0, 0, 0), (0, 1, 0, 0), (1, 0, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)):
        seed_step(*numbers)
        found.append(draws())
        seed_step(*numbers)
        assert draws() == found[-1]
    assert all(len(set(generator)) == 5 for generator in zip(*found, strict=True))


def test_step_seeds_cuda_once_it_is_used(monkeypatch):
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    seed_step(0, 0, 0, 0)
    assert seeds == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    seed_step(0, 0, 0, 0)
    seed_step(0, 0, 1, 0)
    assert len(set(seeds)) == 2
