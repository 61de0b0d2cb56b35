"""Run a script on a GPU that computes nothing, on a machine without a GPU.

    python -m tools.null train_1gpu.py --dataset synthetic
    python -m tools.null torchrun --standalone --nproc_per_node=2 train_ddp.py --dataset synthetic
    python -m tools.null --ranks 64 train_ddp.py --dataset synthetic

PyTorch's own CUDA build runs, on a library that stands in for CUDA, cuBLAS and NCCL: memory is
allocated, small copies move their bytes, kernels and collectives do nothing but are counted. Prints
the counts of an ordinary step. docs/null-device.md says what this can show, and what it cannot.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

if __package__ in (None, ""):  # started by its path, from the folder of the script
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tools.null import report
from tools.null.build import Unsupported, build

INSIDE = Path(__file__).parent / "inside"


def environment(library, folder, gpus=8, memory=80.0, steps=0, ranks=0, rank=0):
    """The variables with which a process runs on the null device: os.environ, changed.

    library: what build() returned. folder: where the processes write their reports. gpus, memory:
    their number, and GiB of each. steps: after which a process ends; 0: none. ranks, rank: if not
    0, the process is one of `ranks`, of which the others do not exist.
    """
    env = dict(os.environ)
    if not env.get("CUDA_VISIBLE_DEVICES"):
        env.pop("CUDA_VISIBLE_DEVICES", None)
    first = f"{library}/libnull.so:{library}/libnvrtc.so.13"  # of which PyTorch brings its own
    env["LD_PRELOAD"] = _joined(first, env.get("LD_PRELOAD"))
    env["LD_LIBRARY_PATH"] = _joined(library, env.get("LD_LIBRARY_PATH"))
    env["PYTHONPATH"] = _joined(INSIDE, env.get("PYTHONPATH"))
    env["TRITON_LIBCUDA_PATH"] = str(library)
    env |= {"NULL_REPORT": str(folder), "NULL_GPUS": str(gpus), "NULL_MEMORY": str(memory)}
    env["NULL_STEPS"] = str(steps)
    if ranks:
        node = min(gpus, ranks)
        env |= {"NULL_RANKS": str(ranks), "WORLD_SIZE": str(ranks), "RANK": str(rank)}
        env |= {"LOCAL_RANK": str(rank % node), "LOCAL_WORLD_SIZE": str(node)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    return env


def _joined(first, rest):
    return f"{first}:{rest}" if rest else str(first)


def command_line(words):
    """A command of the command line as what to execute: SCRIPT ARGS, torchrun ARGS, or a program
    with its arguments."""
    if words[0].endswith(".py"):
        return [sys.executable, *words]
    if words[0] == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    return words


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tools.null",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of the machine (default: 8)")
    parser.add_argument("--memory", type=float, default=80.0, help="GiB of each (default: 80)")
    parser.add_argument(
        "--ranks",
        type=int,
        default=0,
        help="be one rank of so many, of which the others do not exist",
    )
    parser.add_argument("--rank", type=int, default=0, help="which of them (default: 0)")
    parser.add_argument("--steps", type=int, default=0, help="end the processes after N steps")
    parser.add_argument("--kernels", type=int, default=10, help="how many kinds of kernels to list")
    parser.add_argument("--json", metavar="FILE", help="write all counts, of every step")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="SCRIPT ARGS, or torchrun ...")
    args = parser.parse_args()
    if not args.command:
        parser.error("which script? For example: train_1gpu.py --dataset synthetic")
    try:
        library = build()
    except Unsupported as error:
        sys.exit(f"error: {error}")
    with tempfile.TemporaryDirectory(prefix="null-device-") as folder:
        env = environment(
            library, folder, args.gpus, args.memory, args.steps, args.ranks, args.rank
        )
        code = subprocess.call(command_line(args.command), env=env)
        reports = report.read(Path(folder))
    if args.json:
        Path(args.json).write_text(json.dumps(reports) + "\n", encoding="utf-8")
    print("\n".join(report.text_of(reports, args.kernels)))
    sys.exit(code or bool(report.differences(reports)))


if __name__ == "__main__":
    main()
