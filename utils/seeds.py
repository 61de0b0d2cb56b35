"""Seeds of random numbers that depend on nothing but settings and positions. Needs only torch."""

import random
from collections.abc import Callable
from typing import Any, Self

import numpy
import torch
from torch import Tensor

_MASK = 2**64 - 1
on_batch: list[Callable[[int, int, Tensor | None], None]] = []  # called by start_batch()
on_check: list[Callable[[Any], None]] = []  # called by check_task(), with a Loader


def set_seed(seed: int) -> None:
    """Seed Python's, NumPy's and PyTorch's generators, on all devices, before the first batch."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    for listener in on_batch:  # a run before this one, in a notebook, may have left its last batch
        listener(seed, 0, None)


def derive_seed(*numbers: int) -> int:
    """A seed below 2**63, the same in every process and version of Python.

    The mixing function is SplitMix64's (Steele et al. 2014, doi 10.1145/2714064.2660195).
    """
    seed = 0
    for number in numbers:
        seed = (seed + number + 0x9E3779B97F4A7C15) & _MASK
        seed = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        seed = (seed ^ seed >> 27) * 0x94D049BB133111EB & _MASK
        seed ^= seed >> 31
    return seed >> 1


def start_batch(seed: int, epoch: int, indices: Tensor) -> None:
    """Tell whoever draws random numbers by sample (utils/sample_random.py) which samples follow.
    indices: int64 (n,), on the CPU or the device."""
    for listener in on_batch:
        listener(seed, epoch, indices)


def seed_step(seed: int, epoch: int, step: int, rank: int) -> None:
    """Seed the random numbers in the model (dropout): different on each rank and in each step, but
    the same in a run that resumes within an epoch."""
    mixed = derive_seed(seed, epoch, step, rank)
    _seed_cpu(mixed)
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        module = torch.get_device_module(accelerator)  # torch.cuda, for example
        if module.is_initialized():
            module.manual_seed_all(mixed)


def _seed_cpu(mixed):
    torch.default_generator.manual_seed(mixed)  # torch.manual_seed checks for CUDA: 50 times slower
    random.seed(mixed)
    numpy.random.seed(mixed % 2**32)


class SampleSeeds:
    """A context in which seed(index) seeds all generators of the CPU for one sample, so that random
    transforms depend only on (seed, epoch, index). The generators are restored at the end."""

    def __init__(self, seed: int, epoch: int) -> None:
        self.numbers = seed, epoch

    def __enter__(self) -> Self:
        self.states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
        return self

    def seed(self, index: int) -> None:
        """Seed torch, random and numpy for the sample with this index."""
        _seed_cpu(derive_seed(*self.numbers, index))

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self.states[0])
        random.setstate(self.states[1])
        numpy.random.set_state(self.states[2])
