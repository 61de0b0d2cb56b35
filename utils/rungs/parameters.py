"""What refers to the parameters of a model that is about to get new ones."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torch import nn

from utils.errors import UserError


@contextmanager
def replacing_parameters(model: nn.Module) -> Iterator[None]:
    """A context in which fully_shard() and parallelize_module() give a model new parameters. These
    get the attributes of the old ones.

    Raises UserError for what would stay with an old one, and so have no effect: a hook, a list that
    holds it, or a second name in the model.
    """
    old = _old_parameters(model)
    try:
        yield
    except TypeError as error:  # of torch 2.14, for a module in two blocks
        _refuse_tied([names for names, *_ in old if len(names) > 1], error)
        raise
    gc.collect()
    _replace(old, dict(model.named_parameters(remove_duplicate=False)))


def _old_parameters(model):
    """[(all names of a parameter, a weak reference to it, its attributes)]"""
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise UserError(
                f"{name} has a hook, which would not act on the ranks' parts of it: change "
                f"gradients after loss.backward()"
            )
    return [(names[p], weakref.ref(p), dict(vars(p))) for p in names]


def _refuse_tied(tied, cause=None):
    if tied:
        names = "; ".join(" and ".join(names) for names in tied)
        raise UserError(f"{names}: divide one parameter in one block, or in none") from cause


def _replace(old_parameters, new):
    for names, reference, attributes in old_parameters:
        if len({new[name] for name in names}) > 1:
            _refuse_tied([names])
        old, parameter = reference(), new[names[0]]
        vars(parameter).update(attributes | vars(parameter))
        if old is None or old is parameter:
            continue
        # A variable of a running function, such as of a loop over all parameters, does no harm.
        holders = [h for h in gc.get_referrers(old) if not isinstance(h, FrameType)]
        if holders:
            raise UserError(
                f"a {type(holders[0]).__name__} holds {names[0]}, which the ranks divide: take it "
                f"from the model whenever it is used"
            )
