"""python -m tools.verify: do all scripts train the same model? A table, a row a case.

    python -m tools.verify                                the whole family, under three minutes
    python -m tools.verify --script mine/train_ddp.py     your copy of a script through its cases
    python -m tools.verify --plant padding-counted        with a classic bug; --plant list names all
    python -m tools.verify --matrix                       begun by each script, finished by each

Every case trains the same small run: a BatchNorm model with momentum, clipping and augmentation,
two epochs of 8 steps, 6 of 150 samples dropped in each, 37 validation samples that no number of
ranks shares evenly. Exit code 1 where a row is red.
"""

import argparse
import os
import platform
import re
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from tools.lessons import LADDER, ROOT
from tools.plants import BUGS, planted_copy
from tools.runs import finish_run, kill_after_first_save, start_run
from utils.checkpoint import read_checkpoint
from utils.models import ResNet20

BASE = {
    "dataset": "synthetic",
    "synthetic_samples": 150,
    "image_size": 16,
    "model": "resnet20",
    "epochs": 2,
    "global_batch_size": 18,
    "lr": 0.01,
    "clip_norm": 2.0,
    "dtype": "float64",
    "timeout": 60,
    "audit": True,
}
STEPS, TRAINED, DROPPED, VALIDATED = 8, 144, 6, 37  # an epoch

# float64: rounding (1e-16) grows to 1e-14 in the weights of this run; seeing other samples moves
# them by more than 1e-2. docs/traps.md tells where the next two come from; both are for losses.
FLOAT64 = 1e-9
# float32: rounding lets a ReLU's input change sign now and then, which adds or removes one of the
# 18 x 16 x 16 terms of a bias's gradient: 1 / sqrt(4608) = 1.5 % of it. A gradient that is off by
# so much moves the loss by 1.5 % of what training moves it, here 3 %: 5e-4. There may be more than
# one: over eight seeds the largest of 32 differences was 1.3e-3. Three times that.
FLOAT32 = 4e-3
# bfloat16: the logits have 8 bits. One unit in the last place, relative to the loss.
BFLOAT16 = 2**-8


class Case(NamedTuple):
    name: str
    script: str
    nproc: int | None  # None: started without torchrun
    flags: dict
    tolerance: float = FLOAT64  # of losses, and in float64 of weights, relative
    reference: str | None = "1gpu"  # None: only what a run says of itself
    killed: bool = False  # begin with "killed", two processes that die within the first epoch


# So that accumulation and micro-batches compute what the whole batch does.
GROUP = {"norm": "group"}
HALF = {"dtype": "float32", "amp_dtype": "bfloat16"}
# Weights from a file that a Verifier writes.
FROZEN = {"weights": "some", "freeze": "backbone", "optimizer": "adamw"}
CASES = [
    Case("dp", "train_dp.py", None, {}),
    Case("ddp x1", "train_ddp.py", 1, {}),
    Case("ddp x2", "train_ddp.py", 2, {"loader": "workers", "num_workers": 1}),
    Case("ddp x3", "train_ddp.py", 3, {}),
    Case("ddp own BatchNorm x2", "train_ddp.py", 2, {"sync_bn": False}, reference=None),
    Case("ddp float32 x2", "train_ddp.py", 2, {"dtype": "float32"}, FLOAT32, "1gpu float32"),
    # Autocast leaves float64 alone and the scale is a power of two: scaling, unscaling and clipping
    # in the right order change nothing.
    Case("amp float16 x2", "train_ddp_amp.py", 2, {"amp_dtype": "float16"}),
    Case("amp bfloat16 x2", "train_ddp_amp.py", 2, HALF, BFLOAT16, "1gpu bfloat16"),
    Case("accum x2", "train_ddp_accum.py", 2, GROUP | {"micro_batches": 2}, reference="1gpu group"),
    Case("spawn x2", "train_ddp_spawn.py", None, {"spawn_processes": 2}),
    Case("mp 2 devices", "train_mp.py", None, {"devices": "cpu,cpu"}),
    Case(
        "mp micro-batches",
        "train_mp.py",
        None,
        GROUP | {"devices": "cpu,cpu", "micro_batches": 4},
        reference="1gpu group",
    ),
    Case("ddp_mp 2x2", "train_ddp_mp.py", 2, {"devices": "cpu,cpu"}),
    Case("fsdp x2", "train_fsdp.py", 2, {}),
    Case("finetune x2", "train_ddp.py", 2, {"weights": "some"}, reference="1gpu finetune"),
    Case("frozen backbone x2", "train_ddp.py", 2, FROZEN, reference="1gpu frozen"),
    Case("killed, same x2", "train_ddp.py", 2, {}, killed=True),
    Case("killed, other x3", "train_ddp.py", 3, {}, killed=True),
]
REFERENCES = [
    Case("1gpu", "train_1gpu.py", None, {}),
    Case("1gpu group", "train_1gpu.py", None, GROUP),
    Case("1gpu finetune", "train_1gpu.py", None, {"weights": "some"}),
    Case("1gpu frozen", "train_1gpu.py", None, FROZEN),
    Case("1gpu float32", "train_1gpu.py", None, {"dtype": "float32"}),
    Case("1gpu bfloat16", "train_1gpu_autocast.py", None, HALF),
]
KILLED = Case("killed", "train_ddp.py", 2, {"save_steps": 3})

# Which rank opens which file for writing: Python tells every start-up hook.
SPY = """
import os, sys
def _spy(event, args, write=os.write, log=os.open({log!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)):
    if event == "open" and isinstance(args[0], str) and {folder!r} in args[0]:
        if args[2] & (os.O_WRONLY | os.O_RDWR):
            write(log, os.environ.get("RANK", "0").encode() + b"\\n")
sys.addaudithook(_spy)
"""


class Row(NamedTuple):
    case: str
    loss: float | None
    accuracy: float | None
    off: float | None  # largest relative difference of a loss from the reference's
    difference: float | None  # and of a weight
    once: bool | None  # each training sample trained once, each validation sample counted once
    savers: str
    verdict: str  # "green", or what is wrong
    seconds: float


class Verifier:
    """Runs cases side by side, on as many cores as this process may use."""

    def __init__(self, folder, root=ROOT, script=None, device="cpu"):
        self.folder, self.root, self.script = Path(folder), root, script
        self.device = device  # of all processes: with "cuda:0" they share one GPU, over gloo
        self.free, self.freed = set(os.sched_getaffinity(0)), threading.Condition()
        self.references, self.cores = {}, len(self.free)

    def run(self, cases, report=lambda row: None):
        """The cases' rows; report(row) as each is done."""
        names = {case.reference for case in cases} - self.references.keys()
        needed = [case for case in REFERENCES if case.name in names]
        if any("weights" in case.flags for case in cases):
            save_some_weights(self.folder / "weights.pth")
        with ThreadPoolExecutor(self.cores) as pool:
            references = [pool.submit(self._reference, case) for case in needed]
            if any(case.killed for case in cases):
                pool.submit(self._killed).result()
            for future in references:
                future.result()
            rows = [pool.submit(self._row, case, report) for case in cases]
            return [row.result() for row in rows]

    def _train(self, case, output_dir, root, wait=finish_run):
        script = self.script or case.script
        hooks = self.folder / f"hooks-{output_dir.name}"
        hooks.mkdir()
        spy = SPY.format(log=str(hooks / "writes"), folder=str(output_dir))
        (hooks / "sitecustomize.py").write_text(spy)
        path = os.pathsep.join([str(hooks), str(root)])
        cores = self._take(min(self.cores, case.nproc or case.flags.get("spawn_processes", 1)))
        try:
            flags = BASE | case.flags | {"output_dir": output_dir, "device": self.device}
            if "devices" in flags:
                flags["devices"] = f"{self.device},{self.device}"
            if "weights" in flags:
                flags["weights"] = self.folder / "weights.pth"
            process = start_run(script, case.nproc, flags, {"PYTHONPATH": path}, root, cores)
            return wait(process, output_dir)
        finally:
            self._give(cores)

    def _take(self, count):
        with self.freed:
            self.freed.wait_for(lambda: len(self.free) >= count)
            return [self.free.pop() for _ in range(count)]

    def _give(self, cores):
        with self.freed:
            self.free.update(cores)
            self.freed.notify_all()

    def _reference(self, case):
        output_dir = self.folder / case.name.replace(" ", "-")
        if case.script == "train_1gpu_autocast.py":
            case = case._replace(script=autocast_copy(self.folder))
        run = Verifier._train(self._unplanted(), case, output_dir, ROOT)
        assert run.code == 0, f"{case.script} failed:\n{run.stderr}"
        self.references[case.name] = run.rows, read_checkpoint(output_dir / "last.pt")["model"]

    def _unplanted(self):
        plain = Verifier(self.folder, device=self.device)
        plain.free, plain.freed = self.free, self.freed
        return plain

    def _killed(self):
        """Two processes, killed within the first epoch; a kill that came too late is repeated."""
        for attempt in range(5):
            output_dir = self.folder / f"killed-{attempt}"
            self._train(KILLED, output_dir, self.root, kill_after_first_save)
            checkpoint = read_checkpoint(output_dir / "last.pt")
            if checkpoint["epoch"] == 0 and 0 < checkpoint["loader"]["step"] < STEPS:
                self.half_done = output_dir
                return
        raise AssertionError("five runs came to the end of their epoch before they were killed")

    def _row(self, case, report):
        output_dir = self.folder / case.name.replace(" ", "-").replace(",", "")
        if case.killed:
            shutil.copytree(self.half_done, output_dir)
        row = Row(case.name, None, None, None, None, None, "", "", 0.0)
        try:
            run = self._train(case, output_dir, self.root)
            row = self._judge(case, run, row._replace(seconds=run.seconds))
        except AssertionError as error:
            row = row._replace(verdict=str(error).splitlines()[0])
        report(row)
        return row

    def _judge(self, case, run, row):
        if run.code or len(run.rows) != BASE["epochs"]:
            return row._replace(verdict=f"exit code {run.code}: {reason(run.stderr)}")
        last = run.rows[-1]
        once = all(
            (r["train_samples"], r["train_dropped"], r["train_repeated"], r["val_samples"])
            == (TRAINED, DROPPED, 0, VALIDATED)
            for r in run.rows
        )
        hooks = self.folder / f"hooks-{run.output_dir.name}" / "writes"
        savers = sorted(set(hooks.read_text().split()))
        row = row._replace(loss=last["train_loss"], accuracy=last["val_accuracy"], once=once)
        row = row._replace(savers=" ".join(savers), verdict="green")
        if case.killed and "(from step" not in run.stdout:
            row = row._replace(verdict="did not resume in the middle of the epoch")
        if savers != ["0"] and not case.flags.get("save_sharded"):
            row = row._replace(verdict=f"ranks {', '.join(savers)} wrote files")
        if not once:
            row = row._replace(verdict="samples were missed or counted twice")
        if case.reference:
            row = self._compare(case, run, row)
        return row

    def _compare(self, case, run, row):
        rows, reference = self.references[case.reference]
        ours = read_checkpoint(run.output_dir / "last.pt")["model"]
        if ours.keys() != reference.keys():
            return row._replace(verdict="the checkpoint has other tensors")
        losses = {
            f"the {name.replace('_', ' ')} of epoch {i}": abs(row[name] / expected[name] - 1)
            for i, (row, expected) in enumerate(zip(run.rows, rows, strict=True))
            for name in ("train_loss", "val_loss")
        }
        weights = {}
        for name, expected in reference.items():
            scale = expected.double().abs().max().clamp_min(1e-12)
            weights[name] = float((ours[name] - expected).double().abs().max() / scale)
        row = row._replace(off=max(losses.values()), difference=max(weights.values()))
        bound = weights | losses if case.tolerance == FLOAT64 else losses
        for name, difference in bound.items():
            if not difference <= case.tolerance:
                return row._replace(verdict=f"{name} differs by {difference:.1e}")
        return row


def autocast_copy(folder):
    """train_1gpu.py with its forward pass under autocast: what train_ddp_amp.py must equal."""
    text = (ROOT / "train_1gpu.py").read_text()
    forward = "        outputs = model(images)\n        loss = criterion(outputs, labels)\n"
    assert text.count(forward) == 1
    under = "        with torch.autocast(device.type, getattr(torch, cfg.amp_dtype)):\n"
    path = Path(folder) / "train_1gpu_autocast.py"
    path.write_text(text.replace(forward, under + forward.replace("        ", " " * 12)))
    return path


def save_some_weights(path):
    """Of BASE's model for other classes, with BatchNorm statistics that are no longer 0 and 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = ResNet20(num_classes=7)
        for _ in range(20):
            model(torch.randn(18, 3, BASE["image_size"], BASE["image_size"]))
    torch.save(model.state_dict(), path)


def reason(stderr):
    """The line of a failed run's output that says why."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    said = [line for line in lines if re.match(r"error( \(rank \d+\))?: |\w*Error: ", line)]
    return (said or lines[-1:] or ["nothing was said"])[0]


def matrix(folder, report, scripts=None, device="cpu"):
    """Begun by each script (default: all), one epoch, and finished by each: a row a pair."""
    flags = GROUP | {"micro_batches": 2}
    nproc = {rung.script: None for rung in LADDER}
    two = ("train_ddp.py", "train_ddp_amp.py", "train_ddp_mp.py", "train_ddp_accum.py")
    nproc |= {script: 2 for script in (*two, "train_fsdp.py")}
    special = {
        "train_ddp_spawn.py": {"spawn_processes": 2},
        "train_ddp_amp.py": {"amp_dtype": "float16"},
        "train_fsdp.py": {"save_sharded": True},
    }
    # amp_dtype is a setting that must match on resume: the same for all.
    flags |= {"amp_dtype": "float16", "keep_last": 2}
    cases = {
        script: Case(script[6:-3], script, n, flags | special.get(script, {}), reference=None)
        for script, n in nproc.items()
        if script in (scripts or nproc)
    }
    begin = Verifier(folder / "begin", device=device)
    begin.folder.mkdir()
    rows = begin.run([case._replace(reference="1gpu group") for case in cases.values()], report)
    finish = Verifier(folder / "finish", device=device)
    finish.references = begin.references
    finish.folder.mkdir()
    pairs = []
    for first in cases.values():
        for second in cases.values():
            name = f"{first.name} then {second.name}"
            half = finish.folder / name.replace(" ", "-")
            shutil.copytree(begin.folder / first.name, half)
            for path in [*half.glob("epoch-0002*"), half / "last.pt", half / "best.pt"]:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            pairs.append(second._replace(name=name, reference="1gpu group"))
    return rows + finish.run(pairs, report)


HEAD = ["case", "loss", "val accuracy", "loss off by", "weights off by", "each sample once"]
HEAD += ["saved by", "verdict", "s"]


def cells(row):
    def text(value, form):
        return "" if value is None else format(value, form)

    once = {None: "", True: "yes", False: "no"}[row.once]
    verdict = "green" if row.verdict == "green" else f"RED: {row.verdict}"
    numbers = [text(row.loss, ".6f"), text(row.accuracy, ".2%")]
    numbers += [text(row.off, ".1e"), text(row.difference, ".1e")]
    savers = f"rank {row.savers}" if row.savers else ""
    return [row.case, *numbers, once, savers, verdict, f"{row.seconds:.0f}"]


def show(row):
    print_line(cells(row))


def print_line(line):
    *line, verdict, seconds = line
    widths = (22, 9, 12, 11, 14, 16, 8, 3)
    columns = zip([*line, seconds], widths, strict=True)
    print("  ".join([*(text.ljust(width) for text, width in columns), verdict]), flush=True)


def markdown(rows):
    lines = [HEAD, ["---"] * len(HEAD), *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main():
    parser = argparse.ArgumentParser(prog="python -m tools.verify", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--script", metavar="PATH", help="your copy of a script")
    parser.add_argument("--like", metavar="SCRIPT", help="whose cases it runs, if not its name's")
    parser.add_argument("--plant", metavar="BUG", help="a classic bug, or list")
    parser.add_argument("--matrix", action="store_true", help="each script finishes each")
    parser.add_argument("--device", default="cpu", help="of all processes, such as cuda:0")
    parser.add_argument("--write", metavar="FILE", help="write the table as Markdown, too")
    args = parser.parse_args()
    if args.plant == "list":
        print("\n".join(bug.name for bug in BUGS))
        return 0
    cases, script, bug = CASES, None, None
    if args.script and args.plant:
        parser.error("--plant puts a bug into the scripts here, not into yours: pass one of them")
    if args.script:
        script = Path(args.script).resolve()
        cases = [case for case in CASES if case.script == (args.like or script.name)]
        if not script.exists() or not cases:
            parser.error(f"{args.script} is no file, or --like names none of the scripts")
    if args.plant:
        bug = next((bug for bug in BUGS if bug.name == args.plant), None)
        if bug is None:
            parser.error(f"no bug is called {args.plant}: see --plant list")
        print(f"planted: {bug.wrong} In {bug.file}: {bug.line.strip()} -> {bug.instead.strip()}")
    print_line(HEAD)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        folder = Path(folder)
        root = planted_copy(bug, folder / "planted") if bug else ROOT
        if args.matrix:
            rows = matrix(folder, show, device=args.device)
        else:
            rows = Verifier(folder, root, script, args.device).run(cases, show)
    red = [row for row in rows if row.verdict != "green"]
    done = f"{len(rows) - len(red)} of {len(rows)} green in {time.monotonic() - start:.0f} s"
    print(done)
    if args.write:
        machine = f"{len(os.sched_getaffinity(0))} {platform.machine()} cores"
        versions = f"Python {platform.python_version()}, torch {torch.__version__}"
        command = " ".join(["python -m tools.verify", *sys.argv[1:]])
        head = f"`{command}` on {machine}, {versions}: {done}."
        Path(args.write).write_text(f"{head}\n\n{markdown(rows)}\n")
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
