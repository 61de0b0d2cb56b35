"""Train under random faults, until the run is complete, and compare it with an uninterrupted run.

    python -m tools.chaos --script train_ddp.py --nproc 2 --faults 20 --seed 0
    python -m tools.chaos --script all --faults 100 --write docs/results/chaos.md
    python -m tools.chaos --kinds kill-rank,term-all      these alone; --kinds list: the names

After each fault that ends the run, the same command continues it. At the end, weights, optimizer
state and the rows of every epoch must have the same checksums as those of an uninterrupted run. The
same seed repeats the same faults at the same places: after so many steps since the run has resumed.
Most runs are forks of this process, with the launcher of utils/spawn.py; the others (--real 0.1 of
them) are started as a user would, with tools.launch. Exit code 1 if a run ends in another way than
promised, hangs, leaves a process behind or a torn file, or if the result differs.
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

from tools.bench.report import markdown_table
from tools.chaos.faults import BY_NAME, KINDS, End
from tools.chaos.plant import SMALL_DISK
from tools.chaos.run import Soak
from tools.lessons import LADDER, ONE_PROCESS
from tools.verify.cases import FOUR_PROCESSES

SCRIPTS = [rung.script for rung in LADDER if rung.script != "train_dp.py"]  # as train_1gpu.py
HEAD = ["script", "#", "fault", "place", "launcher", "exit code", "seconds", "result"]
WIDTHS = (18, 3, 31, 24, 13, 10, 8)


def parse_arguments():
    """The command line, with `scripts` added."""
    parser = argparse.ArgumentParser(prog="python -m tools.chaos", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--script", default="train_ddp.py", help="all, or names, separated by commas"
    )
    parser.add_argument("--nproc", type=int, default=2, help="ranks, where the script does not say")
    parser.add_argument("--faults", type=int, default=20, help="in total, over all scripts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="", help="names, separated by commas; list: show them")
    parser.add_argument("--real", type=float, default=0.1, help="share of runs that are not forks")
    parser.add_argument("--limit", type=float, default=180, help="seconds until a run hangs")
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
    return [
        row.script,
        str(row.number),
        row.fault,
        row.place,
        row.launcher,
        "" if row.code is None else str(row.code),
        "" if row.seconds is None else f"{row.seconds:.1f}",
        f"FAIL: {'; '.join(row.problems)}"
        if row.problems
        else row.last_line or ("continues" if row.code is None else ""),
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
    command = " ".join(["python -m tools.chaos", *sys.argv[1:]])
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
                script, nproc, folder / script, disk / script if is_small else None, args.limit
            )
            done, problems = soak.run(args.kinds, count, args.seed, print_row, args.real)
            shutil.rmtree(soak.output, ignore_errors=True)
            rows += done
            bad = sum(bool(row.problems) for row in done)
            verdict = f"FAIL: {'; '.join(problems)}" if problems else "the same checksums"
            text = (
                f"`{script}` on {nproc or 1} processes: {len(done)} faults in "
                f"{time.monotonic() - start:.0f} s, {bad} ended in another way than promised; "
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
