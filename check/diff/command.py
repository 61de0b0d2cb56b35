"""Finds the first difference between two training runs.

    cd your/project
    python CLONE/check diff -- train.py -- torchrun --nproc_per_node=2 train_ddp.py
    python CLONE/check diff --at-a main -- train.py        a commit, and the folder as it is
    python CLONE/check diff --root-b ../other -- train.py -- train.py --lr 0.1
    python CLONE/check diff --resume -- train.py -- train.py --resume

Both commands run for a few steps on CPUs, each in a copy of its folder, and compute in float64,
where rounding is below 1e-12, and a mistake above 1e-2. The first difference is named in the order
of causes: samples, inputs, initial weights, outputs of modules, loss, gradients, settings of the
optimizer, update, its state, buffers; then the same of the next step. The exit code is 0 if the
runs are equal, 1 if they differ, and 125 (which `git bisect run` skips) if one could not be run.
"""

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import traceback
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from check.diff import report
from check.diff.factors import EQUAL, ROUNDED
from check.diff.runs import read_steps
from check.diff.stages import Comparer, Outcome
from check.mirror import MOST_BYTES
from check.processes import Processes, exits_on_signals
from check.scenarios import CannotRun, Options, first_save, last_save, shortened, starting

LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
PROCESSES = ("--nproc-per-node", "--nproc_per_node")
RANDOM = ("samples", "inputs", "initial weights", "outputs of modules", "loss")
EPOCHS = 3  # of --steps each, of a run that is resumed
CANNOT_COMPARE = 125  # the exit code that `git bisect run` skips
ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1"}  # torch.compile() would hide the modules


def parse(arguments):
    """The options, and the two commands after `--`, as Commands."""
    from check.__main__ import add_fake_data, named_datasets

    parser = argparse.ArgumentParser(
        prog="check diff",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="check diff [options] -- COMMAND_A [-- COMMAND_B]",
    )
    parser.add_argument("--steps", type=int, default=3, help="steps to compare (default: 3)")
    parser.add_argument(
        "--dtype",
        choices=["float64", "own"],
        default="float64",
        help="own: the scripts' dtype; differences up to 1e-4 then count as rounding",
    )
    for letter in "ab":
        parser.add_argument(
            f"--root-{letter}",
            type=Path,
            default=Path(),
            metavar="FOLDER",
            help=f"the project of command {letter.upper()} (default: the current folder)",
        )
        parser.add_argument(
            f"--at-{letter}", metavar="REVISION", help="this project as it was at a commit of git"
        )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="seed each process at its start, for a script that does not do so itself",
    )
    parser.add_argument(
        "--no-shuffle",
        action="store_true",
        help="RandomSampler and DistributedSampler keep the order of the dataset, so that what "
        "comes after the order of the samples is compared",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="B is A until it is killed after a checkpoint; then command B starts in its folder",
    )
    parser.add_argument(
        "--rename",
        action="append",
        default=[],
        metavar="PATTERN=NEW",
        help="a regular expression, replaced in the names of modules and parameters of B",
    )
    parser.add_argument(
        "--join",
        action="append",
        default=[],
        metavar="Q,K,V=QKV",
        help="parameters that are one in the other run, by parts of their names",
    )
    for letter in "ab":
        parser.add_argument(
            f"--devices-{letter}",
            type=int,
            default=1,
            metavar="N",
            help="CUDA devices that it sees, if it starts its own processes (default: 1)",
        )
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each run")
    parser.add_argument("--device", choices=["mapped", "cpu"], default="mapped")
    parser.add_argument("--limit-data", type=int, default=0, metavar="N")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument(
        "--rank-args",
        default="",
        metavar="ARGS",
        help="what a launcher gives to each rank, in one word: '--local_rank={local_rank}'",
    )
    add_fake_data(parser)
    parser.add_argument("--hide", action="append", default=[], metavar="PATTERN")
    parser.add_argument("--link", action="append", default=[], metavar="PATTERN")
    parser.add_argument("--json", metavar="FILE", help="also write the result as JSON; - prints it")
    options, *commands = _split(arguments)
    args = parser.parse_args(options)
    if len(commands) == 1:
        commands *= 2
    if len(commands) != 2 or not all(commands):
        parser.error(
            "two commands are expected: -- train.py -- torchrun --nproc_per_node=2 train.py"
        )
    if args.resume and (args.at_b or args.root_b != Path()):
        parser.error("--resume: B continues in the folder of A: leave out --root-b and --at-b")
    if args.resume:
        args.root_b, args.at_b = args.root_a, args.at_a
    if args.steps < 1:
        parser.error("--steps is at least 1")
    if args.json and Path(args.json).is_dir():
        parser.error(f"{args.json} cannot be written: it is a folder")
    args.fake_data = named_datasets(args.fake_data)
    for name, values in (("--rename", args.rename), ("--join", args.join), ("--env", args.env)):
        for value in values:
            if "=" not in value:
                parser.error(f"{name} {value}: a = is expected")
    args.commands = [launched(command, shlex.split(args.rank_args)) for command in commands]
    for letter, (command, *_) in zip("ab", args.commands, strict=True):
        root = getattr(args, f"root_{letter}").resolve()
        if not root.is_dir():
            parser.error(f"--root-{letter} {root}: there is no such folder")
        is_old = getattr(args, f"at_{letter}")
        if command[:1] != ["-m"] and not (command and (is_old or (root / command[0]).is_file())):
            parser.error(f"there is no file {command[0] if command else ''} in {root}")
    return args


def _split(arguments):
    """The parts between the `--`."""
    parts = [[]]
    for word in arguments:
        if word == "--":
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


class Command(NamedTuple):
    """A command line. words: the script or module and its arguments; count: the processes that a
    launcher starts, or 0; rank_arguments: what it gives to each of them besides."""

    words: list
    count: int
    rank_arguments: list


def launched(command, rank_arguments=()):
    """The Command of a command line. rank_arguments: the user's."""
    from check.__main__ import rank_arguments_of, script_of

    count = 1
    for number, word in enumerate(command):
        name, _, value = word.partition("=")
        if name in PROCESSES:
            value = value or (command[number + 1] if number + 1 < len(command) else "")
            count = int(value) if value.isdigit() else 1
            break
        if word.endswith(".py"):
            break
    is_launched = any(Path(word).name in LAUNCHERS for word in command[:3])
    if not is_launched:
        return Command(script_of(command), 0, [])
    return Command(script_of(command), count, [*rank_arguments] or rank_arguments_of(command))


@exits_on_signals()
def main(arguments):
    """Compare two runs. Returns the exit code."""
    args = parse(arguments)
    work = Path(tempfile.mkdtemp(prefix="diff-")).resolve()
    try:
        if args.json not in (None, "-"):
            Path(args.json).unlink(missing_ok=True)
        return compare(args, work)
    except CannotRun as error:
        return _fail(str(error), args.json)
    except Exception:
        return _fail(f"{traceback.format_exc()}This is a mistake of the check itself.", args.json)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fail(text, json_file):
    """Say why there is no result. Returns the exit code."""
    print(text, file=sys.stderr)
    if json_file:
        with contextlib.suppress(OSError, CannotRun):  # the text says more
            _write(json_file, {"error": text})
    return CANNOT_COMPARE


def compare(args, work):
    """Run both commands, and report where they part. Returns the exit code."""
    with Processes(ENVIRONMENT) as processes:
        if args.resume:
            outcome = outcome_of_resume(args, work, processes)
        else:
            outcome = outcome_of(args, work, processes)
            find_unseeded(args, work, processes, outcome)
    if args.json:
        _write(args.json, report.as_json(outcome))
    if args.json != "-":
        print(report.text(outcome, args.steps))
    return 0 if outcome.first is None else 1


def outcome_of(args, work, processes, first=None):
    """Run both commands, and compare them. first: the Steps of A, if they are known. Returns an
    Outcome."""
    steps = [first or steps_of(args, work, "a", processes), steps_of(args, work, "b", processes)]
    comparer = _comparer(args, steps)
    return Outcome(comparer.results(*steps), steps, comparer.worlds)


def _comparer(args, steps):
    return Comparer(
        worlds=tuple(len(found[-1].ranks) for found in steps),
        limit=EQUAL if args.dtype == "float64" else ROUNDED,
        renames=[tuple(text.split("=", 1)) for text in args.rename],
        joins=[_join(text) for text in args.join],
    )


def outcome_of_resume(args, work, processes):
    """Run A as a whole; again, until it is killed two steps after its first checkpoint; and B in
    the folder of the killed run. Returns an Outcome: what A computes against what the killed run
    has computed until its last checkpoint, and then B."""
    one, two = args.commands
    most = EPOCHS * args.steps
    with starting(_options(args, "a", work), work / "runs", processes) as start:

        def run(name, command, count, **more):
            print(f"{name}: {' '.join(command.words)}", file=sys.stderr, flush=True)
            tensors = work / "runs" / f"{name}-tensors"
            tensors.mkdir(parents=True)
            plan = _plan(args, tensors, count) | {"steps": args.steps, "epochs": EPOCHS}
            devices = args.devices_a if command is one else args.devices_b
            launch, world = _launch(command, devices)
            done = start.run(name, launch, world, command=command.words, **plan, **more)
            return done, read_steps(done, tensors, count)

        whole, steps = run("whole", one, most)
        if not steps:
            raise CannotRun(_failure(whole, "a"))
        saved = first_save(whole)
        if saved is None or saved + 2 >= len(steps):
            raise CannotRun(
                f"A cannot be resumed: it wrote no checkpoint in {max(0, len(steps) - 3)} steps, "
                f"{args.steps} in each epoch. Give more of them: --steps"
            )
        killed, before = run("killed", one, most, kill_step=saved + 2)
        saved = last_save(killed)
        resumed, after = run("resumed", two, most - saved, root=killed.root)
        if not after:
            raise CannotRun(_failure(resumed, "b"))
    if len(after) > 1:  # samples passed over before the first step do not count
        counts = [len(samples) for samples in after[1].samples]
        after[0].samples = [
            s[max(0, len(s) - n) :] for s, n in zip(after[0].samples, counts, strict=True)
        ]
    for rank, earlier in zip(steps[saved].ranks, steps[saved - 1].ranks, strict=True):
        rank["loaded"] = earlier["state"]
    both = [steps, before[:saved] + after]
    comparer = _comparer(args, both)
    comparer.resumed_after = saved
    outcome = Outcome(comparer.results(*both), both, comparer.worlds, saved)
    first = outcome.first
    if first and first.step <= saved:
        first.text += ". B is A until then: A is not the same when it runs again"
    return outcome


def find_unseeded(args, work, processes, outcome):
    """Run A again, and B, where random numbers may be the first difference: numbers that no seed
    decides are the cause of all others."""
    first = outcome.first
    if first is None or first.stage not in RANDOM:
        return
    for letter, steps in zip("ab", outcome.steps, strict=True):
        again = steps_of(args, work, letter, processes, " again")
        world = len(steps[0].ranks)
        comparer = Comparer((world, world), is_same_command=True)
        found = comparer.results(steps[: first.step], again[: first.step])
        differs = next((result for result in found if not result.is_equal), None)
        if differs and differs.stage in RANDOM:
            first.text += (
                f". But {letter.upper()} is not the same when it runs again (step {differs.step}, "
                f"{differs.stage}: {differs.text}): no seed decides its random numbers"
            )
            return


def steps_of(args, work, letter, processes, again=""):
    """Run command a or b. Returns its Steps."""
    command = args.commands["ab".index(letter)]
    words = " ".join(command.words)
    print(f"Running {letter.upper()}{again}: {words}", file=sys.stderr, flush=True)
    work = work / f"{letter}{again.strip()}"
    run = observe(args, work, letter, processes)
    found = read_steps(run, work / "runs" / "tensors", args.steps)
    if not found or (len(found) < args.steps and (run.code or run.timed_out)):
        raise CannotRun(_failure(run, letter, len(found)))
    return found


def _join(text):
    parts, _, whole = text.partition("=")
    return whole, parts.split(",")


def observe(args, work, letter, processes):
    """Run one of the commands under observation. Returns a Run."""
    command = args.commands["ab".index(letter)]
    options = _options(args, letter, work)
    tensors = work / "runs" / "tensors"  # in the only folder in which the script may write
    tensors.mkdir(parents=True)
    with starting(options, work / "runs", processes) as start:
        launch, world = _launch(command, getattr(args, f"devices_{letter}"))
        return start.run("diff", launch, world, **_plan(args, tensors, args.steps))


def _launch(command, devices):
    """How a command is started, and how many processes or devices it gets."""
    return ("torchrun", command.count) if command.count else ("python", devices)


def _plan(args, tensors, steps):
    """What the observers of a run are told: where they write the tensors of how many steps."""
    return {
        "diff": str(tensors),
        "dtype": args.dtype,
        "seed": args.seed,
        "no_shuffle": args.no_shuffle,
        "most_steps": steps,
    }


def _options(args, letter, work):
    """The Options of a run, in a new folder `work`."""
    work.mkdir(parents=True, exist_ok=True)
    root = getattr(args, f"root_{letter}").resolve()
    revision = getattr(args, f"at_{letter}")
    if revision:
        root = _checked_out(root, revision, work / "revision")
    command = args.commands["ab".index(letter)]
    return Options(
        command=command.words,
        rank_arguments=command.rank_arguments,
        source=root,
        steps=args.steps + 1,
        timeout=args.timeout,
        device=args.device,
        environment=ENVIRONMENT | dict(text.split("=", 1) for text in args.env),
        hidden=args.hide,
        linked=args.link,
        limit_data=args.limit_data,
        fake_data=args.fake_data,
        most_bytes=MOST_BYTES,
    )


def _checked_out(root, revision, target):
    """The folder `root` as it was at a commit."""
    command = ["git", "-C", str(root), "archive", revision]
    done = subprocess.run(command, capture_output=True, env=_environment_of_git())
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise CannotRun(f"git cannot read {revision} of {root}: {' '.join(reason)}")
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(target, filter="data")
    return target


def _environment_of_git():
    """The environment without what names a different repository, as in a hook of git."""
    command = ["git", "rev-parse", "--local-env-vars"]
    names = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return {name: value for name, value in os.environ.items() if name not in names}


def _failure(run, letter, steps=0):
    output = shortened(run.output.strip())
    after = f" after step {steps}; --steps {steps} compares until there" if steps else ""
    if run.timed_out:
        return f"Run {letter.upper()} did not end (--timeout){after}:\n{output}"
    if run.code:
        hint = "\nIf it asks for float32: --dtype own" if "float32" in output[-1000:] else ""
        return f"Run {letter.upper()} failed (exit code {run.code}){after}:\n{output}{hint}"
    return f"Run {letter.upper()} took no step of an optimizer. Its output ends with:\n{output}"


def _write(path, value):
    text = json.dumps(value, indent=2)
    if path == "-":
        print(text)
    else:
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(f"{text}\n", encoding="utf-8")
        except OSError as error:
            raise CannotRun(f"cannot write {path}: {error.strerror}") from None
