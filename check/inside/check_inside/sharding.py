"""Observes fully_shard and its older class: the model of each rank before it is sharded."""

from check_inside.groups import ranks_of
from check_inside.record import PLAN, checksum, guarded, place, record

IS_FLOAT64 = PLAN.get("diff") and PLAN["dtype"] == "float64"  # see compare.py


def install(name, module):
    """Replace fully_shard, and the constructor of the older class."""
    original = module.fully_shard

    def fully_shard(model, *args, **kwargs):
        record("shard", checksums=_checksums(model), group=_averaging(**kwargs), place=place())
        if IS_FLOAT64:
            kwargs.pop("mp_policy", None)
        return original(model, *args, **kwargs)

    for attribute in ("state", "__wrapped__"):
        if hasattr(original, attribute):
            setattr(fully_shard, attribute, getattr(original, attribute))
    module.fully_shard = fully_shard
    wrapper = module.FullyShardedDataParallel
    init = wrapper.__init__

    def __init__(self, model, *args, **kwargs):
        if not kwargs.get("sync_module_states"):
            record("shard", checksums=_checksums(model), place=place())
        if IS_FLOAT64:
            kwargs.pop("mixed_precision", None)
        init(self, model, *args, **kwargs)

    wrapper.__init__ = __init__


def _averaging(mesh=None, dp_mesh_dims=None, **kwargs):
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
