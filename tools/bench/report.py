"""The reports of the benchmarks: a table, a page with figures, ratios to an earlier run."""

import base64
import html
import io
import json
import random
import statistics
from pathlib import Path

from tools.bench.hooks import PARTS

EPOCH = 50_000  # images: an epoch of CIFAR-10
HEAD = ["row", "global batch", f"s / {EPOCH:,} images", "images/s", "speed-up", "efficiency"]
HEAD += ["accuracy", "memory", "data wait", "forward", "backward", "optimizer", "of limit"]
HEAD += ["limited by"]


def medians(samples, name):
    """(median, smallest, largest) of one number of the samples."""
    values = sorted(sample[name] for sample in samples)
    return statistics.median(values), values[0], values[-1]


def spread(middle, low, high, form):
    """A median and its range, as text; of a single run the value alone."""
    text = format(middle, form)
    return text if low == high else f"{text} ({low:{form}} to {high:{form}})"


def run_counts(rows):
    """How often the rows were run, as text: an interrupted bench has more runs of some rows."""
    counts = sorted({len(samples) for samples in rows})
    if counts == [1]:
        return "One run of each row"
    return f"Medians of {' or '.join(map(str, counts))} interleaved runs (smallest to largest)"


def limits_of(result, key):
    """Median images/s of each limit: compute, data, communication."""
    runs = result["limits"][key]
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def mean_parts(samples):
    """Seconds of each of PARTS in an average step."""
    return [statistics.mean(part) for part in zip(*(s["parts"] for s in samples), strict=True)]


def bottleneck(parts, limits, share):
    """What limits a row, as text. share: measured speed / smallest limit."""
    if parts[PARTS.index("data")] > 0.05 * sum(parts):
        return "input: raise num_workers or use loader=device"
    if share < 0.7 and "communication" in limits:
        return "communication (all-reduce, BatchNorm) that computation does not hide"
    if share < 0.7:
        return "overhead between the parts of a step"
    return min(limits, key=limits.get)


def table_rows(result):
    """The cells of the table, one list per row, in the order of HEAD."""
    speed = {
        name: medians(samples, "images_per_second") for name, samples in result["rows"].items()
    }
    for name, key, world_size in result["order"]:
        if name in result["absent"]:
            yield [name, *[""] * (len(HEAD) - 2), result["absent"][name]]
            continue
        samples = result["rows"][name]
        middle, low, high = speed[name]
        parts = mean_parts(samples)
        limits = limits_of(result, key) if key else {}
        share = middle / min(limits.values()) if key else 0
        first = samples[0]
        alone = speed.get("1 device")
        base = speed.get("DDP + AMP x1" if "AMP" in name else "DDP x1")
        comparable = first["global_batch_size"] == result["config"]["global_batch_size"]
        efficiency = "not comparable"
        if comparable and base:
            ranks = world_size if result["gpus"] else 1  # on a CPU all rows have the same cores
            efficiency = f"{middle / base[0] / ranks:.0%}"
        yield [
            name,
            str(first["global_batch_size"]),
            f"{EPOCH / middle:.1f}",
            spread(middle, low, high, ",.0f"),
            f"{middle / alone[0]:.2f}" if alone else "",
            efficiency,
            f"{medians(samples, 'accuracy')[0]:.1%}",
            f"{medians(samples, 'memory')[0] / 2**30:.2f} GiB",
            *(f"{part / sum(parts):.1%}" for part in parts[:4]),
            f"{share:.0%}{' (the limit was slower)' if share > 1 else ''}" if key else "",
            bottleneck(parts, limits, share) if key else "",
        ]


def notes(result):
    """What a reader of the table needs to know."""
    name, samples = next(iter(result["rows"].items()))
    steps, repeats = samples[0]["updates"], run_counts(result["rows"].values())
    first = medians(samples, "start_up")[0]
    where = ", ".join(result["gpus"]) or f"{result['cores']} cores of {result['cpu']}"
    shared = ""
    if not result["gpus"]:
        shared = " All rows have the same cores: efficiency is the speed relative to one process."
    return (
        f"{result['config']['model']}, {result['config']['image_size']}x"
        f"{result['config']['image_size']}, {where}; Python {result['python']}, torch "
        f"{result['torch']}, commit {result['commit']}; `python -m tools.bench "
        f"{result['command']}`. {repeats}; an epoch of {steps} steps after a warm-up epoch; the "
        f"time for {EPOCH:,} images is calculated. Rows with another global batch make a different "
        f"number of updates per epoch, so their efficiency is not comparable. Limits are measured "
        f'interleaved with the rows: computation, reading or all-reduce alone; "of limit" is of '
        f"the smallest. Start to the end of the first step: {first:.1f} s ({name}).{shared}"
    )


def markdown_table(head, rows):
    """Lists of cells -> a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def finished(result):
    """The table for a terminal."""
    lines = [HEAD, *table_rows(result)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD) - 1)]
    text = "\n".join(
        "  ".join([*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[-1]])
        for line in lines
    )
    return f"\n{text}\n\n{notes(result)}"


def figure(result):
    """A PNG: the speed of each row with its limit, and where the time of a step goes.

    Returns None without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    names = [name for name, *_ in result["order"] if name not in result["absent"]]
    keys = {name: key for name, key, _ in result["order"]}
    canvas = Figure((13, 1.5 + 0.4 * len(names)), layout="constrained")
    left, right = canvas.subplots(1, 2, sharey=True)
    for place, name in enumerate(names):
        samples = result["rows"][name]
        middle, low, high = medians(samples, "images_per_second")
        left.barh(place, middle, color="tab:blue", xerr=[[middle - low], [high - middle]])
        if keys[name]:
            limit = min(limits_of(result, keys[name]).values())
            left.plot([limit, limit], [place - 0.4, place + 0.4], color="black")
        start, per_image = 0.0, 1e6 / samples[0]["global_batch_size"]
        for i, part in enumerate(mean_parts(samples)):
            label = PARTS[i] if place == 0 else None
            right.barh(place, part * per_image, left=start, color=f"C{i}", label=label)
            start += part * per_image
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    left.set_xlabel("images/s (line: the smallest limit)")
    right.set_xlabel("microseconds per image")
    right.legend()
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def write_reports(result, folder):
    """Write bench.json, bench.md, bench.png and bench.html, which needs no other file."""
    folder.mkdir(parents=True, exist_ok=True)
    table = markdown_table(HEAD, table_rows(result))
    (folder / "bench.json").write_text(json.dumps(result))
    (folder / "bench.md").write_text(f"{notes(result)}\n\n{table}\n")
    image = figure(result)
    shown = "<p>Figures need matplotlib: pip install matplotlib</p>"
    if image:
        (folder / "bench.png").write_bytes(image)
        data = base64.b64encode(image).decode()
        shown = f'<img alt="speed and parts of a step" src="data:image/png;base64,{data}">'
    cells = [[html.escape(cell) for cell in row] for row in [HEAD, *table_rows(result)]]
    lines = "".join(f"<tr><td>{'</td><td>'.join(row)}</td></tr>\n" for row in cells)
    title = "Speed of the scripts"
    style = "td{border-bottom:1px solid #ccc;padding:.2em .6em}body{font-family:sans-serif}"
    style += "img{max-width:100%}"
    (folder / "bench.html").write_text(
        f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{style}</style>"
        f"<h1>{title}</h1><p>{html.escape(notes(result))}</p><table>{lines}</table>{shown}\n"
    )
    print(f"\nwrote {folder}/bench.json, bench.md, bench.html", flush=True)


def write_table(result, text, folder, name):
    """Write NAME.json and NAME.md, and print the text."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result))
    (folder / f"{name}.md").write_text(text)
    print(f"\n{text}\nwrote {folder}/{name}.json, {name}.md")


def interval(before, after, draws=2000):
    """The ratio of the medians, after / before, and its 95 % bootstrap interval."""
    generator = random.Random(0)

    def resampled(values):
        return statistics.median(generator.choices(values, k=len(values)))

    ratios = sorted(resampled(after) / resampled(before) for _ in range(draws))
    middle = statistics.median(after) / statistics.median(before)
    return middle, ratios[round(0.025 * draws)], ratios[round(0.975 * draws) - 1]


def compared(before, after):
    """The ratios of the rows that both results have, as text."""
    lines = [f"compared with {before['commit']} (torch {before['torch']}), images/s:"]
    for name, samples in after["rows"].items():
        if name in before["rows"]:
            both = [
                [sample["images_per_second"] for sample in values]
                for values in (before["rows"][name], samples)
            ]
            middle, low, high = interval(*both)
            lines.append(f"  {name}: {spread(middle, low, high, '.2f')}")
    return "\n".join(lines)
