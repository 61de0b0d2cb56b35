"""Writes the tensors of the first steps, for check/diff to compare them with another run.

The file step-S-rank-R.pt of PLAN["diff"] holds what one rank had in step S, by the names that the
model gives to modules and parameters. Tensors that are divided among ranks are gathered.
"""

import os
import random
import sys
import warnings
from pathlib import Path

from check_inside.record import PLAN, checksum, once_computed, passing_on, rank, replace
from check_inside.state import STATE

MOST_ELEMENTS = 50_000_000  # of the outputs of modules, in each step
WRAPPERS = (
    "module.",
    "_fsdp_wrapped_module.",
    "_orig_mod.",
    "_checkpoint_wrapped_module.",
    "_forward_module.",
)
WRAPPER_TYPES = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")
LOW = ("float32", "float16", "bfloat16")
FOLDER = PLAN.get("diff")
_roots = []  # models whose forward the script calls, wrappers left out
_names = None  # a WeakIdKeyDictionary: module or parameter -> its name
_parts = {}  # what the script calls, such as the stages of a model -> a number
_running = []  # the states of the generator before the forwards that are running
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

    global _save, _names
    _save = torch.save  # not yet observed
    _names = torch.utils.weak.WeakIdKeyDictionary()
    if PLAN["dtype"] == "float64":
        _compute_in_float64(torch)
    if PLAN["seed"] is not None:
        _seed(torch)
    if PLAN["no_shuffle"]:
        _read_in_order(torch)
    _start_step()
    modules.register_module_forward_pre_hook(_before_forward)
    modules.register_module_forward_hook(_after_forward, with_kwargs=True, always_call=True)
    optimizers = sys.modules["torch.optim.optimizer"]
    optimizers.register_optimizer_step_pre_hook(_before_step)
    optimizers.register_optimizer_step_post_hook(_after_step)
    replace(torch.autograd, "backward", _observe_backward)
    replace(torch.optim.Optimizer, "zero_grad", _observe_zero_grad)
    replace(torch.nn.Module, "zero_grad", _observe_zero_grad)
    for function in ("clip_grads_with_norm_", "clip_grad_norm_", "clip_grad_value_"):
        replacement = _observe_clip(getattr(torch.nn.utils, function))
        for module in (clip_grad, torch.nn.utils):
            setattr(module, function, replacement)


def _compute_in_float64(torch):
    """What asks for a lower precision gets float64, in which rounding is far below any mistake."""
    from torch.overrides import TorchFunctionMode

    low = {getattr(torch, name) for name in LOW}
    casts = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)
    of_bytes = (
        torch.frombuffer,
        torch.from_file,
        torch.Tensor.view,
    )  # the dtype says what is there
    loading = []

    def double(value):
        return torch.float64 if isinstance(value, torch.dtype) and value in low else value

    class Float64(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if loading or function in of_bytes:
                return function(*args, **kwargs or {})
            if function in casts:
                return args[0].double()
            kwargs = {name: double(value) for name, value in (kwargs or {}).items()}
            return function(*map(double, args), **kwargs)

    def observe_load(original):
        def load(*args, **kwargs):
            loading.append(True)
            try:
                return original(*args, **kwargs)
            finally:
                loading.pop()

        return load

    def observe_default(original):
        def set_default_dtype(d):  # a model may be made in bfloat16
            return original(double(d))

        return set_default_dtype

    def observe_engine(original):
        def run_backward(*args, **kwargs):  # outside of the mode, which loss.backward() has left
            with Float64():
                return original(*args, **kwargs)

        return run_backward

    replace(torch, "load", observe_load)
    replace(torch, "set_default_dtype", observe_default)
    replace(torch.autograd, "_engine_run_backward", observe_engine)
    torch.set_default_dtype(torch.float64)
    Float64().__enter__()
    replace(torch.amp.autocast, "__init__", passing_on(lambda given: given.update(enabled=False)))
    scaler = torch.amp.GradScaler.__init__

    def no_scaling(self, *args, **kwargs):
        scaler(self, *args, **kwargs)
        self._enabled = False

    torch.amp.GradScaler.__init__ = no_scaling


def _seed(torch):
    """Seed what the script may not seed."""
    random.seed(PLAN["seed"])
    torch.manual_seed(PLAN["seed"])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(PLAN["seed"])


def _read_in_order(torch):
    """Samplers that shuffle, each in its own way, give the samples in the order of the dataset."""

    def in_order(original):
        def __iter__(self):
            count = len(self.data_source)
            return iter([number % count for number in range(self.num_samples)])

        return __iter__

    def unshuffled(original):
        def __iter__(self):
            self.shuffle = False
            return original(self)

        return __iter__

    replace(torch.utils.data.RandomSampler, "__iter__", in_order)
    replace(torch.utils.data.DistributedSampler, "__iter__", unshuffled)


# Forward passes.


def _before_forward(module, inputs):
    import torch

    if _is_no_forward(torch):
        return None
    if not _running and next(module.parameters(), None) is None:
        return None  # a transform, or a loss
    if not _running:
        _start_forward(module)
    _running.append(checksum(torch.get_rng_state()))
    first = next(module.parameters(), None) if len(_running) == 1 else None
    if PLAN["dtype"] != "float64" or first is None or first.dtype != torch.float64:
        return None
    return torch.utils._pytree.tree_map_only(torch.Tensor, _as_double, inputs)


def _as_double(tensor):
    return tensor.double() if tensor.is_floating_point() else tensor


def _start_forward(module):
    while type(module).__name__ in WRAPPER_TYPES:
        module = module.module
    number = _number_of(module)
    prefix = f"model {number + 1}: " if number else ""
    for name, part in _roots[number].named_modules():
        if type(part).__name__ not in WRAPPER_TYPES:
            _names[part] = prefix + plain(name)
        for parameter_name, parameter in part.named_parameters(recurse=False):
            own = f"{name}.{parameter_name}" if name else parameter_name
            _names[parameter] = prefix + plain(own)
    part = _parts.setdefault(module, len(_parts))
    forward = {
        "model": number,
        "part": part,
        "rows": None,
        "tokens": None,
        "outputs": {},
        "draws": {},
    }
    _step["forwards"].append(forward | {"used": False})


def _number_of(module):
    """The number of a model. What has no other parameters is a part of it, or wraps it; the
    innermost one that has all of them gives them their names."""
    parameters = {*map(id, module.parameters())}
    for number, root in enumerate(_roots):
        known = {*map(id, root.parameters())}
        if root is module:
            return number
        if parameters and known and (parameters <= known or parameters > known):
            if parameters > known or (parameters == known and module in root.modules()):
                _roots[number] = module
            return number
    _roots.append(module)
    return len(_roots) - 1


def plain(name):
    """A name without the names of wrappers."""
    for wrapper in WRAPPERS:
        name = name.replace(f".{wrapper}", ".").removeprefix(wrapper)
        name = "" if name == wrapper[:-1] else name.removesuffix(f".{wrapper[:-1]}")
    return name


def _is_no_forward(torch):
    """Whether a module is called by a compiler, or by a backward pass: activation checkpointing."""
    is_backward = torch._C._current_graph_task_id() != -1
    return is_backward or torch.compiler.is_compiling() or torch.jit.is_tracing()


def _after_forward(module, args, kwargs, outputs=None):  # PyTorch passes no kwargs after an error
    import torch

    if _is_no_forward(torch) or not _running:
        return
    state = _running.pop()
    if not torch.is_grad_enabled():
        if not _running:
            _step["forwards"].pop()  # of an evaluation
        return
    forward = _step["forwards"][-1]
    if not _running:
        forward["rows"], forward["tokens"] = _rows((args, kwargs))
    if module not in _names:
        return  # a wrapper, or made while the model runs
    name = _names[module]
    if checksum(torch.get_rng_state()) != state:
        forward["draws"].setdefault(name, state)
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
    """A checksum of each row of the inputs of a model, by which rows are matched; and the inputs
    themselves if they may be tokens, which are padded to different lengths on different ranks."""
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
    is_text = leaves and leaves[0].dim() == 2 and leaves[0].dtype in (torch.int64, torch.int32)
    return rows, _copy(leaves[0]) if is_text else None


# Losses, gradients, and steps.


def _observe_backward(original):
    running = []

    def backward(tensors, grad_tensors=None, *args, **kwargs):
        tensor = tensors[0] if isinstance(tensors, tuple | list) else tensors
        given = grad_tensors if isinstance(grad_tensors, tuple | list) else [grad_tensors]
        is_loss = tensor.numel() == 1 and all(gradient is None for gradient in given)
        if is_loss and not running:  # the original calls itself in the mode that computes float64
            scale = STATE.scaler.get_scale() if STATE.is_scaled else 1.0
            _step["losses"].append(float(tensor.detach()) / scale)
        for forward in _step["forwards"]:
            forward["used"] = True
        running.append(True)
        try:
            return original(tensors, grad_tensors, *args, **kwargs)
        finally:
            running.pop()

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
            name = _names.get(parameter)
            if name is not None and parameter.grad is not None:
                _step["unclipped"].setdefault(name, _whole(parameter.grad))
        result = original(listed, *args, **kwargs)
        # The norm is what one function returns, and what another is given.
        norm = result if result is not None else (args[1:] or [kwargs.get("total_norm")])[0]
        if hasattr(norm, "numel") and (norm := float(_whole(norm))) not in _step["norms"]:
            _step["norms"].append(norm)
        return result

    return clip


def _before_step(optimizer, args, kwargs):
    global _depth
    _depth += 1
    if _depth > 1 or _count >= PLAN["most_steps"]:
        return None
    _step["is_stage"] = STATE.is_stage
    if not _count:
        _step["loaded"] = _state_of(optimizer)

    def note():  # LBFGS then calls its closure with the weights of a next step
        _note_gradients(optimizer)
        _step["first"] = {name: [*_step[name]] for name in ("forwards", "losses", "norms")}

    return once_computed(args, kwargs, note)


def _note_gradients(optimizer):
    for name, parameter in _named(optimizer):
        gradient = parameter.grad
        _step["gradients"][name] = None if gradient is None else _whole(gradient)
        _step["before"][name] = _whole(parameter)
    for group in optimizer.param_groups:
        _step["settings"].append(dict(_settings(group)))


def _settings(group):
    """The numbers of a group of parameters: each of betas, and whether it is nesterov, too."""
    for key, value in group.items():
        values = value if isinstance(value, tuple | list) else [value]
        if all(isinstance(x, bool | int | float) for x in values):
            for number, x in enumerate(values):
                yield (key if values is not value else f"{key}[{number}]"), float(x)


def _after_step(optimizer, args, kwargs):
    global _depth, _count
    _depth = max(0, _depth - 1)
    if _depth or _count >= PLAN["most_steps"]:
        return

    _step.update(_step.pop("first", {}))
    for name, parameter in _named(optimizer):
        _step["after"][name] = _whole(parameter)
    _step["state"] = _state_of(optimizer)
    seen = set()
    for number, model in enumerate(_roots):
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


def _state_of(optimizer):
    """{name of a parameter and a tensor of its state: the tensor}."""
    import torch

    return {
        f"{name} ({key})": _whole(value)
        for name, parameter in _named(optimizer)
        for key, value in (optimizer.state.get(parameter) or {}).items()
        if isinstance(value, torch.Tensor)
    }


def _start_step():
    _step.clear()
    lists = ("forwards", "losses", "norms", "settings")
    dicts = ("unclipped", "gradients", "before", "after", "state", "buffers")
    _step.update({name: [] for name in lists} | {name: {} for name in dicts})
    _step.update(elements=0, left_out=0)


def _named(optimizer):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(parameters):
        yield _names.get(parameter, f"parameter {number}"), parameter


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _whole(tensor):
    """A copy of all of a tensor. All ranks call this in the same order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _copy(tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor)


def _copy(tensor):
    import torch

    tensor = tensor.detach().to_dense() if tensor.layout == torch.sparse_coo else tensor.detach()
    return tensor.to("cpu", copy=True).contiguous()
