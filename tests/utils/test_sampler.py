"""EpochSampler: the order of one process is that of many."""

import torch
from torch.utils.data import DistributedSampler

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
        state = torch.get_rng_state()
        assert list(one) == together
        assert torch.equal(torch.get_rng_state(), state)
        assert sorted(one) == list(dataset) and len(one) == 40
        assert all(type(index) is int for index in one)
