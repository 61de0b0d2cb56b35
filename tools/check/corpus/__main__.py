"""Measure what tools.check finds, and what it reports although it is right.

    python -m tools.check.corpus [--only TEXT] [--markdown FILE]
    python -m tools.check.corpus --own          the scripts of this project, and the bugs of verify

Checks each script of scripts/ as it is, which must yield notes at most, and with each bug of
bugs.py, which must be reported by its rule. The exit code is 1 if a bug is missed, or if there is a
false alarm.
"""

import argparse
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch

from tools.check.advice import ADVICE
from tools.check.corpus import own
from tools.check.corpus.bugs import BUGS, CORRECT, SCRIPTS
from tools.check.rules import judge
from tools.check.scenarios import CannotRun, Options, run_all


def check(make_options):
    """Check a script. make_options(folder): writes the project there, and returns the Options.
    Returns the findings, what was not checked, and the seconds."""
    work = Path(tempfile.mkdtemp(prefix="corpus-"))
    try:
        options = make_options(work)
        (work / "runs").mkdir()
        start = time.monotonic()
        findings, not_checked = judge(run_all(options, work / "runs"))
        return findings, not_checked, time.monotonic() - start
    finally:
        shutil.rmtree(work, ignore_errors=True)


def options_of(folder, source, script):
    """The Options of a check of the text of a script of the corpus."""
    project = folder / "project"
    project.mkdir()
    (project / "train.py").write_text(source)
    more = script.resume_arguments.split()
    return Options(["train.py", *script.arguments], project, resume_arguments=more)


def main():
    """Check the whole corpus, or a part of it. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="only scripts and bugs whose name contains this")
    parser.add_argument("--markdown", help="write the table to this file")
    parser.add_argument("--own", action="store_true", help="the scripts of this project")
    args = parser.parse_args()
    if args.own:
        return own.main(args.only, args.markdown, check)
    scripts = {script.name: script for script in CORRECT}
    cases = [(s.name, s, (SCRIPTS / f"{s.name}.py").read_text(), None) for s in CORRECT]
    cases += [(bug.name, scripts[bug.script], bug.source(), bug) for bug in BUGS]
    rows, failed = [], 0
    for name, script, source, bug in cases:
        if args.only not in name and args.only != script.name:
            continue
        row = judge_case(name, script, source, bug)
        failed += row[-1] != "ok"
        rows.append(row)
        print(" | ".join(row), flush=True)
    if args.markdown:
        Path(args.markdown).write_text(table(rows))
    print(f"{len(rows)} checks, {failed} wrong")
    return 1 if failed else 0


def judge_case(name, script, source, bug):
    """A row of the table: name, script, what was found, seconds, verdict."""
    try:
        findings, not_checked, seconds = check(lambda folder: options_of(folder, source, script))
    except CannotRun as error:
        return name, script.name, str(error)[-200:].replace("\n", " "), "", "could not run"
    rules = {finding.rule for finding in findings}
    alarms = {rule for rule in rules if ADVICE[rule].severity != "note"}
    verdict = "ok"
    if bug is None:
        if alarms:
            verdict = "false alarm"
    elif bug.finds not in rules:
        verdict = f"missed {bug.finds}"
    elif alarms - {bug.finds, *bug.also}:
        verdict = "false alarm: " + ", ".join(sorted(alarms - {bug.finds, *bug.also}))
    found = ", ".join(sorted(rules)) or "nothing"
    if verdict != "ok":
        for finding in findings:
            print("   ", finding.rule, finding.place, finding.observed)
        for item in not_checked:
            print("   ", "not checked:", item.what, "-", item.why)
    return name, script.name, found, f"{seconds:.0f}", verdict


def table(rows):
    """The page of results."""
    correct = {script.name for script in CORRECT}
    right = [row for row in rows if row[0] in correct]
    bugs = [row for row in rows if row[0] not in correct]
    found = sum(not row[-1].startswith(("missed", "could")) for row in bugs)
    clean = sum(row[-1] == "ok" for row in rows)
    seconds = sorted(float(row[3]) for row in rows if row[3])
    middle = seconds[len(seconds) // 2] if seconds else 0
    lines = [
        "# What tools.check finds",
        "",
        f"`python -m tools.check.corpus`, torch {torch.__version__}, Python "
        f"{platform.python_version()}, two CPU cores.",
        "",
        f"- {found} of {len(bugs)} planted bugs are reported by their rule.",
        f"- {sum(row[-1] == 'ok' for row in right)} of {len(right)} correct scripts yield no error "
        f"and no warning; {clean} of all {len(rows)} checks yield none that they should not.",
        f"- A check takes {middle:.0f} s (median; {seconds[0]:.0f} to {seconds[-1]:.0f})."
        if seconds
        else "",
        "",
        "| script or bug | script | found | seconds | verdict |",
        "|---|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
