"""Observes PyTorch in the processes of a checked script, whose code stays as it is.

`start` does nothing but watch for imports. When a module of OBSERVERS has been imported, its
observer replaces functions of that module by ones that record an event
(`record.py`) and call the original.
"""

import importlib
import importlib.util
import sys

# Module that the script imports -> the modules of this package that observe it.
OBSERVERS = {
    "torch": [
        "limits",
        "failures",
        "lengths",
        "devices",
        "groups",
        "data",
        "batch_norms",
        "compare",
        "training",
        "exact",
        "files",
        "output",
    ],
    "torch.distributed.fsdp": ["sharding"],
    "torch.distributed.tensor.parallel": ["parts"],
    "torch.distributed.pipelining": ["parts"],
    "torch.distributed.checkpoint": ["files"],
    "safetensors.torch": ["files"],
    "torch.utils.tensorboard": ["loggers"],
    "tensorboardX": ["loggers"],
    "wandb": ["loggers"],
    "mlflow": ["loggers"],
    "accelerate": ["libraries"],
    "torchvision.datasets": ["fake_data"],
    "datasets": ["fake_data"],
}


def observe(name, module):
    """Install the observers of a module."""
    for observer in OBSERVERS[name]:
        importlib.import_module(f"check_inside.{observer}").install(name, module)


class _Loader:
    """The loader of a module, followed by the observers of that module."""

    def __init__(self, name, loader):
        self.name = name
        self.loader = loader

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        observe(self.name, module)


class _Finder:
    """Finds what the other finders find, with a loader that installs observers."""

    def __init__(self):
        self.asked = set()  # of the other finders, which is done by way of this one

    def find_spec(self, name, path=None, target=None):
        if name not in OBSERVERS or name in self.asked:
            return None
        self.asked.add(name)
        try:
            # Libraries also ask, before they import it, whether a module is there.
            spec = importlib.util.find_spec(name)
        finally:
            self.asked.discard(name)
        if spec is None or spec.loader is None:
            return None
        spec.loader = _Loader(name, spec.loader)
        return spec


def start():
    """Observe what has been imported, and what will be."""
    sys.meta_path.insert(0, _Finder())
    for name in OBSERVERS:
        if name in sys.modules:
            observe(name, sys.modules[name])
