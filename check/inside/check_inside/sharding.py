"""Observes fully_shard and its older class: the model of each rank before it is sharded."""

import torch

from check_inside.groups import ranks_of
from check_inside.record import PLAN, checksum, guarded, passing_on, place, record, replace
from check_inside.state import STATE

IS_FLOAT64 = PLAN.get("diff") and PLAN["dtype"] == "float64"  # see compare.py


def install(name, module):
    """Replace fully_shard, and the constructor of the older class."""
    replace(module, "fully_shard", passing_on(_before_fully_shard))
    replace(module.FullyShardedDataParallel, "__init__", passing_on(_before_fsdp, _after_fsdp))


def _before_fully_shard(given):
    mesh = given.get("mesh")
    group = _averaging(mesh, given.get("dp_mesh_dims"))
    is_one = bool(group) and (mesh is None or mesh.ndim == 1)
    _record(given["module"], is_one, group=group)
    if IS_FLOAT64:
        given.pop("mp_policy", None)


def _record(module, is_one, **fields):
    """is_one: whether the ranks hold the shards of one model; else some of them hold copies."""
    record("shard", checksums=_checksums(module), one_model=is_one, place=place(), **fields)


def _before_fsdp(given):
    if not given.get("sync_module_states"):
        strategy = getattr(given.get("sharding_strategy"), "name", "FULL_SHARD")
        _record(given["module"], strategy in ("FULL_SHARD", "SHARD_GRAD_OP"))
    if PLAN["device"] != "cuda":
        given["device_id"] = torch.device("cpu")  # without it, it asks for an accelerator
    if IS_FLOAT64:
        given.pop("mixed_precision", None)


def _after_fsdp(given, result):
    handle = given["self"]._handle
    if handle is not None and handle.uses_sharded_strategy:
        flat = handle.flat_param
        STATE.flat |= {id(flat), *map(id, flat._params or [])}


def _averaging(mesh, dp_mesh_dims):
    """The ranks that average their gradients."""
    if dp_mesh_dims is not None:
        return []  # the mesh has more dimensions than those
    return ranks_of(None) if mesh is None else mesh.mesh.flatten().tolist()


@guarded
def _checksums(model):
    """Checksums of the parameters that are not sharded yet."""
    return [
        checksum(parameter)
        for parameter in list(model.parameters())[:3000]
        if not hasattr(parameter, "to_local") and not parameter.is_meta
    ]
