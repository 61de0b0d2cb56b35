"""The table of verify: on the terminal, as Markdown and as JSON."""

import json
import os
import platform
import sys
from pathlib import Path

import torch

from tools.lib import history
from tools.lib.markdown import markdown_table
from tools.verify.judge import Problem

HEAD = ["case", "train loss", "val metric", "loss difference", "weight difference"]
HEAD += ["each sample once", "written by", "result", "s"]
WIDTHS = (26, 10, 12, 15, 17, 16, 10, 4)  # of all but the result, which comes last on a terminal


def cells_of(row):
    """A Row's to_json() -> the text of each column of HEAD."""

    def text(name, form):
        return "" if row[name] is None else format(row[name], form)

    result = "pass"
    if row["problem"]:
        result = f"FAIL: {Problem[row['problem']].value} ({row['details']})".removesuffix(" ()")
    return [
        row["case"],
        text("train_loss", ".6f"),
        text("val_metric", ".6f"),
        text("loss_difference", ".1e"),
        text("weight_difference", ".1e"),
        {None: "", True: "yes", False: "no"}[row["each_sample_once"]],
        f"rank {', '.join(map(str, row['writers']))}" if row["writers"] else "",
        result,
        f"{row['seconds']:.0f}",
    ]


def head_of(metric):
    """The names of the columns, with the metric that decides which epoch is the best."""
    return [f"val {metric}" if name == "val metric" else name for name in HEAD]


def print_head(metric):
    """Print the first line of the table. metric: the one that decides which epoch is the best."""
    _print_cells(head_of(metric))


def print_row(row):
    """Print a Row."""
    _print_cells(cells_of(row.to_json()))


def _print_cells(cells):
    *cells, result, seconds = cells
    columns = zip([*cells, seconds], WIDTHS, strict=True)
    print("  ".join([*(text.ljust(width) for text, width in columns), result]), flush=True)


def write(path, rows, summary, suite):
    """Write the table as Markdown to `path`, and as JSON next to it."""
    path = Path(path)
    machine = f"{len(os.sched_getaffinity(0))} {platform.machine()} cores"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    command = " ".join(["python -m tools.verify", *sys.argv[1:]])
    result = {"command": command, "machine": machine, "versions": versions, "summary": summary}
    result["commit"] = history.head()
    result["task"], result["left_out"] = suite.task, suite.left_out
    result["rows"] = [row.to_json() for row in rows]
    table = markdown_table(head_of(suite.best[0]), map(cells_of, result["rows"]))
    path.write_text(
        f"`{command}` on {machine}, {versions}: {summary}.\n\n{table}\n", encoding="utf-8"
    )
    path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
