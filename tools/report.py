"""Curves, settings and times of runs, on one page that works offline.

    python -m tools.report runs/a runs/b [-o report.html] [--png report.png]

A run is its --output-dir. The page says which epoch was the best; it has the loss, the metric, the
learning rate and the throughput over samples and over time, with skipped steps marked; the settings
that differ; and what each rank's time was spent on, if the run had --timing. The runs may be
anybody's: nothing in their files is trusted.
"""

import argparse
import fcntl
import json
import math
import os
from contextlib import suppress
from datetime import timedelta
from html import escape
from pathlib import Path
from typing import NamedTuple

import torch
import yaml

from tools.lib.page import (
    color_of,
    drawing,
    figure,
    key,
    key_of_lines,
    marker_of,
    page,
    save_picture,
    table,
    write_file,
)
from utils.errors import UserError
from utils.options.timing import NAMES
from utils.reports import report_errors

COUNTS = ("samples", "seconds")  # what rows hold besides the results of a task
FILES = "metrics.jsonl", "steps.jsonl"
LINES = {"solid": "training", "dashed": "validation", "cross": "skipped step"}


class Run(NamedTuple):
    """What the output folder of a run holds."""

    name: str
    rows: list  # of metrics.jsonl
    steps: list  # of steps.jsonl
    settings: dict  # texts
    best: int | None  # the epoch of best.pt
    notes: list  # what a reader must know


class Point(NamedTuple):
    """A point of a curve. samples, seconds: of training, since the start of the run."""

    samples: float
    seconds: float
    value: float


# Reading


def read_run(folder, name):
    """The Run in a folder. Raises UserError if there is none, or if it is broken."""
    folder, notes, read = Path(folder), [], {}
    for file in FILES:
        read[file], is_complete = read_rows(folder / file)
        if not is_complete:
            notes.append(f"the last line of {file} is incomplete")
    rows, steps = read.values()
    if not rows and not steps:
        if (folder / "config.yaml").exists():
            raise UserError(f"the run in {folder} has no rows yet: wait until its first epoch ends")
        raise UserError(
            f"there is no run in {folder}: it must hold metrics.jsonl, as the --output-dir of a "
            f"script does after its first epoch"
        )
    settings = read_settings(folder / "config.yaml")
    epochs = settings.get("epochs", "")
    if is_running(folder):
        notes.append("still running")
        if not rows:
            notes.append("still in its first epoch: no validation yet")
    elif epochs.isdecimal() and len(rows) < int(epochs):
        notes.append(f"stopped after {len(rows)} of {epochs} epochs")
    return Run(name, rows, steps, settings, read_best(folder), notes)


def read_rows(path):
    """(the rows of one of FILES, whether its last line is complete).

    Without such a file, there are no rows. Raises UserError if any line but the last one, which a
    crash may have truncated, is not JSON.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").rstrip("\n").split("\n")
    except FileNotFoundError:
        return [], True
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number == len(lines):
                return rows, False
            raise UserError(f"line {number} of {path} is not JSON: remove it") from None
    return rows, True


def is_number(value):
    """Whether a value of a row is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def ratio(a, b):
    """a / b; NaN if b is 0."""
    return a / b if b else math.nan


def read_settings(path):
    """The settings in a config.yaml as texts, {} if there is none."""
    try:
        text = path.read_text(encoding="utf-8")  # empty, if the disk was full
        return yaml.load(text, yaml.BaseLoader) or {}
    except FileNotFoundError:
        return {}


def read_best(folder):
    """The epoch of best.pt, or None."""
    with suppress(Exception):  # no such file, or a damaged one
        saved = torch.load(folder / "best.pt", "cpu", weights_only=True, mmap=True)
        return int(saved["epoch"]) - 1  # it holds the epoch to continue with
    return None


def is_running(folder):
    """Whether a run holds the lock on its folder (utils/guards/lock.py)."""
    with suppress(OSError):
        file = os.open(folder / ".lock", os.O_RDONLY)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
    return False


def names_of(folders):
    """A short name for each folder: as many of the last parts of its path as tell it apart. Raises
    UserError if a folder is given twice."""
    paths = [Path(folder).resolve() for folder in folders]
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise UserError(f"{folders[number]} is given twice")
    length, names = 0, [""] * (len(paths) + 1)
    while len(set(names)) < len(names):
        length += 1
        names = ["/".join(path.parts[-length:]) for path in paths]
    return names


# Curves


class Axis:
    """Converts places within a run to samples and to seconds of training."""

    def __init__(self, run):
        self.run, self.starts = run, [(0.0, 0.0)]
        batch = run.settings.get("global_batch_size", "")
        self.batch = int(batch) if batch.isdecimal() else 0
        for row in run.rows:
            samples, seconds = self.starts[-1]
            self.starts.append((samples + row["train_samples"], seconds + row["train_seconds"]))
        speeds = [row["samples_per_second"] for row in run.steps]
        self.speed = sum(speeds) / len(speeds) if speeds else 1.0

    def end(self, epoch, value):
        """The Point of a value at the end of an epoch, the number of which counts from 0."""
        return Point(*self.starts[epoch + 1], value)

    def within(self, epoch, samples, value):
        """The Point of a value after a number of samples of an epoch."""
        before, since = self.starts[min(epoch, len(self.starts) - 1)]
        seconds = ratio(samples, self.speed)
        if epoch < len(self.run.rows):
            row = self.run.rows[epoch]
            seconds = ratio(samples, row["train_samples"]) * row["train_seconds"]
        return Point(before + samples, since + seconds, value)

    def step(self, epoch, step):
        """The Point of a step of an epoch, without a value."""
        return self.within(epoch, step * self.batch, math.nan)


def curves(run):
    """{name of a curve: {"train": [Point], and perhaps "validation": [Point]}}."""
    axis, metric = Axis(run), metric_of(run)
    speeds = [ratio(row["train_samples"], row["train_seconds"]) for row in run.rows]
    found = {}
    shares = [name for name in _results_of_training(run) if name.startswith("share_")]
    for name in ["loss", *([metric] if metric else []), *shares]:
        train = [row.get(f"train_{name}") for row in run.rows]
        ends = [(i, row[f"val_{name}"]) for i, row in enumerate(run.rows) if f"val_{name}" in row]
        found[name] = {"train": _training(axis, train, name)}
        found[name]["validation"] = [axis.end(i, value) for i, value in ends]
    rates = [row["lr"] for row in run.rows]
    found["learning rate"] = {"train": _training(axis, rates, "lr")}
    found["samples/s"] = {"train": _training(axis, speeds, "samples_per_second")}
    return found


def _training(axis, values, name):
    """The Points of a number in the rows of steps; in epochs without any, in `values`, the numbers
    of the epochs."""
    points, steps = [], {}
    for row in axis.run.steps:
        if is_number(row.get(name)):
            steps.setdefault(row["epoch"], []).append(row)
    for epoch in sorted({*range(len(values)), *steps}):
        own = steps.get(epoch)
        for row in own or ():
            points.append(axis.within(epoch, row["samples"], row[name]))
        if not own and epoch < len(values) and values[epoch] is not None:
            points.append(axis.end(epoch, values[epoch]))
    return points


def _results_of_training(run):
    """What the first row holds of training, without "train_"."""
    row = (run.rows or [{}])[0]
    return [name.removeprefix("train_") for name in row if name.startswith("train_")]


def metric_of(run):
    """The metric of the run's task: the first of its results that is neither the loss nor the share
    of a source in a mixture; None if there is no other."""
    names = [name for name in _results_of_training(run) if not name.startswith("share_")]
    if run.steps:
        names += [name for name, value in run.steps[0].items() if is_number(value)]
    known = {"loss", "epoch", "step", "lr", "samples_per_second", "data_seconds", "memory", *COUNTS}
    return next((name for name in names if name not in known), None)


def skipped_steps(run):
    """The Points of the steps that were skipped."""
    axis = Axis(run)
    return [
        axis.step(epoch, step)
        for epoch, row in enumerate(run.rows)
        for step in row.get("skipped_steps", [])
    ]


def draw_curves(axes, runs, name, by_time):
    """Draw one kind of curve of all runs on a matplotlib Axes."""
    horizontal = Point._fields[int(by_time)]
    values = []
    for number, run in enumerate(runs):
        color = color_of(number)
        style = {"color": color, "marker": marker_of(number), "markersize": 4.5}
        for kind, points in curves(run).get(name, {}).items():
            x = [_drawable(getattr(point, horizontal)) for point in points]
            y = [_drawable(point.value) for point in points]
            values += y
            if kind == "train":
                every = 1 + len(points) // 6  # a few markers tell runs apart without colors
                axes.plot(x, y, linewidth=1.4, markevery=(number % every, every), **style)
            else:
                style |= {"markevery": 1 + len(points) // 200, "markerfacecolor": "none"}
                axes.plot(x, y, linewidth=1.4, linestyle="--", **style)
        x = [_drawable(getattr(point, horizontal)) for point in skipped_steps(run)]
        transform = axes.get_xaxis_transform()
        axes.plot(x, [0.02] * len(x), "x", color=color, transform=transform, markersize=6)
    # A diverging loss or a perplexity would flatten everything after it; ratios need no logarithms.
    values = [value for value in values if math.isfinite(value)]
    if values and min(values) > 0 and max(values) > max(1, 100 * min(values)):
        axes.set_yscale("log")
    if name == "samples/s":
        axes.set_yscale("linear")
        axes.set_ylim(bottom=0)  # otherwise, small changes would look large
    axes.set_xlabel("seconds of training" if by_time else "samples")
    axes.xaxis.set_major_locator(_few_ticks())
    axes.xaxis.set_major_formatter(_with_units())


def _drawable(number):
    """A number, or NaN if it is so large that matplotlib fails."""
    return number if abs(number) < 1e100 else math.nan


def _few_ticks():
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(6)


def _with_units():
    from matplotlib.ticker import EngFormatter

    return EngFormatter(sep="")


# The page


def charts(runs):
    """The charts over samples and over time, of which the reader chooses."""
    names = dict.fromkeys(name for run in runs for name in curves(run))
    parts = [
        '<input type="radio" name="by" id="samples" checked><label for="samples">over samples'
        '</label><input type="radio" name="by" id="time"><label for="time">over time</label>'
    ]
    for by_time, kind in ((False, "samples"), (True, "time")):
        figures = []
        for name in names:
            drawn, axes = drawing(5.6, 3.4)
            draw_curves(axes[0, 0], runs, name, by_time)
            figures.append(figure(drawn, f"{name} over {kind}"))
        parts.append(f'<div class="by {kind}"><div class="grid">{"".join(figures)}</div></div>')
    return "\n".join(parts)


def results_of(runs):
    """The names of the results in the rows of runs: validation and metrics first."""
    names = {name for run in runs for name in (run.rows or [{}])[-1]}
    names = [n for n in names if n.startswith(("train_", "val_")) and not n.endswith(COUNTS)]
    return sorted(names, key=lambda name: (name.startswith("train_"), name.endswith("_loss"), name))


def table_of_results(runs, name, cells, more=()):
    """A table with the results of one row per run. cells: [[row of a run, texts of `more`]]."""
    results, rows = results_of(runs), []
    for run, (row, *texts) in zip(runs, cells, strict=True):
        values = [f"{row[result]:.4f}" if result in row else "" for result in results]
        rows.append([run.name, *values, *texts])
    head = ["run", *(result.replace("_", " ") for result in results), *more]
    return f"<h2>{name}</h2>{table(head, rows)}"


def bests(runs):
    """The table of the epochs in best.pt, empty if no run has such a file."""
    cells = []
    for run in runs:
        by_epoch = {row["epoch"]: row for row in run.rows}
        cells.append([by_epoch[run.best], str(run.best)] if run.best in by_epoch else [{}, ""])
    if not any(row for row, _ in cells):
        return ""
    return table_of_results(runs, "Best epoch, which best.pt holds", cells, ["epoch"])


def lasts(runs):
    """The table of the last epoch of each run."""
    cells = []
    for run in runs:
        if not run.rows:
            cells.append([{}, "0", "", "", ""])
            continue
        last = run.rows[-1]
        seconds = sum(row["train_seconds"] + row.get("val_seconds", 0) for row in run.rows)
        speed = ratio(last["train_samples"], last["train_seconds"])
        texts = [str(len(run.rows)), str(last["world_size"]), f"{speed:,.0f}", duration(seconds)]
        cells.append([last, *texts])
    return table_of_results(runs, "Last epoch", cells, ["epochs", "processes", "samples/s", "time"])


def duration(seconds):
    """Seconds as hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))


def settings(runs):
    """The settings that differ; of a single run, all of them."""
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    if len(runs) > 1:
        names = [n for n in names if len({repr(run.settings.get(n)) for run in runs}) > 1]
        names = [n for n in names if n != "output_dir"]  # every run has its own
    rows = [[name, *(str(run.settings.get(name, "")) for run in runs)] for name in names]
    shown = table(["setting", *(run.name for run in runs)], rows)
    if len(runs) > 1:
        return f"<h2>Settings that differ</h2>{shown if rows else '<p>None.</p>'}"
    return f"<h2>Settings</h2><details><summary>all {len(rows)}</summary>{shown}</details>"


def rank_times(run):
    """{name: seconds of each rank in all epochs}, {} without --timing. Epochs on other numbers of
    processes than the last one do not count."""
    rows = [row["time"] for row in run.rows if isinstance(row.get("time"), dict)]
    if not rows:
        return {}
    sums = {name: seconds for name, seconds in rows[-1].items() if name != "total"}
    ranks = len(next(iter(sums.values())))
    for row in rows[:-1]:
        for name, seconds in row.items():
            if name != "total" and len(seconds) == ranks:
                sums[name] = [a + b for a, b in zip(sums[name], seconds, strict=True)]
    return {name: seconds for name, seconds in sums.items() if any(seconds)}


def time_spent(run, names):
    """What each rank's time was spent on: a drawing and a table. names: {what: text} of what the
    colors stand for, in their order."""
    times = rank_times(run)
    ranks = range(len(next(iter(times.values()))))
    totals = [sum(seconds[rank] for seconds in times.values()) or 1.0 for rank in ranks]
    drawn, axes = drawing(5.6, 0.8 + min(0.3 * len(ranks), 8))
    left = [0.0] * len(ranks)
    for number, name in enumerate(names):
        if name in times:
            shares = [100 * s / total for s, total in zip(times[name], totals, strict=True)]
            axes[0, 0].barh(ranks, shares, left=left, color=color_of(number), height=0.7)
            left = [a + b for a, b in zip(left, shares, strict=True)]
    labeled = ranks[:: 1 + len(ranks) // 27]  # so that the labels do not overlap
    axes[0, 0].set_yticks(labeled, [f"rank {rank}" for rank in labeled])
    axes[0, 0].invert_yaxis()
    axes[0, 0].set_xlim(0, 100)
    axes[0, 0].set_xlabel("percent of the time")
    rows = [
        [f"rank {rank}", *(f"{seconds[rank]:.1f} s" for seconds in times.values())]
        for rank in ranks
    ]
    shown = table(["", *(names[name] for name in times)], rows)
    limits = [str(row["limited_by"]) for row in run.rows if "limited_by" in row]
    drawn = figure(drawn, ": ".join([run.name, *limits[-1:]]))
    return f"<div>{drawn}<details><summary>in seconds</summary>{shown}</details></div>"


def report(runs):
    """The page, as text."""
    notes = [f"{run.name}: {', '.join(run.notes)}." for run in runs if run.notes]
    notes = "".join(f"<p>{escape(note)}</p>" for note in notes)
    parts = [notes, bests(runs), "<h2>Curves</h2>"]
    parts += [key([run.name for run in runs], has_markers=True), key_of_lines(LINES), charts(runs)]
    parts.append(
        '<p class="pale">Filled markers only tell the runs apart. Nothing is smoothed: a curve has '
        'the rows of steps.jsonl (<span class="whole">--log-steps</span>), if there are any, '
        "otherwise one point per epoch.</p>"
    )
    parts += [lasts(runs), settings(runs)]
    timed = [run for run in runs if rank_times(run)]
    if timed:
        spent = {name for run in timed for name in rank_times(run)}
        names = {name: text for name, text in NAMES.items() if name in spent}
        bars = "".join(time_spent(run, names) for run in timed)
        parts += ["<h2>What the time was spent on</h2>", key(names.values())]
        parts.append(f'<div class="grid">{bars}</div>')
    title = ", ".join(run.name for run in runs[:3]) + (", ..." if len(runs) > 3 else "")
    return page(title, f"{len(runs)} run{'s' * (len(runs) > 1)}", "\n".join(parts))


def picture(runs):
    """All charts over samples as one drawing."""
    from matplotlib.lines import Line2D

    names = list(dict.fromkeys(name for run in runs for name in curves(run)))
    lines = math.ceil(len(names) / 2)
    drawn, axes = drawing(10.5, 0.4 + 3 * lines, (lines, 2))
    for axis in axes.flat[len(names) :]:
        axis.remove()
    for axis, name in zip(axes.flat, names, strict=False):
        draw_curves(axis, runs, name, by_time=False)
        axis.set_title(name)
    handles = [
        Line2D([], [], color=color_of(number), marker=marker_of(number))
        for number in range(len(runs))
    ]
    handles += [Line2D([], [], color="gray"), Line2D([], [], color="gray", linestyle="--")]
    place = {"loc": "outside upper left", "frameon": False, "ncols": 4}
    legend = drawn.legend(handles, ["run"] * len(runs) + ["training", "validation"], **place)
    for text, run in zip(legend.get_texts(), runs, strict=False):
        text.set_text(run.name[-40:])  # as a label, "_name" would be left out
    return drawn


@report_errors
def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m tools.report", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the --output-dir of a run")
    parser.add_argument("-o", "--output", default="report.html", help="default: report.html")
    parser.add_argument("--png", default="", help="also draw the charts as one picture")
    args = parser.parse_args(argv)
    names = names_of(args.runs)
    runs = [read_run(folder, name) for folder, name in zip(args.runs, names, strict=True)]
    write_file(args.output, report(runs))
    print(f"wrote {args.output}")
    if args.png:
        save_picture(picture(runs), args.png)
        print(f"wrote {args.png}")


if __name__ == "__main__":
    main()
