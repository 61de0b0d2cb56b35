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
        # A run that logs nothing, or one of several of a group that somebody has asked for.
        if kwargs.get("mode") != "disabled" and not kwargs.get("group"):
            folder = kwargs.get("log_dir", kwargs.get("logdir", args[1] if len(args) > 1 else None))
            record("logger", what=what, folder=folder and str(folder), place=place())
        return original(*args, **kwargs)

    return start
