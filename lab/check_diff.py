"""Measure what `check diff` names: pairs that agree, and each bug that changes training.

    python -m lab.check_diff [--only TEXT] [--markdown FILE]

Each case of `make verify` is compared with its reference, which must be equal, and each planted bug
with the reference of its row. Each bug of the check's corpus is compared with the script that has
none. The exit code is 1 if a pair that agrees is not equal.
"""

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch

from check.diff.command import ENVIRONMENT, outcome_of, parse, steps_of
from check.processes import Processes
from check.scenarios import CannotRun
from check.tests.corpus.bugs import BUGS as CORPUS
from check.tests.corpus.bugs import CORRECT
from lab.check_own import OWN_PATH_FOR_CPUS, command_of
from tools.lib.ladder import ROOT
from tools.lib.markdown import markdown_table
from tools.verify import one_file
from tools.verify.cases import AUTOCAST_COPY, ONE_FILE_COPY, SUITES
from tools.verify.plants import PLANTS, plant
from tools.verify.run import autocast_copy, project_with_task

EPOCH = 7  # steps, of which the last is in the second epoch
ANY_GRADIENTS = ("gradients", "gradients before clipping")
LOSS, GRADIENTS, OUTPUTS = "loss", "gradients before clipping", "outputs of modules"
# Bug -> (the stage that should be named, a word that should be said), written before any run.
EXPECTED = {
    "set_epoch-forgotten": ("samples", "18 samples"),
    # The schedule of the learning rate knows the number of steps from the start.
    "samples-repeated-to-fill-up": ("settings of the optimizer", "lr"),
    "loss-divided-twice": (LOSS, "0.5 times"),
    "around-the-wrapper": (GRADIENTS, "not all are averaged"),
    "batchnorm-per-rank": (OUTPUTS, "bn1"),
    "activation-in-a-batchnorm": (OUTPUTS, "bn1"),
    "scaled-gradients-clipped": (GRADIENTS, "65536 times"),
    "seed-per-rank": ("initial weights", "Rank 1"),
    "seed-per-tensor-rank": ("initial weights", "Rank 1"),
    "sampler-over-all-ranks": ("samples", ""),
    "gradients-averaged-over-micro-batches": (GRADIENTS, "0.166667 times"),
    "norm-of-the-slices": ("norm of the gradients", ""),
    "rank-local-random_split": ("inputs", ""),
    "unseeded-split": ("inputs", ""),
    "mean-of-the-micro-batches-means": (LOSS, ""),
    "mean-of-the-ranks-means": (LOSS, ""),
    "balance-of-one-rank": (LOSS, ""),
    "router-trained-on-one-rank": (GRADIENTS, "router"),
    "expert-gradients-of-all-ranks": (GRADIENTS, "2 times"),
    "norm-without-the-other-ranks-experts": ("norm of the gradients", ""),
    "keys-gathered-in-the-order-of-ranks": (OUTPUTS, ""),
    "targets-of-one-rank-counted": (LOSS, ""),
    "loss-scaled-by-the-context-ranks": (LOSS, "2 times"),
    "muon-of-each-shard": ("update", ""),
    "muon-of-several-as-one": ("update", ""),
    "padding-in-the-perplexity": (LOSS, ""),
    "targets-lost-between-pieces": ("inputs", ""),
    "tied-weights-come-apart-in-the-pipeline": (GRADIENTS, "embedding"),
    "tied-weights-come-apart-in-fsdp": ("initial weights", "head"),
    "buffers-not-broadcast": ("buffers", "ank 1"),
    "shards-divided-twice": ("samples", ""),
    "every-rank-reads-everything": ("samples", "same samples"),
    "buffer-mixed-per-rank": ("samples", ""),
    "epoch-ends-at-different-times": ("samples", ""),
    "weighted-order-repeated": ("samples", ""),
    "dropout-seeded-per-rank": (OUTPUTS, "Dropout"),
    "same-noise-on-all-ranks": (OUTPUTS, "Dropout"),
    "same-noise-in-all-micro-batches": (OUTPUTS, "Dropout"),
    "noise-seeded-per-rank": (OUTPUTS, ""),
    "noise-seeded-per-step": (OUTPUTS, ""),
    "draws-numbered-in-their-order": (OUTPUTS, ""),
    "shares-in-a-row": ("samples", ""),
    "frozen-batchnorm-learns": (OUTPUTS, "bn1"),
    "one-file-set_epoch-forgotten": ("samples", ""),
    "one-file-transforms-unseeded": ("inputs", ""),
    "one-file-loss-divided-twice": (LOSS, "0.5 times"),
    "one-file-around-the-wrapper": (GRADIENTS, "not all are averaged"),
    "one-file-micro-batches-counted-once": (LOSS, ""),
    "one-file-never-synchronized": (GRADIENTS, "not all are averaged"),
    "one-file-seed-per-rank": ("initial weights", "rank 1"),
    "one-file-fsdp-loss-divided-twice": (LOSS, "0.333333 times"),
}
IN_SECOND_EPOCH = {
    "set_epoch-forgotten",
    "samples-repeated-to-fill-up",
    "epoch-ends-at-different-times",
    "weighted-order-repeated",
    "one-file-set_epoch-forgotten",
}
SCALED = {"scaled-gradients-clipped"}  # float64 would leave the scaler out
# Rule of the check -> the stages of which one should be named, for bugs of its corpus that change
# training within the first epoch, or at the start of the second.
STAGES = {
    "same-samples": ("samples", "inputs"),
    "no-set-epoch": ("samples",),
    "shares-overlap": ("samples", "inputs"),
    "samples-left-out": ("samples",),
    "not-shuffled": ("samples", "inputs"),
    "same-augmentation": ("inputs",),
    "same-noise": ("inputs",),
    "models-start-differently": ("initial weights",),
    "batchnorm-per-rank": (OUTPUTS,),
    "no-train-mode": (OUTPUTS,),
    "unused-parameters": (OUTPUTS,),
    "zero-gradients": (OUTPUTS, LOSS),
    "mean-of-means": (LOSS,),
    "loss-not-divided": (LOSS, *ANY_GRADIENTS),
    "gradient-scale": (LOSS, *ANY_GRADIENTS),
    "ddp-bypassed": ANY_GRADIENTS,
    "never-synchronized": ANY_GRADIENTS,
    "gradients-not-averaged": ANY_GRADIENTS,
    "no-zero-grad": ANY_GRADIENTS,
    "clip-before-unscale": ("gradients before clipping", "norm of the gradients"),
    "clip-before-average": (*ANY_GRADIENTS, "norm of the gradients"),
    "rates-differ": ("settings of the optimizer",),
    "replicas-drift": (*ANY_GRADIENTS, "update", "weights"),
    "buffers-differ": ("buffers",),
}
COPIES = {AUTOCAST_COPY: autocast_copy, ONE_FILE_COPY: one_file.reference}
STARTS_ITSELF = ("imagenet_style", "by_processes")


class Pair(NamedTuple):
    """A comparison. make(folder): writes the projects, and returns the arguments of `check diff`;
    reference: pairs of one reference share the run of A; expects: (stages, a word), or None if they
    are equal."""

    name: str
    group: str
    reference: tuple
    make: object
    expects: tuple | None = None


def pairs():
    """All pairs: scripts that agree, planted bugs, and bugs of the corpus."""
    for suite in SUITES.values():
        for case in suite.cases:
            if case.resumes is None and case.reference:
                yield _of_case(f"{suite.task}: {case.name}", "agree", suite, case)
    for bug in PLANTS:
        if bug.name in EXPECTED:
            suite = SUITES[bug.task]
            case = next(case for case in suite.cases if case.name == bug.row)
            yield _of_case(bug.name, "planted", suite, case, bug)
    scripts = {script.name: script for script in CORRECT}
    for bug in CORPUS:
        if bug.finds in STAGES:  # the others change what is measured, saved or resumed
            yield _of_corpus(bug, scripts[bug.script])


def _of_case(name, group, suite, case, bug=None):
    """A Pair of a case, with a bug if there is one, as B, and its reference as A."""
    reference = {each.name: each for each in suite.references}.get(case.reference, case)
    options = ["--steps", str(EPOCH if name in IN_SECOND_EPOCH else 2)]
    if case.flags.get("dtype") == "ieee" or name in SCALED:
        options += ["--dtype", "own"]
    if case.script in OWN_PATH_FOR_CPUS:
        options += ["--device", "cpu"]

    def make(folder):
        arguments, commands = [*options], []
        for letter, each in (("a", reference), ("b", case)):
            project = project_with_task(suite.task, folder / letter / "project")
            if bug and letter == "b":
                plant(bug, project)
            if each.script in COPIES:
                COPIES[each.script](project)
            command, environment = command_of(suite, each, each.flags, project)
            launcher = ["torchrun", f"--nproc_per_node={each.nproc}"] if each.nproc else []
            commands += ["--", *launcher, *command]
            arguments += [f"--root-{letter}", str(project)]
            arguments += [f"--devices-{letter}", str(each.flags.get("spawn_processes", 1))]
            for variable, value in environment.items():
                arguments += ["--env", f"{variable}={value}"]
        return arguments + commands

    expects = ((EXPECTED[name][0],), EXPECTED[name][1]) if bug else None
    return Pair(name, group, (suite.task, reference.name, *options), make, expects)


def _of_corpus(bug, script):
    """A Pair of a bug of the corpus, and of the script without it, on two processes each."""
    steps = {"no-set-epoch": 24, "no-zero-grad": 4, "no-train-mode": 24}.get(bug.finds, 2)
    options = ["--steps", str(steps)]
    if bug.finds == "clip-before-unscale":
        options += ["--dtype", "own"]
    launcher = ["torchrun", "--nproc_per_node=2"]
    if script.name in STARTS_ITSELF:
        launcher, options = [], [*options, "--devices-a", "2", "--devices-b", "2"]

    def make(folder):
        arguments, commands = [*options], []
        for letter, text in (("a", script.source()), ("b", bug.source())):
            project = folder / letter / "project"
            project.mkdir(parents=True)
            (project / "train.py").write_text(text, encoding="utf-8")
            arguments += [f"--root-{letter}", str(project)]
            commands += ["--", *launcher, *script.command(), *script.arguments]
        return arguments + commands

    expects = (STAGES[bug.finds], "")
    return Pair(f"{bug.name} ({script.name})", "corpus", (script.name, *options), make, expects)


def main():
    """Compare all, or a part of them. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="only pairs whose name or group contains this")
    parser.add_argument(
        "--markdown", type=Path, help="write the page of results here, and JSON beside it"
    )
    args = parser.parse_args()
    rows, known = [], {}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # references import tools
    with Processes(ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)}) as processes:
        for pair in sorted(pairs(), key=lambda pair: (pair.group, pair.reference)):
            if args.only in pair.name or args.only == pair.group:
                rows.append(row_of(pair, processes, known))
                print(json.dumps(rows[-1]), flush=True)
                if args.markdown:
                    write(args.markdown, rows)
    return 1 if any(row["group"] == "agree" and row["verdict"] != "right" for row in rows) else 0


def row_of(pair, processes, known):
    """What is named, as a dict. known: {reference: (its project, its Steps)}, which is added to."""
    work = Path(tempfile.mkdtemp(prefix="diff-")).resolve()
    start = time.monotonic()
    row = {"name": pair.name, "group": pair.group, "expected": pair.expects}
    try:
        (work / "runs").mkdir()
        args = parse(pair.make(work))
        if pair.reference not in known:
            known.clear()
            known[pair.reference] = steps_of(args, work / "runs", "a", processes)
        outcome = outcome_of(args, work / "runs", processes, known[pair.reference])
        row |= {"step": 0, "stage": "", "text": "", "compared": 0}
        if outcome.first:
            first = outcome.first
            row |= {"step": first.step, "stage": first.stage, "text": first.text}
        row["compared"] = sum(result.compared for result in outcome.results)
        row["skipped"] = sorted({f"{r.stage}: {r.skipped}" for r in outcome.results if r.skipped})
    except (CannotRun, SystemExit) as error:
        row["error"] = _reason(str(error))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return row | {"verdict": _verdict(row), "seconds": round(time.monotonic() - start)}


def _reason(text):
    """The line of an output that says why a script has failed."""
    lines = text.strip().split("\n")
    return next((line for line in lines if "error (" in line or "Error: " in line), lines[-1])


def _verdict(row):
    if "ModuleNotFoundError" in row.get("error", "") or "requires `" in row.get("error", ""):
        return "not run"
    if "error" in row:
        return "refused" if row["group"] == "planted" else "could not run"
    if not row["expected"]:
        return "false difference" if row["stage"] else "right"
    stages, word = row["expected"]
    if not row["stage"]:
        return "missed"
    return "right" if row["stage"] in stages and word in row["text"] else "misnamed"


def write(path, rows):
    """Write the page, and the rows in JSON next to it, with the rows of earlier calls."""
    log = path.with_suffix(".json")
    known = json.loads(log.read_text(encoding="utf-8")) if log.exists() else []
    by_name = {row["name"]: row for row in [*known, *rows]}
    rows = [by_name[pair.name] for pair in pairs() if pair.name in by_name]
    log.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    agree = [row for row in rows if row["group"] == "agree"]
    bugs = [row for row in rows if row["group"] != "agree"]
    right = [row for row in bugs if row["verdict"] == "right"]
    stages = Counter(row["stage"] for row in right)
    verdicts = Counter(row["verdict"] for row in bugs)
    page = PAGE.format(
        versions=f"Python {platform.python_version()}, torch {torch.__version__}",
        equal=sum(row["verdict"] == "right" for row in agree),
        agree=len(agree),
        compared=sum(row.get("compared", 0) for row in agree),
        partly=sum(bool(row.get("skipped")) for row in agree),
        bugs=len(bugs),
        said=", ".join(f"{verdicts[name]} {name}" for name in VERDICTS if verdicts[name]),
        stages=markdown_table(
            ["stage", "bugs"], [[stage, str(count)] for stage, count in stages.most_common()]
        ),
        others=markdown_table(
            ["bug", "verdict", "named", "expected", "why"],
            [_cells(row) for row in bugs if row["verdict"] != "right"],
        ),
    )
    path.write_text(page, encoding="utf-8")


def _cells(row):
    """The cells of a bug that was not named as expected."""
    stages, place = row["expected"]
    expected = " or ".join(stages) + (f": {place}" if place else "")
    why = WHY.get(row["name"], row.get("error", ""))[:200]
    cells = [row["name"], row["verdict"], row.get("stage", ""), expected, why]
    return [cell.replace("|", "\\|") for cell in cells]


VERDICTS = ("right", "misnamed", "missed", "refused", "could not run", "not run")
WHY = {"tutorial: buffers of each rank (tutorial)": "True: A does not have this layer"}
PAGE = """# What `check diff` names

`python -m lab.check_diff --markdown lab/results/diff.md`, {versions}, two CPU
cores. `--only TEXT` replaces some of the rows; the others are of earlier calls, and what has not
been run has no row. [diff.json](diff.json) has what was named in each pair.

- {equal} of {agree} pairs that agree in `make verify` are equal, in {compared} comparisons. In
  {partly} of them, padding or outputs that one rank holds a part of are not compared.
- Of {bugs} bugs that change training: {said}.

The bugs of `make verify` are compared with the reference of their row, mostly on one process; those
of the check's corpus, whose script is in brackets, with the same script on as many processes.
*Right*: the stage, and the place or factor where the bug has one, are those that were expected.
Most expectations were written down before the first run. Corrected afterwards were the expectations
of samples-repeated-to-fill-up (the learning rate differs before the samples do), of weights that
are changed outside the optimizer (now a separate stage), and, for the corpus, whether gradients
are named before or after clipping. *Refused*: the script itself ends with an error. Bugs that
change only what is measured, saved or resumed are left out.

## Named as expected

{stages}

## Not named as expected

{others}
"""


if __name__ == "__main__":
    sys.exit(main())
