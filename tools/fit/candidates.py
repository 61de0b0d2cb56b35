"""What else may fit: scripts of the ladder, half precision, activation checkpointing."""

import ast
import re
import threading
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tools.lib.ladder import ONE_PROCESS, ROOT, RUNGS
from tools.lib.update import RECORD

TASK_LINE = re.compile(r"^import ([\w.]+) as task\b", re.MULTILINE)
IMPORTS = "import torch\n"
ANCHOR = '    if cfg.compile != "none":\n'
# As docs/recipes/activation-checkpointing.md: a test compares them.
CHECKPOINTING = """\
    for block in task.blocks(model):
        recomputed = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
        block.forward = partial(recomputed, block.forward)
"""
NOT_ALONE = {  # scripts that cannot run as one rank of many
    "train_pp.py": "its stages wait for what the others send: run all of them, with  python -m "
    "tools.null torchrun --standalone --nproc_per_node=2 train_pp.py",
    "train_ddp_spawn.py": "it starts its processes itself: ask about train_ddp.py, which needs the "
    "same memory",
    "train_ddp_mp.py": "each process drives several GPUs: run  python -m tools.null --ranks N "
    "train_ddp_mp.py",
}
_writing = threading.Lock()


class Candidate(NamedTuple):
    """A way to train. flags: {setting: value}. recomputes: with activation checkpointing."""

    name: str
    script: str
    flags: dict
    recomputes: bool = False


def is_of_ladder(script):
    """Whether a script is one of this project's, or lies in a copy: they name their task in one
    line."""
    is_ours = ROOT in script.parents or (script.parent / RECORD).exists()
    return is_ours and TASK_LINE.search(script.read_text(encoding="utf-8")) is not None


def text_of(script, task, recomputes):
    """A script's text with a different task, unless that is empty, and with checkpointing."""
    text = script.read_text(encoding="utf-8")
    if task:
        text = TASK_LINE.sub(f"import {task} as task", text, count=1)
    if recomputes:
        text = text.replace(IMPORTS, f"from functools import partial\n\n{IMPORTS}", 1)
        text = text.replace(ANCHOR, CHECKPOINTING + ANCHOR, 1)
    return text


def find(name, folder):
    """The script of the ladder: the copy in the folder, or else this project's."""
    own = folder / name
    return own if own.exists() else ROOT / name


def replicas(script, ranks, flags):
    """How many ranks divide a global batch among them."""
    if script in ONE_PROCESS or script in ("train_tp.py", "train_pp.py"):
        return 1
    if script == "train_fsdp_tp.py":
        return int(flags.get("fsdp_size") or ranks)
    return ranks


def own_settings(script):
    """The names of the settings that a script has besides the settings of all scripts."""
    rung = RUNGS.get(script)
    if rung is None or not rung.settings:
        return set()
    module, _, name = rung.settings.partition(":")
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    kinds = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return {field.target.id for field in kinds[0].body if isinstance(field, ast.AnnAssign)}


def name_of(flag):
    """--fsdp-size=8, --no-sync-bn -> the name of the setting."""
    name = flag.partition("=")[0].removeprefix("--").replace("-", "_")
    return name.removeprefix("no_")


def without(arguments, names):
    """The arguments of a script without these settings, and their values."""
    kept, is_dropped = [], False
    for word in arguments:
        if word.startswith("--"):
            is_dropped = name_of(word) in names
        if not is_dropped:
            kept.append(word)
        elif not word.startswith("--") or "=" in word:
            is_dropped = False
    return kept


def value_of(arguments, name):
    """The value of a setting among the arguments, or None."""
    value = None
    for word, following in pairwise([*arguments, ""]):
        if word.startswith("--") and name_of(word) == name:
            value = word.partition("=")[2] or following
    return value


def candidates(gpus, node, samples):
    """The ways to train on so many GPUs, `node` of them in each machine. samples: in a batch of all
    of them."""
    yield from _without_micro_batches(gpus, node)
    count = min(4, samples // gpus)
    if count > 1:
        flags = {"micro_batches": count}
        yield Candidate(f"{count} micro-batches", "train_ddp_accum.py", flags)


def _without_micro_batches(gpus, node):
    if gpus == 1:
        yield Candidate("one GPU", "train_1gpu.py", {})
        yield Candidate("one GPU, checkpointing", "train_1gpu.py", {}, True)
        yield Candidate("mixed precision", "train_ddp_amp.py", {"amp_dtype": "bfloat16"})
        amp = {"amp_dtype": "bfloat16"}
        yield Candidate("mixed precision, checkpointing", "train_ddp_amp.py", amp, True)
        return
    half = {"fsdp_dtype": "bfloat16"}
    yield Candidate("data parallel", "train_ddp.py", {})
    yield Candidate("data parallel, bf16", "train_ddp_amp.py", {"amp_dtype": "bfloat16"})
    yield Candidate("data parallel, checkpointing", "train_ddp.py", {}, True)
    yield Candidate("FSDP", "train_fsdp.py", {})
    yield Candidate("FSDP, bf16", "train_fsdp.py", half)
    yield Candidate("FSDP, bf16, checkpointing", "train_fsdp.py", half, True)
    if gpus > node:
        within = half | {"fsdp_size": str(node)}
        yield Candidate("FSDP within a node, bf16", "train_fsdp.py", within)
        across = half | {"fsdp_size": str(gpus // node)}
        yield Candidate("tensor parallel within a node, bf16", "train_fsdp_tp.py", across)
    else:
        yield Candidate("tensor parallel", "train_tp.py", {})


def arguments_for(candidate, script, arguments):
    """The arguments of a run of a candidate, from the arguments of a script: its own settings are
    dropped, unless the candidate's script has them, too."""
    foreign = own_settings(script) - own_settings(candidate.script)
    kept = without(arguments, foreign | candidate.flags.keys())
    for name, value in candidate.flags.items():
        kept += [f"--{name.replace('_', '-')}", str(value)]
    return kept


def write(candidate_script, folder, task, recomputes):
    """A script to run: itself, or, if it is to be changed, a copy in the folder."""
    script = Path(candidate_script)
    if not task and not recomputes:
        return script
    path = Path(folder) / f"{script.stem}{'-recomputes' * recomputes}.py"
    with _writing:
        if not path.exists():  # or a run may be reading it
            path.write_text(text_of(script, task, recomputes), encoding="utf-8")
    return path
