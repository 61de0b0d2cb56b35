"""Observes that ranks hold parts of one model: they are not replicas of each other."""

from check_inside.groups import ranks_of
from check_inside.record import place, record, replace
from check_inside.state import STATE


def install(name, module):
    """Observe tensor and pipeline parallelism."""
    if name.endswith("pipelining"):
        replace(module.PipelineStage, "__init__", _observe_stage)
    else:
        replace(module, "parallelize_module", _observe_parallel)


def _observe_stage(original):
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        STATE.is_stage = True
        record("parts", how="pipeline", group=ranks_of(self.group), place=place())

    return __init__


def _current_mesh():
    from torch.distributed.device_mesh import _mesh_resources

    return _mesh_resources.get_current_mesh()


def _observe_parallel(original):
    def parallelize_module(module, device_mesh=None, *args, **kwargs):
        mesh = device_mesh if device_mesh is not None else _current_mesh()
        ranks = mesh.mesh.flatten().tolist() if mesh is not None else None
        record("parts", how="tensor parallel", group=ranks, place=place())
        return original(module, device_mesh, *args, **kwargs)

    return parallelize_module
