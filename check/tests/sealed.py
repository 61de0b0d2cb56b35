"""What the check reports for public scripts that nobody had checked when the rules were written.

    python -m check.tests.sealed FOLDER [--results FILE] [--only TEXT] [--markdown FILE]

sealed.json lists 20 repositories, with two mutants each (one changed line) and what is expected of
the check. It was committed before the rules that it measures, and no rule was changed after its
first run. FOLDER holds the repositories, each at its commit, as OWNER+NAME. --results keeps what
was found; the same command goes on where an interrupted one has ended.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHECK = Path(__file__).parents[1]
LIST = Path(__file__).with_name("sealed.json")
SECONDS = 900  # for one check; the machine may be busy


def cases():
    """(name, entry, mutant or None) of all checks, in the order of the list."""
    for entry in json.loads(LIST.read_text(encoding="utf-8")):
        yield entry["repository"], entry, None
        for number, mutant in enumerate(entry["mutants"], 1):
            yield f"{entry['repository']} #{number}", entry, mutant


def prepare(source, folder, entry, mutant):
    """Copy a repository, with the edits that it needs, its data, and the line of a mutant."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(".git"))
    changes = list(entry["edits"])
    if mutant:
        changes.append([mutant["file"], mutant["old"], mutant["new"]])
    for name, old, new in changes:
        text = (folder / name).read_text(encoding="utf-8")
        if old not in text:
            raise ValueError(f"{entry['repository']}: {name} has no {old!r}")
        (folder / name).write_text(text.replace(old, new), encoding="utf-8")
    if entry["prepare"]:
        subprocess.run([sys.executable, "-c", entry["prepare"]], cwd=folder, check=True)


def run(folder, entry):
    """Check the script of an entry. Returns what is kept in the results."""
    command = [sys.executable, CHECK, "--json", "-", "--timeout", "300", *entry["options"], "--"]
    command += entry["command"].split()
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=folder / entry["folder"], capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no result within {SECONDS} s", "seconds": SECONDS}
    report = json.loads(done.stdout or '{"error": ""}')
    seconds = round(time.monotonic() - start, 1)
    if "error" in report:
        return {"failed": (report["error"] or done.stderr)[-1500:], "seconds": seconds}
    keys = ("rule", "severity", "file", "line", "observed")
    found = [[finding[key] for key in keys] for finding in report["findings"]]
    not_checked = [[item["what"], item["why"]] for item in report["not_checked"]]
    return {"found": found, "not_checked": not_checked, "seconds": seconds}


def verdict(entry, mutant, result):
    """For a mutant, whether its bug is found; for an original, what is missed and not expected."""
    if result is None:
        return "not run"
    if "failed" in result:
        return "no result"
    rules = {found[0] for found in result["found"]}
    alarms = {found[0] for found in result["found"] if found[1] != "note"}
    if mutant and mutant["expected"]:
        return "found" if rules & set(mutant["expected"]) else "missed"
    others = sorted(alarms - set(entry["expected"]))
    missed = sorted(set(entry["expected"]) - rules)
    parts = [f"missed {', '.join(missed)}"] * bool(missed)
    parts += [f"not expected: {', '.join(others)}"] * bool(others)
    return "; ".join(parts) or "as expected"


def page(results):
    """The results as a table in Markdown."""
    lines = ["| repository | change | expected | reported | verdict | s |", "| --- " * 6 + "|"]
    for name, entry, mutant in cases():
        result = results.get(name)
        expected = (mutant or {}).get("expected") or ([] if mutant else entry["expected"])
        bug = mutant["bug"] if mutant else f"none: {entry['why']}"
        reported = []
        for rule, severity, *_ in (result or {}).get("found", []):
            if f"`{rule}`" not in reported and severity != "note":
                reported.append(f"`{rule}`")
        cells = [
            f"{entry['repository']}, {entry['commit'][:8]}" if mutant is None else "",
            bug,
            " or ".join(f"`{rule}`" for rule in expected) or "nothing",
            ", ".join(reported) or "nothing",
            verdict(entry, mutant, result),
            f"{result['seconds']:.0f}" if result else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main():
    """Check what has no result yet. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the repositories, as OWNER+NAME")
    parser.add_argument("--only", default="", help="only those whose name contains this")
    parser.add_argument("--results", type=Path, help="keep the results in this file")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    args = parser.parse_args()
    results = {}
    if args.results and args.results.exists():
        results = json.loads(args.results.read_text(encoding="utf-8"))
    for name, entry, mutant in cases():
        if args.only in name and name not in results:
            work = Path(tempfile.mkdtemp(prefix="sealed-"))
            source = args.folder / entry["repository"].replace("/", "+")
            prepare(source, work / "project", entry, mutant)
            results[name] = run(work / "project", entry)
            shutil.rmtree(work, ignore_errors=True)
            if args.results:
                args.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        if args.only in name:
            print(name, "|", verdict(entry, mutant, results.get(name)), flush=True)
    if args.markdown:
        args.markdown.write_text(page(results), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
