"""What an ordinary step of each script costs on the null device: kernels, copies, waits, messages.

    python -m lab.budgets
    python -m lab.budgets --peers     # what others launch; needs requirements/peers.txt

Writes lab/results/null.json. A test compares each script with it, so that what a change adds to a
step, such as a kernel per tensor, or a wait, does not go unnoticed. The counts hold for the null
device, without cuDNN, and for one version of PyTorch.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch

from tools.fit.candidates import text_of
from tools.lib.ladder import RESULTS, ROOT
from tools.lib.markdown import markdown_table
from tools.lib.runs import flag_list
from tools.null import report

RESULT = RESULTS / "null.json"
# Enough steps for DistributedDataParallel, which waits in its first ten to log times.
FLAGS = {
    "dataset": "synthetic",
    "synthetic_samples": 112,
    "image_size": 8,
    "model": "vit_tiny",
    "global_batch_size": 8,
    "num_workers": 0,
    "epochs": 1,
    "timeout": 60,
}
# script: processes, options of tools.null, flags. One process stands for a rank of several where it
# can: a stage of a pipeline needs the objects of the others.
RUNS = {
    "train_1gpu.py": (None, {}, {}),
    "train_dp.py": (None, {"gpus": 1}, {}),
    "train_1gpu_graph.py": (None, {}, {}),
    "train_ddp.py": (None, {"ranks": 4}, {}),
    "train_ddp_spawn.py": (None, {"gpus": 1}, {}),
    "train_ddp_amp.py": (None, {"ranks": 4}, {"amp_dtype": "float16"}),
    "train_ddp_accum.py": (None, {"ranks": 4}, {"micro_batches": 2}),
    "train_fsdp.py": (None, {"ranks": 4}, {"optimizer": "adamw"}),
    "train_tp.py": (None, {"ranks": 4}, {"optimizer": "adamw"}),
    "train_fsdp_tp.py": (None, {"ranks": 4}, {"fsdp_size": 2, "optimizer": "adamw"}),
    "train_pp.py": (2, {}, {}),
    "train_mp.py": (None, {"gpus": 2}, {}),
    "train_ddp_mp.py": (None, {"ranks": 2, "gpus": 4}, {}),
}
# {script: why it is not run}. It waits in each step, to learn how many tokens an expert gets.
LEFT_OUT = {"train_ep.py": "where tokens go depends on values, which the null device lacks"}
LEFT_OUT |= {"train_cp.py": "it compares outputs at the start, and the null device has none"}
# What is fused for a task by --compile default: settings of a small model of train_1gpu.py.
COMPILED = {
    "images": {},
    "text": {"layers": 2, "heads": 4, "width": 64, "context": 64, "padding": "context"},
    "segmentation": {"image_size": 16, "width": 8, "synthetic_samples": 112},
    "diffusion": {"layers": 2, "heads": 4, "width": 32, "image_size": 8, "patch_size": 2}
    | {"dataset": "synthetic", "synthetic_samples": 112},
}
# A step with what a user might choose instead (lab/bench/peer.py), on one GPU: the same model,
# images and global batch. Each peer also with the fused optimizer, its best setting here.
PEER_FLAGS = FLAGS | {"image_size": 224, "model": "vit_b_16", "device": "cuda"}
PEER_FLAGS |= {"synthetic_samples": 320}  # 80 steps in two epochs
ROUNDS = 5  # of all peers: a machine that is busy for a while slows all of them
OURS = "train_1gpu.py"
PEERS = "tutorial", "tuned", "accelerate", "accelerate+fused", "fabric", "fabric+fused", OURS
OF_ALL = "global_batch_size", "num_workers", "epochs", "timeout"  # of FLAGS
BREAK = re.compile(r"Graph break\b.*? at (\S+:\d+)")
HEAD = ["script", "run", "kernels", "graphs", "copies", "waits", "collectives", "bytes sent"]


def counts_of(step):
    """An ordinary step's counts: {kind: number}, and the bytes of its collectives."""
    counts = {kind: report.number(step, kind) for kind in report.KINDS}
    return counts | {"bytes": report.size(step, "collective")}


def measure(script):
    """counts_of() a run of a script, of its first rank."""
    nproc, options, flags = RUNS[script]
    with tempfile.TemporaryDirectory(prefix="null-budgets-") as folder:
        result = Path(folder) / "counts.json"
        command = [sys.executable, "-m", "tools.null", "--json", str(result), *flag_list(options)]
        if nproc:
            command += ["torchrun", "--standalone", f"--nproc_per_node={nproc}"]
        everything = FLAGS | flags | {"output_dir": f"{folder}/run"}
        command += [script, *flag_list(everything)]
        return counts_of(report.ordinary_step(report_of_run(command, script, result)))


def report_of_run(command, name, result, **variables):
    """What the first rank of a run has reported in the file `result`."""
    env = os.environ | variables
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"error: {name} on the null device:\n{run.stderr}")
    return json.loads(result.read_text(encoding="utf-8"))[0]


def measure_peer(name):
    """counts_of() a run of a peer, or of OURS, and the median of the processor's seconds that a
    step takes of the thread that launches."""
    with tempfile.TemporaryDirectory(prefix="null-budgets-") as folder:
        result = Path(folder) / "counts.json"
        command = [sys.executable, "-m", "tools.null", "--gpus=1", f"--json={result}"]
        if name == OURS:
            # As many steps as a peer takes in its two epochs.
            command += [name, *flag_list(PEER_FLAGS | {"epochs": 2, "output_dir": f"{folder}/run"})]
        else:
            command += [sys.executable, "-m", "lab.bench.peer", folder, name, "1", "float32"]
            command += flag_list(PEER_FLAGS)
        found = report_of_run(command, name, result, NULL_TIMES="1")
    return counts_of(report.ordinary_step(found)), median(found["seconds"])


def measure_peers():
    """The counts of each peer, and its host's time in relation to that of the first one: the
    median of ROUNDS, the lowest and the highest."""
    counts, seconds = {}, {name: [] for name in PEERS}
    for _ in range(ROUNDS):
        for name in PEERS:
            counts[name], time = measure_peer(name)
            seconds[name].append(time)
            print(f"{name}: {counts[name]}, {1e3 * time:.2f} ms", flush=True)
    peers, base = {}, seconds[PEERS[0]]
    for name in PEERS:
        ratios = [own / first for own, first in zip(seconds[name], base, strict=True)]
        values = median(ratios), min(ratios), max(ratios)
        peers[name] = counts[name] | {"host": [round(value, 3) for value in values]}
    return peers


def peers_table(result):
    """The counts of the peers, as a Markdown table."""
    rows = []
    for name, counts in result["peers"].items():
        cells = [f"{counts[kind]:,}" for kind in ("kernel", "copy", "wait", "collective")]
        middle, low, high = counts["host"]
        cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})" if name != PEERS[0] else "1")
        rows.append([name.replace("+", ", "), *cells])
    head = ["loop", "kernels", "copies", "waits", "collectives", "host's time, ratio"]
    return markdown_table(head, rows)


def measure_task(task, mode):
    """The kernels of an ordinary step of train_1gpu.py with --compile, and where the graph breaks,
    as file:line."""
    flags = FLAGS if task == "images" else {name: FLAGS[name] for name in OF_ALL}
    with tempfile.TemporaryDirectory(prefix="null-budgets-") as folder:
        result, script = Path(folder) / "counts.json", Path(folder) / "train_1gpu.py"
        text = text_of(ROOT / script.name, f"tasks.{task}", False)
        script.write_text(text, encoding="utf-8")
        options = flag_list({"json": result, "steps": 4})
        everything = flags | COMPILED[task] | {"compile": mode, "output_dir": f"{folder}/run"}
        run = subprocess.run(
            [sys.executable, "-m", "tools.null", *options, str(script), *flag_list(everything)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "TORCH_LOGS": "graph_breaks"},
            capture_output=True,
            text=True,
        )
        if run.returncode:
            sys.exit(f"error: {task} with --compile {mode} on the null device:\n{run.stderr}")
        step = report.ordinary_step(json.loads(result.read_text(encoding="utf-8"))[0])
    # Not of utils/: on a slow machine, a line about the progress reads the sums.
    breaks = {place for place in BREAK.findall(run.stderr) if f"{ROOT}/utils/" not in place}
    return {"kernels": report.number(step, "kernel"), "breaks": sorted(breaks)}


def compiled_table(result):
    """The kernels of each task before and after fusion, as a Markdown table."""
    rows = []
    for task, modes in result["compiled"].items():
        cells = [f"{modes[mode]['kernels']:,}" for mode in ("none", "default")]
        rows.append([task, *cells, str(len(modes["default"]["breaks"]))])
    return markdown_table(["task", "kernels", "with --compile default", "graph breaks"], rows)


def description(script):
    """How a script was run."""
    nproc, options, flags = RUNS[script]
    ranks = nproc or options.get("ranks", 1)
    return ", ".join([f"{ranks} rank{'s' * (ranks > 1)}", *(t[2:] for t in flag_list(flags))])


def table(result):
    """The published counts, as a Markdown table."""
    rows = []
    for script, counts in result["scripts"].items():
        cells = [f"{number:,}" for number in counts.values()]
        rows.append([f"`{script}`", description(script), *cells])
    return markdown_table(HEAD, rows)


def main():
    parser = argparse.ArgumentParser(prog="python -m lab.budgets", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--peers", action="store_true", help="measure only what others launch")
    args = parser.parse_args()
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    if args.peers:
        write(result | {"peers": measure_peers()})
        return
    scripts = {}
    for script in RUNS:
        scripts[script] = measure(script)
        print(script, scripts[script], flush=True)
    compiled = {}
    for task in COMPILED:
        compiled[task] = {mode: measure_task(task, mode) for mode in ("none", "default")}
        print(task, compiled[task], flush=True)
    write(result | {"torch": torch.__version__, "scripts": scripts, "compiled": compiled})


def write(result):
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
