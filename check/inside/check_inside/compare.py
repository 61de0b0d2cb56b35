"""For check/diff: writes the tensors of the first steps, for a comparison with another run.

The file step-S-rank-R.pt of PLAN["diff"] holds what one rank had in step S, by the names that the
model gives to modules and parameters. Tensors that are divided among ranks are gathered.
"""

import os
import sys
import warnings
from pathlib import Path

from check_inside.record import PLAN, checksum, rank, replace
from check_inside.state import STATE

MOST_ELEMENTS = 50_000_000  # of the outputs of modules, in each step
WRAPPERS = ("module.", "_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")
WRAPPER_TYPES = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")
LOW = ("float32", "float16", "bfloat16")
FOLDER = PLAN.get("diff")
_roots = {}  # id of a model whose forward the script calls -> (its number, itself)
_names = {}  # id of a module or a parameter -> its name
_running = []  # the names of the modules whose forward is running
_step = {}
_save = None
_count = 0
_depth = 0  # of steps of optimizers within steps


def install(name, torch):
    """Observe the first steps. The observer of `training`, which may end the run, comes later."""
    if not FOLDER:
        return
    import torch.nn.modules.module as modules
    import torch.nn.utils.clip_grad as clip_grad

    global _save
    _save = torch.save  # not yet observed
    if PLAN["dtype"] == "float64":
        _compute_in_float64(torch)
    _start_step()
    modules.register_module_forward_pre_hook(_before_forward)
    modules.register_module_forward_hook(_after_forward, with_kwargs=True, always_call=True)
    optimizers = sys.modules["torch.optim.optimizer"]
    optimizers.register_optimizer_step_pre_hook(_before_step)
    optimizers.register_optimizer_step_post_hook(_after_step)
    replace(torch.autograd, "backward", _observe_backward)
    replace(torch.optim.Optimizer, "zero_grad", _observe_zero_grad)
    replace(torch.nn.Module, "zero_grad", _observe_zero_grad)
    for function in ("clip_grad_norm_", "clip_grad_value_"):
        replacement = _observe_clip(getattr(clip_grad, function))
        for module in (clip_grad, torch.nn.utils):
            setattr(module, function, replacement)


def _compute_in_float64(torch):
    """What asks for a lower precision gets float64, in which rounding is far below any mistake."""
    from torch.overrides import TorchFunctionMode

    low = {getattr(torch, name) for name in LOW}
    casts = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)

    def double(value):
        return torch.float64 if isinstance(value, torch.dtype) and value in low else value

    class Float64(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function in casts:
                return args[0].double()
            kwargs = {name: double(value) for name, value in (kwargs or {}).items()}
            return function(*map(double, args), **kwargs)

    torch.set_default_dtype(torch.float64)
    Float64().__enter__()
    autocast = torch.amp.autocast_mode.autocast.__init__

    def no_autocast(self, *args, **kwargs):
        autocast(self, *args, **kwargs | {"enabled": False})

    torch.amp.autocast_mode.autocast.__init__ = no_autocast
    scaler = torch.amp.GradScaler.__init__

    def no_scaling(self, *args, **kwargs):
        scaler(self, *args, **kwargs)
        self._enabled = False

    torch.amp.GradScaler.__init__ = no_scaling


# Forward passes.


def _before_forward(module, inputs):
    import torch

    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    if not _running:
        _start_forward(module)
    _running.append(_names.get(id(module), type(module).__name__))
    first = next(module.parameters(), None) if len(_running) == 1 else None
    if PLAN["dtype"] != "float64" or first is None or first.dtype != torch.float64:
        return None
    return torch.utils._pytree.tree_map_only(torch.Tensor, _as_double, inputs)


def _as_double(tensor):
    return tensor.double() if tensor.is_floating_point() else tensor


def _start_forward(module):
    inner = module
    while type(inner).__name__ in WRAPPER_TYPES:
        inner = inner.module
    number, _ = _roots.setdefault(id(inner), (len(_roots), inner))
    prefix = f"model {number + 1}: " if number else ""
    for name, part in module.named_modules():
        _names.setdefault(id(part), prefix + plain(name))
        for parameter_name, parameter in part.named_parameters(recurse=False):
            own = f"{name}.{parameter_name}" if name else parameter_name
            _names.setdefault(id(parameter), prefix + plain(own))
    forward = {"model": number, "rows": None, "outputs": {}, "used": False}
    _step["forwards"].append(forward)


def plain(name):
    """A name without those of wrappers."""
    for wrapper in WRAPPERS:
        name = name.replace(f".{wrapper}", ".").removeprefix(wrapper)
        name = "" if name == wrapper[:-1] else name.removesuffix(f".{wrapper[:-1]}")
    return name


def _after_forward(module, args, kwargs, outputs):
    import torch

    if torch.compiler.is_compiling() or torch.jit.is_tracing() or not _running:
        return
    name = _running.pop()
    if not torch.is_grad_enabled():
        if not _running:
            _step["forwards"].pop()  # of an evaluation
        return
    forward = _step["forwards"][-1]
    if not _running:
        forward["rows"] = _rows((args, kwargs))
    leaves = torch.utils._pytree.tree_leaves(outputs)
    for number, tensor in enumerate(x for x in leaves if isinstance(x, torch.Tensor)):
        if tensor.is_floating_point() and not tensor.is_meta:
            _step["elements"] += tensor.numel()
            if _step["elements"] > MOST_ELEMENTS:
                _step["left_out"] += 1
                continue
            key = name, type(module).__name__, number
            forward["outputs"].setdefault(key, []).append(_whole(tensor))


def _rows(inputs):
    """A checksum of each row of the inputs of a model, by which rows are matched."""
    import torch

    leaves = [
        _local(x)
        for x in torch.utils._pytree.tree_leaves(inputs)
        if isinstance(x, torch.Tensor) and x.dim()
    ]
    rows = [0] * (len(leaves[0]) if leaves else 0)
    for leaf in leaves:
        if len(leaf) == len(rows):
            rows = [checksum(leaf[i], crc) for i, crc in enumerate(rows)]
    return rows


# Losses, gradients, and steps.


def _observe_backward(original):
    def backward(tensors, grad_tensors=None, *args, **kwargs):
        tensor = tensors[0] if isinstance(tensors, tuple | list) else tensors
        given = grad_tensors if isinstance(grad_tensors, tuple | list) else [grad_tensors]
        if tensor.numel() == 1 and all(gradient is None for gradient in given):
            _step["losses"].append(float(tensor.detach()))
        for forward in _step["forwards"]:
            forward["used"] = True
        return original(tensors, grad_tensors, *args, **kwargs)

    return backward


def _observe_zero_grad(original):
    def zero_grad(self, *args, **kwargs):
        """What has gone backward until now is not part of the step."""
        _step["losses"].clear()
        _step["forwards"] = [forward for forward in _step["forwards"] if not forward["used"]]
        return original(self, *args, **kwargs)

    return zero_grad


def _observe_clip(original):
    def clip(parameters, *args, **kwargs):
        listed = [parameters] if hasattr(parameters, "grad") else list(parameters)
        for parameter in listed:
            name = _names.get(id(parameter))
            if name is not None and parameter.grad is not None:
                _step["unclipped"].setdefault(name, _whole(parameter.grad))
        norm = original(listed, *args, **kwargs)
        if hasattr(norm, "numel"):
            _step["norms"].append(float(_whole(norm)))
        return norm

    return clip


def _before_step(optimizer, args, kwargs):
    global _depth
    _depth += 1
    if _depth > 1 or _count >= PLAN["most_steps"]:
        return
    _step["is_stage"] = STATE.is_stage
    for name, parameter in _named(optimizer):
        gradient = parameter.grad
        _step["gradients"][name] = None if gradient is None else _whole(gradient)
        _step["before"][name] = _whole(parameter)
    for group in optimizer.param_groups:
        settings = {
            key: value
            for key, value in group.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        _step["settings"].append(settings)


def _after_step(optimizer, args, kwargs):
    global _depth, _count
    _depth = max(0, _depth - 1)
    if _depth or _count >= PLAN["most_steps"]:
        return
    import torch

    for name, parameter in _named(optimizer):
        _step["after"][name] = _whole(parameter)
        for key, value in (optimizer.state.get(parameter) or {}).items():
            if isinstance(value, torch.Tensor):
                _step["state"][f"{name} ({key})"] = _whole(value)
    seen = set()
    for number, model in _roots.values():
        prefix = f"model {number + 1}: " if number else ""
        for name, buffer in model.named_buffers():
            if id(buffer) not in seen:
                seen.add(id(buffer))
                _step["buffers"][prefix + plain(name)] = _whole(buffer)
    path = Path(FOLDER) / f"step-{_count}-rank-{rank() or 0}.pt"
    _save(_step, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)
    _count += 1
    _start_step()


def _start_step():
    _step.clear()
    lists = ("forwards", "losses", "norms", "settings")
    dicts = ("unclipped", "gradients", "before", "after", "state", "buffers")
    _step.update({name: [] for name in lists} | {name: {} for name in dicts})
    _step.update(elements=0, left_out=0)


def _named(optimizer):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(parameters):
        yield _names.get(id(parameter), f"parameter {number}"), parameter


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _whole(tensor):
    """A copy of all of a tensor. All ranks call this in the same order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _copy(tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor)


def _copy(tensor):
    return tensor.detach().to("cpu", copy=True).contiguous()
