"""Lets a script that is written for CUDA run on a CPU: "cuda" is the CPU, and "nccl" is gloo.

Nothing of this is active with --device cpu, for a script's own CPU path, or with --device cuda.
"""

import collections
import contextlib
import linecache
import sys
import time
import types
import weakref

from check_inside.record import PLAN, called_by_user, passing_on, replace
from check_inside.state import STATE

_current = 0
_is_used = False  # the script has asked for a GPU
TYPES = ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")


def install(name, torch):
    """Map devices in the functions that take one, and answer for a GPU per process."""
    # A compiler would take longer than everything else, for the same numbers.
    torch.compile = _no_compile
    torch.nn.Module.compile = lambda self, *args, **kwargs: None
    if PLAN["device"] != "mapped":
        return
    _map_tensors(torch)
    _map_attributes(torch)
    _map_types(torch)
    _map_generators(torch)
    _map_profiler(torch)
    _map_cuda(torch)
    _map_accelerator(torch)
    _map_mesh(torch)
    _map_amp(torch)
    _map_batch_norm(torch)


def _map_batch_norm(torch):
    """SyncBatchNorm refuses a CPU; the statistics of this rank's samples take its place."""
    ddp = torch.nn.parallel.DistributedDataParallel
    ddp._passing_sync_batchnorm_handle = lambda self, module: None
    torch.nn.SyncBatchNorm.forward = torch.nn.modules.batchnorm._BatchNorm.forward


def _no_compile(model=None, **options):
    return (lambda model: model) if model is None else model


def _device(device):
    """The CPU in place of a CUDA device; anything else as it is."""
    global _is_used
    kind = device.split(":")[0] if isinstance(device, str) else getattr(device, "type", None)
    if kind != "cuda":
        return device
    _is_used = True
    return "cpu"


def _map_tensors(torch):
    from torch.utils._device import DeviceContext, _device_constructors

    def make(original):
        def function(*args, **kwargs):
            if "device" in kwargs:
                kwargs["device"] = _device_or_index(kwargs["device"])
            kwargs.pop("pin_memory", None)
            return original(*args, **kwargs)

        return function

    def make_constructor(original):
        mapped = make(original)

        def function(*args, **kwargs):
            tensor = mapped(*args, **kwargs)
            # Reading it makes no GPU wait. Operations do not pass this on.
            tensor._check_on_cpu = kwargs.get("device") is None
            return tensor

        return function

    for function in _device_constructors():
        if getattr(torch, function.__name__, None) is function:
            replace(torch, function.__name__, make_constructor)
    for function in (
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "rand_like",
        "randn_like",
        "randint_like",
    ):
        replace(torch, function, make)
    tensor = torch.Tensor
    for method in ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"):
        replace(tensor, method, make)

    def make_to(original):
        def to(self, *args, **kwargs):
            if args and not isinstance(args[0], torch.Tensor | torch.dtype):
                args = (_device_or_index(args[0]), *args[1:])
            if "device" in kwargs:
                kwargs["device"] = _device_or_index(kwargs["device"])
            result = original(self, *args, **kwargs)
            if isinstance(result, torch.Tensor):
                result._check_on_cpu = False
            return result

        return to

    for owner in (tensor, torch.nn.Module, torch.nn.utils.rnn.PackedSequence):
        replace(owner, "to", make_to)
    tensor.cuda = lambda self, *args, **kwargs: self.to("cuda")
    tensor.pin_memory = lambda self, *args, **kwargs: self
    tensor.record_stream = lambda self, stream: None
    torch.nn.Module.cuda = lambda self, device=None: self
    torch.set_default_device = lambda device: None

    replace(DeviceContext, "__init__", _mapping("device"))  # of `with torch.device("cuda"):`


def _mapping(name, default=None):
    """For replace(): maps the argument with this name."""

    def before(given):
        given[name] = _device(given.get(name, default))

    return passing_on(before)


def _device_or_index(device):
    """Map a device. A number stands for the accelerator with that index, as in PyTorch."""
    return _device("cuda") if type(device) is int else _device(device)


def _map_attributes(torch):
    """Map what says where a tensor is, for lines of the script that demand a GPU. Lines that choose
    between kernels see the CPU, as PyTorch and other libraries do: there are no GPU kernels."""
    tensor = torch.Tensor
    base = {name: getattr(tensor, name) for name in ("device", "is_cuda", "get_device", "type")}

    def is_mapped(self, depth=3):
        is_there = not getattr(self, "_check_on_cpu", False) and base["device"].__get__(self).type
        return _is_used and is_there == "cpu" and called_by_user(depth)

    def is_demanded(self):
        return is_mapped(self, 4) and _is_demand(sys._getframe(2))

    def device(self):
        there = base["device"].__get__(self)
        return torch.device("cuda", _current) if is_demanded(self) else there

    def is_cuda(self):
        return True if is_demanded(self) else base["is_cuda"].__get__(self)

    def get_device(self):
        return _current if is_mapped(self) else base["get_device"](self)

    def kind(self, dtype=None, *args, **kwargs):
        if dtype is None:
            name = base["type"](self)
            return name.replace("torch.", "torch.cuda.") if is_demanded(self) else name
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return base["type"](self, dtype, *args, **kwargs)

    tensor.device, tensor.is_cuda = property(device), property(is_cuda)
    tensor.get_device, tensor.type = get_device, kind


_demands = {}  # (file, line) -> whether it is one


def _is_demand(frame):
    """Whether a frame is at an assertion, or at a condition under which it raises an error."""
    key = (frame.f_code.co_filename, frame.f_lineno)
    if key not in _demands:
        line, following = (linecache.getline(key[0], key[1] + i).strip() for i in range(2))
        raises = line.startswith(("if ", "elif ")) and following.startswith("raise")
        _demands[key] = line.startswith("assert") or raises
    return _demands[key]


def _map_types(torch):
    """torch.cuda.FloatTensor and the like, which older scripts construct tensors with."""
    for name in TYPES:
        setattr(torch.cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))


def _map_generators(torch):
    original = torch.Generator

    class Kind(type(original)):
        def __instancecheck__(cls, thing):
            return isinstance(thing, original)

    class Generator(original, metaclass=Kind):
        def __new__(cls, device="cpu"):
            generator = original.__new__(cls, device=_device_or_index(device))
            STATE.generators.append(weakref.ref(generator))
            return generator

    torch.Generator = Generator


def _map_profiler(torch):
    """There are no kernels on a GPU to be traced; a profiler of nothing else would not start."""
    profiler = sys.modules.get("torch.profiler.profiler")
    if profiler is None:
        return
    activity = profiler.ProfilerActivity

    def before(given):
        if given.get("activities") is not None:
            given["activities"] = set(given["activities"]) - {activity.CUDA} or {activity.CPU}

    for kind in (profiler._KinetoProfile, profiler.profile):
        replace(kind, "__init__", passing_on(before))


def _map_cuda(torch):
    cuda = torch.cuda

    def set_device(device):
        global _current, _is_used
        _is_used = True
        index = device if isinstance(device, int) else torch.device(device).index
        _current = index or 0

    properties = types.SimpleNamespace(
        name="CPU in place of a GPU",
        total_memory=80 * 2**30,
        multi_processor_count=108,
        major=8,
        minor=0,
        uuid="00000000-0000-0000-0000-000000000000",
    )
    answers = {
        "synchronize": None,
        "empty_cache": None,
        "ipc_collect": None,
        "init": None,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "reset_peak_memory_stats": None,
        "reset_max_memory_allocated": None,
        "memory_summary": "",
        "memory_stats": collections.defaultdict(int),
        "mem_get_info": (80 * 2**30, 80 * 2**30),
        "utilization": 0,
        "get_device_name": properties.name,
        "get_device_properties": properties,
        "get_device_capability": (8, 0),
        "is_bf16_supported": True,
        "get_arch_list": ["sm_80"],
        "manual_seed": None,
        "manual_seed_all": None,
        "set_rng_state": None,
        "set_rng_state_all": None,
        "set_per_process_memory_fraction": None,
        "_record_memory_history": None,
        "_snapshot": {},
        "_dump_snapshot": None,
    }
    for function, answer in answers.items():
        for module in (cuda, cuda.memory, cuda.random):
            if module is cuda or hasattr(module, function):
                setattr(module, function, _answer(answer))
    answer_others(cuda, "is_available", lambda: True)
    answer_others(cuda, "is_initialized", lambda: True)
    answer_others(cuda, "device_count", lambda: PLAN["devices"])
    cuda.set_device = set_device
    cuda.current_device = lambda: _current
    cuda.get_rng_state = lambda device=None: torch.random.get_rng_state()
    cuda.get_rng_state_all = lambda: [torch.random.get_rng_state()]
    cuda.device = lambda device=None: contextlib.nullcontext()
    cuda.stream = lambda stream=None: contextlib.nullcontext()
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = lambda device=None: _Stream()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = cuda.nvtx.mark = _answer(None)
    cuda.nvtx.range = lambda *args, **kwargs: contextlib.nullcontext()


def _answer(value):
    return lambda *args, **kwargs: value


class _Stream:
    """A stream or an event: everything has already happened on a CPU."""

    def __init__(self, *args, **kwargs):
        self.time = time.monotonic()

    def record(self, stream=None):
        self.time = time.monotonic()

    def record_event(self, event=None):
        return event or _Stream()

    def elapsed_time(self, end):
        """Milliseconds; never 0, by which scripts divide."""
        return max(1000 * (end.time - self.time), 1e-3)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return _answer({"query": True, "is_capturing": False}.get(name, 0.0))


def _map_accelerator(torch):
    if not hasattr(torch, "accelerator"):
        return
    accelerator = torch.accelerator
    answer_others(accelerator, "is_available", lambda: True)
    answer_others(accelerator, "current_accelerator", lambda *args, **kwargs: torch.device("cuda"))
    answer_others(accelerator, "device_count", lambda: PLAN["devices"])
    accelerator.set_device_index = accelerator.set_device_idx = torch.cuda.set_device
    accelerator.current_device_index = accelerator.current_device_idx = torch.cuda.current_device
    accelerator.current_stream = lambda device=None: _Stream()
    accelerator.synchronize = _answer(None)
    accelerator.get_memory_info = torch.cuda.mem_get_info
    for function in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        setattr(accelerator, function, _answer(0))
    for function in ("empty_cache", "reset_peak_memory_stats"):
        setattr(accelerator, function, _answer(None))


def _map_mesh(torch):
    """The mesh of a group of CPUs, from which fully_shard and DTensor take their device."""
    if not torch.distributed.is_available():
        return
    mesh = torch.distributed.device_mesh.DeviceMesh
    replace(mesh, "__init__", _mapping("device_type"))


def answer_others(module, name, answer):
    """Replace a function, but not for PyTorch itself, which would then use the GPU."""
    original = getattr(module, name)

    def function(*args, **kwargs):
        caller = sys._getframe(1).f_globals.get("__name__", "")
        ask = original if caller == "torch" or caller.startswith("torch.") else answer
        return ask(*args, **kwargs)

    setattr(module, name, function)


def _map_amp(torch):
    """The older classes in torch.cuda.amp derive from these."""

    def before(given):
        # What is compared exactly has no lower precision at all.
        given["enabled"] = given.get("enabled", True) and not PLAN["run"].startswith("exact")
        if _device(given["device_type"]) != given["device_type"] and given.get("dtype") is None:
            given["dtype"] = torch.float16  # as on a GPU: a CPU's own default is bfloat16
        given["device_type"] = _device(given["device_type"])

    replace(torch.amp.autocast, "__init__", passing_on(before))
    replace(torch.amp.GradScaler, "__init__", _mapping("device", "cuda"))
    torch.is_autocast_enabled = _map_first(torch.is_autocast_enabled)
    torch.get_autocast_dtype = _map_first(torch.get_autocast_dtype)
    torch.get_autocast_gpu_dtype = lambda: torch.get_autocast_dtype("cuda")


def _map_first(original):
    def function(*args):
        return original(*map(_device, args))

    return function
