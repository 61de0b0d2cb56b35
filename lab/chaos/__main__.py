"""Train under random faults, until the run is complete, and compare it with an uninterrupted run.

    python -m lab.chaos --script train_ddp.py --nproc 2 --faults 20 --seed 0
    python -m lab.chaos --script all --faults 100 --write docs/results/chaos.md
    python -m lab.chaos --task text
    python -m lab.chaos --task shards                   images in tar files, in a ShardOrder
    python -m lab.chaos --task stream                   images that can only be iterated over
    python -m lab.chaos --kinds kill-rank,term-all      only these; --kinds list: the names

After each fault that ends the run, the same command continues it. At the end, weights, optimizer
state and the rows of every epoch must have the same checksums as those of an uninterrupted run. The
same seed repeats the same faults at the same places: a fixed number of steps after the run resumes.
Most runs are forks of this process, with the launcher of utils/rungs/spawn.py; the others (--real
0.1 of them) are started as a user would, with tools.launch. The exit code is 1 if a run ends
differently than promised, hangs, leaves a process or a torn file behind, or if the result differs.
"""

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from lab.chaos.faults import BY_NAME, KINDS, End
from lab.chaos.plant import SMALL_DISK
from lab.chaos.run import TASK_FLAGS, Soak
from tools.lessons import LADDER, ONE_PROCESS
from tools.markdown import markdown_table
from tools.verify.cases import FOUR_PROCESSES

SCRIPTS = [rung.script for rung in LADDER if rung.script != "train_dp.py"]  # as train_1gpu.py
HEAD = ["script", "#", "fault", "place", "launcher", "exit code", "seconds", "result"]
WIDTHS = (18, 3, 31, 24, 13, 10, 8)


def parse_arguments():
    """The command line, with `scripts` added."""
    parser = argparse.ArgumentParser(prog="python -m lab.chaos", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--script", default="train_ddp.py", help="all, or names, separated by commas"
    )
    parser.add_argument("--task", default="images", choices=TASK_FLAGS)
    parser.add_argument("--nproc", type=int, default=2, help="ranks, unless the script fixes it")
    parser.add_argument("--faults", type=int, default=20, help="in total, over all scripts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="", help="names, separated by commas; list: show them")
    parser.add_argument(
        "--real", type=float, default=0.1, help="fraction of runs that are not forks"
    )
    parser.add_argument("--limit", type=float, default=180, help="seconds that a run may take")
    parser.add_argument("--folder", type=Path, help="keep the files there")
    parser.add_argument("--write", metavar="FILE", type=Path, help="write the log as Markdown")
    args = parser.parse_args()
    args.kinds = args.kinds.split(",") if args.kinds else list(BY_NAME)
    if unknown := set(args.kinds) - BY_NAME.keys() - {"list"}:
        parser.error(f"there is no kind {', '.join(sorted(unknown))}: see --kinds list")
    if args.kinds != ["list"] and all(
        BY_NAME[name].end in (End.CONTINUES, End.RESUMES) for name in args.kinds
    ):
        parser.error("at least one of the kinds must end a run")
    args.scripts = SCRIPTS if args.script == "all" else args.script.split(",")
    if unknown := set(args.scripts) - set(SCRIPTS):
        parser.error(f"{', '.join(unknown)} is not one of {', '.join(SCRIPTS)}")
    return args


def mount_small_disk(folder):
    """Mount 32 MiB of memory as `folder`, for this process and its children alone. Returns whether
    that is possible: it needs root."""
    libc, clone_newns, private = ctypes.CDLL(None, use_errno=True), 0x20000, 1 << 18 | 1 << 14
    if os.geteuid() or libc.unshare(clone_newns):
        return False
    libc.mount(b"none", b"/", None, private, None)  # private, with all mounts below
    command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "none", str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0


def cells_of(row):
    """A Row -> the text of each column of HEAD."""
    result = row.last_line
    if row.problems:
        result = f"FAIL: {'; '.join(row.problems)}"
    elif row.code is None:
        result = "continues"
    return [
        row.script,
        str(row.number),
        row.fault,
        row.place,
        row.launcher,
        "" if row.code is None else str(row.code),
        "" if row.seconds is None else f"{row.seconds:.1f}",
        result,
    ]


def print_row(row):
    """Print a Row, or the head of the table."""
    *cells, result = cells_of(row) if row else HEAD
    columns = zip(cells, WIDTHS, strict=True)
    print("  ".join([*(text.ljust(width) for text, width in columns), result]), flush=True)


def processes_of(script, nproc):
    """The number of ranks for a script; None for a single process."""
    if script in ONE_PROCESS:
        return None
    return 4 if script in FOUR_PROCESSES else nproc


def write(path, rows, summary):
    """Write the log as Markdown."""
    command = " ".join(["python -m lab.chaos", *sys.argv[1:]])
    cores = len(os.sched_getaffinity(0))
    lines = "\n".join(f"- {line}" for line in summary)
    table = markdown_table(HEAD, map(cells_of, rows))
    path.write_text(
        f"# A log of faults\n\n`{command}` on {cores} CPU cores, torch {torch.__version__}:\n\n"
        f"{lines}\n\n{table}\n"
    )


def main():
    args = parse_arguments()
    if args.kinds == ["list"]:
        print("\n".join(f"{kind.name:14}  {kind.title}: {kind.end.value}" for kind in KINDS))
        return 0
    rows, summary, failed = [], [], False
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        folder, disk = args.folder or Path(temporary), Path(temporary) / "disk"
        disk.mkdir()
        is_small = mount_small_disk(disk)
        print(f"full disk: {'32 MiB of memory' if is_small else 'an injected OSError(ENOSPC)'}")
        print_row(None)
        for index, script in enumerate(args.scripts):
            count = args.faults * (index + 1) // len(args.scripts)
            count -= args.faults * index // len(args.scripts)
            start = time.monotonic()
            nproc = processes_of(script, args.nproc)
            soak = Soak(
                script,
                nproc,
                folder / script,
                disk / script if is_small else None,
                args.limit,
                task=args.task,
            )
            done, problems = soak.run(args.kinds, count, args.seed, print_row, args.real)
            shutil.rmtree(soak.output, ignore_errors=True)
            rows += done
            bad = sum(bool(row.problems) for row in done)
            verdict = f"FAIL: {'; '.join(problems)}" if problems else "the same checksums"
            text = (
                f"`{script}` on {nproc or 1} processes: {len(done)} faults in "
                f"{time.monotonic() - start:.0f} s, {bad} ended differently than promised; "
                f"compared with an uninterrupted run: {verdict}"
            )
            summary.append(text)
            print(text, flush=True)
            failed |= bool(bad or problems)
        if is_small:
            subprocess.run(["umount", str(disk)], check=False)
    if args.write:
        write(args.write, rows, summary)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
