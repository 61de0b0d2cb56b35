"""python -m tools.bench --config configs/bench.yaml: the scripts, timed on this machine.

Each row is a script run as a user runs it, a process of its own through torchrun. All rows take
turns, and so do the runs that measure their limits; the table has medians. The first epoch of a run
warms up and is left out, start-up is timed apart. On a CPU the processes of a row share the cores.

    --quick              five small rows, under two minutes on two cores
    --compare FILE       ratios to an earlier bench.json, with intervals
    --set NAME=VALUE     any setting of the scripts, for all rows
    --predict 8x8        speed-up on 8 nodes of 8 GPUs, by a model (tools/scaling.py)
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torchvision

from tools import scaling
from tools.bench_report import compared, finished, write_reports
from tools.runs import ROOT, finish_run, flag_list, start_run
from utils.config import load_config
from utils.distributed import available_cores

LIMIT = 1800  # seconds that a run may take


class Row(NamedTuple):
    name: str
    script: str
    world_size: int
    flags: dict
    amp: bool = False
    absent: str = ""  # why there is no such row here
    limited: bool = True  # False: by more devices than a process of tools.limits has


def rows_for(counts, gpus, batch, quick):
    """The rows of the table for these numbers of processes."""
    most = max(counts)
    rows = [Row("1 device", "train_1gpu.py", 1, {})]
    rows += [Row(f"DDP x{n}", "train_ddp.py", n, {}) for n in counts]
    rows += [Row(f"DDP + AMP x{n}", "train_ddp_amp.py", n, {}, True) for n in counts]
    if quick:
        return [row for row in rows if row.world_size in (1, most)]
    if gpus:
        rows += modes()
    absent = "" if gpus > 1 else f"DataParallel needs 2 GPUs, and {gpus} are visible"
    rows.insert(1, Row("DataParallel", "train_dp.py", 1, {}, absent=absent, limited=False))
    rows += [
        Row(f"DDP x{n}, {batch} each", "train_ddp.py", n, {"global_batch_size": batch * n})
        for n in counts
        if n > 1
    ]
    parts = {"micro_batches": 2}
    rows.append(Row(f"accumulation x{most}", "train_ddp_accum.py", most, parts))
    rows.append(Row(f"FSDP x{most}", "train_fsdp.py", most, {}))
    stages = "cuda,cuda" if gpus > 1 else "cuda:0,cuda:0" if gpus else "cpu,cpu"
    devices = {"devices": stages}
    rows.append(Row("2 stages", "train_mp.py", 1, devices, limited=not gpus))
    if most > 1:
        absent = f"it needs 4 GPUs, and {gpus} are visible" if 0 < gpus < 4 else ""
        name = "DDP x2, 2 stages"
        rows.append(Row(name, "train_ddp_mp.py", 2, devices, absent=absent, limited=not gpus))
    return rows


def modes():
    """One GPU in each precision: eager, compiled, and with CUDA graphs."""
    precisions = [("float32", "", {}), ("tf32", "", {"tf32": True})]
    precisions += [(name, name, {"amp_dtype": name}) for name in ("bfloat16", "float16")]
    compilers = {"eager": "none", "compiled": "default", "CUDA graphs": "reduce-overhead"}
    return [
        Row(
            f"1 device, {precision}, {how}",
            "train_ddp_amp.py" if amp else "train_1gpu.py",
            1,
            flags | {"compile": mode},
            bool(amp),
        )
        for precision, amp, flags in precisions
        for how, mode in compilers.items()
    ]


class Bench:
    """Runs rows and limits on one machine, with one config."""

    def __init__(self, flags, folder, steps):
        self.flags, self.folder, self.steps, self.runs = flags, Path(folder), steps, 0
        self.cores = sorted(os.sched_getaffinity(0))

    def _settings(self, row):
        """Flags of a row: an epoch of made-up images is as long as was asked for."""
        flags = self.flags | row.flags
        cfg = load_config(flag_list(flags))
        if cfg.dataset == "synthetic":
            length = self.steps * cfg.global_batch(row.world_size)
            flags = {"synthetic_samples": length} | flags
        return flags | {"epochs": 2, "save_minutes": 0, "resume": "never"}, cfg

    def _run(self, module, row, arguments, flags):
        self.runs += 1
        out = self.folder / str(self.runs)
        out.mkdir()
        flags = flags | {"output_dir": out / "run"}
        alone = row.script in ("train_1gpu.py", "train_dp.py", "train_mp.py")
        nproc = None if alone and module == "tools.probe" else row.world_size
        started = time.time()
        process = start_run(
            ["-m", module, out, *arguments], nproc, flags, cwd=ROOT, cores=self.cores
        )
        run = finish_run(process, out / "run", LIMIT)
        if run.code:
            raise RuntimeError(f"{row.name} failed with exit code {run.code}:\n{run.stderr}")
        ranks = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
        return run, ranks, started

    def row(self, row):
        """One run of a row -> a sample."""
        flags, cfg = self._settings(row)
        run, ranks, started = self._run("tools.probe", row, [row.script], flags)
        steps = [step for rank in ranks for step in rank["epochs"][1]]
        batch, last = cfg.global_batch(row.world_size), run.rows[-1]
        return {
            "images_per_second": last["train_samples"] / last["train_seconds"],
            "step_seconds": statistics.median(sum(step) for step in steps),
            "parts": [statistics.mean(part) for part in zip(*steps, strict=True)],
            "steps": [sum(step) for step in ranks[0]["epochs"][1]],
            "accuracy": last["val_accuracy"],
            "train_accuracy": last["train_accuracy"],
            "samples": last["train_samples"],
            "global_batch_size": batch,
            "updates": len(ranks[0]["epochs"][1]),
            "memory": sum(rank["memory"] for rank in ranks),
            "threads": ranks[0]["threads"],
            "start_up": max(rank["first_step"] for rank in ranks) - started,
            "device": ranks[0]["device"],
        }

    def limits(self, row):
        """One run of what limits rows like this one -> images/s of each."""
        flags, cfg = self._settings(row)
        _, ranks, _ = self._run("tools.limits", row, ["1" if row.amp else "0"], flags)
        batch = cfg.global_batch(row.world_size)
        return {name: batch / max(rank[name] for rank in ranks) for name in ranks[0]}

    def peer(self, row, arguments):
        """One run of tools.peer -> what each of its ranks found."""
        flags, _ = self._settings(row)
        return self._run("tools.peer", row, arguments, flags)[1]


def limit_key(row):
    """Rows with equal keys have equal limits; "" has none."""
    if not row.limited:
        return ""
    # How a device computes; not how many parts or stages.
    names = ("global_batch_size", "tf32", "amp_dtype", "compile")
    how = " ".join(str(row.flags[name]) for name in names if name in row.flags)
    return f"{row.world_size} {'amp' if row.amp else ''} {how}"


def measure(bench, rows, repeats):
    """All in turns, `repeats` times -> {"rows": {name: samples}, "limits": {key: samples},
    "absent": {name: why}}. A row that fails is absent, and so is what Ctrl-C came before."""
    absent = {row.name: row.absent for row in rows if row.absent}
    rows = [row for row in rows if not row.absent]
    found = {"rows": {row.name: [] for row in rows}, "limits": {}, "absent": absent}
    jobs = []
    for row in rows:
        jobs.append((bench.row, row, found["rows"][row.name]))
        key = limit_key(row)
        if row.limited and key not in found["limits"]:
            found["limits"][key] = []
            jobs.append((bench.limits, row, found["limits"][key]))
    jobs, start, failed = jobs * repeats, time.monotonic(), {}
    try:
        for done, (run, row, samples) in enumerate(jobs, start=1):
            if row.name in failed:
                continue
            try:
                samples.append(run(row))
            except (RuntimeError, AssertionError) as error:
                print(error, file=sys.stderr, flush=True)
                failed[row.name] = f"failed: {last_line(error)}"
                continue
            if samples is found["rows"][row.name]:
                print(f"{row.name}: {samples[-1]['images_per_second']:.0f} images/s", flush=True)
            left = (time.monotonic() - start) / done * (len(jobs) - done)
            print(f"{done} of {len(jobs)} runs, {left:.0f} s left", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted: reporting what has been measured", file=sys.stderr, flush=True)
    for row in rows:
        missing = not found["rows"][row.name] or not found["limits"].get(limit_key(row), True)
        if missing or row.name in failed:
            absent[row.name] = failed.get(row.name, "it, or its limits, were not measured")
            del found["rows"][row.name]
    return found


def last_line(error):
    """Of what a run said: short, and fit for a table."""
    return str(error).strip().splitlines()[-1].replace("|", "/")[:120]


def machine():
    """Hardware and versions, as far as they decide how fast it is."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(
            (line.split(": ")[1] for line in lines if line.startswith("model name")), model
        )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": model,
        "cores": available_cores(),
        "gpus": gpus,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "commit": commit.stdout.strip() or "no git",
        "load": os.getloadavg()[0],  # what else was running when it began
    }


def setting(text):
    """NAME=VALUE -> (name, value), true and false as what they are."""
    name, _, value = text.partition("=")
    return name, {"true": True, "false": False}.get(value, value)


def arguments():
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", default="configs/bench.yaml", help="of the scripts")
    parser.add_argument("--processes", help="such as 1,2,4; default: by the GPUs or the cores")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each row (default: 3)")
    parser.add_argument("--steps", type=int, default=12, help="an epoch of made-up images")
    parser.add_argument("--quick", action="store_true", help="fewer, smaller rows, once each")
    parser.add_argument("--only", metavar="TEXT", help="rows whose name holds this")
    parser.add_argument("--set", metavar="NAME=VALUE", action="append", default=[])
    parser.add_argument("--compare", metavar="FILE", help="an earlier bench.json")
    parser.add_argument("--predict", metavar="NODESxGPUS", help="from --output's bench.json")
    parser.add_argument("--bandwidth", default="400Gb/s", help="between nodes (default: 400Gb/s)")
    parser.add_argument("--latency", default="5us", help="of every link (default: 5us)")
    parser.add_argument("--within", default="450GB/s", help="bandwidth within a node")
    parser.add_argument("--output", default="runs/bench", help="folder of the reports")
    args = parser.parse_args()
    if min(args.repeats, args.steps) < 1:
        parser.error("--repeats and --steps must be at least 1")
    if args.predict and not re.fullmatch(r"[1-9]\d*x[1-9]\d*", args.predict):
        parser.error(f"--predict {args.predict} is no number of nodes and GPUs such as 8x8")
    try:
        latency = scaling.parse_time(args.latency)
        rates = [scaling.parse_rate(rate) for rate in (args.within, args.bandwidth)]
    except ValueError as error:
        parser.error(str(error))
    args.links = [scaling.Link(rate, latency) for rate in rates]
    return args


def main():
    args = arguments()
    if args.predict:
        result = json.loads((Path(args.output) / "bench.json").read_text())
        print(scaling.report(result, args.predict, *args.links))
        return
    gpus, cores = torch.cuda.device_count(), available_cores()
    counts = [n for n in (1, 2, 4, 8) if n <= (gpus or min(cores, 4))]
    if args.processes:
        counts = [int(n) for n in args.processes.split(",")]
    flags = {"config": args.config} | dict(map(setting, args.set))
    if args.quick:
        flags = {"global_batch_size": 64} | flags
        args.repeats, args.steps, counts = 1, min(args.steps, 6), counts[:2]
    cfg = load_config(flag_list(flags))
    rows = rows_for(counts, gpus, cfg.global_batch_size, args.quick)
    rows = [row for row in rows if (args.only or "") in row.name]
    facts = machine() | {"command": " ".join(sys.argv[1:]), "config": vars(cfg)}
    print(f"{cfg.model}, {facts['gpus'] or facts['cpu']}, {cores} cores", flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        found = measure(Bench(flags, folder, args.steps), rows, args.repeats)
    if not found["rows"]:
        sys.exit("nothing was measured: " + json.dumps(found["absent"]))
    result = facts | found
    result["order"] = [[row.name, limit_key(row), row.world_size] for row in rows]
    print(finished(result))
    write_reports(result, Path(args.output))
    if args.compare:
        print(compared(json.loads(Path(args.compare).read_text()), result))
    if any(why.startswith("failed") for why in result["absent"].values()):
        sys.exit("not all rows could be measured: see the table")


if __name__ == "__main__":
    main()
