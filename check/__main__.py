#!/usr/bin/env python3
"""Check a training script for the classic bugs of distributed training, by running it.

    cd your/project
    python CLONE/check -- train.py --its arguments        CLONE: a clone of this repository
    python CLONE/check --resume-args=--resume -- train.py
    python CLONE/check -- -m package.train --its arguments
    python CLONE/check -- torchrun --nproc_per_node=8 train.py
    python CLONE/check --skill                            how an agent uses it

The script stays as it is. It runs in copies of its folder: on one process and on two (gloo on
CPUs; what is written for CUDA is mapped to a CPU), for a few steps of a few epochs, and it is
killed after a checkpoint and started again. The exit code is 0 without findings (notes do not
count), 1 with findings, and 2 if the script could not be run.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import sys
import tempfile
import traceback
from pathlib import Path

if __package__ in (None, ""):  # started by its path, from the folder of the script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from check import report
from check.mirror import MOST_BYTES
from check.processes import exits_on_signals
from check.rules import judge
from check.scenarios import CannotRun, Options, remove, run_all

WITHOUT_VALUE = ("--standalone", "--no-python", "--no_python", "--use_env", "--use-env")
WITHOUT_VALUE += ("--virtual-local-rank", "--virtual_local_rank", "--run-path", "--run_path")
PYTHON_WITH_VALUE = ("-W", "-X")  # python -m is that of the command
TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")


def parse(arguments):
    """The options of the check, and the command after `--`."""
    parser = argparse.ArgumentParser(
        prog="check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--processes", type=int, default=2, metavar="N", help="where there are several (default: 2)"
    )
    parser.add_argument("--steps", type=int, default=4, help="steps per epoch (default: 4)")
    parser.add_argument("--epochs", type=int, default=2, help="epochs per run (default: 2)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each run")
    parser.add_argument(
        "--device",
        choices=["mapped", "cpu", "cuda"],
        default="mapped",
        help="mapped: what the script does with CUDA is done on the CPU (default); cpu: the path "
        "that the script itself has for CPUs; cuda: real GPUs",
    )
    parser.add_argument(
        "--launch",
        choices=["auto", "torchrun", "python"],
        default="auto",
        help="python: the script starts its own processes (default: found out by running it)",
    )
    parser.add_argument(
        "--limit-data",
        type=int,
        default=0,
        metavar="N",
        help="len() of each dataset is at most N, so that an epoch comes to its end; with an odd "
        "number, the ranks cannot have equal shares",
    )
    parser.add_argument(
        "--root",
        type=Path,
        default=Path(),
        metavar="FOLDER",
        help="the folder of which each run gets a copy, if the script needs more of it than the "
        "one in which it runs",
    )
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument(
        "--resume-args",
        default="",
        metavar="ARGS",
        help="what the script needs to resume, in one word",
    )
    parser.add_argument(
        "--rank-args",
        default="",
        metavar="ARGS",
        help="what a launcher gives to each rank, in one word, such as '--local_rank={local_rank}' "
        "or '--rank {rank} --world-size {world_size}'",
    )
    parser.add_argument(
        "--hide",
        action="append",
        default=[],
        metavar="PATTERN",
        help="files that the script must not see, such as the checkpoints of a real run",
    )
    parser.add_argument(
        "--link",
        action="append",
        default=[],
        metavar="PATTERN",
        help="files and folders that the script only reads, and that are too large for copies",
    )
    parser.add_argument(
        "--copy-limit",
        type=float,
        default=MOST_BYTES / 1e9,
        metavar="GB",
        help="the largest files beyond this are linked, and cannot be written (default: 1)",
    )
    parser.add_argument(
        "--writable",
        action="append",
        type=_folder,
        default=[],
        metavar="FOLDER",
        help="a folder outside of the copies in which the script may write",
    )
    add_fake_data(parser)
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="FILE",
        help="a report by --json, whose findings are accepted: only others count",
    )
    parser.add_argument(
        "--fail-on",
        type=_kinds,
        default=report.FAILURES,
        metavar="KINDS",
        help="what makes the exit code 1, such as error or error,warning,note,not-checked "
        "(default: error,warning)",
    )
    parser.add_argument(
        "--notes", action="store_true", help="also print what costs time, or may be intended"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the report as JSON; - prints it")
    parser.add_argument("--sarif", metavar="FILE", help="also write the findings as SARIF")
    parser.add_argument(
        "--keep", metavar="FOLDER", help="keep the copies and what was observed there"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- train.py its arguments")
    args = parser.parse_args(arguments)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    args.command = script_of(command)
    args.by_hand = bool(args.rank_args)
    args.rank_args = shlex.split(args.rank_args) or rank_arguments_of(command)
    if not args.command:
        parser.error("what is to be checked? For example: -- train.py --its arguments")
    if args.command[0] != "-m":
        script = Path(args.command[0])
        if not script.is_file():
            parser.error(f"there is no file {script} in {Path.cwd()}")
        paths = [Path(os.path.abspath(script)), script.resolve()]
        inside = [path for path in paths if path.is_relative_to(args.root.resolve())]
        if not inside:
            parser.error(
                f"{script} is not in {args.root.resolve()}: start the check in the project's "
                "folder, or name it with --root"
            )
        args.command[0] = os.path.relpath(inside[0])  # in a copy: the copy's script
    if not Path.cwd().is_relative_to(args.root.resolve()):
        parser.error(f"--root {args.root} does not contain {Path.cwd()}")
    if min(args.steps, args.epochs) < 1:
        parser.error("--steps and --epochs are at least 1")
    if args.processes < 2:
        parser.error("--processes is at least 2: the script also runs on one")
    if args.limit_data < 0:
        parser.error("--limit-data is a number of samples; 0: all")
    args.fake_data = named_datasets(args.fake_data)
    for path in filter(None, (args.json, args.sarif)):
        if not Path(path).parent.is_dir() or Path(path).is_dir():
            parser.error(f"{path} cannot be written: it is a folder, or its folder does not exist")
    if args.baseline:
        args.accepts = _read_baseline(parser, args.baseline)
    for variable in args.env:
        if "=" not in variable:
            parser.error(f"--env {variable}: NAME=VALUE is expected")
    return args


def _read_baseline(parser, path):
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        [(each["rule"], each["file"], each["code"]) for each in report["findings"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"--baseline {path}: it is not a report that --json has written ({error!r})")
    return report


def _kinds(text):
    kinds = tuple(text.split(","))
    if not set(kinds) <= {*report.ORDER, report.NOT_CHECKED}:
        raise argparse.ArgumentTypeError(f"{text}: some of error,warning,note,not-checked")
    return kinds


def _folder(text):
    if not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"there is no folder {text}")
    return os.path.realpath(text)


def add_fake_data(parser):
    """Add --fake-data, whose values named_datasets() joins."""
    parser.add_argument(
        "--fake-data",
        nargs="?",
        action="append",
        type=_fake_data,
        metavar="NAME=KEY:VALUE,...",
        help="small random data in place of the datasets of torchvision and of Hugging Face; "
        "NAME=text:str,label:class2 tells the columns of a dataset, NAME=classes:5,train:1000 "
        "other numbers of classes and samples",
    )


def _fake_data(text):
    """("name", {"column": "type"}) of an argument of --fake-data."""
    name, _, columns = text.partition("=")
    pairs = [column.split(":") for column in columns.split(",")]
    if not name or any(len(pair) != 2 for pair in pairs):
        raise argparse.ArgumentTypeError(f"{text}: NAME=COLUMN:TYPE,... is expected")
    return name, dict(pairs)


def named_datasets(values):
    """All values of --fake-data together: {"name": {"column": "type"}}; None if there are none."""
    return None if values is None else dict(filter(None, values))


def script_of(command):
    """The script or module of a command line and its arguments, without its launcher."""
    command = list(command)
    if command and re.fullmatch(r"python[\d.]*", Path(command[0]).name):
        command = command[1:]
        while command and command[0].startswith("-") and command[0] != "-m":
            command = command[2 if command[0] in PYTHON_WITH_VALUE else 1 :]
    if command[:2] == ["accelerate", "launch"]:  # its flags, with or without a value, up to a file
        names = [i for i, name in enumerate(command) if name.endswith(".py") or name == "-m"]
        command = command[names[0] if names else 2 :]
    if command[:1] == ["-m"] and command[1:2] and command[1] in TORCHRUN:
        command = command[1:]
    if command and (command[0] in TORCHRUN or Path(command[0]).name == "torchrun"):
        command = command[1:]
        while command and command[0].startswith("-") and command[0] not in ("-m", "--module", "--"):
            has_value = "=" not in command[0] and command[0] not in WITHOUT_VALUE
            command = command[2 if has_value else 1 :]
        if command[:1] == ["--module"]:
            command[0] = "-m"
        elif command[:1] == ["--"]:
            command = command[1:]
    return command


def rank_arguments_of(command):
    """What the launcher of a command line gives to each rank besides the script's own arguments."""
    launcher = "torch.distributed.launch"
    if launcher not in command:
        return []
    own = command[command.index(launcher) + 1 : len(command) - len(script_of(command))]
    return [] if {"--use_env", "--use-env"} & set(own) else ["--local-rank={local_rank}"]


def script_file(command):
    """The path of the script of a command, where a module is in a file or in a package."""
    if command[0] != "-m":
        return command[0]
    path = Path(*command[1].split("."))
    return str(path / "__main__.py" if path.is_dir() else path.with_suffix(".py"))


def main(arguments=None):
    """Check a script. Returns the exit code: 1 only if the script has a bug."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["diff"]:
        from check.diff import command

        return command.main(arguments[1:])
    if arguments == ["--skill"]:
        print(Path(__file__).with_name("SKILL.md").read_text(encoding="utf-8"), end="")
        return 0
    args = parse(arguments)
    try:
        return check(args)
    except CannotRun as error:
        return _fail(str(error), args)
    except Exception:
        return _fail(f"{traceback.format_exc()}This is a mistake of the check itself.", args)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


@exits_on_signals()
def check(args):
    """Check a script. Returns the exit code. args: what parse() returns."""
    options = Options(
        command=args.command,
        rank_arguments=args.rank_args,
        by_hand=args.by_hand,
        source=args.root.resolve(),
        subfolder=os.path.relpath(Path.cwd(), args.root.resolve()),
        processes=args.processes,
        steps=args.steps,
        epochs=args.epochs,
        timeout=args.timeout,
        device=args.device,
        launch=args.launch,
        environment=dict(variable.split("=", 1) for variable in args.env),
        resume_arguments=shlex.split(args.resume_args),
        hidden=args.hide,
        limit_data=args.limit_data,
        fake_data=args.fake_data,
        most_bytes=int(args.copy_limit * 1e9),
        linked=args.link,
        writable=args.writable,
    )
    for path in filter(None, (args.json, args.sarif)):
        # What an earlier check has found is not the result of this one.
        if path != "-" and not _is_baseline(path, args):
            Path(path).unlink(missing_ok=True)
    work = Path(args.keep or tempfile.mkdtemp(prefix="check-")).resolve()
    work.mkdir(parents=True, exist_ok=True)
    if any(work.iterdir()):
        raise CannotRun(f"--keep {work}: the folder is not empty")
    names = " ".join(args.command)
    print(f"Checking {names}", file=sys.stderr, flush=True)
    try:
        checked = run_all(options, work, tell=_tell)
        findings, not_checked = judge(checked)
        known = []
        if args.baseline:
            known = report.accepted(findings, args.accepts, options.source)
            findings = [finding for finding in findings if finding not in known]
        if args.json:
            _write(args.json, report.as_json(findings, not_checked, checked, known))
        if args.sarif:
            prefix = os.path.relpath(options.source, repository(options.source))
            script = os.path.join(options.subfolder, script_file(args.command))
            _write(args.sarif, report.as_sarif(findings, script, prefix, known, not_checked))
        if args.json != "-":
            with_notes = args.notes or "note" in args.fail_on
            print(report.text(findings, not_checked, checked, known, with_notes))
        return 1 if report.is_failure(findings, not_checked, args.fail_on) else 0
    finally:
        if not args.keep:
            remove(work)


def _fail(text, args):
    """Say why there is no result. Returns the exit code."""
    print(text, file=sys.stderr)
    if args.json and not _is_baseline(args.json, args):
        with contextlib.suppress(OSError):  # the text says more
            _write(args.json, json.dumps({"error": text}, indent=2))
    return 2


def _is_baseline(path, args):
    return args.baseline is not None and Path(path).resolve() == args.baseline.resolve()


def repository(folder):
    """The folder of the repository that a folder is in, or this folder itself."""
    parents = (folder, *folder.parents)
    return next((path for path in parents if (path / ".git").exists()), folder)


def _tell(name):
    print(f"  {name}", file=sys.stderr, flush=True)


def _write(path, text):
    if path == "-":
        print(text)
    else:
        temporary = Path(f"{os.path.realpath(path)}.tmp")
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(os.path.realpath(path))


if __name__ == "__main__":
    sys.exit(main())
