"""The process group, and helpers for work that only one process does. They also work without a
process group, as if the world had one rank."""

import atexit
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from utils.errors import PeerError, UserError

_control_groups: dict[bool, Any] = {}  # of gloo; True: with a long timeout
_data_parallel_group: dist.ProcessGroup | None = None  # None: all ranks
_devices = [torch.device("cpu")]  # of this process; several only where it divides the model


def set_data_parallel_group(group: dist.ProcessGroup | None) -> None:
    """Declare which ranks divide each global batch among them, one rank of each replica of the
    model: for scripts that divide the model. Without this call, every rank holds a replica."""
    global _data_parallel_group
    _data_parallel_group = group


def data_parallel_group() -> dist.ProcessGroup | None:
    """The group of the ranks that divide each global batch, for collectives; None: all ranks."""
    return _data_parallel_group


def dp_rank() -> int:
    """This process's number among the ranks that divide each global batch."""
    return dist.get_rank(_data_parallel_group) if dist.is_initialized() else 0


def dp_world_size() -> int:
    """The number of replicas of the model."""
    return dist.get_world_size(_data_parallel_group) if dist.is_initialized() else 1


def control_group(patient: bool = False) -> dist.ProcessGroup | None:
    """The gloo group for messages that are not part of a step. patient: the one in which ranks wait
    for a download or a disk, for hours."""
    return _control_groups.get(patient)


def launched_world_size() -> int:
    """The number of processes of this job, known before they form a process group: WORLD_SIZE."""
    return int(os.environ.get("WORLD_SIZE") or 1)


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
    however the targets are distributed (docs/mean-of-means.md).

    count: a 0-dim tensor, which is reduced; or a number, which must be the same on every replica.
    """
    if not isinstance(count, Tensor):
        return count
    device = _devices[-1] if count.is_cpu else count.device  # NCCL reduces nothing on a CPU
    return all_reduce(count.to(device, torch.float64, copy=True)) / dp_world_size()


def rebuild_ddp_buckets(model: DistributedDataParallel) -> None:
    """Give DistributedDataParallel's gradient buckets their final order before the first step.

    DDP sorts its buckets after the first backward pass, by the order in which the gradients became
    ready; so the first step of a run, and of a resumed one, would sum in a different order from
    all later steps. This runs that first pass, on the sum of all parameters instead of the model.
    """
    inner, parameters = model.module, [p for p in model.parameters() if p.requires_grad]
    device = parameters[-1].device
    model.module = nn.Sequential(inner)  # replace its forward: hooks of `inner` expect an input
    model.module.forward = lambda: sum(p.real.sum().to(device) for p in parameters)
    model().backward()
    model.module = inner
    model.zero_grad(set_to_none=True)


def all_gather_object(value: Any, patient: bool = False) -> list[Any]:
    """The `value` (small, picklable) of every rank, as a list in the order of the ranks. patient:
    see control_group()."""
    values = [value]
    if dist.is_initialized():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value, group=control_group(patient))
    return values


def require_same(remedy: str = "", **facts: Any) -> None:
    """Raise UserError, on all ranks, if a fact differs between them."""
    ranks = all_gather_object(facts)
    for rank, theirs in enumerate(ranks):
        for name, value in ranks[0].items():
            if theirs.get(name) != value:
                raise UserError(
                    f"{name}: {value!r} on rank 0, but {theirs.get(name)!r} on rank {rank}{remedy}"
                )


def default_device_type() -> str:
    """The type of the accelerator that this process sees, or else cpu. Not mps, which has no
    float64, in which metrics are added."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None or accelerator.type == "mps" else accelerator.type


def set_devices(devices: list[torch.device]) -> list[torch.device]:
    """Declare the devices of this process: batches go to the first, the last one has the loss."""
    global _devices
    _devices = devices
    return devices


def current_device() -> torch.device:
    """The device to which batches go, once it has been chosen."""
    return _devices[0]


def select_device(
    name: str = "auto", local_rank: int = 0, local_world_size: int = 1
) -> torch.device:
    """Make the device of this process the current one, and return it.

    name: auto (an accelerator, or else the CPU), cpu, cuda (the GPU with index local_rank, or the
    only visible one, as with srun --gpus-per-task=1), cuda:1, ...; or a different accelerator.
    Raises UserError if there is no such device.
    """
    try:
        device = torch.device(default_device_type() if name == "auto" else name)
        visible = 1 if device.type == "cpu" else torch.accelerator.device_count()
    except RuntimeError as error:
        raise UserError(f"--device {name}: {str(error).splitlines()[0]}") from None
    if device.type == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # DataParallel would use the GPUs that it sees
        return set_devices([torch.device("cpu")])[0]
    if visible == 1 and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ:
        local_rank, local_world_size = 0, 1  # srun shows each process its own GPU
    needed = local_world_size if device.index is None else device.index + 1
    if needed > visible:
        raise UserError(
            f"{local_world_size} processes with --device {name} need {needed} devices, but "
            f"{visible} are visible"
        )
    device = torch.device(device.type, local_rank) if device.index is None else device
    torch.accelerator.set_device_index(device)
    return set_devices([device])[0]


def init_distributed(
    device: str = "auto",
    timeout: float = 300.0,
    devices: list[torch.device] | None = None,
    bound: bool = True,
) -> torch.device:
    """Join the process group that torchrun's environment describes; return this rank's device.

    Reads RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    (https://docs.pytorch.org/docs/stable/elastic/run.html). The backend is PyTorch's default for
    the device, or gloo for ranks that share the one GPU that `device` names, such as cuda:0.

    timeout: seconds that a collective waits for the other ranks. devices: all devices of this
    process, if it uses several. bound: bind the group to the device; without, NCCL connects each
    pair of ranks that send messages, and these do not wait for others.
    Raises UserError if the environment is incomplete.
    """
    if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        script = os.path.basename(sys.argv[0])
        raise UserError(
            f"start one process per device:  torchrun --standalone --nproc_per_node=N {script}"
        )
    if "TORCHELASTIC_USE_AGENT_STORE" in os.environ:  # launched by torchrun, or by spawn.py
        die_with_parent()  # otherwise, the ranks of a killed torchrun would keep training
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    devices = devices or [select_device(device, local_rank, local_world_size)]
    is_shared = ":" in device and local_world_size > 1
    backend = "gloo" if is_shared else dist.get_default_backend_for_device(devices[0])
    is_bound = bound and backend != "gloo" and len(devices) == 1
    patience = timedelta(seconds=timeout)
    try:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=patience))
    except (ValueError, dist.DistError) as error:  # a port in use or above 65535, missing ranks
        raise UserError(f"MASTER_ADDR, MASTER_PORT: {str(error).splitlines()[0]}") from None
    if local_world_size == world_size:
        # torchrun keeps one store over its restarts: without a new prefix, a restarted rank
        # connects to the addresses of the dead ones (pytorch/pytorch#135712).
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    dist.init_process_group(
        backend,
        timeout=patience,
        store=store,
        rank=rank,
        world_size=world_size,
        device_id=devices[0] if is_bound else None,
    )
    _control_groups[False] = dist.new_group(backend="gloo", timeout=patience)
    _control_groups[True] = dist.new_group(backend="gloo", timeout=timedelta(hours=12))
    # A group that outlives the interpreter may abort the process (pytorch/pytorch#190489).
    atexit.register(_control_groups.clear)
    return devices[0]


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG


def available_cores() -> int:
    """The cores of this node that its job may use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # a container's quota; no cgroup v2, or "max": none
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def cores_per_rank() -> int:
    """The cores of this node for each of its ranks, at least 1."""
    return max(1, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


@contextmanager
def fail_together(patient: bool = False) -> Iterator[None]:
    """Raise on all ranks if the body raises on one: that rank raises its own error, the others
    PeerError. Without it, the others would wait in their next collective until it times out.
    patient: see control_group()."""
    try:
        yield
    except Exception:
        with suppress(RuntimeError):  # a peer has died: this rank's own error tells more
            all_gather_object(True, patient)
        raise
    if any(all_gather_object(False, patient)):
        raise PeerError


@contextmanager
def main_process_first() -> Iterator[None]:
    """Run the body on rank 0, then on the first process of every other node, then on the rest: for
    a download or a cache that the others reuse, whether or not the nodes share a file system."""
    own_turn = 0 if is_main_process() else 1 if dist.get_node_local_rank(0) == 0 else 2
    for turn in range(3):
        with fail_together(patient=True):
            if turn == own_turn:
                yield
