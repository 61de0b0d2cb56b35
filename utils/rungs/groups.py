"""Which ranks hold a replica of the model together, for scripts that divide the model."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from utils.distributed import set_data_parallel_group
from utils.errors import UserError


def require_gpu_per_rank() -> None:
    """Raise UserError if several ranks share a GPU. They use gloo, which cannot do all that NCCL
    does with a GPU's memory: DistributedDataParallel works, sharding and sending do not."""
    if dist.get_backend() == "gloo" and torch.cuda.is_available():
        raise UserError(
            "this script needs a GPU for each rank: start fewer ranks, or pass --device cpu"
        )


def set_single_replica() -> None:
    """Declare that all ranks together hold one replica, and train on the same batches."""
    require_gpu_per_rank()
    group, _ = dist.new_subgroups(1, backend="gloo")  # sends nothing, and NCCL would connect it
    set_data_parallel_group(group)


def build_mesh(
    device_type: str, sizes: tuple[int, ...], timeout: float, names: tuple[str, ...] | None = None
) -> DeviceMesh:
    """init_device_mesh(), whose groups wait `timeout` seconds, as the default group does, and not
    PyTorch's ten or thirty minutes."""
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)
    # torch 2.11 has it under a private name alone.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in mesh.get_all_groups():
        set_timeout(timedelta(seconds=timeout), group)
    return mesh
