"""Prints what a check has found: for people, as JSON, and as SARIF for code hosts."""

import json
import os
import tempfile
from pathlib import Path
from urllib.parse import quote

from check.advice import ADVICE

ORDER = ("error", "warning", "note")
FAILURES = ("error", "warning")  # by default
NOT_CHECKED = "not-checked"


def sorted_findings(findings):
    """The most serious ones first."""
    return sorted(findings, key=lambda finding: ORDER.index(ADVICE[finding.rule].severity))


def is_failure(findings, not_checked=(), kinds=FAILURES):
    """Whether there is something of these kinds: the exit code is 1 then."""
    found = {ADVICE[finding.rule].severity for finding in findings}
    return bool(found & set(kinds)) or (bool(not_checked) and NOT_CHECKED in kinds)


def code_of(finding, source):
    """The line of code that a finding names, or None. It stays the same when lines move."""
    if not finding.place:
        return None
    try:
        lines = (source / finding.place[0]).read_text(encoding="utf-8").splitlines()
        return lines[finding.place[1] - 1].strip()
    except (OSError, UnicodeDecodeError, IndexError):
        return None


def accepted(findings, baseline, source):
    """The findings that a baseline, the JSON of an earlier report, has as well: of the same rule,
    in the same line of code, wherever this is now in its file."""
    known = {(each["rule"], each["file"], each["code"]) for each in baseline["findings"]}
    keys = {
        finding: (finding.rule, finding.place and finding.place[0], code_of(finding, source))
        for finding in findings
    }
    return [finding for finding in findings if keys[finding] in known]


def text(findings, not_checked, checked, known=(), with_notes=False):
    """The report for people. known: findings that were accepted, which are only counted, as notes
    are unless with_notes."""
    lines = []
    for finding in sorted_findings(findings):
        advice = ADVICE[finding.rule]
        if advice.severity == "note" and not with_notes:
            continue
        place = f"{finding.place[0]}:{finding.place[1]}: " if finding.place else ""
        lines += [
            f"{place}{advice.severity}: {finding.observed}  [{finding.rule}]",
            f"  {advice.why}",
        ]
        lines += [f"      {line}" for line in advice.fix.splitlines()]
        lines.append("")
    for item in not_checked:
        lines.append(f"not checked: {item.what}: {item.why}")
    written = sorted(set(written_outside(checked)))
    if written:
        lines.append(f"written outside of the copy of the folder: {', '.join(written[:5])}")
    counts = [
        sum(ADVICE[finding.rule].severity == severity for finding in findings) for severity in ORDER
    ]
    seconds = sum(run.seconds for run in checked.runs.values())
    names = [f"{n} {name}{'' if n == 1 else 's'}" for n, name in zip(counts, ORDER, strict=True)]
    if counts[-1] and not with_notes:
        names[-1] += " (--notes shows them)"
    options = checked.options
    length = f"{options.epochs} epochs of {options.steps} steps"
    runs = f"{len(checked.runs)} runs of up to {length}, {seconds:.0f} s"
    also = f" ({len(known)} more are accepted by the baseline)" if known else ""
    lines.append(f"{', '.join(names)}{also}; {len(not_checked)} not checked; {runs}")
    return "\n".join(lines)


def written_outside(checked):
    """Paths that the script wrote or renamed to, other than in the copy of its folder."""
    own = os.path.join(os.path.realpath(tempfile.gettempdir()), "check-")
    for run in checked.runs.values():
        inside = (str(run.root.resolve()), own, "/dev")
        renamed = {event["source"] for event in run.any("rename")}
        written = [event["path"] for event in run.any("save", "write")]
        moved = [event["path"] for event in run.any("rename") if event["by_user"]]
        for path in [*(path for path in written if path not in renamed), *moved]:
            if not path.startswith(inside) and _could_be_written(path, checked.writable):
                yield path


def _could_be_written(path, folders):
    """Whether the kernel let the script write there; what is observed are its attempts."""
    return folders is None or any(Path(path).is_relative_to(folder) for folder in folders)


def as_json(findings, not_checked, checked, known=()):
    """The report as a JSON object, of the findings that were accepted, too."""
    return json.dumps(
        {
            "findings": [
                {
                    "rule": finding.rule,
                    "severity": ADVICE[finding.rule].severity,
                    "file": finding.place and finding.place[0],
                    "line": finding.place and finding.place[1],
                    "code": code_of(finding, checked.options.source),
                    "accepted": finding in known,
                    "observed": finding.observed,
                    "why": ADVICE[finding.rule].why,
                    "fix": ADVICE[finding.rule].fix,
                }
                for finding in sorted_findings([*findings, *known])
            ],
            "not_checked": [item._asdict() for item in not_checked],
            "written_outside": sorted(set(written_outside(checked))),
            "runs": {name: round(run.seconds, 1) for name, run in checked.runs.items()},
        },
        indent=2,
    )


def _uri(path, prefix):
    return quote(os.path.normpath(os.path.join(prefix, path)))


def as_sarif(findings, script, prefix=".", known=(), not_checked=()):
    """The findings as SARIF 2.1.0 (https://docs.oasis-open.org/sarif/sarif/v2.1.0/).

    prefix: the path from the repository to the folder whose files the findings name. known:
    findings that were accepted, which code hosts do not show as open. What was not checked is a
    notification of the tool (3.20.21).
    """
    rules = sorted({finding.rule for finding in [*findings, *known]})
    results = [
        {
            "ruleId": finding.rule,
            "level": ADVICE[finding.rule].severity,
            "message": {"text": f"{finding.observed}. {ADVICE[finding.rule].why}"},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {
                            "uri": _uri(finding.place[0] if finding.place else script, prefix),
                            "uriBaseId": "%SRCROOT%",
                        },
                        "region": {"startLine": finding.place[1] if finding.place else 1},
                    }
                }
            ],
        }
        | ({"suppressions": [{"kind": "external"}]} if finding in known else {})
        for finding in sorted_findings([*findings, *known])
    ]
    driver = {
        "name": "check-training",
        "rules": [
            {
                "id": rule,
                "shortDescription": {"text": ADVICE[rule].why},
                "help": {"text": ADVICE[rule].fix or ADVICE[rule].why},
            }
            for rule in rules
        ],
    }
    notifications = {
        "toolExecutionNotifications": [
            {"level": "note", "message": {"text": f"not checked: {item.what}: {item.why}"}}
            for item in not_checked
        ]
    }
    return json.dumps(
        {
            "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
            "version": "2.1.0",
            "runs": [
                {
                    "tool": {"driver": driver},
                    "invocations": [{"executionSuccessful": True} | notifications],
                    "results": results,
                }
            ],
        },
        indent=2,
    )
