"""Time the scripts on this machine.

    python -m lab.bench --config configs/bench.yaml

Each row is a script run as a user runs it, in its own processes. The runs of all rows, and those
that measure their limits, are interleaved; the table shows medians. The first epoch of a run is a
warm-up and not counted; start-up is timed separately. On a CPU, the processes of a row share the
cores.

    --quick              five small rows, under two minutes on two cores
    --compare FILE       ratios to an earlier bench.json, with intervals
    --set NAME=VALUE     any setting of the scripts, for all rows
"""

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

from lab.bench.report import compared, finished, write_reports
from lab.bench.rows import rows_for
from lab.bench.runner import Runner, machine, process_counts, setting, take_turns
from tasks.images import Settings
from tools.lib.runs import end_runs_on_sigterm, flag_list
from utils.config import load_config


def measure(runner, rows, repeats):
    """Measure rows and their limits, interleaved.

    Returns {"rows": {name: samples}, "limits": {key: samples}, "absent": {name: reason},
    "failed": names of the rows that failed}.
    """
    absent = {row.name: row.absent for row in rows if row.absent}
    rows = [row for row in rows if not row.absent]
    jobs, keys = {}, {row.limits_key for row in rows} - {""}
    for row in rows:
        jobs[row.name] = partial(runner.row, row)
        if row.limits_key in keys:
            jobs[f"limits {row.limits_key}"] = partial(runner.limits, row)
            keys.remove(row.limits_key)
    samples, errors = take_turns(jobs, repeats, describe)
    kept, limits, failed = {}, {}, []
    for row in rows:
        parts = [row.name]
        if row.limits_key:
            parts.append(f"limits {row.limits_key}")
        reasons = [errors[part] for part in parts if part in errors]
        if reasons:
            failed.append(row.name)
            absent[row.name] = f"failed: {reasons[0]}"
        elif not all(samples[part] for part in parts):
            absent[row.name] = "it or its limits were not measured"
        else:
            kept[row.name] = samples[row.name]
            for part in parts[1:]:
                limits[row.limits_key] = samples[part]
    return {"rows": kept, "limits": limits, "absent": absent, "failed": failed}


def describe(sample):
    """A sample of a row, or of limits, in one line."""
    if "images_per_second" in sample:
        return f"{sample['images_per_second']:.0f} images/s"
    return ", ".join(f"{name} {speed:.0f} images/s" for name, speed in sample.items())


def parse_arguments():
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m lab.bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", default="configs/bench.yaml", help="config file of the scripts")
    parser.add_argument("--processes", help="such as 1,2,4 (default: by the GPUs or cores)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each row (default: 3)")
    parser.add_argument("--steps", type=int, default=12, help="steps per epoch of synthetic images")
    parser.add_argument("--quick", action="store_true", help="fewer, smaller rows, once each")
    parser.add_argument("--only", metavar="TEXT", help="only rows whose name contains TEXT")
    parser.add_argument("--set", metavar="NAME=VALUE", action="append", default=[])
    parser.add_argument("--compare", metavar="FILE", help="an earlier bench.json")
    parser.add_argument("--output", default="runs/bench", help="folder of the reports")
    return parser.parse_args()


def main():
    args = parse_arguments()
    gpus, counts = torch.cuda.device_count(), process_counts(args.processes)
    flags = {"config": args.config} | dict(map(setting, args.set))
    if args.quick:
        flags = {"global_batch_size": 64} | flags
        args.repeats, args.steps, counts = 1, min(args.steps, 6), counts[:2]
    cfg = load_config(Settings, None, flag_list(flags))
    rows = rows_for(counts, gpus, cfg.global_batch_size, quick=args.quick)
    rows = [row for row in rows if (args.only or "") in row.name]
    result = machine() | {"config": vars(cfg)}
    print(f"{cfg.model}, {result['gpus'] or result['cpu']}, {result['cores']} cores", flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        result |= measure(Runner(flags, folder, args.steps), rows, args.repeats)
    if not result["rows"]:
        sys.exit("error: nothing was measured: " + json.dumps(result["absent"]))
    result["order"] = [[row.name, row.limits_key, row.world_size] for row in rows]
    print(finished(result))
    write_reports(result, Path(args.output))
    if args.compare:
        print(compared(json.loads(Path(args.compare).read_text()), result))
    if result["failed"]:
        sys.exit(f"error: these rows failed: {', '.join(result['failed'])}")


if __name__ == "__main__":
    end_runs_on_sigterm()
    main()
