"""Curves, settings and times of runs, on one page that works offline.

    python -m tools.report runs/a runs/b [-o report.html] [--png report.png]

A run is its --output-dir. The page has the loss, the metric, the learning rate and the throughput
over samples and over time, with restarts and skipped steps marked; the final figures; the settings
that differ; and what each rank's time was spent on, if the run had --timing.
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

import yaml

from tools.page import (
    color_of,
    drawing,
    figure,
    key,
    marker_of,
    page,
    save_picture,
    table,
    write_file,
)
from utils.errors import UserError, report_errors
from utils.options.timing import NAMES

COUNTS = ("samples", "seconds")  # what rows hold besides the results of a task
# The numbers that the rows of a file have, whatever the task.
NUMBERS = {
    "metrics.jsonl": ["epoch", "world_size", "lr"]
    + [f"{split}_{name}" for split in ("train", "val") for name in ("loss", *COUNTS)],
    "steps.jsonl": ["epoch", "samples", "loss", "lr", "samples_per_second"],
    "starts.jsonl": ["epoch", "step", "steps_per_epoch"],
}


class Run(NamedTuple):
    """What the output folder of a run holds."""

    name: str
    rows: list  # of metrics.jsonl
    steps: list  # of steps.jsonl
    starts: list  # of starts.jsonl
    settings: dict
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
    for file in NUMBERS:
        read[file], is_complete = read_rows(folder / file)
        if not is_complete:
            notes.append(f"the last line of {file} is incomplete")
    rows, steps, starts = read.values()
    if not rows and not steps:
        if (folder / "config.yaml").exists():
            raise UserError(f"the run in {folder} has no rows yet: wait until its first epoch ends")
        raise UserError(
            f"there is no run in {folder}: it must hold metrics.jsonl, as the --output-dir of a "
            f"script does after its first epoch"
        )
    settings = read_settings(folder / "config.yaml")
    epochs = settings.get("epochs")
    if is_running(folder):
        notes.append("still running")
        if not rows:
            notes.append("still in its first epoch: no validation yet")
    elif isinstance(epochs, int) and len(rows) < epochs:
        notes.append(f"stopped after {len(rows)} of {epochs} epochs")
    return Run(name, rows, steps, starts, settings, notes)


def read_rows(path):
    """(the rows of one of the files of NUMBERS, whether its last line is complete).

    Without such a file, there are no rows. Raises UserError if it cannot be read, or if any line
    but the last one, which a crash may have truncated, is not a row.
    """
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return [], True
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):
                return rows, False
            raise UserError(f"line {number} of {path} is not JSON: remove it") from None
        known = row if isinstance(row, dict) else {}
        for name in NUMBERS[path.name]:
            if not isinstance(known.get(name), int | float):
                raise UserError(f"line {number} of {path} has no number {name!r}: remove it")
        rows.append(row)
    return rows, True


def read_settings(path):
    """The settings in a config.yaml, {} if there is none."""
    try:
        settings = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    return settings if isinstance(settings, dict) else {}


def is_running(folder):
    """Whether a run holds the lock on its folder (utils/run_folder.py)."""
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
    """A short name for each folder: as many of the last parts of its path as tell it apart. Bytes
    that are not UTF-8 are replaced. Raises UserError if a folder is given twice."""
    paths = [Path(folder).resolve() for folder in folders]
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise UserError(f"{folders[number]} is given twice")
    length, names = 0, [""] * (len(paths) + 1)
    while len(set(names)) < len(names):
        length += 1
        names = ["/".join(path.parts[-length:]) for path in paths]
    return [os.fsencode(name).decode(errors="replace") for name in names]


# Curves


class Axis:
    """Where a place within a run is, in samples and in seconds of training."""

    def __init__(self, run):
        self.run, self.starts = run, [(0.0, 0.0)]
        for row in run.rows:
            samples, seconds = self.starts[-1]
            self.starts.append((samples + row["train_samples"], seconds + row["train_seconds"]))
        sizes = [row["train_samples"] for row in run.rows]
        speeds = [row["samples_per_second"] for row in run.steps]
        self.size = sizes[-1] if sizes else math.inf
        self.speed = sum(speeds) / len(speeds) if speeds else 1.0

    def end(self, epoch, value):
        """The Point of a value at the end of an epoch, the number of which counts from 0."""
        return Point(*self.starts[epoch + 1], value)

    def within(self, epoch, samples, value):
        """The Point of a value after a number of samples of an epoch."""
        before, since = self.starts[min(epoch, len(self.starts) - 1)]
        seconds = samples / self.speed
        if epoch < len(self.run.rows):
            row = self.run.rows[epoch]
            seconds = samples / row["train_samples"] * row["train_seconds"]
        return Point(before + samples, since + seconds, value)

    def step(self, epoch, step):
        """The Point of a step of an epoch, without a value."""
        places = [(start["epoch"], start["step"]) for start in self.run.starts]
        before = [n for n, place in enumerate(places) if place <= (epoch, step)]
        share = 1.0
        if before:  # the number of steps may have changed when the run was resumed
            share = step / self.run.starts[before[-1]]["steps_per_epoch"]
        size = self.size
        if epoch < len(self.run.rows):
            size = self.run.rows[epoch]["train_samples"]
        return self.within(epoch, share * size if math.isfinite(size) else 0.0, math.nan)


def curves(run):
    """{name of a curve: {"train": [Point], and perhaps "validation": [Point]}}."""
    axis, metric = Axis(run), metric_of(run)
    speeds = [row["train_samples"] / row["train_seconds"] for row in run.rows]
    found = {}
    for name in ["loss", metric] if metric else ["loss"]:
        train = [row.get(f"train_{name}") for row in run.rows]
        ends = [(i, row[f"val_{name}"]) for i, row in enumerate(run.rows) if f"val_{name}" in row]
        found[name] = {"train": _training(axis, train, name)}
        found[name]["validation"] = [axis.end(i, value) for i, value in ends]
    rates = [row["lr"] for row in run.rows]
    found["learning rate"] = {"train": _training(axis, rates, "lr")}
    found["samples/s"] = {"train": _training(axis, speeds, "samples_per_second")}
    return found


def _training(axis, values, name):
    """The Points of a number in the rows of steps; in epochs without any, those of `values`, the
    numbers of the epochs."""
    points = []
    steps = [row for row in axis.run.steps if name in row]
    for epoch in range(max([len(values), *(row["epoch"] + 1 for row in steps)])):
        own = [row for row in steps if row["epoch"] == epoch]
        points += [axis.within(epoch, row["samples"], row[name]) for row in own]
        if not own and epoch < len(values) and values[epoch] is not None:
            points.append(axis.end(epoch, values[epoch]))
    return points


def metric_of(run):
    """The metric of the run's task: the first of its results that is not the loss; None if there is
    no other."""
    names = [name.removeprefix("train_") for name in (run.rows or [{}])[0] if "train_" in name]
    names += list(run.steps[0]) if run.steps else []
    known = {"loss", "epoch", "step", "lr", "samples_per_second", "data_seconds", "memory", *COUNTS}
    return next((name for name in names if name not in known | {"gradient_norm"}), None)


def marks(run):
    """({Points of restarts}, {Points of skipped steps})."""
    axis = Axis(run)
    restarts = [axis.step(start["epoch"], start["step"]) for start in run.starts[1:]]
    skipped = [
        axis.step(epoch, step)
        for epoch, row in enumerate(run.rows)
        for step in row.get("skipped_steps", [])
    ]
    return restarts, skipped


def draw_curves(axes, runs, name, by_time):
    """Draw one kind of curve of all runs on a matplotlib Axes."""
    horizontal = Point._fields[int(by_time)]
    values = []
    for number, run in enumerate(runs):
        color = color_of(number)
        style = {"color": color, "marker": marker_of(number), "markersize": 4.5}
        for kind, points in curves(run).get(name, {}).items():
            x = [getattr(point, horizontal) for point in points]
            y = [point.value for point in points]
            values += y
            if kind == "train":
                every = 1 + len(points) // 6  # a few markers tell runs apart without colors
                axes.plot(x, y, linewidth=1.4, markevery=(number % every, every), **style)
            else:
                axes.plot(x, y, linewidth=1.4, linestyle="--", markerfacecolor="none", **style)
        _draw_marks(axes, run, horizontal, color)
    # A diverging loss or a perplexity would flatten all that follows; ratios need no logarithms.
    values = [value for value in values if math.isfinite(value)]
    if values and min(values) > 0 and max(values) > max(1, 100 * min(values)):
        axes.set_yscale("log")
    if name == "samples/s":
        axes.set_yscale("linear")
        axes.set_ylim(bottom=0)  # otherwise, small changes would look large
    axes.set_xlabel("seconds of training" if by_time else "samples")
    axes.xaxis.set_major_locator(_few_ticks())
    axes.xaxis.set_major_formatter(_with_units())


def _draw_marks(axes, run, horizontal, color):
    """Draw the restarts and the skipped steps of a run."""
    restarts, skipped = marks(run)
    for point in restarts:
        axes.axvline(getattr(point, horizontal), color=color, linewidth=1, linestyle=":")
    x, transform = [getattr(point, horizontal) for point in skipped], axes.get_xaxis_transform()
    axes.plot(x, [0.02] * len(x), "x", color=color, transform=transform, markersize=6)


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


def finals(runs):
    """The table of the last figures of each run."""
    head = ["run", "epochs", "processes", "samples/s", "time"]
    results = []
    for run in runs:
        results += [n for n in (run.rows or [{}])[-1] if n.startswith(("train_", "val_"))]
    results = [n for n in dict.fromkeys(results) if not n.endswith(COUNTS)]
    rows = []
    for run in runs:
        if not run.rows:
            rows.append([run.name, "0", *[""] * (len(head) - 2 + len(results))])
            continue
        last = run.rows[-1]
        seconds = sum(row["train_seconds"] + row["val_seconds"] for row in run.rows)
        speed = last["train_samples"] / last["train_seconds"]
        cells = (
            str(len(run.rows)),
            str(last["world_size"]),
            f"{speed:,.0f}",
            str(timedelta(seconds=round(seconds))),
        )
        values = [f"{last[name]:.4f}" if name in last else "" for name in results]
        rows.append([run.name, *cells, *values])
    return table([*head, *(name.replace("_", " ") for name in results)], rows)


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
    rows = [row["time"] for row in run.rows if "time" in row]
    if not rows:
        return {}
    sums = {name: seconds for name, seconds in rows[-1].items() if name != "total"}
    ranks = len(next(iter(sums.values())))
    for row in rows[:-1]:
        for name, seconds in row.items():
            if name != "total" and len(seconds) == ranks:
                before = sums.get(name, [0.0] * ranks)
                sums[name] = [a + b for a, b in zip(before, seconds, strict=True)]
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
    parts = [notes, key([run.name for run in runs], has_markers=True), charts(runs)]
    parts.append(
        '<p class="pale">Solid: training. Dashed: validation. Dotted and vertical: a restart. '
        "Crosses: skipped steps. Filled markers only tell the runs apart. Nothing is smoothed: a "
        "curve has the rows of steps.jsonl (--log-steps), if there are any, otherwise those of "
        "epochs.</p>"
    )
    parts += ["<h2>Final figures</h2>", finals(runs), settings(runs)]
    timed = [run for run in runs if rank_times(run)]
    if timed:
        spent = {name for run in timed for name in rank_times(run)}
        names = {name: NAMES.get(name, name) for name in (*NAMES, *sorted(spent)) if name in spent}
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
        axis.set_title(name, parse_math=False)
    handles = [
        Line2D([], [], color=color_of(number), marker=marker_of(number))
        for number in range(len(runs))
    ]
    handles += [Line2D([], [], color="gray"), Line2D([], [], color="gray", linestyle="--")]
    place = {"loc": "outside upper left", "frameon": False, "ncols": 4}
    legend = drawn.legend(handles, ["run"] * len(runs) + ["training", "validation"], **place)
    for text, run in zip(legend.get_texts(), runs, strict=False):
        text.set_parse_math(False)
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
