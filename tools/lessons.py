"""The ladder as data: each script, its parent, and how many changed lines its lesson may take."""

import ast
import difflib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Rung(NamedTuple):
    script: str
    parent: str | None
    budget: int  # changed code lines, added and removed, the module's docstring left out
    adds: str


LADDER = [
    Rung("train_1gpu.py", None, 0, "one device: the loop"),
    Rung("train_dp.py", "train_1gpu.py", 2, "`nn.DataParallel`, the line not to use"),
    Rung(
        "train_ddp.py",
        "train_1gpu.py",
        22,
        "`DistributedDataParallel`: one process a device, on one node or many",
    ),
    Rung("train_ddp_amp.py", "train_ddp.py", 20, "mixed precision: autocast, `GradScaler`"),
    Rung("train_mp.py", "train_1gpu.py", 28, "model parallel: one model over several devices"),
    Rung("train_ddp_mp.py", "train_mp.py", 22, "data parallel x model parallel"),
    Rung("train_fsdp.py", "train_ddp.py", 12, "`fully_shard` (FSDP2): sharded parameters"),
    Rung("train_ddp_accum.py", "train_ddp.py", 28, "gradient accumulation with `no_sync`"),
    Rung("train_ddp_spawn.py", "train_ddp.py", 16, "started from Python, without torchrun"),
]


def code(script):
    """The lines of a script, without the module's docstring."""
    text = (ROOT / script).read_text()
    end = ast.parse(text).body[0].end_lineno
    return text.splitlines()[end:]


def lesson(rung):
    """The unified diff from the parent to the rung: one line of context, no file headers."""
    lines = difflib.unified_diff(code(rung.parent), code(rung.script), n=1, lineterm="")
    return [line for line in lines if not line.startswith(("---", "+++"))]


def changed(rung):
    """Changed code lines, added and removed."""
    return sum(line[0] in "+-" and line[1:].strip() != "" for line in lesson(rung))
