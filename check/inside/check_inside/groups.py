"""Observes process groups: collectives, DistributedDataParallel, and processes that are spawned."""

import atexit
import functools
import os
import re
import sys

from check_inside.devices import answer_others
from check_inside.record import PLAN, guarded, place, record, replace
from check_inside.state import STATE

MOST_COLLECTIVES = 20_000
_hooks = 0
_count = 0
_asked = {}  # group -> the backend that the script has asked for


def ranks_of(group):
    """The ranks of a process group, or of all; none if there is no group yet."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return []
    return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)


def install(name, torch):
    """Replace the functions that create groups, wrap models and start processes."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    if not dist.is_available():
        return

    def make_init(original):
        def init_process_group(backend=None, *args, **kwargs):
            asked = backend
            if PLAN["device"] == "mapped":
                backend = "gloo"
                kwargs.pop("device_id", None)
            args = tuple(_here(argument) for argument in args)
            if "init_method" in kwargs:
                kwargs["init_method"] = _here(kwargs["init_method"])
            if os.environ.get("MASTER_ADDR"):
                os.environ["MASTER_ADDR"] = "127.0.0.1"
            record("joins", place=place())  # it may wait there for a rank that has failed
            result = original(backend, *args, **kwargs)
            _asked[dist.group.WORLD] = asked
            record("init", world=dist.get_world_size(), place=place())
            _observe(dist.group.WORLD)
            return result

        return init_process_group

    def make_new_group(original):
        def new_group(*args, **kwargs):
            asked = kwargs.get("backend") or _asked.get(dist.group.WORLD)
            if PLAN["device"] == "mapped" and "nccl" in str(kwargs.get("backend")):
                kwargs["backend"] = "gloo"
            group = original(*args, **kwargs)
            _asked[group] = asked
            _observe(group)
            return group

        return new_group

    for function, make in (("init_process_group", make_init), ("new_group", make_new_group)):
        replacement = make(getattr(c10d, function))
        for module in (c10d, dist):
            setattr(module, function, replacement)
    # A mesh that is made first creates the group; it has imported the function before us.
    torch.distributed.device_mesh.init_process_group = c10d.init_process_group

    if PLAN["device"] == "mapped":
        original = dist.get_backend

        def get_backend(group=None):
            asked = _asked.get(group or dist.group.WORLD)
            return "nccl" if asked == "nccl" else original(group)

        answer_others(dist, "get_backend", get_backend)
        for function in ("all_gather_into_tensor", "all_gather_single"):
            if hasattr(c10d, function):
                replacement = _of_any_shape(getattr(c10d, function))
                for module in (c10d, dist):
                    setattr(module, function, replacement)
    for function in ("all_gather_object", "gather_object"):
        replacement = _observe_objects(getattr(c10d, function))
        for module in (c10d, dist):
            setattr(module, function, replacement)
    _observe_ddp(torch.nn.parallel.DistributedDataParallel)
    spawning = sys.modules["torch.multiprocessing.spawn"]  # the package has a function of that name

    def make_start(original):
        def start_processes(fn, args=(), nprocs=1, *others, **kwargs):
            record("spawn", processes=nprocs, place=place())
            return original(fn, args, nprocs, *others, **kwargs)

        return start_processes

    replacement = make_start(spawning.start_processes)
    for module in (spawning, torch.multiprocessing):
        module.start_processes = replacement
    replace(torch.nn.DataParallel, "__init__", _observe_data_parallel)


def _here(method):
    """An address at which ranks meet, on this machine, where all of them are: a script may name a
    node of a cluster."""
    is_address = isinstance(method, str) and method.startswith("tcp://")
    return re.sub(r"^tcp://(\[.*?\]|[^:/]+)", "tcp://127.0.0.1", method) if is_address else method


def _observe_objects(original):
    @functools.wraps(original)
    def gather(*args, **kwargs):
        record("gathers_objects", place=place())
        return original(*args, **kwargs)

    return gather


def _of_any_shape(original):
    """NCCL only asks for the right number of elements, but gloo also for certain shapes."""

    def all_gather(output_tensor, input_tensor, *args, **kwargs):
        return original(output_tensor.view(-1), input_tensor.view(-1), *args, **kwargs)

    return all_gather


def _observe(group):
    """Record the collectives of a group, where PyTorch has hooks for that."""
    global _hooks
    if group is None or not hasattr(group, "register_pre_hook"):
        if group is not None and not isinstance(group, int):
            record("no_hooks")
        return
    _hooks += 1

    @guarded
    def before(call):
        global _count
        _count += 1
        if _count > MOST_COLLECTIVES:
            return
        tensors = list(call.input_tensors or []) or list(call.output_tensors or [])
        name = getattr(call.name, "name", str(call.name))
        values = None
        if "REDUCE" in name and sum(t.numel() for t in tensors) <= 16:
            values = [float(x) for t in tensors for x in t.detach().reshape(-1)]
        record(
            "collective",
            name=name,
            sizes=[list(t.shape) for t in tensors[:8]],
            values=values,
            in_forward=STATE.depth > 0,
            place=place(),
        )

    number = 70_000 + _hooks
    group.register_pre_hook(number, before)
    atexit.register(group.unregister_pre_hook, number)  # or Python's end is a segmentation fault


def _observe_ddp(ddp):
    def make(original):
        def __init__(self, module, device_ids=None, output_device=None, *args, **kwargs):
            if PLAN["device"] == "mapped":
                device_ids = output_device = None
            record(
                "wrap",
                type="DistributedDataParallel",
                group=ranks_of(kwargs.get("process_group")),
                find_unused=kwargs.get("find_unused_parameters", False),
                place=place(),
            )
            STATE.wrapped |= {id(parameter) for parameter in module.parameters()}
            original(self, module, device_ids, output_device, *args, **kwargs)

        return __init__

    replace(ddp, "__init__", make)

    def make_join(original):
        def __init__(self, *args, **kwargs):
            record("join", place=place())
            original(self, *args, **kwargs)

        return __init__

    # Also what DistributedDataParallel.join() uses.
    replace(sys.modules["torch.distributed.algorithms.join"].Join, "__init__", make_join)


def _observe_data_parallel(original):
    def __init__(self, module, device_ids=None, output_device=None, dim=0):
        record("wrap", type="DataParallel", place=place())
        original(self, module, [] if PLAN["device"] == "mapped" else device_ids, None, dim)
        if PLAN["device"] == "mapped":
            self.module = module
            self.device_ids = []

    return __init__
