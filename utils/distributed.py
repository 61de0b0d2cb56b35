"""Who am I, how many are we, what only one process does.

Every helper also works without a process group, as if the world had one rank. Needs only torch.
"""

import atexit
import ctypes
import os
import signal
import sys
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import wraps
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

_store = None  # reachable while ranks fail, so that only the first of them speaks
_at_end = []  # see at_end()
_sigterm = []  # what SIGTERM did before an error was written down
_control_group = None  # gloo with a long timeout: waits for downloads and saves, not for a step


class UserError(Exception):
    """Something outside the code is wrong. The message says what, where and what to do about it,
    and is shown without a traceback."""


class PeerError(Exception):
    """Another rank failed and says why; this rank leaves without a word."""


def report_errors(main):
    """Decorate main() with this: of all ranks only the first that fails speaks.

    A UserError shows its message, anything else one traceback: in torchrun's report of the root
    cause (https://docs.pytorch.org/docs/stable/elastic/errors.html), without torchrun by Python.
    The ranks that fail because of it leave with exit code 1 as well.
    """

    @record  # writes the traceback where torchrun looks for it
    def first_speaks(*args, **kwargs):
        try:
            result = main(*args, **kwargs)
            for function in _at_end:
                function()
            return result
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, PeerError) or not _first_to_fail():
                time.sleep(0.2)  # what started the ranks shall see the one that speaks end first
                sys.exit(1)
            if not isinstance(error, UserError | KeyboardInterrupt):
                # torchrun, ending all ranks, must not find the traceback's file half written.
                _sigterm.append(signal.signal(signal.SIGTERM, signal.SIG_IGN))
                raise
            where = f" (rank {get_rank()})" if get_world_size() > 1 else ""
            # In one write, so that ranks do not interleave.
            said = f"error{where}: {str(error) or 'interrupted'}\n"
            os.write(2, said.encode(errors="surrogateescape"))  # as a file name may need
            sys.exit(1)

    @wraps(main)
    def wrapper(*args, **kwargs):
        try:
            return first_speaks(*args, **kwargs)
        except Exception:
            if _sigterm:
                signal.signal(signal.SIGTERM, _sigterm.pop() or signal.SIG_DFL)
            if "TORCHELASTIC_ERROR_FILE" in os.environ:
                sys.exit(1)  # torchrun will show it
            raise

    return wrapper


def at_end(function):
    """Have report_errors call function() when main() has returned, on every rank."""
    if function not in _at_end:
        _at_end.append(function)


def get_rank():
    return dist.get_rank() if dist.is_initialized() else 0


def get_world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def get_local_rank():
    """This process's number on its node: LOCAL_RANK, set by torchrun."""
    return int(os.environ.get("LOCAL_RANK", 0)) if dist.is_initialized() else 0


def get_local_world_size():
    """Processes on this node: LOCAL_WORLD_SIZE, set by torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if dist.is_initialized() else 1


def is_main_process():
    return get_rank() == 0


def all_reduce(tensor, op=dist.ReduceOp.SUM):
    """`tensor`, reduced in place over all ranks, and returned."""
    if dist.is_initialized():
        dist.all_reduce(tensor, op)
    return tensor


def all_gather_object(value):
    """The `value` of every rank (small and picklable), in the order of the ranks."""
    values = [value] * get_world_size()
    if dist.is_initialized():
        dist.all_gather_object(values, value, group=_control_group)
    return values


def get_device(device="auto"):
    """The device of a script that runs as one process.

    device: auto, cpu, cuda, or one device such as "cuda:1".
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            f"{_script()} runs as one process, but WORLD_SIZE is {os.environ['WORLD_SIZE']}: "
            f"start it with  python {_script()}, or start train_ddp.py with torchrun"
        )
    return _use_device(device, local_rank=0, local_world_size=1)


def init_distributed(device="auto", timeout=300.0, per_process=1):
    """Join the process group that torchrun's environment describes; return this rank's device.

    Reads RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    (https://docs.pytorch.org/docs/stable/elastic/run.html). The backend follows the device: NCCL
    for CUDA, gloo for the CPU and where ranks share the one GPU that `device` names.

    device: auto, cpu, cuda (GPU number LOCAL_RANK), or one device such as "cuda:0" for all ranks.
    timeout: seconds that a collective waits for the other ranks.
    per_process: GPUs that a process owns; local rank r has number r * per_process and the next.
    Raises UserError where the environment is incomplete or contradicts itself.
    """
    global _store, _control_group
    timeout = timedelta(seconds=timeout)
    rank, local_rank, world_size, local_world_size = _read_environment()
    if _launched():
        die_with_parent()  # or the ranks of a killed torchrun would train on as orphans
    shared = device.startswith("cuda:") and local_world_size > 1
    device = _use_device(device, local_rank, local_world_size, per_process)
    try:
        store, rank, world_size = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
    except dist.DistError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise UserError(f"rank {rank} cannot meet the others at {where}: {error}") from None
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        # torchrun keeps one store over its restarts: without a new prefix a restarted rank
        # dials the addresses of the dead ones (pytorch/pytorch#135712).
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt-{attempt}", store)
    _store = store
    nccl = device.type == "cuda" and not shared
    dist.init_process_group(
        "nccl" if nccl else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if nccl and per_process == 1 else None,
    )
    _control_group = dist.new_group(backend="gloo", timeout=timedelta(hours=12))
    # A group that outlives the interpreter may abort the process (pytorch/pytorch#190489).
    atexit.register(globals().update, _store=None, _control_group=None)
    return device


def _read_environment():
    """-> rank, local rank, world size, local world size, each checked."""
    launch = f"torchrun --standalone --nproc_per_node=N {_script()}"
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if not os.environ.get(name)]
    if len(missing) == len(names):
        raise UserError(f"{_script()} runs as one process a device: start it with  {launch}")
    if missing:
        raise UserError(
            f"the environment sets some of {', '.join(names)} but not {', '.join(missing)}: "
            f"set all five, or start with  {launch}"
        )
    numbers = {name: os.environ[name] for name in names if name != "MASTER_ADDR"}
    numbers["LOCAL_WORLD_SIZE"] = os.environ.get("LOCAL_WORLD_SIZE", "1")
    for name, text in numbers.items():
        if not text.isdecimal():
            raise UserError(f"{name}={text!r} is not a whole number: start with  {launch}")
    rank, local_rank, world_size = (int(numbers[name]) for name in names[:3])
    local_world_size = max(int(numbers["LOCAL_WORLD_SIZE"]), local_rank + 1)
    if rank >= world_size or local_rank > rank or local_world_size > world_size:
        raise UserError(
            f"RANK={rank}, LOCAL_RANK={local_rank}, WORLD_SIZE={world_size} contradict each "
            f"other (LOCAL_RANK <= RANK < WORLD_SIZE): start with  {launch}"
        )
    return rank, local_rank, world_size, local_world_size


def _use_device(name, local_rank, local_world_size, per_process=1):
    """The torch.device that `name` means for this process, made the current one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = None
    with suppress(RuntimeError):
        device = torch.device(name)
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(f"device {name!r} is not one of auto, cpu, cuda, cuda:0, cuda:1, ...")
    if device.type == "cpu":
        # torchrun sets OMP_NUM_THREADS=1, which would leave most cores idle.
        torch.set_num_threads(max(1, available_cores() // local_world_size))
        return device
    visible = torch.cuda.device_count()
    needed = local_world_size * per_process if device.index is None else device.index + 1
    if needed > visible:
        raise UserError(
            f"{local_world_size} processes on this node with --device {name} need {needed} CUDA "
            f"devices, but {visible} are visible "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'is not set')}): "
            f"start with --nproc_per_node={max(visible // per_process, 1)}, or pass --device cpu"
        )
    if device.index is None:
        device = torch.device("cuda", local_rank * per_process)
    torch.cuda.set_device(device)  # or every rank would also allocate on GPU 0
    return device


def available_cores():
    """The cores that this process may use: its affinity, cut by a cgroup's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with suppress(OSError, ValueError):  # no cgroup v2, or "max": no quota
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


@contextmanager
def fail_together():
    """If the body raises on one rank, every rank raises at its end: that rank its own error, the
    others PeerError. Without it, the others would wait in their next collective for the timeout.
    """
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    failed = all_gather_object(error is not None)
    if error is not None:
        raise error
    if any(failed):
        raise PeerError(f"rank {failed.index(True)} failed")


@contextmanager
def main_process_first():
    """Run the body on the first process of every node, then on the node's other processes.

    For what one process a node should do, and the others should find done: a download, a cache.
    If it raises there, the others raise PeerError and never run it.
    """
    first = get_local_rank() == 0
    if first:
        with fail_together():
            yield
    else:
        with fail_together():
            pass  # meets the first processes at the end of their body
        yield


def _script():
    return Path(sys.argv[0]).name


def die_with_parent():
    """Ask Linux to kill this process when the one that started it dies, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG


def _launched():
    return "TORCHELASTIC_USE_AGENT_STORE" in os.environ  # by torchrun, or spawn.py


def _first_to_fail():
    if _store is None:  # before the process group every rank of a node sees the same error
        if os.environ.get("LOCAL_RANK", "0") != "0" and _launched():
            time.sleep(10)  # local rank 0 speaks, and its end is this rank's
        return True  # nobody did: the error is this rank's alone
    try:
        return _store.add("failures", 1) == 1
    except Exception:  # the store went down with rank 0, of which torchrun reports
        return not _launched()
