"""The scripts of this project as somebody's scripts, and with the bugs that `make verify` catches.

    python -m lab.check_own [--only TEXT] [--markdown FILE]

A check knows nothing of them: it sees a folder with the scripts and their modules, and a command.
The exit code is 1 if there is a false alarm.
"""

import argparse
import json
import platform
import shutil
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from check.advice import ADVICE
from check.processes import Processes
from check.scenarios import CannotRun, Options
from check.tests.corpus.__main__ import check
from tools.lib.ladder import ROOT
from tools.lib.markdown import markdown_table
from tools.lib.runs import flag_list
from tools.verify import one_file
from tools.verify.cases import (
    COPIES,
    ONE_FILE,
    ONE_FILE_COPY,
    RECIPES,
    SAME_SHAPE,
    SUITES,
    Case,
    Suite,
)
from tools.verify.plants import PLANTS, plant
from tools.verify.run import (
    change_by_recipe,
    changed_copy,
    project_with_task,
    save_pretrained_weights,
    write_shards,
    write_text,
    write_text_shards,
)

CORRECT = {
    "images": [
        "1gpu",
        "1gpu_graph",
        "dp",
        "ddp x2",
        "spawn x2",
        "amp x2, float16",
        "accum x2",
        "fsdp x2",
        "tp x2",
        "fsdp_tp x4, 2 x 2",
        "pp x2, 1F1B",
        "mp, 2 stages",
        "ddp_mp x2, 2 stages",
        "one_file ddp x2",
        "one_file fsdp x3",
    ],
    "text": ["ddp x2", "fsdp x2", "accum x2", "cp x2"],
    "moe": ["ep x2"],
    "segmentation": ["ddp x2", "fsdp x2"],
    "diffusion": ["ddp x2", "fsdp x2"],
}
OWN_PATH_FOR_CPUS = ("train_1gpu_graph.py",)  # CUDA graphs cannot be mapped to a CPU
ONE_FILE_TASK = ["tools/__init__.py", "tools/verify/__init__.py", "tools/verify/one_file_task.py"]


PROCESSES = ("spawn_processes", "fsdp_size")
MORE = {"epoch-restarted-on-resume": {"save_steps": 3}}  # flags without which a bug has no effect
REFUSED = "refused by the script"
VERDICTS = ("reported", REFUSED, "not checked", "missed")
ALIKE = "one process and two train alike, and both wrongly"
POSITION = "the run is killed, not stopped by SIGTERM, after which the script saves within an epoch"
UNSEEN = {
    "sampler-over-all-ranks": "two ranks are two replicas of one rank each, or one of both",
    "gradients-averaged-over-micro-batches": "gradients are compared between replicas only",
    "tied-weights-come-apart-in-the-pipeline": "gradients are compared between replicas only",
    "samples-repeated-to-fill-up": "DistributedSampler's default, which most scripts accept",
    "rank-local-accuracy": "the sums of all ranks are there; the script prints another number",
    "every-epoch-is-the-best": "no bug of several processes",
    "balance-of-one-rank": "the gradients differ by less than the 2 % that the rule reports",
    "muon-of-each-shard": "gradients are compared, not what the optimizer makes of them",
    "muon-of-several-as-one": "gradients are compared, not what the optimizer makes of them",
    "dropout-seeded-per-rank": "dropout from the generator of a rank is usual",
    "mean-of-the-ranks-means": "the gradients differ by 1.8 %; the rule reports more than 2 %",
    "weighted-order-repeated": "the keys of the samples hold the epoch, so no two epochs are alike",
    "shares-in-a-row": "each rank has its own share; only the global batches differ",
    "epoch-restarted-on-resume": "reported as a note, epoch-repeated: it may be intended",
    "padding-in-the-perplexity": ALIKE,
    "tied-weights-come-apart-in-fsdp": ALIKE,
    "one-file-micro-batches-counted-once": ALIKE,
    "one-file-position-lost": POSITION,
    "one-file-sums-lost": POSITION,
    "one-file-fsdp-position-lost": POSITION,
}


# Bugs of one run that do not hide each other, for one check.
TOGETHER = [
    ["set_epoch-forgotten", "batchnorm-per-rank", "loss-divided-twice", "optimizer-state-lost"],
    [
        "saving-on-every-rank",
        "every-epoch-is-the-best",
        "rank-local-accuracy",
        "samples-repeated-to-fill-up",
    ],
    ["scale-lost", "scaled-gradients-clipped"],
    [
        "one-file-set_epoch-forgotten",
        "one-file-transforms-unseeded",
        "one-file-loss-divided-twice",
        "one-file-position-lost",
        "one-file-momentum-lost",
        "one-file-sums-lost",
    ],
    [
        "one-file-fsdp-loss-divided-twice",
        "one-file-fsdp-position-lost",
        "one-file-fsdp-momentum-lost",
    ],
]
# The rule that reports a bug, where another bug is planted with it.
FINDS = {
    "set_epoch-forgotten": "no-set-epoch",
    "batchnorm-per-rank": "batchnorm-per-rank",
    "loss-divided-twice": "gradient-scale",
    "optimizer-state-lost": "optimizer-not-restored",
    "saving-on-every-rank": "saved-by-every-rank",
    "scale-lost": "scaler-not-restored",
    "scaled-gradients-clipped": "clip-before-unscale",
    "one-file-set_epoch-forgotten": "no-set-epoch",
    "one-file-transforms-unseeded": "same-augmentation",
    "one-file-loss-divided-twice": "gradient-scale",
    "one-file-momentum-lost": "optimizer-not-restored",
    "one-file-fsdp-loss-divided-twice": "gradient-scale",
    "one-file-fsdp-momentum-lost": "optimizer-not-restored",
}


class Own(NamedTuple):
    """A check of one of this project's scripts, with bugs, if any."""

    name: str
    suite: Suite
    case: Case
    bugs: tuple = ()


def own_checks():
    """All checks: of the scripts as they are, and of each planted bug in the script of its row."""
    cases = {
        task: {case.name: case for case in [*suite.references, *suite.cases]}
        for task, suite in SUITES.items()
    }
    checks = [
        Own(f"{task}: {name}", SUITES[task], cases[task][name])
        for task, names in CORRECT.items()
        for name in names
    ]
    by_name = {bug.name: bug for bug in PLANTS}
    taken = {name for names in TOGETHER for name in names}
    for names in [*TOGETHER, *([name] for name in by_name if name not in taken)]:
        bugs = tuple(by_name[name] for name in names)
        case = cases[bugs[0].task][bugs[0].row]
        checks.append(Own(", ".join(names), SUITES[bugs[0].task], case, bugs))
    return checks


def options_of(own, folder):
    """The Options of a check, whose project is made in a folder."""
    project = folder / "project"
    project_with_task(own.suite.task, project)
    for bug in own.bugs:
        plant(bug, project)
    # The check decides how many processes there are, and gives the batches of two ranks to one.
    flags = own.case.flags | MORE.get(own.name, {})
    flags = {name: value for name, value in flags.items() if name not in PROCESSES}
    if own.suite.task in ("text", "moe"):
        flags |= SAME_SHAPE
    command, environment = command_of(own.suite, own.case, flags, project)
    device = "cpu" if own.case.script in OWN_PATH_FOR_CPUS else "mapped"
    steps = own.suite.steps  # to the end of each epoch
    return Options(command, project, steps=steps, environment=environment, device=device)


def command_of(suite, case, flags, project):
    """The script of a case with its flags, and the environment that it needs. What it reads is
    written into the folder of the project."""
    flags = {name: value for name, value in suite.base.items() if name != "audit"} | flags
    flags["output_dir"] = "run"
    if "weights" in flags:
        save_pretrained_weights(project / "weights.pth")
        flags["weights"] = "weights.pth"
    if "data_dir" in flags:
        write_shards(project / "shards", suite.base)
        flags["data_dir"] = "shards"
    if flags.get("text_file") == "FOLDER":
        write_text_shards(project / "texts", suite)
        flags["text_file"] = "texts"
    elif "text_file" in flags:
        flags["text_file"] = write_text(project / "text.txt").name
    if case.script in COPIES:
        original, name = COPIES[case.script]
        changed_copy(project / original, project / case.script, name)
    if case.script in RECIPES:
        original, recipe = RECIPES[case.script]
        change_by_recipe(project / original, recipe, suite.task)
        shutil.copyfile(project / original, project / case.script)
    environment = {}
    if case.script in ONE_FILE:
        flags = one_file.flags_of(flags, Path("run"))
    if case.script in (*ONE_FILE, ONE_FILE_COPY):
        environment = {"READS": "reads", "PYTHONPATH": "."}
        for name in ONE_FILE_TASK:
            (project / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, project / name)
    return [case.script, *flag_list(flags)], environment


def main():
    """Check all, or a part of them. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="only checks whose name contains this")
    parser.add_argument(
        "--markdown", type=Path, help="write the page of results here, and JSON beside it"
    )
    args = parser.parse_args()
    with Processes() as processes:
        return check_all(args.only, args.markdown, partial(check, processes=processes))


def check_all(only, markdown, check):
    """Check all, or those whose name contains `only`. Returns the exit code.

    markdown: a page of results to write; the rows of earlier calls are kept in JSON next to it.
    """
    rows = []
    for own in own_checks():
        if only in own.name:
            rows.append(row_of(own, check))
            print(json.dumps(rows[-1]), flush=True)
            if markdown:
                write(Path(markdown), rows)
    return 1 if any("false alarm" in row["verdicts"].values() for row in rows) else 0


def row_of(own, check):
    """What a check finds, as a dict."""
    names = [bug.name for bug in own.bugs] or [own.name]
    row = {"name": own.name, "script": own.case.script, "rules": [], "found": []}
    row |= {"not_checked": [], "seconds": 0}
    try:
        findings, not_checked, seconds = check(lambda folder: options_of(own, folder))
    except CannotRun as error:
        row["found"] = [str(error).strip().splitlines()[-1]]
        verdict = REFUSED if own.bugs else "could not run"
        return row | {"verdicts": {name: verdict for name in names}}
    row["rules"] = sorted({finding.rule for finding in findings})
    row["found"] = [f"{f.rule}: {_place(f)}{f.observed}" for f in findings]
    row["not_checked"] = [f"{item.what}: {item.why}" for item in not_checked]
    row["seconds"] = round(seconds)
    return row | {"verdicts": {name: _verdict(own, name, row) for name in names}}


def _verdict(own, name, row):
    alarms = [rule for rule in row["rules"] if ADVICE[rule].severity != "note"]
    if not own.bugs:
        return "false alarm" if alarms else "ok"
    if FINDS[name] in row["rules"] if name in FINDS else alarms and len(own.bugs) == 1:
        return "reported"
    return "not checked" if row["not_checked"] else "missed"


def _place(finding):
    if not finding.place:
        return ""
    file, line = finding.place
    return f"{str(file).removeprefix(f'{ROOT}/')}:{line}: "  # not where this project happens to be


def write(page, rows):
    """Write the page, and the rows in JSON next to it, with the rows of earlier calls."""
    path = page.with_suffix(".json")
    known = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    by_name = {row["name"]: row for row in [*known, *rows]}
    checks = [own for own in own_checks() if own.name in by_name]
    rows = [by_name[own.name] for own in checks]
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, two CPU cores"
    path.write_text(
        json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n", encoding="utf-8"
    )
    page.write_text(_page(versions, checks, by_name), encoding="utf-8")


def _page(versions, checks, rows):
    right = [rows[own.name] for own in checks if not own.bugs]
    bugs = [(bug.name, rows[own.name]) for own in checks for bug in own.bugs]
    counts = Counter(row["verdicts"][name] for name, row in bugs)
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    quiet = sum(row["verdicts"][row["name"]] == "ok" for row in right)
    table = markdown_table(
        ["bug", "script", "verdict", "by", "why not"],
        [
            [name, f"`{row['script']}`", row["verdicts"][name], *_reasons(name, row)]
            for name, row in bugs
        ],
    )
    return PAGE.format(
        versions=versions,
        quiet=quiet,
        right=len(right),
        bugs=len(bugs),
        correct=sum(map(len, CORRECT.values())),
        planted=len(PLANTS),
        said=said,
        table=table,
    )


def _reasons(name, row):
    """(the rule that reports a bug, or "", and why none does)."""
    verdict = row["verdicts"][name]
    if verdict == "reported":
        return (f"`{FINDS[name]}`" if name in FINDS else _told(row)[0]), ""
    if verdict == REFUSED:
        return row["found"][0].replace("|", "\\|"), ""
    return "", UNSEEN.get(name, _told(row)[1])


def _told(row):
    return ", ".join(f"`{rule}`" for rule in row["rules"]), "; ".join(row["not_checked"])


PAGE = """# What the check finds in this project

`python -m lab.check_own --markdown lab/results/check-own.md`, {versions}.
A check sees a folder and a command, as with anybody's script. `--only TEXT` replaces some of the
rows; the others are of earlier calls, and what has not been run has no row.

- {quiet} of {right} checks of correct scripts, of {correct} in all, yield no error and no warning.
- Of {bugs} bugs, of the {planted} that `make verify` catches: {said}.

The bugs of [traps](../../docs/traps.md), planted in a copy; those that do not hide each other, in
one copy.
[check-own.json](check-own.json) has the checks of correct scripts, and what was not checked:

{table}
"""


if __name__ == "__main__":
    sys.exit(main())
