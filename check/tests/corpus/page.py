"""The page of results of the corpus: precision and recall, over all and of each rule."""

from collections import Counter

from check.advice import ADVICE

COMMAND = "python -m check.tests.corpus --results results.json --markdown lab/results/check.md"


def is_alarm(rule):
    """Whether a finding of this rule makes a check fail."""
    return ADVICE[rule].severity != "note"


def expected(script, bug):
    """The rules that rightly report this case."""
    return {*script.notes, *([bug.finds, *bug.also] if bug else [])}


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
    alarms = sorted(filter(is_alarm, rules - expected(script, bug)))
    return f"false alarm: {', '.join(alarms)}" if alarms else "ok"


def page(rows, versions):
    """The page of results. rows: (name, script, bug or None, result)."""
    run = [row for row in rows if "seconds" in row[3]]
    correct = [row for row in run if row[2] is None]
    bugs = [row for row in run if row[2] is not None]
    found = [row for row in bugs if row[2].finds in rules_of(row[3])]
    quiet = [row for row in correct if not any(map(is_alarm, rules_of(row[3])))]
    alarms = [(row, rule) for row in run for rule in rules_of(row[3]) if is_alarm(rule)]
    right = [rule for row, rule in alarms if rule in expected(row[1], row[2])]
    seconds = sorted(row[3]["seconds"] for row in run)
    missing = len(rows) - len(run)
    lines = [
        "# What the check finds",
        "",
        f"`{COMMAND}`, {', '.join(versions)}.",
        "",
        "The scripts of [check/tests/corpus](../../check/tests/corpus/) are of many styles. Each "
        "is checked as it is, and once with each of the bugs that are planted in it.",
        "",
        "| | |",
        "|---|---|",
        f"| recall | {_share(len(found), len(bugs))} bugs are reported by their rule |",
        f"| precision | {_share(len(right), len(alarms))} errors and warnings are of the bug "
        "that was planted, or of one that it causes |",
        f"| correct scripts | {_share(len(quiet), len(correct))} yield no error and no warning |",
        f"| seconds per check | {seconds[len(seconds) // 2]:.0f} (median; {seconds[0]:.0f} to "
        f"{seconds[-1]:.0f}) |",
        *([f"| not run | {missing} of {len(rows)} |"] if missing else []),
        "",
        "The corpus was written with the rules, and the rules were corrected until the corpus "
        "passed: these figures say that nothing has got worse, not what the next script will "
        "show.",
        "",
        "[check.json](check.json) has each script and each bug, with what was reported.",
        "",
        "## Rules",
        "",
        "found: of the bugs that are planted for this rule. False: checks of a script or of a "
        "different bug in which the rule reports what is not there; of a note, only of correct "
        "scripts.",
        "",
        "| rule | severity | found | false |",
        "|---|---|---|---|",
        *_rule_rows(run),
        "",
    ]
    return "\n".join(lines)


def _share(part, whole):
    percent = f" ({100 * part / whole:.0f} %)" if whole else ""
    return f"{part} of {whole}{percent}"


def log(rows):
    """What each case has yielded, to be written beside the page. rows: as of page()."""
    return [
        {
            "case": name,
            "script": script.name,
            "style": script.style(),
            "rule": bug.finds if bug else "",
            "reported": sorted(rules_of(result)),
            "not checked": list(dict.fromkeys(what for what, _ in result.get("not_checked", []))),
            "seconds": result.get("seconds"),
            "verdict": verdict(name, script, bug, result),
        }
        for name, script, bug, result in rows
    ]


def _rule_rows(run):
    planted, found, false = Counter(), Counter(), Counter()
    for _, script, bug, result in run:
        rules = rules_of(result)
        if bug:
            planted[bug.finds] += 1
            found[bug.finds] += bug.finds in rules
        for rule in rules - expected(script, bug):
            false[rule] += is_alarm(rule) or bug is None
    for rule, advice in ADVICE.items():
        share = f"{found[rule]} of {planted[rule]}" if planted[rule] else "none is planted"
        yield f"| `{rule}` | {advice.severity} | {share} | {false[rule]} |"
