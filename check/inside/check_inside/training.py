"""Observes models, backwards, optimizers, gradient scalers and clipping."""

import gc
import sys
import weakref

from check_inside import exact, limits, own
from check_inside.data import fingerprints, generator_states, note_noise, random_states
from check_inside.record import (
    PLAN,
    called_by_user,
    checksum,
    guarded,
    once_computed,
    passing_on,
    place,
    record,
    replace,
)
from check_inside.state import STATE

MOST_TENSORS = 3000  # of which single checksums are recorded
SMALL = 1_000_000  # elements of a gradient that is looked at before each backward
RESTARTS = PLAN["run"] in ("killed", "resumed")

MEAN_LOSSES = (
    "cross_entropy",
    "nll_loss",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "kl_div",
)


def install(name, torch):
    """Register PyTorch's global hooks, and replace the functions that have none."""
    import torch.nn.modules.module as modules
    import torch.nn.utils.clip_grad as clip_grad

    optimizers = sys.modules["torch.optim.optimizer"]
    replace(torch.nn.Module, "__call__", _observe_call)
    modules.register_module_forward_pre_hook(_before_forward)
    modules.register_module_forward_hook(_after_forward, always_call=True)
    optimizers.register_optimizer_step_pre_hook(_before_step)
    optimizers.register_optimizer_step_post_hook(_after_step)
    replace(torch.optim.Optimizer, "add_param_group", passing_on(after=_observe_parameters))
    replace(torch.optim.Optimizer, "zero_grad", _observe_zero_grad)
    torch.optim.lr_scheduler.LRScheduler.__new__ = _new_scheduler
    replace(torch.autograd, "backward", _observe_backward)
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        replacement = _observe_clip(getattr(clip_grad, name))
        for module in (clip_grad, torch.nn.utils):
            setattr(module, name, replacement)
    replace(torch.nn.functional, "batch_norm", passing_on(_count_batch_norm))
    for loss in MEAN_LOSSES:
        replace(torch.nn.functional, loss, _mark_mean)
    replace(torch.Tensor, "mean", _mark_mean_of_all)
    replace(torch, "mean", _mark_mean_of_all)
    for method in ("__add__", "__radd__", "__sub__"):
        replace(torch.Tensor, method, _pass_mark_on)
    replace(torch.optim.lr_scheduler.ReduceLROnPlateau, "step", _observe_plateau)
    for method in ("item", "tolist", "__float__", "__int__", "__bool__"):
        replace(torch.Tensor, method, _observe_sync)
    replace(torch.optim.swa_utils, "update_bn", _observe_update_bn)
    scaler = torch.amp.GradScaler
    replace(scaler, "scale", _observe_scale)
    replace(scaler, "unscale_", _observe_unscale)
    replace(scaler, "step", _observe_scaler_step)


# Models.


def _observe_call(original):
    """Hooks are not given the arguments that have names."""

    def __call__(self, *args, **kwargs):
        if STATE.depth == 0:
            STATE.keywords = kwargs
        return original(self, *args, **kwargs)

    return __call__


def _before_forward(module, inputs):
    STATE.depth += 1
    if STATE.depth == 1:
        _root_forward(module, inputs)


def _after_forward(module, inputs, outputs):
    STATE.depth = max(0, STATE.depth - 1)
    if STATE.depth == 0 and PLAN["run"] == "two":
        _record_outputs(outputs)
        if not module.training:
            _record_buffers(module)


@guarded
def _record_outputs(outputs):
    """What a model computes in the first step: each rank may have a part of the outputs."""
    if STATE.steps == 0 and STATE.forwards and "inputs" in STATE.forwards[-1]:
        STATE.forwards[-1]["outputs"] = fingerprints(outputs)


_evaluated = set()  # (model, number of the epoch)


@guarded
def _record_buffers(module):
    """The buffers with which a model evaluates, after a wrapper may have broadcast them."""
    import torch

    key = (id(module), STATE.training_epochs)
    if torch.is_grad_enabled() or key in _evaluated or id(module) not in STATE.models.numbers:
        return
    _evaluated.add(key)
    buffers = {name: checksum(b) for name, b in module.named_buffers() if b.is_floating_point()}
    if buffers and STATE.steps:
        record("buffers", model=STATE.models(module), buffers=buffers, place=place())


@guarded
def _root_forward(module, inputs):
    """A forward that the script calls itself: of the model, or of its wrapper."""
    import torch

    if next(module.parameters(), None) is None or STATE.calibrating:
        return
    if torch.jit.is_tracing() or torch.compiler.is_compiling():
        return  # what is observed would be part of the trace
    if id(module) not in STATE.models.numbers:
        for name, parameter in module.named_parameters():
            name = name.replace("_fsdp_wrapped_module.", "").replace("_orig_mod.", "")
            STATE.names.setdefault(id(parameter), name.removeprefix("module."))
    ordinal = STATE.models(module)
    parts = list(module.modules())
    norms = [part for part in parts if isinstance(part, torch.nn.modules.batchnorm._BatchNorm)]
    dropouts = [part for part in parts if isinstance(part, torch.nn.modules.dropout._DropoutNd)]
    inner = module  # Lightning changes the mode of what DistributedDataParallel wraps
    while isinstance(getattr(inner, "module", None), torch.nn.Module):
        inner = inner.module
    forward = {
        "model": ordinal,
        "type": type(module).__name__,
        "training": inner.training,
        "grad": torch.is_grad_enabled(),
        "dropout": sum(part.training and part.p > 0 for part in dropouts),
        "dropouts": sum(part.p > 0 for part in dropouts),
        "norm": sum(part.training and part.track_running_stats for part in norms),
        "norms": len(norms),
        "synced": sum(isinstance(part, torch.nn.SyncBatchNorm) for part in norms),
        "frozen_norm": sum(map(_is_frozen, norms)),
        "place": place(),
    }
    key = tuple(value for name, value in forward.items() if name != "place")
    if PLAN["run"] == "two" and STATE.steps < 3:
        forward["caller"] = place(_is_of_a_module)
    if not STATE.active and torch.is_grad_enabled():
        forward["rows"] = fingerprints((inputs, STATE.keywords))  # of a script that has no loader
    if hasattr(module, "require_backward_grad_sync"):
        forward["syncs"] = module.require_backward_grad_sync
    if RESTARTS and forward["grad"] and not any(other["grad"] for other in STATE.forwards):
        forward["buffers"] = {name: checksum(buffer) for name, buffer in module.named_buffers()}
    if (STATE.steps < 3 or RESTARTS) and torch.is_grad_enabled():
        if STATE.noise and len(STATE.noise) == 1:
            STATE.noise.append(generator_states())
        forward["inputs"] = fingerprints((inputs, STATE.keywords))
    STATE.forwards.append(forward)
    weights = id(next(module.parameters()))  # a wrapper has the weights of what it wraps
    if forward["grad"]:
        STATE.trained.add(weights)
    for epoch in STATE.active:
        epoch.forward(weights, key, forward)


def _is_of_a_module(frame):
    return hasattr(frame.f_locals.get("self"), "named_parameters")


def _is_frozen(norm):
    """Whether a BatchNorm learns statistics, and its weights have not changed since its first
    forward.

    The weights of a momentum encoder need no gradient either, but they follow another encoder's.
    """
    if not norm.training or not norm.track_running_stats:
        return False
    if norm.weight is None or norm.weight.requires_grad:
        return False
    weight = checksum(norm.weight)
    return STATE.frozen.setdefault(id(norm), weight) == weight


def _count_batch_norm(given):
    STATE.batch_norms += given.get("training", False)


def _observe_update_bn(original):
    def update_bn(*args, **kwargs):
        STATE.calibrating = True
        try:
            return original(*args, **kwargs)
        finally:
            STATE.calibrating = False

    return update_bn


# Losses and backwards.


def _mark_mean(original):
    def loss(*args, **kwargs):
        result = original(*args, **kwargs)
        if kwargs.get("reduction", "mean") == "mean":
            result._check_is_mean = True
        return result

    return loss


def _mark_mean_of_all(original):
    def mean(input, *args, **kwargs):
        result = original(input, *args, **kwargs)
        if not args and not kwargs and input.dim() and input.requires_grad:
            result._check_is_mean = True
        return result

    return mean


def _pass_mark_on(original):
    """A mean to which a penalty is added is still a mean. One that is multiplied may be a share."""

    def operation(self, other):
        result = original(self, other)
        is_marked = getattr(self, "_check_is_mean", False) or (
            getattr(other, "_check_is_mean", False) and original.__name__ != "__sub__"
        )
        if is_marked and isinstance(result, self.__class__):
            result._check_is_mean = True
        return result

    return operation


_stale = {}  # ordinal of an optimizer -> [(parameter, checksum of the gradient after its step)]
_accumulated = set()  # optimizers whose old gradients are there at a backward


def _observe_backward(original):
    def backward(tensors, *args, **kwargs):
        limits.before_backward()
        tensor = tensors[0] if isinstance(tensors, tuple | list) else tensors
        _find_accumulated()
        _find_first_backward()
        where = place()
        is_mean = getattr(tensor, "_check_is_mean", False)
        result = original(tensors, *args, **kwargs)
        _follow_accumulated()
        STATE.backwards_of_run += 1
        for epoch in STATE.active:
            epoch.backward(STATE.trained)
        STATE.backwards.append([where, is_mean])
        _remember_gradient()
        return result

    return backward


@guarded
def _find_accumulated():
    """Optimizers whose gradients of the last step are still there."""
    for optimizer, gradients in _stale.items():
        kept = [p.grad is not None and checksum(p.grad) == crc for p, crc in gradients]
        if gradients and all(kept):
            _accumulated.add(optimizer)
        else:
            _accumulated.discard(optimizer)


@guarded
def _follow_accumulated():
    for optimizer in _accumulated:  # the next backward of this step adds to the sum of these
        kept = [p for p, _ in _stale[optimizer] if p.grad is not None]
        _stale[optimizer] = [(p, checksum(p.grad)) for p in kept]


_last_gradient = None


@guarded
def _remember_gradient():
    """The checksums of a gradient after a backward, to notice that it is changed before the step,
    or added to, and of its parameter."""
    global _last_gradient
    for parameter in STATE.parameters:
        if parameter.grad is not None and parameter.numel() < SMALL:
            _last_gradient = (parameter, checksum(parameter.grad), _weights(parameter))
            return


def _weights(parameter):
    """The shape and the checksum of a parameter. FSDP's older class also changes the shape."""
    return tuple(parameter.shape), checksum(parameter)


@guarded
def _find_first_backward():
    """Whether this backward adds to a gradient of this step, and to one of other weights."""
    if _last_gradient is None:
        return
    parameter, gradient, weights = _last_gradient
    if parameter.grad is None or checksum(parameter.grad) != gradient:
        STATE.first_backward = len(STATE.backwards)
    elif _weights(parameter) != weights and tuple(parameter.shape) == weights[0]:
        STATE.moved = place()


def _observe_zero_grad(original):
    def zero_grad(self, *args, **kwargs):
        ordinal = STATE.optimizers(self)
        _stale.pop(ordinal, None)
        _accumulated.discard(ordinal)
        return original(self, *args, **kwargs)

    return zero_grad


# Optimizers.


def _observe_parameters(given, result):
    for parameter in given["self"].param_groups[-1]["params"]:
        if id(parameter) not in STATE.parameter_ids:
            STATE.parameter_ids.add(id(parameter))
            STATE.parameters.append(parameter)
            if PLAN["run"] == "two" and parameter.requires_grad:
                own.observe(parameter)


_step_depth = 0


def _before_step(optimizer, args, kwargs):
    global _step_depth
    _step_depth += 1
    if _is_initialization():
        return None
    if _step_depth > 1:  # of an optimizer in an optimizer, such as ZeRO's, which has the state
        record("inner_step", step=STATE.steps, state=_state_checksum(optimizer))
        return None
    return once_computed(args, kwargs, lambda: _record_step(optimizer))


@guarded
def _record_step(optimizer):
    ordinal = STATE.optimizers(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [None if p.grad is None else checksum(p.grad) for p in parameters[:MOST_TENSORS]]
    rescaled = _last_gradient is not None and (
        _last_gradient[0].grad is None or checksum(_last_gradient[0].grad) != _last_gradient[1]
    )
    trained = {id(p) for model in STATE.models.objects for p in model.parameters()}
    record(
        "step",
        step=STATE.steps,
        optimizer=ordinal,
        type=type(optimizer).__name__,
        rates=[float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
        settings=[_settings(group) for group in optimizer.param_groups],
        schedulers=_schedulers(),
        parameters=[checksum(p) for p in STATE.parameters[:MOST_TENSORS]],
        gradients=gradients,
        names=[STATE.names.get(id(p)) for p in parameters[:MOST_TENSORS]]
        if STATE.steps < 2
        else [],
        all_names=[STATE.names.get(id(p)) for p in STATE.parameters[:MOST_TENSORS]]
        if STATE.steps < 2
        else [],
        rounded=_rounded() if STATE.steps == 0 else None,
        zero=not any(_has_gradient(p) for p in parameters),
        sharded=any(_is_sharded(p) for p in parameters),
        state=_state_checksum(optimizer),
        scaler=_scaler_state(),
        backwards=STATE.backwards,
        added=len(STATE.backwards) - STATE.first_backward,
        moved=STATE.moved,
        batches=STATE.batches,
        forwards=STATE.forwards[:50],
        syncs=list(STATE.syncs.values()),
        batch_norms=STATE.batch_norms,
        clips=STATE.clips,
        rescaled=rescaled and not STATE.clips and not STATE.is_scaled,
        accumulated=ordinal in _accumulated,
        unwrapped=_unwrapped(parameters),
        skipped=own.skipped(parameters),
        strangers=sum(id(p) not in trained for p in parameters) if trained else 0,
        size=len(parameters),
        noise=STATE.noise,
        others=_others() if RESTARTS else [],
        sums=_sums(parameters) if RESTARTS else None,
        drew=STATE.random_states != random_states() if RESTARTS else None,
        place=place(),
    )
    exact.gradients_of(ordinal, parameters)
    own.write(ordinal, parameters, _scaler_state())


def _after_step(optimizer, args, kwargs):
    global _step_depth
    _step_depth = max(0, _step_depth - 1)
    if _step_depth or _is_initialization():
        return
    _remember_gradients(optimizer)
    STATE.steps += 1
    _start_step()
    limits.after_step()


@guarded
def _remember_gradients(optimizer):
    """What is still there at the next backward is added to."""
    small = [
        p
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None and p.numel() < SMALL and bool(p.grad.detach().abs().sum() > 0)
    ]
    ordinal = STATE.optimizers(optimizer)
    _stale[ordinal] = [(p, checksum(p.grad)) for p in small[:3]]
    _accumulated.discard(ordinal)


def _unwrapped(parameters):
    """The positions of parameters with a gradient that no DistributedDataParallel holds, where
    there is one."""
    if not STATE.wrapped or STATE.steps > 2:
        return []
    return [
        i for i, p in enumerate(parameters) if p.grad is not None and id(p) not in STATE.wrapped
    ]


def _others():
    """[id, checksum] of tensors with the shape of a parameter that are not parameters, gradients,
    or states of an optimizer: an average of the weights, or a second model, is among them."""
    import torch

    shapes = {tuple(p.shape) for p in STATE.parameters}
    states = (s for o in STATE.optimizers.objects for s in o.state.values() if isinstance(s, dict))
    known = [x for s in states for x in s.values() if isinstance(x, torch.Tensor)]
    known += [p.grad for p in STATE.parameters if p.grad is not None] + STATE.parameters
    if any(x.layout != torch.strided or hasattr(x, "to_local") for x in known):
        return []
    pointers = {x.data_ptr() for x in known}
    kinds = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    tensors = [thing for thing in gc.get_objects() if type(thing) in kinds and thing.is_leaf]
    pointers |= {x.grad.data_ptr() for x in tensors if x.grad is not None and not x.grad.is_sparse}
    tensors = [
        x
        for x in tensors
        if x.is_floating_point() and x.layout == torch.strided and tuple(x.shape) in shapes
    ]
    found = [x for x in tensors if x.device.type == "cpu" and x.data_ptr() not in pointers]
    return [[id(x), checksum(x)] for x in found[:MOST_TENSORS]]


def _sums(parameters):
    """[a projection, the norm] of the gradients, and the same of the parameters, for a comparison
    with another run of the same step."""
    import torch

    sums = []
    for tensors in ([p.grad for p in parameters if p.grad is not None], parameters):
        total, square = 0.0, 0.0
        for number, tensor in enumerate(tensors):
            tensor = tensor.detach()
            tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            tensor = tensor.to_dense() if tensor.is_sparse else tensor
            flat = tensor.reshape(-1)[: SMALL // 10].double()
            weights = torch.arange(len(flat), dtype=torch.float64).add(number).cos()
            total += float(flat @ weights)
            square += float(flat @ flat)
        sums.append([total, square**0.5])
    return sums


def _start_step():
    global _last_gradient
    _last_gradient = None
    STATE.backwards = []
    STATE.first_backward = 0
    STATE.moved = None
    STATE.batches = {}
    STATE.forwards = []
    STATE.syncs = {}
    STATE.clips = []
    STATE.batch_norms = 0
    note_noise()


def _is_initialization():
    """Whether PyTorch takes a step with a rate of 0, so that there is a state to load into."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            return True
        frame = frame.f_back
    return False


def _rounded():
    """The lower precision in which all parameters could be stored without a loss, or None."""
    import torch

    parameters = [p.detach() for p in STATE.parameters if p.dtype == torch.float32]
    parameters = [p.to_local() if hasattr(p, "to_local") else p for p in parameters]
    for dtype in (torch.float16, torch.bfloat16):
        if parameters and all(torch.equal(p.to(dtype).float(), p) for p in parameters):
            return str(dtype).removeprefix("torch.")
    return None


def _has_gradient(parameter):
    gradient = parameter.grad
    if hasattr(gradient, "to_local"):
        gradient = gradient.to_local()
    return gradient is not None and bool(gradient.detach().any())


def _is_sharded(parameter):
    if id(parameter) in STATE.flat:
        return True
    placements = getattr(parameter, "placements", ())
    return any(placement.is_shard() for placement in placements)


def _settings(group):
    """What else than the rate a group of parameters holds: momentum, or what an optimizer counts
    there. Schedules write there what they have been given."""
    skipped = ("params", "lr", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")
    found = {}
    for name, value in group.items():
        values = list(value) if isinstance(value, tuple | list) else [value]
        if name not in skipped and all(isinstance(x, bool | int | float) for x in values):
            found[name] = [float(x) for x in values]
    return found


def _observe_plateau(original):
    def step(self, metrics, *args, **kwargs):
        _record_metric(metrics)
        return original(self, metrics, *args, **kwargs)

    return step


@guarded
def _record_metric(metrics):
    record("plateau", value=float(metrics), place=place())


def _new_scheduler(kind, *args, **kwargs):
    """Record each new schedule here: not all call the __init__ of their base."""
    scheduler = object.__new__(kind)
    STATE.schedulers.append(weakref.ref(scheduler))
    return scheduler


def _schedulers():
    """[type, number of the epoch or step that it has come to] of each schedule."""
    alive = filter(None, (reference() for reference in STATE.schedulers))
    return [[type(s).__name__, getattr(s, "last_epoch", None)] for s in alive]


def _state_checksum(optimizer):
    """[number of tensors and numbers, their checksum] of the state of the optimizer."""
    import torch

    count = crc = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            values = optimizer.state.get(parameter) or {}  # None in a ZeroRedundancyOptimizer
            for key in sorted(values, key=str):
                if isinstance(values[key], torch.Tensor):
                    count += 1
                    crc = checksum(values[key], crc)
    return [count, crc]


# Gradient scalers and clipping.


def _scaler_state():
    scaler = STATE.scaler
    if scaler is None or not scaler.is_enabled():
        return None
    return [float(scaler.get_scale()), int(scaler._get_growth_tracker())]


def _observe_scale(original):
    def scale(self, outputs):
        STATE.scaler = self
        result = original(self, outputs)
        if self.is_enabled():
            STATE.is_scaled = True
            if getattr(outputs, "_check_is_mean", False):
                result._check_is_mean = True
        return result

    return scale


def _observe_unscale(original):
    def unscale_(self, optimizer):
        STATE.is_scaled = False
        return original(self, optimizer)

    return unscale_


def _observe_scaler_step(original):
    def step(self, optimizer, *args, **kwargs):
        record("scaler_step", clips=STATE.clips)
        STATE.is_scaled = False
        before = STATE.steps
        result = original(self, optimizer, *args, **kwargs)
        if STATE.steps == before:  # an overflow: what was counted belongs to no step
            _start_step()
        return result

    return step


def _observe_clip(original):
    def clip(*args, **kwargs):
        record("clip", place=place())
        STATE.clips.append({"scaled": STATE.is_scaled, "place": place()})
        return exact.clip(original, *args, **kwargs)

    return clip


# Reads of tensors by the host.


def _observe_sync(original):
    def read(self):
        on_cpu = getattr(self, "_check_on_cpu", False)
        if called_by_user() and not STATE.fetching and STATE.active and not on_cpu:
            where = place()
            entry = STATE.syncs.setdefault(str(where), [where, original.__name__, 0])
            entry[2] += 1
        return original(self)

    return read
