"""Observes loggers that a job should have one of."""

from check_inside.record import place, record, replace

CLASSES = {"torch.utils.tensorboard": "SummaryWriter", "tensorboardX": "SummaryWriter"}
FUNCTIONS = {"wandb": "init", "mlflow": "start_run"}


def install(name, module):
    """Replace the constructor of a writer, or the function that starts a run."""
    if name in CLASSES:
        replace(getattr(module, CLASSES[name]), "__init__", lambda f: _observe(f, CLASSES[name]))
    elif hasattr(module, FUNCTIONS[name]):
        replace(module, FUNCTIONS[name], lambda f: _observe(f, f"{name}.{FUNCTIONS[name]}"))


def _observe(original, what):
    def start(*args, **kwargs):
        record("logger", what=what, place=place())
        return original(*args, **kwargs)

    return start
