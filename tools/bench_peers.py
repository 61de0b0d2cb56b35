"""python -m tools.bench_peers: these scripts beside what a user would pick instead (tools/peer.py).

Every row is a process of its own through torchrun, all rows take turns, `--repeats` times; the
same images, model, optimizer and global batch, the second epoch of each run. An epoch is `--steps`
long; where the workers start anew in each, it is as long as CIFAR-10's, or what they cost would
count many times over. A ratio compares with the fastest peer of the same number of processes, and
says in which precisions. Peers keep each rank's own BatchNorm statistics on the CPU, where PyTorch
has no SyncBatchNorm: the rows "own statistics" do the same.
"""

import argparse
import statistics
import sys
import tempfile
import time
from typing import NamedTuple

import torch

from tools.bench import Bench, Row, last_line, machine, setting
from tools.bench_report import EPOCH, interval, medians, run_counts, write_table
from tools.peer import PEERS
from tools.runs import flag_list
from utils.config import load_config
from utils.distributed import available_cores

HEAD = ["row", "precision", "workers", f"s / {EPOCH:,} images", "images/s", "ratio to best peer"]


class Contestant(NamedTuple):
    name: str
    world_size: int
    precision: str
    workers: str = ""
    peer: str = ""  # a name of tools.peer; empty: one of the scripts
    row: Row = None

    def key(self):
        return " ".join((self.name, self.precision, self.workers)).strip()

    def facts(self):
        own = "ours" if self.row else "bare" if self.peer == "bare" else "peer"
        return {"name": self.name, "kind": own, "world_size": self.world_size} | {
            "precision": self.precision,
            "workers": self.workers,
            "samples": [],
        }


def contestants(counts, workers):
    """All rows, for these numbers of processes and of the peers' DataLoader workers."""
    found = []
    for n in counts:
        ours = [Row(f"ours, DDP x{n}", "train_ddp.py", n, {})]
        if n == 1:
            ours = [Row("ours, 1 device", "train_1gpu.py", 1, {})]
            found.append(Contestant("bare loop, our loader", 1, "float32", peer="bare"))
        else:
            ours.append(
                Row(f"ours, DDP x{n}, own statistics", "train_ddp.py", n, {"sync_bn": False})
            )
        found += [Contestant(row.name, n, "float32", row=row) for row in ours]
        last = ours[-1]
        half = last._replace(script="train_ddp_amp.py", amp=True)
        found.append(Contestant(last.name, n, "bfloat16", row=half))
        rivals = [name for name in PEERS if name != "bare"]
        found.append(Contestant(f"tutorial as published x{n}", n, "float32", "10!", "tutorial"))
        found += [
            Contestant(f"{name} x{n}", n, "float32", str(count), name)
            for name in rivals
            for count in (workers if n == 1 else workers[:1])  # the processes need the cores
        ]
        found += [
            Contestant(f"{name} x{n}", n, "bfloat16", str(workers[0]), name)
            for name in rivals
            if name != "tutorial"
        ]
    return found


def sample(bench, contestant):
    """One run -> images/s, and the accuracy of the training in that epoch: all of them learn."""
    if contestant.row:
        found = bench.row(contestant.row)
        return {name: found[name] for name in ("images_per_second", "train_accuracy")}
    flags = {"sync_bn": False}
    if contestant.workers.endswith("!"):  # what starting them costs is spread over a real epoch
        flags = {"synthetic_samples": EPOCH} | bench.flags | flags
    row = Row(contestant.name, "", contestant.world_size, flags)
    arguments = [contestant.peer, contestant.workers or "0", contestant.precision]
    ranks = bench.peer(row, arguments)
    samples, seconds = sum(r["samples"] for r in ranks), max(r["seconds"] for r in ranks)
    accuracy = statistics.mean(r["accuracy"] for r in ranks)
    return {"images_per_second": samples / seconds, "train_accuracy": accuracy}


def ratio(result, own):
    """Of one of our rows: to the fastest peer with as many processes, of equal precision and of
    float32. Of the bare loop: what the script makes of its speed."""

    def found(kind, precision):
        rows = [
            other["samples"]
            for other in result["contestants"].values()
            if (other["kind"], other["precision"]) == (kind, precision)
            and other["world_size"] == own["world_size"]
        ]
        return max(rows, key=lambda r: medians(r, "images_per_second")[0], default=None)

    def said(before, after, what):
        speeds = ([sample["images_per_second"] for sample in rows] for rows in (before, after))
        return "{:.2f} ({:.2f} to {:.2f}) {}".format(*interval(*speeds), what)

    if own["kind"] == "bare":
        ours = found("ours", own["precision"])
        return said(own["samples"], ours, "of it is our loop") if ours else ""
    if own["kind"] == "peer":
        return ""
    best = {p: found("peer", p) for p in dict.fromkeys((own["precision"], "float32"))}
    return "; ".join(said(rows, own["samples"], f"of {p}") for p, rows in best.items() if rows)


def table(result):
    lines = [HEAD, ["---"] * len(HEAD)]
    for own in result["contestants"].values():
        middle, low, high = medians(own["samples"], "images_per_second")
        lines.append(
            [
                own["name"],
                own["precision"],
                own["workers"].replace("!", ", anew each epoch"),
                f"{EPOCH / middle:.1f}",
                f"{middle:,.0f} ({low:,.0f} to {high:,.0f})",
                ratio(result, own),
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main():
    parser = argparse.ArgumentParser(prog="python -m tools.bench_peers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", default="configs/bench.yaml", help="of the scripts")
    parser.add_argument("--processes", help="such as 1,2,4; default: by the GPUs or the cores")
    parser.add_argument("--workers", help="of the peers; default: 0 and one a core")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each row (default: 3)")
    parser.add_argument("--steps", type=int, default=12, help="an epoch of made-up images")
    parser.add_argument("--only", metavar="TEXT", action="append", help="rows that hold this")
    parser.add_argument("--set", metavar="NAME=VALUE", action="append", default=[])
    parser.add_argument("--output", default="runs/bench-peers", help="folder of the reports")
    args = parser.parse_args()
    gpus, cores = torch.cuda.device_count(), available_cores()
    counts = [n for n in (1, 2, 4, 8) if n <= (gpus or min(cores, 4))]
    if args.processes:
        counts = [int(n) for n in args.processes.split(",")]
    workers = [int(n) for n in args.workers.split(",")] if args.workers else [0, cores]
    flags = {"config": args.config} | dict(map(setting, args.set))
    everyone = contestants(counts, workers)
    if args.only:
        everyone = [c for c in everyone if any(text in c.key() for text in args.only)]
    result = machine() | {"command": " ".join(sys.argv[1:])}
    result["config"] = vars(load_config(flag_list(flags)))
    result["contestants"] = {c.key(): c.facts() for c in everyone}
    start, done = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        bench = Bench(flags, folder, args.steps)
        try:
            for c in everyone * args.repeats:
                own = result["contestants"][c.key()]
                if "failed" in own:
                    continue
                try:
                    own["samples"].append(sample(bench, c))
                except (RuntimeError, AssertionError) as error:
                    own["failed"] = last_line(error)
                    print(f"{c.key()} failed: {error}", file=sys.stderr, flush=True)
                    continue
                speed, done = own["samples"][-1]["images_per_second"], done + 1
                left = (time.monotonic() - start) / done * (len(everyone) * args.repeats - done)
                print(f"{c.key()}: {speed:.0f} images/s, {left:.0f} s left", flush=True)
        except KeyboardInterrupt:
            print("interrupted: reporting what has been measured", file=sys.stderr, flush=True)
    failed = [key for key, c in result["contestants"].items() if "failed" in c]
    measured = {key: c for key, c in result["contestants"].items() if c["samples"]}
    if not measured:
        sys.exit("nothing was measured")
    result["contestants"] = measured
    where = ", ".join(result["gpus"]) or f"{cores} cores of {result['cpu']}"
    runs = run_counts(c["samples"] for c in measured.values())
    said = f"{result['config']['model']}, {where}, torch {result['torch']}, {runs} runs"
    text = f"{said} of each row in turns, medians (least to most).\n\n{table(result)}\n"
    write_table(result, text, args.output, "peers")
    if failed:
        sys.exit(f"not all rows could be measured: {', '.join(failed)}")


if __name__ == "__main__":
    main()
