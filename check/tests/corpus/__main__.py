"""Measure what the check finds, and what it reports although it is right.

    python -m check.tests.corpus [--only TEXT] [--results FILE]

Checks each script of scripts/ as it is, which must yield notes at most, and with each bug of
bugs.py, which must be reported by its rule. The exit code is 1 if a bug is missed, or if there is a
false alarm. Scripts that need a package that is not installed are not checked, and the output says
so.

--results keeps what each case has yielded. The same command then goes on where an interrupted one
has ended: a case is checked again only if its script, or the code of the check, has changed.
"""

import argparse
import importlib
import json
import shutil
import sys
import tempfile
import time
import zlib
from pathlib import Path

from check.advice import ADVICE
from check.processes import Processes
from check.rules import judge
from check.scenarios import CannotRun, Options, run_all
from check.tests.corpus.bugs import BUGS, CORRECT

CHECK = Path(__file__).parents[2]


def check(make_options, processes=None):
    """Check a script. make_options(folder): writes the project there, and returns the Options.
    Returns the findings, what was not checked, and the seconds."""
    work = Path(tempfile.mkdtemp(prefix="corpus-"))
    try:
        options = make_options(work)
        (work / "runs").mkdir()
        start = time.monotonic()
        shared = None if options.environment else processes  # it belongs to their start
        findings, not_checked = judge(run_all(options, work / "runs", shared))
        return findings, not_checked, time.monotonic() - start
    finally:
        shutil.rmtree(work, ignore_errors=True)


def options_of(folder, source, script):
    """The Options of a check of the text of a script of the corpus."""
    project = folder / "project"
    project.mkdir()
    (project / "train.py").write_text(source, encoding="utf-8")
    more = script.resume_arguments.split()
    return Options([*script.command(), *script.arguments], project, resume_arguments=more)


def missing(script):
    """Why a script cannot run here: the packages that it needs and that fail to import, or ""."""
    absent = []
    for name in script.needs:
        try:
            importlib.import_module(name)
        except ImportError as error:
            absent.append(f"{name} ({error})")
    return ", ".join(absent)


def measure(source, script, processes):
    """What a check of this text yields, as it is kept in a file of results."""
    absent = missing(script)
    if absent:
        return {"skipped": absent}
    try:
        findings, not_checked, seconds = check(
            lambda folder: options_of(folder, source, script), processes
        )
    except CannotRun as error:
        return {"failed": str(error)[-2000:]}
    return {
        "found": [[f.rule, f.place and f.place[1], f.observed] for f in findings],
        "not_checked": [[item.what, item.why] for item in not_checked],
        "seconds": round(seconds, 1),
    }


def digest(source, script, code):
    """Changes with the script, its arguments, and the code of the check."""
    text = repr((source, script.command(), script.arguments, script.resume_arguments, script.needs))
    return zlib.crc32(text.encode(), code)


def code_of_check():
    """A checksum of all modules of the check, without its tests."""
    crc = 0
    for path in sorted(CHECK.rglob("*.py")):
        if "tests" not in path.relative_to(CHECK).parts:
            crc = zlib.crc32(path.read_bytes(), crc)
    return crc


def rules_of(result):
    """The rules that have reported something."""
    return {rule for rule, _, _ in result.get("found", [])}


def verdict(name, script, bug, result):
    """ok, not run, could not run, or what is wrong with the result of a case."""
    if "skipped" in result:
        return "not run"
    if "failed" in result:
        return "could not run"
    rules = rules_of(result)
    if bug and bug.finds not in rules:
        return f"missed {bug.finds}"
    others = rules - {*script.notes, *([bug.finds, *bug.also] if bug else [])}
    alarms = sorted(rule for rule in others if ADVICE[rule].severity != "note")
    return f"false alarm: {', '.join(alarms)}" if alarms else "ok"


def main():
    """Check the whole corpus, or a part of it. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="only scripts and bugs whose name contains this")
    parser.add_argument("--results", type=Path, help="keep the results of each case in this file")
    args = parser.parse_args()
    with Processes() as processes:
        return check_corpus(args, processes)


def check_corpus(args, processes):
    """Check the scripts and bugs that were asked for. Returns the exit code."""
    scripts = {script.name: script for script in CORRECT}
    cases = [(script.name, script, None) for script in CORRECT]
    cases += [(bug.name, scripts[bug.script], bug) for bug in BUGS]
    results = {}
    if args.results and args.results.exists():
        results = json.loads(args.results.read_text(encoding="utf-8"))
    code = code_of_check()
    rows = []
    for name, script, bug in cases:
        if args.only not in name and args.only != script.name:
            continue
        source = bug.source() if bug else script.source()
        mark = digest(source, script, code)
        if results.get(name, {}).get("digest") != mark or "skipped" in results[name]:
            results[name] = measure(source, script, processes) | {"digest": mark}
            if args.results:
                new = args.results.with_suffix(".new")
                new.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
                new.replace(args.results)
        rows.append((name, script, bug, results[name]))
        _tell(*rows[-1])
    wrong = sum(verdict(*row) not in ("ok", "not run") for row in rows)
    skipped = sum(verdict(*row) == "not run" for row in rows)
    print(f"{len(rows) - skipped} checks, {wrong} wrong; {skipped} not run")
    return 1 if wrong else 0


def _tell(name, script, bug, result):
    """A line about a case, and what was found if it is not as it should be."""
    outcome = verdict(name, script, bug, result)
    rules = ", ".join(sorted(rules_of(result))) or "nothing"
    print(" | ".join([name, script.name, rules, str(result.get("seconds", "")), outcome]))
    if outcome != "ok":
        for rule, line, observed in result.get("found", []):
            print("   ", rule, line, observed)
        for what, why in result.get("not_checked", []):
            print("   ", "not checked:", what, "-", why)
        print("   ", result.get("skipped") or result.get("failed", ""))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
