"""Makes datasets shorter (--limit-data), by what len() says.

All that PyTorch and scripts derive from it agrees then, on all ranks: samplers and their shares,
random splits, the number of steps. The samples stay: an index beyond the length still works.
"""

import functools
import itertools

from check_inside.record import PLAN, replace

LIMIT = PLAN["limit_data"]
_whole = False  # len() is the real one


def install(name, torch):
    """Replace __len__ of all map-style datasets, those that are defined later included."""
    if not LIMIT:
        return
    base = torch.utils.data.Dataset

    def __init_subclass__(cls, **kwargs):
        super(base, cls).__init_subclass__(**kwargs)
        _limit(cls)

    base.__init_subclass__ = classmethod(__init_subclass__)
    classes = [base]
    for cls in classes:  # which grows meanwhile
        classes += cls.__subclasses__()
        _limit(cls)
    split = _make_split(torch.utils.data.random_split)
    for module in (torch.utils.data, torch.utils.data.dataset):
        module.random_split = split


def _limit(cls):
    """Replace __len__ of a class, unless that is done or its samples have no index."""
    from torch.utils.data import IterableDataset

    length = getattr(cls, "__len__", None)
    if length is None or issubclass(cls, IterableDataset) or hasattr(length, "_check_limits"):
        return

    def make(original):
        @functools.wraps(original)
        def __len__(self):
            count = original(self)
            return count if _whole else min(count, LIMIT)

        __len__._check_limits = True
        return __len__

    replace(cls, "__len__", make)


def _make_split(original):
    """Lengths that were given as numbers add up to the real length."""

    @functools.wraps(original)
    def random_split(dataset, lengths, *args, **kwargs):
        count, whole = len(dataset), whole_length(dataset)
        if count != whole == sum(lengths):
            ends = [end * count // whole for end in itertools.accumulate(lengths)]
            lengths = [end - start for start, end in itertools.pairwise([0, *ends])]
        return original(dataset, lengths, *args, **kwargs)

    return random_split


def whole_length(dataset):
    """The real length of a dataset."""
    global _whole
    _whole = True
    try:
        return len(dataset)
    finally:
        _whole = False


def why_not_limited(epoch):
    """Why the samples of an epoch are more than the limit, or None."""
    dataset, drawn = epoch.dataset, len(epoch.drawn)
    if not LIMIT or (drawn <= LIMIT and not epoch.is_iterable):
        return None
    name = type(dataset).__name__
    if not hasattr(getattr(type(dataset), "__len__", None), "_check_limits"):
        return f"a {name} is not a map-style torch.utils.data.Dataset"
    return f"the sampler of a {name} yields {drawn} indices, whatever len() of the dataset is"
