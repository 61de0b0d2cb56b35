"""EpochSampler: the order of one process is that of many."""

import torch
from torch.utils.data import DataLoader, DistributedSampler

from utils.sampler import EpochSampler


def test_order_is_that_of_distributed_sampler():
    dataset = range(40)
    for seed, epoch in ((0, 0), (0, 3), (5, 1)):
        one = EpochSampler(dataset, seed)
        one.set_epoch(epoch)
        ranks = [DistributedSampler(dataset, 4, rank, seed=seed) for rank in range(4)]
        for sampler in ranks:
            sampler.set_epoch(epoch)
        together = [index for group in zip(*ranks, strict=True) for index in group]
        assert list(one) == together
        assert sorted(one) == list(dataset) and len(one) == 40


def test_order_depends_on_seed_and_epoch_alone():
    sampler = EpochSampler(range(100), seed=1)
    first = list(sampler)
    state = torch.get_rng_state()
    assert list(sampler) == first
    assert torch.equal(torch.get_rng_state(), state)
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert list(EpochSampler(range(100), seed=2)) == list(sampler)  # as DistributedSampler: the sum
    assert all(type(index) is int for index in first)


def test_sampler_works_with_a_data_loader():
    sampler = EpochSampler(range(10), seed=0)
    batches = list(DataLoader(range(10), batch_size=4, sampler=sampler))
    assert torch.cat(batches).tolist() == list(sampler)
