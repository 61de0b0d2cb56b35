"""Observes that ranks hold parts of one model: they are not replicas of each other."""

from check_inside.record import place, record, replace


def install(name, module):
    """Observe tensor and pipeline parallelism."""
    if name.endswith("pipelining"):
        replace(module.PipelineStage, "__init__", lambda f: _observe(f, "pipeline"))
    else:
        replace(module, "parallelize_module", lambda f: _observe(f, "tensor parallel"))


def _observe(original, how):
    def split(*args, **kwargs):
        record("parts", how=how, place=place())
        return original(*args, **kwargs)

    return split
