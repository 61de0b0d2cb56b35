"""lab.bench.epochs with an option of DistributedDataParallel that the scripts leave off.

    python -m lab.bench.batched OUT SCRIPT FLAGS ...

With batched_grad_copy, one kernel copies the gradients of a bucket, instead of one each. On a CPU,
this is slower: 125 instead of 107 ms per step of ResNet-50. What a GPU gains is not known yet.
"""

from functools import partialmethod
from inspect import signature

from torch.nn.parallel import DistributedDataParallel

from lab.bench import epochs


def is_available():
    """Whether this version of torch has the option: 2.11 does not."""
    return "batched_grad_copy" in signature(DistributedDataParallel).parameters


def main():
    wrap = DistributedDataParallel.__init__
    DistributedDataParallel.__init__ = partialmethod(wrap, batched_grad_copy=True)
    epochs.main()


if __name__ == "__main__":
    main()
