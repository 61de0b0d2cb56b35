"""The reports of the benchmarks: tables, and ratios to an earlier run."""

import json
import random
import statistics
from pathlib import Path

from lab.bench.hooks import PARTS
from tools.lib.markdown import markdown_table

EPOCH = 50_000  # images: an epoch of CIFAR-10
HEAD = ["row", "global batch", f"s / {EPOCH:,} images", "images/s", "speed-up", "efficiency"]
HEAD += ["of limit", "limited by", "accuracy", "memory", "data wait", "forward", "backward"]
HEAD += ["optimizer"]


def medians(samples, name):
    """(median, smallest, largest) of one number of the samples."""
    values = sorted(sample[name] for sample in samples)
    return statistics.median(values), values[0], values[-1]


def spread(middle, low, high, form):
    """A median and its range, as text; for a single run, the value alone."""
    text = format(middle, form)
    return text if low == high else f"{text} ({low:{form}} to {high:{form}})"


def run_counts(rows):
    """How often the rows were run, as text: an interrupted benchmark has more runs of some rows."""
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
            reason = {"row": name, "limited by": result["absent"][name]}
            yield [reason.get(column, "") for column in HEAD]
            continue
        samples = result["rows"][name]
        middle, low, high = speed[name]
        parts = mean_parts(samples)
        batch = samples[0]["global_batch_size"]
        yield [
            name,
            str(batch),
            f"{EPOCH / middle:.1f}",
            spread(middle, low, high, ",.0f"),
            f"{middle / speed['1 device'][0]:.2f}" if "1 device" in speed else "",
            efficiency(result, speed, name, batch, world_size),
            *limit_cells(result, key, middle, parts),
            f"{medians(samples, 'accuracy')[0]:.1%}",
            f"{medians(samples, 'memory')[0] / 2**30:.2f} GiB",
            *(f"{part / sum(parts):.1%}" for part in parts[:4]),
        ]


def efficiency(result, speed, name, batch, world_size):
    """The speed, relative to one process's speed times the number of processes, as text."""
    base = speed.get("DDP + AMP x1" if "AMP" in name else "DDP x1")
    if not base or batch != result["config"]["global_batch_size"]:
        return "not comparable"
    ranks = world_size if result["gpus"] else 1  # on a CPU, all rows have the same cores
    return f"{speed[name][0] / base[0] / ranks:.0%}"


def limit_cells(result, key, speed, parts):
    """The cells "of limit" and "limited by"; key: of the limits, empty if there are none."""
    if not key:
        return "", ""
    limits = limits_of(result, key)
    share = speed / min(limits.values())
    text = f"{share:.0%}"
    if share > 1:
        text += " (the limit was slower)"
    return text, bottleneck(parts, limits, share)


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
        f"{result['torch']}, commit {result['commit']}; `python -m lab.bench "
        f"{result['command']}`. {repeats}; an epoch of {steps} steps after a warm-up epoch; the "
        f"time for {EPOCH:,} images is extrapolated. Rows with a different global batch size make "
        "a different number of updates per epoch, so their efficiency is not comparable. Limits "
        "are measured interleaved with the rows: computation, data loading or all-reduce alone; "
        f'"of limit" is relative to the smallest. From the start to the end of the first step: '
        f"{first:.1f} s ({name}).{shared} The accuracy after two epochs of {steps} steps "
        "only shows that a row learns: so early, differences of rounding (in float32, and "
        "more with AMP) grow fast, and with accumulation BatchNorm normalizes with a micro-batch. "
        "That the scripts train the same model is what `make verify` shows, in float64."
    )


def finished(result):
    """The table for a terminal."""
    lines = [HEAD, *table_rows(result)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    widths[-1] = 0
    texts = []
    for line in lines:
        cells = zip(line, widths, strict=True)
        texts.append("  ".join(cell.ljust(width) for cell, width in cells))
    table = "\n".join(texts)
    return f"\n{table}\n\n{notes(result)}"


def write_reports(result, folder):
    """Write bench.json and bench.md."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = markdown_table(HEAD, table_rows(result))
    (folder / "bench.json").write_text(json.dumps(result))
    (folder / "bench.md").write_text(f"{notes(result)}\n\n{rows}\n")
    print(f"\nwrote {folder}/bench.json, bench.md", flush=True)


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
