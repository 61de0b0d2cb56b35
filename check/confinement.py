"""What the runs of a script can reach: where they may write, and which services they may use."""

import os
import tempfile
from pathlib import Path

from check.inside.check_inside import landlock

SYSTEM = ("/dev", "/proc", "/run", "/sys", "/tmp", "/var/tmp")
CACHES = (
    "CUDA_CACHE_PATH",
    "HF_DATASETS_CACHE",
    "HF_HOME",
    "HF_HUB_CACHE",
    "MPLCONFIGDIR",
    "NLTK_DATA",
    "NUMBA_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR",
    "TORCH_HOME",
    "TRANSFORMERS_CACHE",
    "TRITON_CACHE_DIR",
    "XDG_CACHE_HOME",
)
OFFLINE = {
    "CLEARML_OFFLINE_MODE": "1",
    "COMET_START_ONLINE": "0",
    "NEPTUNE_MODE": "offline",
    "SWANLAB_MODE": "offline",
    "WANDB_MODE": "offline",
    # Without a token, public models can be read, and nothing can be pushed.
    "HF_TOKEN": "",
    "HF_TOKEN_PATH": os.devnull,
    "HUGGING_FACE_HUB_TOKEN": "",
}


def is_protected(originals, writable):
    """Whether the kernel keeps the script from writing its own folder and what links lead to.

    writable: folders that the user has named.
    """
    named = [Path(folder).resolve() for folder in writable]
    reached = any(path.is_relative_to(folder) for path in originals.reached for folder in named)
    return landlock.is_available() and not reached


def writable_folders(originals, named, work):
    """The folders where the script may write: the copies, what the user has named, temporary
    folders, and caches; none of these if the folder of the script lies in it, or what a link there
    leads to. None if the kernel cannot restrict it."""
    if not landlock.is_available():
        return None
    home = Path(os.path.expanduser("~"))
    usual = [*SYSTEM, tempfile.gettempdir(), *home.glob(".*"), home / "nltk_data"]
    usual += [os.environ[name] for name in CACHES if os.environ.get(name)]
    usual = [Path(path).resolve() for path in usual if os.path.isdir(path)]
    free = [
        folder
        for folder in usual
        if not any(path.is_relative_to(folder) for path in originals.reached)
    ]
    return sorted({str(path) for path in (*free, *named, work)})


def services(root):
    """Variables for a run, so that trackers and hubs are offline or write into its copy."""
    offline = dict(OFFLINE)
    if os.environ.get("MLFLOW_TRACKING_URI"):  # a server; the default is a file
        offline["MLFLOW_TRACKING_URI"] = f"sqlite:///{root}/mlflow.db"
    return offline
