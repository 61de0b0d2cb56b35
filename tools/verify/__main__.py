"""Do all scripts train the same model? Prints a table with one row per case.

    python -m tools.verify                               for images, in ten to twenty minutes
    python -m tools.verify --script mine/train_ddp.py    the cases of train_ddp.py with your copy
    python -m tools.verify --plant padding-counted       with a classic bug; --plant list: the names
    python -m tools.verify --matrix                      each script resumes the run of each
    python -m tools.verify --task text                   or moe, segmentation, diffusion
    python -m tools.verify --script mine/train_ddp.py -- --lr 0.01     edited, or with your own task

Every case trains the same small run (tools/verify/cases.py). With flags behind `--`, or if its task
is not one of the project's, a script is compared with itself: on one process, on several,
accumulated, stopped and resumed at various places, and evaluating within an epoch
(tools/verify/own.py). Exit code 1 if a case fails.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tools.lib.closure import options
from tools.lib.ladder import ROOT, RUNGS
from tools.lib.output import may_be_closed
from tools.lib.runs import end_runs_on_sigterm
from tools.verify.cases import GPU_PER_RANK, SUITES, cases_of
from tools.verify.own import CannotVerify, own_task, parse_flags, verify_own
from tools.verify.plants import PLANTS, planted_copy
from tools.verify.run import Verifier, run_matrix
from tools.verify.table import print_head, print_row, write


def parse_arguments():
    """The command line, with `suite`, `cases` and `scripts` added."""
    parser = argparse.ArgumentParser(prog="python -m tools.verify", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--task", choices=SUITES, default="images", help="what the scripts train")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--script", metavar="PATH", type=Path, help="your copy of a script")
    parser.add_argument("--like", metavar="SCRIPT", help="whose cases to run, if the names differ")
    names = ["list", *(bug.name for bug in PLANTS)]
    modes.add_argument("--plant", choices=names, metavar="BUG", help="a classic bug, or list")
    parser.add_argument("--only", metavar="TEXT", help="only cases whose name contains TEXT")
    modes.add_argument("--matrix", action="store_true", help="each script resumes the run of each")
    parser.add_argument("--device", default="cpu", help="of all processes, such as cuda:0")
    parser.add_argument(
        "--write", metavar="FILE", help="write FILE (Markdown), and JSON next to it"
    )
    own = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:own])
    args.flags = sys.argv[own + 1 :]
    bug = next((bug for bug in PLANTS if bug.name == args.plant), None)
    args.suite = SUITES[bug.task if bug else args.task]
    args.cases, args.scripts, args.own = args.suite.cases, {}, None
    if args.script:
        name, path = args.like or args.script.name, args.script.resolve()
        args.cases, args.scripts = cases_of(args.suite, name), {name: path}
        if not path.is_file():
            parser.error(f"there is no file {path}")
        args.own = own_task(path, of_project=bool(args.flags))
    args.cases = [case for case in args.cases if (args.only or "") in case.name]
    if args.matrix and args.only:
        parser.error("--matrix runs all pairs, without --only")
    if args.script and name not in RUNGS:
        parser.error(f"{name} is not a name of the ladder: pass --like, and the original's name")
    if args.script and not args.own and (lacking := lacking_options(path, name, args)):
        names = ",".join(lacking)
        parser.error(
            f"the cases need options that {path.parent} does not have: add them with  "
            f"python -m tools.copy --update {path.parent} --with {names}"
        )
    if not args.cases and not args.own:
        names = ", ".join(case.name for case in args.suite.cases)
        parser.error(f"no case contains {args.only!r}: there are {names}")
    if args.flags and not args.own:
        parser.error(
            "flags behind -- are for a script of yours (--script): the project's cases have their "
            "own settings"
        )
    return args


def lacking_options(path, name, args):
    """The names of the options that the cases set, and that a copy of a script lacks. path: of the
    copy; name: of the original."""
    if not (path.parent / "utils").is_dir():  # it imports the project's modules
        return []
    flags = [f"--{key}" for case in args.cases for key in args.suite.base | case.flags]
    flags += [f"--{key} {value}" for case in args.cases for key, value in case.flags.items()]
    used = {flag.replace("_", "-") for flag in flags}
    return [
        option.name
        for option in options(ROOT / name).values()
        if option.setting in used and not (path.parent / option.path.relative_to(ROOT)).exists()
    ]


def main():
    args = parse_arguments()
    if args.plant == "list":
        print("\n".join(bug.name for bug in PLANTS))
        return 0
    bug = next((bug for bug in PLANTS if bug.name == args.plant), None)
    if bug:
        print(f"planted in {bug.file}: {bug.effect}\n{bug.diff()}")
    if "cuda:" in args.device:
        print(f"the ranks share {args.device}; ranks of {', '.join(GPU_PER_RANK)} run on the CPU")
    print_head("metric" if args.own else args.suite.best[0])
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        folder = Path(folder)
        if args.own:
            path, like = args.script.resolve(), args.like or args.script.name
            flags = parse_flags(args.flags)
            try:
                rows, args.suite = verify_own(
                    path, like, args.own, flags, folder, print_row, args.device, args.only or ""
                )
            except CannotVerify as error:
                print(f"error: {error}", file=sys.stderr)
                return 2
        elif args.matrix:
            rows = run_matrix(folder, print_row, device=args.device, suite=args.suite)
        else:
            root = planted_copy(bug, folder / "planted") if bug else None
            verifier = Verifier(folder, args.suite, root, args.scripts, args.device)
            rows = verifier.run(args.cases, print_row)
    failed = sum(row.problem is not None for row in rows)
    passed = f"{len(rows) - failed} of {len(rows)} cases passed"
    summary = f"{passed} in {time.monotonic() - start:.0f} s"
    print(summary)
    for what, reason in args.suite.left_out.items():
        print(f"no rows for {what}: {reason}")
    if args.write:
        write(args.write, rows, summary, args.suite)
    return 1 if failed else 0


if __name__ == "__main__":
    end_runs_on_sigterm()
    with may_be_closed():
        sys.exit(main())
