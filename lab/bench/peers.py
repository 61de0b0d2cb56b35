"""Compare the scripts with what a user might choose instead (lab/bench/peer.py).

    python -m lab.bench.peers

Every row runs in its own processes, `--repeats` times, interleaved with the others, with the same
images, model, optimizer and global batch; the second epoch of each run is timed. An epoch has
`--steps` steps; if the workers are restarted in each epoch, it is as long as an epoch of CIFAR-10,
because in a short epoch their start would dominate. Every peer runs with several numbers of
workers; those with which it is clearly slower than with its best are run once and not reported. A
ratio compares with the fastest peer on the same number of processes, for each precision. On the
CPU, the peers keep BatchNorm statistics per rank, because PyTorch's SyncBatchNorm needs a GPU; so
do the rows "BatchNorm per rank".
"""

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass
from functools import partial

from lab.bench.peer import PEERS
from lab.bench.report import EPOCH, interval, medians, run_counts, spread, write_table
from lab.bench.rows import Row
from lab.bench.runner import Runner, machine, process_counts, setting, take_turns
from tasks.images import Settings
from tools.lib.markdown import markdown_table
from tools.lib.runs import end_runs_on_sigterm, flag_list
from utils.config import load_config
from utils.distributed import cores_per_rank

HEAD = ["row", "precision", "workers", f"s / {EPOCH:,} images", "images/s", "ratio to best peer"]


@dataclass(frozen=True)
class Contestant:
    """A row of the table: one of the scripts, or a peer."""

    name: str
    world_size: int
    precision: str
    workers: str = ""
    peer: str = ""  # a name of lab.bench.peer; empty: one of the scripts
    row: Row | None = None

    @property
    def key(self):
        """A unique name."""
        return " ".join((self.name, self.precision, self.workers)).strip()

    def facts(self):
        """What the JSON file holds about it, without samples."""
        kind = "peer"
        if self.row:
            kind = "ours"
        elif self.peer == "bare":
            kind = "bare"
        return {
            "name": self.name,
            "kind": kind,
            "world_size": self.world_size,
            "precision": self.precision,
            "workers": self.workers,
            "samples": [],
        }


def contestants(counts, workers):
    """All rows, for these numbers of processes and of the peers' DataLoader workers."""
    rows = []
    for n in counts:
        ours = [Row(f"ours, DDP x{n}", "train_ddp.py", n)]
        if n == 1:
            ours = [Row("ours, 1 device", "train_1gpu.py")]
            rows.append(Contestant("bare loop, our loader", 1, "float32", peer="bare"))
        else:
            name = f"ours, DDP x{n}, BatchNorm per rank"
            ours.append(Row(name, "train_ddp.py", n, {"sync_bn": False}))
        rows += [Contestant(row.name, n, "float32", row=row) for row in ours]
        last = ours[-1]
        half = Row(last.name, "train_ddp_amp.py", n, last.flags | {"amp_dtype": "bfloat16"})
        rows.append(Contestant(last.name, n, "bfloat16", row=half))
        on_one = ("tuned", "reference")
        peers = [name for name in PEERS if name != "bare" and (n == 1 or name not in on_one)]
        rows.append(Contestant(f"tutorial as published x{n}", n, "float32", "10!", "tutorial"))
        rows += [
            Contestant(f"{name} x{n}", n, precision, str(count), name)
            for name in peers
            for precision in ("float32", "bfloat16")
            for count in workers
        ]
    return rows


def with_best_workers(rows, samples):
    """The rows without the peers whose first run was slower than 0.9 times the same peer's fastest.

    A peer is one row for each number of workers; only its fastest ones are worth more runs.
    """

    def speed(row):
        return samples[row.key][0]["images_per_second"] if samples[row.key] else 0.0

    best = {}
    for row in rows:
        group = row.name, row.precision
        best[group] = max(best.get(group, 0.0), speed(row))
    return [row for row in rows if speed(row) >= 0.9 * best[row.name, row.precision]]


def sample(runner, contestant):
    """One run. Returns images/s and the training accuracy, which shows that every row learns."""
    if contestant.row:
        result = runner.row(contestant.row)
        return {name: result[name] for name in ("images_per_second", "train_accuracy")}
    flags = {"sync_bn": False}
    if contestant.workers.endswith("!"):  # in a short epoch, the start of the workers dominates
        flags = {"synthetic_samples": EPOCH} | runner.flags | flags
    arguments = [contestant.peer, contestant.workers or "0", contestant.precision]
    ranks = runner.peer(contestant.name, contestant.world_size, flags, arguments)
    samples, seconds = sum(r["samples"] for r in ranks), max(r["seconds"] for r in ranks)
    accuracy = statistics.mean(r["accuracy"] for r in ranks)
    return {"images_per_second": samples / seconds, "train_accuracy": accuracy}


def ratio(result, facts):
    """The cell of the last column.

    For one of the scripts: its speed relative to the fastest peer on the same number of
    processes, at the same precision and at float32. For the bare loop: the script's speed relative
    to it.
    """

    def fastest(kind, precision):
        rows = [
            other["samples"]
            for other in result["contestants"].values()
            if (other["kind"], other["precision"]) == (kind, precision)
            and other["world_size"] == facts["world_size"]
        ]
        return max(rows, key=lambda r: medians(r, "images_per_second")[0], default=None)

    def text(before, after, label):
        speeds = ([sample["images_per_second"] for sample in rows] for rows in (before, after))
        return f"{spread(*interval(*speeds), '.2f')} {label}"

    if facts["kind"] == "bare":
        ours = fastest("ours", facts["precision"])
        return text(facts["samples"], ours, "(our loop / bare loop)") if ours else ""
    if facts["kind"] == "peer":
        return ""
    best = {p: fastest("peer", p) for p in dict.fromkeys((facts["precision"], "float32"))}
    return "; ".join(text(rows, facts["samples"], f"of {p}") for p, rows in best.items() if rows)


def table_rows(result):
    """The cells of the table, one list per row, in the order of HEAD."""
    for facts in result["contestants"].values():
        middle, low, high = medians(facts["samples"], "images_per_second")
        yield [
            facts["name"],
            facts["precision"],
            facts["workers"].replace("!", ", restarted each epoch"),
            f"{EPOCH / middle:.1f}",
            spread(middle, low, high, ",.0f"),
            ratio(result, facts),
        ]


def main():
    parser = argparse.ArgumentParser(prog="python -m lab.bench.peers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", default="configs/bench.yaml", help="config file of the scripts")
    parser.add_argument("--processes", help="such as 1,2,4 (default: by the GPUs or cores)")
    parser.add_argument(
        "--workers", help="workers of the peers (default: 0, 1, half the cores, all cores)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs of each row (default: 3)")
    parser.add_argument("--steps", type=int, default=12, help="steps per epoch of synthetic images")
    parser.add_argument(
        "--only", metavar="TEXT", action="append", help="only rows whose name contains TEXT"
    )
    parser.add_argument("--set", metavar="NAME=VALUE", action="append", default=[])
    parser.add_argument("--output", default="runs/bench-peers", help="folder of the reports")
    args = parser.parse_args()
    cores, counts = cores_per_rank(), process_counts(args.processes)
    workers = sorted({0, 1, cores // 2, cores})
    if args.workers:
        workers = [int(n) for n in args.workers.split(",")]
    flags = {"config": args.config} | dict(map(setting, args.set))
    rows = contestants(counts, workers)
    if args.only:
        rows = [c for c in rows if any(text in c.key for text in args.only)]
    result = machine() | {"config": vars(load_config(Settings, None, flag_list(flags)))}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        runner = Runner(flags, folder, args.steps)
        jobs = {contestant.key: partial(sample, runner, contestant) for contestant in rows}
        samples, errors = take_turns(
            jobs,
            args.repeats,
            describe=lambda sample: f"{sample['images_per_second']:.0f} images/s",
            select=lambda samples: [row.key for row in with_best_workers(rows, samples)],
        )
    result["contestants"] = {
        c.key: c.facts() | {"samples": samples[c.key]}
        for c in with_best_workers(rows, samples)
        if samples[c.key]
    }
    result["failed"] = errors
    if not result["contestants"]:
        sys.exit(f"error: nothing was measured: {errors}")
    where = ", ".join(result["gpus"]) or f"{cores} cores of {result['cpu']}"
    runs = run_counts(c["samples"] for c in result["contestants"].values())
    text = f"{result['config']['model']}, {where}, torch {result['torch']}. {runs}.\n\n"
    text += markdown_table(HEAD, table_rows(result)) + "\n"
    write_table(result, text, args.output, "peers")
    if errors:
        sys.exit(f"error: these rows failed: {', '.join(errors)}")


if __name__ == "__main__":
    end_runs_on_sigterm()
    main()
