"""The order of the samples in scripts that run as one process. Needs only torch."""

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler


class EpochSampler(Sampler[int]):
    """A RandomSampler whose order depends only on (seed, epoch).

    It has the permutation of DistributedSampler, so that one process and many train on the same
    global batches (https://docs.pytorch.org/docs/stable/data.html).
    """

    def __init__(self, dataset: Sized, seed: int) -> None:
        self.dataset, self.seed, self.epoch = dataset, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(torch.randperm(len(self.dataset), generator=generator).tolist())
