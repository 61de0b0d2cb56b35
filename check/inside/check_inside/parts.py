"""Observes that ranks hold parts of one model: they are not replicas of each other."""

from check_inside.groups import ranks_of
from check_inside.record import passing_on, place, record, replace
from check_inside.state import STATE


def install(name, module):
    """Observe tensor and pipeline parallelism."""
    if name.endswith("pipelining"):
        replace(module.PipelineStage, "__init__", _observe_stage)
    else:
        replace(module, "parallelize_module", passing_on(_before_parallel))


def _observe_stage(original):
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        STATE.is_stage = True
        record("parts", how="pipeline", group=ranks_of(self.group), place=place())

    return __init__


def _current_mesh():
    from torch.distributed.device_mesh import _mesh_resources

    return _mesh_resources.get_current_mesh()


def _before_parallel(given):
    mesh = given.get("device_mesh")
    mesh = mesh if mesh is not None else _current_mesh()
    ranks = mesh.mesh.flatten().tolist() if mesh is not None else None
    record("parts", how="tensor parallel", group=ranks, place=place())
