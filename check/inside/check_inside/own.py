"""Keeps the gradients that a rank has computed itself, before the ranks average them.

Their mean is what a step should be made with, whatever the step draws at random.
"""

from check_inside.record import PLAN, guarded, record, write_numbers
from check_inside.state import STATE

STEPS = 2  # of each optimizer, that are compared
LOOKED_AT = 16  # steps
ELEMENTS = 100_000  # of all gradients; of more, every k-th one is compared

_sums = {}  # id of a parameter -> the sum of its gradients since the last step
_written = {}  # optimizer -> steps
_reached = set()  # ids of parameters to which a backward has come since the last step


def observe(parameter):
    """Add up the gradients of a parameter as backwards compute them."""

    def add(gradient):
        _reached.add(id(parameter))
        if STATE.steps < 2 * STEPS:
            _add(id(parameter), gradient)

    parameter.register_hook(add)


@guarded
def _add(key, gradient):
    part = _part(gradient)
    _sums[key] = part if key not in _sums else _sums[key] + part


def _part(gradient):
    gradient = gradient.detach()
    if hasattr(gradient, "to_local"):
        gradient = gradient.to_local()
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    total = sum(p.numel() for p in STATE.parameters)
    return gradient.reshape(-1)[:: 1 + total // ELEMENTS].double().clone()


def skipped(parameters):
    """The positions of parameters that have a gradient, but none of this rank's own backwards:
    other ranks have computed it."""
    found = []
    if PLAN["run"] == "two" and STATE.steps < LOOKED_AT:
        found = [
            i for i, p in enumerate(parameters) if p.grad is not None and id(p) not in _reached
        ]
    _reached.difference_update(map(id, parameters))
    return found


@guarded
def write(optimizer, parameters, scaler):
    """Write the gradients of a step, and those that this rank has computed for it."""
    import torch

    count = _written.get(optimizer, 0)
    is_complete = all(p.grad is None or id(p) in _sums for p in parameters)
    if PLAN["run"] != "two" or count >= STEPS or not torch.distributed.is_initialized():
        _sums.clear()
        return
    _written[optimizer] = count + 1
    trained = [p for p in parameters if p.grad is not None]
    if is_complete and trained and not any(hasattr(p, "to_local") for p in trained):
        scale = scaler[0] if scaler else 1.0
        ours = torch.cat([_sums[id(p)] for p in trained]) / scale
        step = torch.cat([_part(p.grad) for p in trained])
        name = f"own-{optimizer}-{count}"
        file = f"{name}-rank{torch.distributed.get_rank()}"
        write_numbers(file, torch.cat([ours, step]))
        record("own_gradients", step=STATE.steps, name=name, file=file)
    for parameter in parameters:
        _sums.pop(id(parameter), None)
