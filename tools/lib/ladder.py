"""The ladder as data: each script, its parent, and how many lines its lesson may change."""

import ast
import difflib
import pkgutil
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "lab" / "results"  # of measurements


class Rung(NamedTuple):
    """A script of the ladder."""

    script: str
    parent: str | None
    budget: int  # changed code lines, added and removed, without the module docstring
    adds: str
    settings: str | None = None  # the class of its own settings, if it has any
    task: str = "images"  # named in the script; any other that has what the technique needs will do

    def settings_class(self):
        """The dataclass of the script's own settings, or None."""
        return self.settings and pkgutil.resolve_name(self.settings)


LADDER = [
    Rung("train_1gpu.py", None, 0, "the training loop on one device"),
    Rung("train_dp.py", "train_1gpu.py", 2, "`nn.DataParallel`, and why not to use it"),
    Rung(
        "train_1gpu_graph.py",
        "train_1gpu.py",
        26,
        "the whole training step in one CUDA graph",
        "utils.rungs.graph:GraphSettings",
    ),
    Rung(
        "train_ddp.py",
        "train_1gpu.py",
        28,
        "`DistributedDataParallel`: one process per device, on one node or several",
    ),
    Rung(
        "train_ddp_spawn.py",
        "train_ddp.py",
        16,
        "launched from Python with `mp.spawn`, without torchrun",
        "utils.rungs.spawn:SpawnSettings",
    ),
    Rung(
        "train_ddp_amp.py",
        "train_ddp.py",
        24,
        "mixed precision: `autocast` and `GradScaler`",
        "utils.rungs.amp:AmpSettings",
    ),
    Rung(
        "train_ddp_accum.py",
        "train_ddp.py",
        28,
        "gradient accumulation with `no_sync`",
        "utils.rungs.accumulation:AccumulationSettings",
    ),
    Rung(
        "train_fsdp.py",
        "train_ddp.py",
        18,
        "`fully_shard` (FSDP2): parameters, gradients and optimizer state are sharded",
        "utils.rungs.fsdp:FsdpSettings",
    ),
    Rung(
        "train_tp.py",
        "train_ddp.py",
        28,
        "tensor parallelism: each layer of a ViT is divided among the ranks",
    ),
    Rung(
        "train_fsdp_tp.py",
        "train_fsdp.py",
        24,
        "two dimensions: `fully_shard` across replicas, tensor parallelism within each",
        "utils.rungs.fsdp:FsdpSettings",
    ),
    Rung(
        "train_ep.py",
        "train_fsdp.py",
        12,
        "expert parallelism: experts of a mixture on different ranks, with all-to-all",
        "utils.rungs.fsdp:FsdpSettings",
        "moe",
    ),
    Rung(
        "train_cp.py",
        "train_ddp.py",
        24,
        "context parallelism: each sequence is divided among the ranks",
        task="text",
    ),
    Rung(
        "train_pp.py",
        "train_ddp.py",
        44,
        "pipeline parallelism: layers on different ranks, with schedules such as 1F1B",
        "utils.rungs.pipeline:PipelineSettings",
    ),
    Rung(
        "train_mp.py",
        "train_1gpu.py",
        28,
        "model parallelism: one model over several devices",
        "utils.rungs.model_parallel:StagesSettings",
    ),
    Rung(
        "train_ddp_mp.py",
        "train_mp.py",
        26,
        "model parallelism in each process, data parallelism across processes",
        "utils.rungs.model_parallel:StagesSettings",
    ),
]
ONE_PROCESS = ("train_1gpu.py", "train_1gpu_graph.py", "train_dp.py", "train_mp.py")
RUNGS = {rung.script: rung for rung in LADDER}


def code(script):
    """The lines of a script, without the module docstring."""
    text = (ROOT / script).read_text(encoding="utf-8")
    end = ast.parse(text).body[0].end_lineno
    return text.splitlines()[end:]


def lesson(rung):
    """The unified diff from the parent to the rung: one line of context, no file headers."""
    lines = difflib.unified_diff(code(rung.parent), code(rung.script), n=1, lineterm="")
    return [line for line in lines if not line.startswith(("---", "+++"))]


def changed(rung):
    """The number of changed code lines, added and removed."""
    return sum(line[0] in "+-" and line[1:].strip() != "" for line in lesson(rung))
