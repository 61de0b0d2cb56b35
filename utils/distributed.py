"""The process group, and helpers for work that only one process does. Needs torch and errors.py.

Every helper also works without a process group, as if the world had one rank.
"""

import atexit
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from utils.errors import PeerError, UserError
from utils.reports import set_failure_store
from utils.watchdog import watch

_control_group: Any = None  # gloo with a long timeout
_data_parallel_group: dist.ProcessGroup | None = None  # None: all ranks
_device = torch.device("cpu")  # on which this process has its loss
RESTART_COUNTS = {  # by the id that stays the same
    "TORCHELASTIC_RUN_ID": "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID": "SLURM_RESTART_COUNT",
}


def set_data_parallel_group(group: dist.ProcessGroup | None) -> None:
    """Declare which ranks divide each global batch among them: one rank of each replica.

    Without this call, every rank holds a replica of the model. For scripts that split the model
    over several ranks.
    """
    global _data_parallel_group
    _data_parallel_group = group


def data_parallel_group() -> dist.ProcessGroup | None:
    """The group of the data-parallel ranks, for collectives; None: all ranks."""
    return _data_parallel_group


def dp_rank() -> int:
    """This process's number among the data-parallel ranks, which divide each global batch."""
    return dist.get_rank(_data_parallel_group) if dist.is_initialized() else 0


def dp_world_size() -> int:
    """The number of data-parallel ranks, which is the number of replicas of the model."""
    return dist.get_world_size(_data_parallel_group) if dist.is_initialized() else 1


def launched_world_size() -> int:
    """The number of processes of this job, known before they form a process group: WORLD_SIZE."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def job_ids() -> dict[str, str]:
    """The names that this job keeps when torchrun --max-restarts starts it again, and when SLURM
    requeues it. torchrun calls all jobs "none" unless it has --standalone or --rdzv-id."""
    ids = {}
    for name in RESTART_COUNTS:
        if os.environ.get(name, "none") != "none":
            ids[name] = os.environ[name]
    return ids


def is_restart_of(starts: Iterable[Mapping[str, Any]]) -> bool:
    """Whether this job was started again, and one of its starts, rows of starts.jsonl, was noted.
    Before that, the folder has what an earlier run wrote."""
    ids = job_ids()
    for name, count in RESTART_COUNTS.items():
        if os.environ.get(count, "0") == "0":
            continue
        if name not in ids or ids[name] in [row.get(name) for row in starts]:
            return True
    return False


def control_group() -> dist.ProcessGroup | None:
    """The gloo group for messages that are not part of a step; it has a long timeout."""
    return _control_group


def get_local_world_size() -> int:
    """The number of processes on this node: LOCAL_WORLD_SIZE, set by torchrun."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if dist.is_initialized() else 1


def is_main_process() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def all_reduce(tensor: Tensor) -> Tensor:
    """Reduce `tensor` in place over the data-parallel ranks, and return it."""
    if dp_world_size() > 1:
        dist.all_reduce(tensor, group=_data_parallel_group)
    return tensor


def mean_over_replicas(count: Tensor | float) -> Tensor | float:
    """The mean of `count` over the replicas of the model, for the denominator of a loss.

    DistributedDataParallel averages gradients over the replicas. If each replica divides its sum of
    losses by this mean, the result is the gradient of the mean loss over the whole global batch,
    however the targets are distributed. If each divided by its own count, the targets of a replica
    that has few of them would weigh more (docs/mean-of-means.md).

    count: a 0-dim tensor, which is reduced; or a number, which must be the same on every replica,
    so that nothing has to be sent (Meter.compute() checks that).
    """
    if not isinstance(count, Tensor):
        return count
    device = _device if count.is_cpu else count.device  # NCCL reduces nothing on a CPU
    return all_reduce(count.to(device, torch.float64, copy=True)) / dp_world_size()


def rebuild_ddp_buckets(model: DistributedDataParallel) -> None:
    """Give DistributedDataParallel's gradient buckets their final order before the first step.

    DDP sorts its buckets after the first backward pass, by the order in which the gradients became
    ready; so the first step of a run, and of a resumed one, would sum in a different order from
    all later steps. This runs that first pass, on the sum of all parameters instead of the model.
    """
    inner, parameters = model.module, [p for p in model.parameters() if p.requires_grad]
    device = parameters[-1].device
    model.module = nn.Sequential(inner)  # its forward, as hooks of `inner` expect an input
    model.module.forward = lambda: sum(p.real.sum().to(device) for p in parameters)
    model().backward()
    model.module = inner
    model.zero_grad(set_to_none=True)


def all_gather_object(value: Any) -> list[Any]:
    """Return the `value` (small, picklable) of every rank, as a list in the order of the ranks."""
    values = [value]
    if dist.is_initialized():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value, group=_control_group)
    return values


def default_device_type() -> str:
    """The type of the accelerator that this process sees, or else cpu. Not mps: metrics are added
    in float64, which it does not have."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None or accelerator.type == "mps" else accelerator.type


def parse_device(name: str) -> torch.device:
    """The device with this name: the CPU, or an accelerator for which PyTorch was built
    (https://docs.pytorch.org/docs/stable/torch.html#accelerators). Raises UserError otherwise."""
    accelerator = torch.accelerator.current_accelerator()
    types = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    with suppress(RuntimeError):  # not the name of a device
        device = torch.device(name)
        if device.type in types and str(device) == name:  # torch.device("cuda:257") is cuda:1
            return device if device.type != "cpu" else torch.device("cpu")
    examples = ", ".join(types) if accelerator is None else f"cpu, {types[1]}, {types[1]}:0, ..."
    raise UserError(f"{name!r} is not a device of this PyTorch: {examples}")


def select_device(
    name: str = "auto", local_rank: int = 0, local_world_size: int = 1
) -> torch.device:
    """Make the device that `name` means for this process the current one, and return it.

    For the CPU, this hides the GPUs from the process (CUDA_VISIBLE_DEVICES).

    name: cpu, cuda (GPU number local_rank, or the only visible GPU, as with srun
    --gpus-per-task=1), cuda:1, ...; or a different accelerator, such as xpu or xpu:1. auto: an
    accelerator, or else the CPU. Raises UserError if there is no such device.
    """
    device = parse_device(default_device_type() if name == "auto" else name)
    if device.type == "mps":
        raise UserError("device mps has no float64, in which metrics are added: pass --device cpu")
    if device.type == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # DataParallel would use the GPUs that it sees
        return device
    visible = torch.accelerator.device_count()
    if visible == 1 and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ:
        local_rank, local_world_size = 0, 1  # torchrun's processes all see the same GPUs
    needed = local_world_size if device.index is None else device.index + 1
    if needed > visible:
        raise UserError(
            f"{local_world_size} processes with --device {name} need {needed} {device.type} "
            f"devices, but {visible} are visible: start fewer, set CUDA_VISIBLE_DEVICES, or pass "
            f"--device cpu"
        )
    if device.index is None:
        device = torch.device(device.type, local_rank)
    torch.accelerator.set_device_index(device)  # otherwise, ranks would use memory of GPU 0, too
    return device


def init_distributed(
    device: str = "auto",
    timeout: float = 300.0,
    devices: list[torch.device] | None = None,
    bound: bool = True,
) -> torch.device:
    """Join the process group that torchrun's environment describes; return this rank's device.

    Reads RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    (https://docs.pytorch.org/docs/stable/elastic/run.html). The backend is PyTorch's default for
    the device, such as NCCL for CUDA and gloo for the CPU; gloo also for ranks that share the one
    GPU that `device` names.

    device: auto, cpu, cuda (the GPU with index LOCAL_RANK), or one device for all ranks: cuda:0.
    Other accelerators likewise.
    timeout: seconds that a collective waits for the other ranks.
    devices: all devices of this process, if it uses several (utils/rungs/model_parallel.py).
    bound: bind the group to the device. NCCL then connects all ranks now, and messages between two
    ranks wait for everything that was sent before; otherwise, each pair has its own queue.
    Raises UserError if the environment is incomplete or inconsistent, or the ranks cannot connect.
    """
    global _device
    local_rank, world_size, local_world_size = _read_environment()
    if "TORCHELASTIC_USE_AGENT_STORE" in os.environ:  # launched by torchrun, or by spawn.py
        die_with_parent()  # otherwise, the ranks of a killed torchrun would keep training
        _refuse_dead_launcher()
    shared = ":" in device and local_world_size > 1
    devices = devices or [select_device(device, local_rank, local_world_size)]
    _device = devices[-1]
    backend = "gloo" if shared else dist.get_default_backend_for_device(devices[0])
    device_id = devices[0] if bound and backend != "gloo" and len(devices) == 1 else None
    one_node = local_world_size == world_size
    try:
        store = _join(backend, device_id, timedelta(seconds=timeout), one_node)
    except RuntimeError as error:  # gloo listens on the host name's address, often 127.0.1.1
        names = dict(socket.if_nameindex()).values()
        usable = [name for name in names if one_node or name not in ("lo", "lo0")]
        raise UserError(
            f"cannot reach the other ranks ({str(error).splitlines()[0]}): check MASTER_ADDR="
            f"{os.environ['MASTER_ADDR']}, and set GLOO_SOCKET_IFNAME to the interface that leads "
            f"to the other nodes, one of {', '.join(usable)}"
        ) from None
    if world_size > 1:
        watch(store, timeout, ignored_group=_control_group)
    return devices[0]


def require_gpu_per_rank() -> None:
    """Raise UserError if several ranks share a GPU. They use gloo, which cannot do all that NCCL
    does with a GPU's memory: DistributedDataParallel works, sharding and sending do not."""
    if dist.get_backend() == "gloo" and torch.cuda.is_available():
        raise UserError(
            "this script needs a GPU for each rank: start fewer ranks, or pass --device cpu"
        )


def _join(backend, device_id, timeout, one_node):
    global _control_group
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    if one_node:
        # torchrun keeps one store over its restarts: without a new prefix, a restarted rank
        # connects to the addresses of the dead ones (pytorch/pytorch#135712).
        store = dist.PrefixStore(f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    set_failure_store(store)
    options = dict(store=store, rank=rank, world_size=world_size, device_id=device_id)
    dist.init_process_group(backend, timeout=timeout, **options)
    _control_group = dist.new_group(backend="gloo", timeout=timeout)
    extend = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    extend(timedelta(hours=12), _control_group)  # downloads and saves outlast a step
    # A group that outlives the interpreter may abort the process (pytorch/pytorch#190489).
    atexit.register(globals().update, _control_group=None)
    return store


def _refuse_dead_launcher():
    """Raise UserError if the launcher ended before die_with_parent() was called, so that nobody
    hosts the store. PyTorch would look for it until twice the timeout is over."""
    if os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True":
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        try:
            socket.create_connection(place, timeout=5).close()
        except ConnectionRefusedError:
            raise UserError(f"the launcher has ended: nobody listens at {place}") from None
        except OSError:  # a slow network: PyTorch tries again
            pass


def _read_environment():
    """Return the local rank, the world size and the local world size, checked."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")
    texts = [os.environ.get(name, "") for name in names]
    with suppress(ValueError):  # not a number
        rank, local_rank, world_size, local_world_size, _ = map(int, texts[:5])
        if 0 <= local_rank <= rank < world_size >= local_world_size > local_rank and texts[5]:
            return local_rank, world_size, local_world_size
    found = ", ".join(map("=".join, zip(names, texts, strict=True))) if any(texts) else "none"
    raise UserError(
        f"start one process per device:  torchrun --standalone --nproc_per_node=N "
        f"{os.path.basename(sys.argv[0])}  (it sets {', '.join(names)}; here: {found})"
    )


def available_cores() -> int:
    """The number of cores that this process may use, by its affinity and its cgroup's CPU quota."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no cgroup v2, or "max": no quota
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def cores_per_rank() -> int:
    """This rank's share of the node's cores, at least 1."""
    return max(1, available_cores() // get_local_world_size())


@contextmanager
def fail_together() -> Iterator[None]:
    """Raise on all ranks if the body raises on one: that rank raises its own error, the others
    PeerError. Without it, the others would wait in their next collective until it times out.
    """
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    failed = all_gather_object(bool(error))
    if error:
        raise error
    if True in failed:
        raise PeerError(f"rank {failed.index(True)} failed")


@contextmanager
def main_process_first() -> Iterator[None]:
    """Run the body on rank 0, then on the first process of every other node, then on the rest.

    For work that one process does and the others reuse, such as a download or a cache: the nodes
    may share its folder, or have one each. All return together. If the body raises on a process,
    the others raise PeerError, and those whose turn has not come never run it.
    """
    main_process, first_of_node, others = range(3)
    turn = main_process if is_main_process() else first_of_node
    if dist.get_node_local_rank(0) > 0:
        turn = others
    for now in (main_process, first_of_node, others):
        with fail_together():
            if now == turn:
                yield


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
