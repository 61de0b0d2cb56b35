"""Observes process groups: collectives, DistributedDataParallel, and processes that are spawned."""

import atexit
import functools
import os
import re
import sys

from check_inside.devices import answer_others
from check_inside.record import PLAN, guarded, passing_on, place, record, replace
from check_inside.state import STATE

MOST_COLLECTIVES = 20_000
_hooks = 0
_count = 0
_named = {}  # "port": the first one that the script has named
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

    creates = {
        "init_process_group": passing_on(_before_init, _after_init),
        "new_group": passing_on(_before_new_group, _after_new_group),
    }
    for function, make in creates.items():
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
        as_nccl = {
            "all_gather_into_tensor": _of_any_shape,
            "all_gather_single": _of_any_shape,
            "all_reduce": _also_mean_of_integers,
        }
        for function, make in as_nccl.items():
            if hasattr(c10d, function):
                replacement = make(getattr(c10d, function))
                for module in (c10d, dist):
                    setattr(module, function, replacement)
    for function in ("all_gather_object", "gather_object"):
        replacement = _observe_objects(getattr(c10d, function))
        for module in (c10d, dist):
            setattr(module, function, replacement)
    _observe_ddp(torch.nn.parallel.DistributedDataParallel)
    spawning = sys.modules["torch.multiprocessing.spawn"]  # the package has a function of that name
    replace(spawning, "start_processes", passing_on(_before_spawn))
    torch.multiprocessing.start_processes = spawning.start_processes
    data_parallel = passing_on(_before_data_parallel, _after_data_parallel)
    replace(torch.nn.DataParallel, "__init__", data_parallel)


def _before_init(given):
    given["asked"] = given.get("backend")
    if PLAN["device"] == "mapped":
        given["backend"] = "gloo"
        given.pop("device_id", None)
    if "init_method" in given:
        given["init_method"] = _here(given["init_method"])
    if os.environ.get("MASTER_ADDR"):
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    if os.environ.get("MASTER_PORT"):
        os.environ["MASTER_PORT"] = _own_port(os.environ["MASTER_PORT"])
    record("joins", place=place())  # it may wait there for a rank that has failed


def _after_init(given, result):
    import torch.distributed as dist

    _asked[dist.group.WORLD] = given["asked"]
    record("init", world=dist.get_world_size(), place=place())
    _observe(dist.group.WORLD)


def _before_new_group(given):
    given["asked"] = given.get("backend")
    if PLAN["device"] == "mapped" and "nccl" in str(given.get("backend")):
        given["backend"] = "gloo"


def _after_new_group(given, group):
    import torch.distributed as dist

    _asked[group] = given["asked"] or _asked.get(dist.group.WORLD)
    _observe(group)


def _before_spawn(given):
    record("spawn", processes=given.get("nprocs", 1), place=place())


def _here(method):
    """An address at which ranks meet, on this machine, where all of them are: a script may name a
    node of a cluster."""
    address = re.fullmatch(r"tcp://(?:\[.*?\]|[^:/]+):(\d+)(.*)", str(method))
    return f"tcp://127.0.0.1:{_own_port(address[1])}{address[2]}" if address else method


def _own_port(port):
    """A port of this run in place of the first one that the script names, at which the ranks of a
    different check may meet, too."""
    if PLAN.get("port") is None:
        return port
    return str(PLAN["port"]) if _named.setdefault("port", port) == port else port


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


def _also_mean_of_integers(original):
    """NCCL also averages integers; gloo refuses that."""

    @functools.wraps(original)
    def all_reduce(tensor, op=None, group=None, async_op=False):
        import torch.distributed as dist

        op = dist.ReduceOp.SUM if op is None else op
        if op != dist.ReduceOp.AVG or tensor.is_floating_point() or async_op:
            return original(tensor, op, group, async_op)
        original(tensor, dist.ReduceOp.SUM, group)
        tensor.div_(dist.get_world_size(group), rounding_mode="trunc")

    return all_reduce


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
    replace(ddp, "__init__", passing_on(_before_ddp))

    def make_join(original):
        def __init__(self, *args, **kwargs):
            record("join", place=place())
            original(self, *args, **kwargs)

        return __init__

    # Also what DistributedDataParallel.join() uses.
    replace(sys.modules["torch.distributed.algorithms.join"].Join, "__init__", make_join)


def _before_ddp(given):
    if PLAN["device"] == "mapped":
        given.update(device_ids=None, output_device=None)
    record(
        "wrap",
        type="DistributedDataParallel",
        group=ranks_of(given.get("process_group")),
        nested=any(isinstance(part, type(given["self"])) for part in given["module"].modules()),
        find_unused=given.get("find_unused_parameters", False),
        place=place(),
    )
    STATE.wrapped |= {id(parameter) for parameter in given["module"].parameters()}


def _before_data_parallel(given):
    record("wrap", type="DataParallel", place=place())
    if PLAN["device"] == "mapped":
        given.update(device_ids=[], output_device=None)


def _after_data_parallel(given, result):
    if PLAN["device"] == "mapped":
        given["self"].module = given["module"]
        given["self"].device_ids = []
