"""The ladder as data: each script, its parent, and how many lines its lesson may change."""

import ast
import difflib
import pkgutil
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Rung(NamedTuple):
    """A script of the ladder."""

    script: str
    parent: str | None
    budget: int  # changed code lines, added and removed, without the module docstring
    adds: str
    config: str = "utils.config:Config"  # the class of its settings

    def config_class(self):
        """The dataclass of the script's settings."""
        return pkgutil.resolve_name(self.config)


LADDER = [
    Rung("train_1gpu.py", None, 0, "the training loop on one device"),
    Rung("train_dp.py", "train_1gpu.py", 2, "`nn.DataParallel`, and why not to use it"),
    Rung(
        "train_1gpu_graph.py",
        "train_1gpu.py",
        30,
        "the whole training step in one CUDA graph",
    ),
    Rung(
        "train_ddp.py",
        "train_1gpu.py",
        24,
        "`DistributedDataParallel`: one process per device, on one node or several",
    ),
    Rung(
        "train_ddp_spawn.py",
        "train_ddp.py",
        16,
        "launched from Python with `mp.spawn`, without torchrun",
        "utils.spawn:SpawnConfig",
    ),
    Rung(
        "train_ddp_amp.py",
        "train_ddp.py",
        23,
        "mixed precision: `autocast` and `GradScaler`",
        "utils.amp:AmpConfig",
    ),
    Rung(
        "train_ddp_accum.py",
        "train_ddp.py",
        28,
        "gradient accumulation with `no_sync`",
        "utils.accumulation:AccumulationConfig",
    ),
    Rung(
        "train_fsdp.py",
        "train_ddp.py",
        12,
        "`fully_shard` (FSDP2): parameters, gradients and optimizer state are sharded",
        "utils.fsdp:FsdpConfig",
    ),
    Rung(
        "train_tp.py",
        "train_ddp.py",
        24,
        "tensor parallelism: each layer of a ViT is divided among the ranks",
    ),
    Rung(
        "train_fsdp_tp.py",
        "train_fsdp.py",
        24,
        "two dimensions: `fully_shard` across replicas, tensor parallelism within each",
        "utils.fsdp:FsdpConfig",
    ),
    Rung(
        "train_pp.py",
        "train_ddp.py",
        28,
        "pipeline parallelism: layers on different ranks, with schedules such as 1F1B",
        "utils.pipeline:PipelineConfig",
    ),
    Rung(
        "train_mp.py",
        "train_1gpu.py",
        28,
        "model parallelism: one model over several devices",
        "utils.model_parallel:StagesConfig",
    ),
    Rung(
        "train_ddp_mp.py",
        "train_mp.py",
        22,
        "model parallelism in each process, data parallelism across processes",
        "utils.model_parallel:StagesConfig",
    ),
]
ONE_PROCESS = ("train_1gpu.py", "train_1gpu_graph.py", "train_dp.py", "train_mp.py")
RUNGS = {rung.script: rung for rung in LADDER}


def code(script):
    """The lines of a script, without the module docstring."""
    text = (ROOT / script).read_text()
    end = ast.parse(text).body[0].end_lineno
    return text.splitlines()[end:]


def lesson(rung):
    """The unified diff from the parent to the rung: one line of context, no file headers."""
    lines = difflib.unified_diff(code(rung.parent), code(rung.script), n=1, lineterm="")
    return [line for line in lines if not line.startswith(("---", "+++"))]


def changed(rung):
    """The number of changed code lines, added and removed."""
    return sum(line[0] in "+-" and line[1:].strip() != "" for line in lesson(rung))
