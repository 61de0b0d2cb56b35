"""What each rank hands to collectives in a step, measured on CPUs, and by formula.

    python -m lab.communication

Writes lab/results/communication.json. The model is small, the formulas are not: a test compares
them with runs. Sizes are the sizes of the whole tensor that a collective works on: the result of an
all-gather, the input of a reduce-scatter, an all-reduce or an all-to-all. Of S bytes, each of N
ranks sends S (N - 1) / N, and twice that in an all-reduce.
"""

import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from lab.bench.hooks import run_script
from tools.lib.ladder import RESULTS, ROOT
from tools.lib.markdown import markdown_table
from tools.lib.runs import end_runs_on_sigterm, finish_run, start_run
from tools.verify.run import project_with_task, write_text
from utils.checkpoint import Checkpointer
from utils.rungs import context_parallel

RESULT = RESULTS / "communication.json"
KINDS = {  # {part of an operator's name: the collective}
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "all_to_all": "all-to-all",
    "alltoall": "all-to-all",
}
COLLECTIVES = list(dict.fromkeys(KINDS.values()))
STEP = 3  # whose collectives count: those before it compare the ranks, or are the first
FLAGS = {"context": 32, "layers": 2, "heads": 2, "width": 16, "padding": "context", "epochs": 1}
FLAGS |= {"global_batch_size": 8, "dtype": "float32", "clip_norm": 0, "device": "cpu"}
FLAGS |= {"num_workers": 0, "num_threads": 1, "save_minutes": 0}
# The task, the script, and the numbers of ranks.
ROWS = [
    ("moe", script, ranks)
    for script in ("train_ddp.py", "train_fsdp.py", "train_ep.py")
    for ranks in (2, 4)
]
ROWS += [("text", "train_cp.py", ranks) for ranks in (2, 4)]
HEAD = ["script", "ranks", *(f"{kind}, kB" for kind in COLLECTIVES), "by formula"]


class Counts(TorchDispatchMode):
    """Adds up the bytes of collectives of at least 1 kB: smaller ones send counts, norms and
    losses. bytes: {collective: bytes}."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if name.startswith(("c10d", "_c10d")):
            kinds = {kind for part, kind in KINDS.items() if part in name}
            sizes = [t.nbytes for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
            if kinds and "functional" in name and "gather" in name:  # it gets the part
                sizes = [sizes[0] * torch.distributed.get_world_size()]
            if kinds and max(sizes) >= 1000:
                self.bytes[kinds.pop()] += max(sizes)
        return function(*args, **(kwargs or {}))


def install(result):
    """Make every script fill `result`, a dict, with the bytes of the step number STEP."""
    counts, steps, save_point = Counts(), [], Checkpointer.step
    make_mask = context_parallel.causal_lower_right

    def mask(*arguments):  # a subclass of Tensor, which cannot be made while anything counts
        with _disable_current_modes():
            return make_mask(*arguments)

    def record(checkpoint):
        steps.append(dict(counts.bytes))
        if len(steps) == STEP:
            result.update(steps[-1])
        save_point(checkpoint)
        counts.bytes.clear()

    Checkpointer.step, context_parallel.causal_lower_right = record, mask
    counts.__enter__()


def measure(task, script, ranks, folder, root=None, **flags):
    """{collective: bytes} of a step, the mean over the ranks. root: the folder of the scripts;
    default: a copy of the project's. flags: besides FLAGS."""
    root = root or project_with_task(task, folder / "project")
    folder.mkdir(exist_ok=True)
    text_file = write_text(folder / "text.txt", train=40, val=6)
    flags = FLAGS | {"output_dir": folder / "run", "text_file": text_file} | flags
    environment = {"PYTHONPATH": f"{root}{os.pathsep}{ROOT}"}
    command = ["-m", "lab.communication", folder, root / script]
    run = finish_run(start_run(command, ranks, flags, environment, root), folder / "run", limit=600)
    if run.code:
        raise RuntimeError(run.stderr)
    counts = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    kinds = {kind for count in counts for kind in count}
    return {k: round(sum(c.get(k, 0) for c in counts) / ranks) for k in COLLECTIVES if k in kinds}


def sizes(task, layers=FLAGS["layers"]):
    """The numbers of parameters outside the blocks, of the blocks without experts, and of experts,
    for FLAGS."""
    width = FLAGS["width"]
    outside = (256 + FLAGS["context"] + 2) * width
    block = 4 * width * width + 3 * width + 2 * 2 * width  # attention and norms
    mlp = 8 * width * width + 5 * width
    experts = 4 * mlp if task == "moe" else 0
    block += 4 * width if task == "moe" else mlp  # a router of four experts
    return outside, layers * block, layers * experts


def formula(task, script, ranks):
    """{collective: bytes} of a step, the mean over the ranks, for FLAGS. Every parameter is float32
    and divides evenly among the ranks."""
    outside, blocks, experts = sizes(task)
    tokens = FLAGS["global_batch_size"] * FLAGS["context"] // ranks  # of a rank's share
    features = 4 * tokens * FLAGS["width"]
    gathered = blocks + (experts if script == "train_fsdp.py" else 0)
    result = {}
    if script in ("train_ddp.py", "train_cp.py"):
        result["all-reduce"] = 4 * (outside + blocks + experts)
    else:
        result["all-gather"] = 4 * (outside + 2 * gathered)
        result["reduce-scatter"] = 4 * (outside + gathered)
    if script == "train_cp.py":  # keys and values of all ranks, and their gradients
        whole = 2 * features * ranks * FLAGS["layers"]
        result |= {"all-gather": whole, "reduce-scatter": whole}
    if script == "train_ep.py":  # two copies of each token, there and back, and their gradients
        result["all-to-all"] = 4 * 2 * features * FLAGS["layers"]
    return {kind: result[kind] for kind in COLLECTIVES if kind in result}


def table(result):
    """The published bytes, as a Markdown table."""
    rows = []
    for row in result["rows"]:
        expected = formula(row["task"], row["script"], row["ranks"])
        cells = [f"{row['bytes'][k] / 1e3:.1f}" if k in row["bytes"] else "" for k in COLLECTIVES]
        is_same = "the same" if row["bytes"] == expected else json.dumps(expected)
        rows.append([f"`{row['script']}`", str(row["ranks"]), *cells, is_same])
    return markdown_table(HEAD, rows)


def main():
    if len(sys.argv) > 1:  # a rank
        folder, script, *flags = sys.argv[1:]
        result, path = {}, Path(folder) / f"rank-{os.environ['RANK']}.json"
        install(result)
        write = lambda: path.write_text(json.dumps(result))  # noqa: E731
        run_script(script, flags, lambda loader, batches: batches, write)
        return
    rows = []
    for task, script, ranks in ROWS:
        with tempfile.TemporaryDirectory(prefix="communication-") as folder:
            found = measure(task, script, ranks, Path(folder))
        rows.append({"task": task, "script": script, "ranks": ranks, "bytes": found})
        print(task, script, ranks, found, formula(task, script, ranks), flush=True)
    result = {"torch": torch.__version__, "rows": rows}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    end_runs_on_sigterm()
    main()
