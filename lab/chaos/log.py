"""The log of random faults: written as JSON, and shown as a table."""

import json
import os
import sys

import torch

from lab.chaos.faults import KINDS
from tools.lib.ladder import RESULTS
from tools.lib.markdown import markdown_table

RESULT = RESULTS / "chaos.json"
HEAD = ["script", "#", "fault", "place", "launcher", "exit code", "seconds", "result"]
# How the summary of a script ends whose result is as it should be.
SAME, ALIKE = "the same checksums", "the same numbers to 1e-9"


def cells_of(row):
    """A Row -> the text of each column of HEAD."""
    result = row.last_line
    if row.problems:
        result = f"FAIL: {'; '.join(row.problems)}"
    elif row.code is None:
        result = "continues"
    return [
        row.script,
        str(row.number),
        row.fault,
        row.place,
        row.launcher,
        "" if row.code is None else str(row.code),
        "" if row.seconds is None else f"{row.seconds:.1f}",
        result,
    ]


def write(path, task, rows, summary):
    """Write the log of a task, beside the logs of other tasks that the file holds."""
    log = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    log[task] = {
        "command": " ".join(["python -m lab.chaos", *sys.argv[1:]]),
        "machine": f"{len(os.sched_getaffinity(0))} CPU cores, torch {torch.__version__}",
        "summary": summary,
        "rows": [cells_of(row) for row in rows],
    }
    path.write_text(json.dumps(log) + "\n", encoding="utf-8")


def report(log):
    """A line per task, and a table: how many faults of each kind each script has had. log: as
    write() has written it."""
    lines, rows = [], []
    for part in log.values():
        done = [dict(zip(HEAD, cells, strict=True)) for cells in part["rows"]]
        bad = sum(row["result"].startswith("FAIL") for row in done)
        verdict = ALIKE if any(text.endswith(ALIKE) for text in part["summary"]) else SAME
        same = sum(text.endswith(verdict) for text in part["summary"])
        lines.append(
            f"- `{part['command']}` on {part['machine']}: {len(done)} faults, {bad} ended "
            f"differently than promised; {same} of {len(part['summary'])} scripts end with "
            f"{verdict}"
        )
        rows += done
    scripts = list(dict.fromkeys(row["script"] for row in rows))
    names = [script.removeprefix("train_").removesuffix(".py") for script in scripts]
    cells = [_cells_of_kind(kind.title, rows, scripts) for kind in KINDS]
    table = markdown_table(
        ["fault", *names, "in all", "exit codes", "most seconds"], [row for row in cells if row]
    )
    return "\n".join([*lines, "", table])


def _cells_of_kind(title, rows, scripts):
    """A row of the table; nothing if there was no such fault."""
    rows = [row for row in rows if row["fault"] == title]
    counts = [sum(row["script"] == script for row in rows) for script in scripts]
    codes = sorted({row["exit code"] or "continues" for row in rows})
    seconds = [float(row["seconds"]) for row in rows if row["seconds"]]
    most = f"{max(seconds):.1f}" if seconds else ""
    return rows and [title, *map(str, counts), str(len(rows)), ", ".join(codes), most]
