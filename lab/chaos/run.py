"""Runs a script with faults until it is complete, and compares it with an uninterrupted run."""

import hashlib
import itertools
import json
import math
import os
import re
import signal
import zipfile
from pathlib import Path
from typing import NamedTuple

import torch

from lab.chaos.faults import BY_NAME, End, make_plan
from lab.chaos.plant import FILLER
from lab.chaos.start import forked_run, real_run
from tools.lib.edits import changed
from tools.lib.ladder import ROOT, RUNGS
from tools.lib.runs import last_line, load_script
from tools.verify.cases import FLOAT64, MATRIX_FLAGS, SUITES
from tools.verify.run import (
    changed_copy,
    project_with_task,
    write_shards,
    write_text,
    write_text_shards,
)
from utils.checkpoint import read_checkpoint
from utils.errors import UserError

# Five steps per epoch, with a worker of a DataLoader in every rank; saves after steps 2 and 4, too.
STEPS = 5
FLAGS = {
    "global_batch_size": 12,
    "lr": 0.01,
    "lr_schedule": "constant",
    "device": "cpu",
    "num_threads": 1,
    "num_workers": 1,
    "save_steps": 2,
    "timeout": 60,
    "audit": True,
    "log_steps": 3,
}
KILLS = ("kill-rank", "kill-save", "kill-rename", "kill-row")  # without a launcher, nothing is left
# What differs from run to run, and so does what ends with "seconds".
TIMED = ("samples_per_second", "memory", "resumed_at_step", "world_size")
SPAWN = "train_ddp_spawn.py"  # has its own launcher, which does not fork
SCRIPT_FLAGS = MATRIX_FLAGS | {SPAWN: {"num_workers": 0}}  # spawned, too: ten seconds each
IMAGES = {"dataset": "synthetic", "synthetic_samples": 60, "image_size": 8, "model": "resnet20"}
IMAGES |= {"loader": "workers"}
TEXT = {"context": 24, "layers": 4, "heads": 4, "width": 16, "padding": "context"}
TASK_FLAGS = {
    "images": IMAGES,
    "shards": IMAGES | {"dataset": "shards"},
    "stream": IMAGES | {"augment": "none"},
    "text": TEXT,
    "moe": TEXT,
    "mixture": TEXT,
}
COPIES = {  # {task: changes of a copy of the script}
    "shards": [],
    "stream": [("import tasks.images as task", "import lab.chaos.stream_task as task")],
    "mixture": [
        ("import tasks.images as task", "import lab.chaos.mixture_task as task"),
        ("train_result = train", "train_result = train_set.shares(epoch) | train"),
    ],
}
VIT = {"model": "vit_tiny", "image_size": 16, "clip_norm": 1.5}
WITH_VIT = ("train_tp.py", "train_fsdp_tp.py", "train_pp.py")
STOP_TIMEOUT = 10  # --timeout of a run in which a rank is stopped for good
# That script runs without workers. SIGUSR1 kills Python's resource tracker, which mp.spawn starts,
# and the next one prints many tracebacks.
NOT_WITH_SPAWN = {"kill-worker", "usr1-all"}


class Row(NamedTuple):
    """A row of the table: a fault and its outcome."""

    script: str
    number: int
    fault: str
    place: str
    launcher: str
    code: int | None  # None: it did not end the run
    seconds: float | None  # from the fault until no process was left
    last_line: str
    problems: list


class ChaosRun:
    """Trains with a script under faults. Its files are in `folder`, and the files of the run with
    faults in `output`.

    nproc: the number of ranks; several, in a list, take turns; None for a single process. limit,
    patience: see forked_run(). task: a name in TASK_FLAGS; images: what the script trains; shards:
    the images task, reading tar files in the order of a ShardOrder; stream: the same task over
    Streamed datasets; mixture: the text task over a mixture of shards, a stream and a mixture.
    """

    def __init__(
        self,
        script,
        nproc,
        folder,
        output=None,
        limit=180,
        patience=30,
        flags=None,
        task="images",
    ):
        self.script, self.folder = script, Path(folder)
        self.output = Path(output or self.folder / "run")
        self.turns = nproc if isinstance(nproc, list) else [nproc]
        self.ranks, self.has_launcher = min(n or 1 for n in self.turns), nproc is not None
        self.is_exact = len(self.turns) == 1
        self.limits = limit, patience
        self.folder.mkdir(parents=True, exist_ok=True)
        own_task = RUNGS[script].task
        task = own_task if task == "images" else task
        self.flags = FLAGS | TASK_FLAGS[task] | SCRIPT_FLAGS.get(script, {})
        self.path = ROOT / script
        if not self.is_exact:
            self.flags["dtype"] = "float64"
        if task in COPIES:
            self.path = self.folder / script
            changed_copy(ROOT / script, self.path, "shards" if task == "shards" else "stream")
            self.path.write_text(changed(self.path.read_text(), COPIES[task], self.path))
        if task == "shards":
            self.flags["data_dir"] = self.folder / "shards"
            write_shards(self.flags["data_dir"], IMAGES)
        if task == "mixture":
            self.flags["text_file"] = self.folder / "text"
            write_text_shards(self.flags["text_file"], SUITES["text"])
        if task in ("text", "moe"):
            self.flags["text_file"] = write_text(self.folder / "text", train=60, val=6)
            if task != own_task:
                self.path = project_with_task(task, self.folder / "project") / script
        elif script in WITH_VIT:
            self.flags |= VIT
        if script == SPAWN:
            self.flags |= {"spawn_processes": nproc}
            self.turns = [None]
        self.flags |= flags or {}
        self.damaged = set()  # (inode, time of change) of the files that a fault has damaged
        self.module = None if script == SPAWN else load_script(self.path)

    def run(self, names, count, seed, report=lambda row: None, real_share=0.1):
        """Train under `count` faults of these kinds. Returns the Rows, and the problems of the
        result. Calls report(row) as soon as a Row is known."""
        forked = self.module is not None
        plan = make_plan(
            [name for name in names if forked or name not in NOT_WITH_SPAWN],
            count,
            self.ranks,
            self.has_launcher,
            f"{seed} {self.script}",
            warm_up=2 * STEPS,
            forked=forked,
            real_share=real_share,
        )
        # A run goes on for two steps after a signal; after the last fault, an epoch remains.
        steps = sum(3 + max([0, *(fault.step for fault in attempt.faults)]) for attempt in plan)
        self.flags["epochs"] = steps // STEPS + 2
        straight, turns = self.folder / "straight", itertools.cycle(self.turns)
        self.nproc = next(turns)
        ended = self._train(straight, [], forked)
        if ended.code != 0:
            return [], [f"the uninterrupted run failed: {last_line(ended.stderr)}"]
        rows = []
        for number, attempt in enumerate(plan, 1):
            self.nproc = next(turns)
            for fault in attempt.faults:
                if not fault.step:
                    self._damage(fault)
            ended = self._train(self.output, attempt.faults, attempt.forked)
            (self.folder / f"stderr-{number}").write_text(ended.stderr)
            problems = list(self._broken_promises(ended))
            is_last = number == len(plan)
            for row in self._rows(attempt, ended, is_last, problems):
                rows.append(row)
                report(row)
            if is_last and ended.code != 0:
                problems.append(f"the last run failed: {last_line(ended.stderr)}")
            if ended.code is None or (is_last and problems):
                return rows, problems
        return rows, list(compare(self.output, straight, self.is_exact))

    def _train(self, output, faults, forked):
        """Run once, to its end. Returns its Ended."""
        is_stopped = any(fault.kind == "stop" for fault in faults)
        flags = self.flags | {"output_dir": output}
        flags["timeout"] = STOP_TIMEOUT if is_stopped else self.flags["timeout"]
        planned = [fault._asdict() for fault in faults if fault.step]
        start, script = (forked_run, self.module) if forked else (real_run, self.path)
        ended = start(script, self.nproc, flags, planned, self.folder, *self.limits)
        (output / FILLER).unlink(missing_ok=True)
        return ended

    def _damage(self, fault):
        """Do to the files what a fault between two runs would have done."""
        last = self.output / "last.pt"
        if fault.kind == "leftover":
            (self.output / "last.pt.tmp").write_bytes(b"half of a file")
            return
        if fault.kind == "torn-row":
            rows = self.output / "metrics.jsonl"
            os.truncate(rows, rows.stat().st_size - 2 - int(50 * fault.fraction))
            return
        if fault.kind == "zeros":
            size = last.stat().st_size
            os.truncate(last, 0)
            os.truncate(last, size)
        elif fault.kind == "truncate":
            os.truncate(last, int(fault.fraction * last.stat().st_size))
        elif _identity(last) not in self.damaged:
            flip_bit(last, fault.fraction)
        self.damaged.add(_identity(last))

    def _broken_promises(self, ended):
        """What no fault may cause."""
        limit, patience = self.limits
        if ended.code is None:
            yield f"the run did not end in {limit:.0f} s"
        elif ended.left:
            yield f"{len(ended.left)} processes were still there {patience:.0f} s later"
        for path in self.output.glob("*.pt"):
            try:
                if _identity(path) not in self.damaged:
                    read_checkpoint(path, join_parts=False)
            except UserError as error:
                yield f"torn file: {error}"

    def _rows(self, attempt, ended, is_last, problems):
        """A Row per fault of an attempt; the one that ended the run also has its `problems`."""
        launcher = "fork"
        if not attempt.forked:
            launcher = "tools.launch" if self.nproc else "python"
        for fault in attempt.faults:
            kind, line = BY_NAME[fault.kind], ended.fired.get(fault.number)
            ends_run = fault is attempt.faults[-1] and not is_last
            details = [*(problems if ends_run else []), *self._wrong(kind, ended, ends_run)]
            if fault.step and not line:
                details.append("the run did not get that far")
            place = "between two runs"
            if line:
                rank = f"rank {fault.rank}, " if self.ranks > 1 else ""
                place = f"{rank}epoch {line['epoch']}, step {line['step']}"
            yield Row(
                self.script,
                fault.number,
                kind.title,
                place,
                launcher,
                ended.code if ends_run else None,
                ended.gone_at - line["time"] if line and ends_run else None,
                self._message(ended) if ends_run and (ended.code or 0) > 0 else "",
                details,
            )

    def _message(self, ended):
        return last_line(ended.stderr.replace(str(self.output), "OUTPUT_DIR"))

    def _wrong(self, kind, ended, ends_run):
        """What differs from what this kind of fault promises."""
        alone = not self.has_launcher and kind.name in KILLS
        if not alone and not re.search(kind.text, ended.stderr):
            yield f"no {kind.text!r} on stderr: {last_line(ended.stderr)}"
        if not ends_run:
            return
        code = 1
        if alone or kind.end is End.KILLED:
            code = -signal.SIGKILL
        elif kind.end is End.SAVED:
            code = 75
        if ended.code != code:
            yield f"exit code {ended.code}, not {code}: {last_line(ended.stderr)}"
        # An error with its cause, as PyTorch's of a loader process that died, is one report.
        reports = ended.stderr.count("Traceback (most recent call last)")
        reports -= ended.stderr.count("was the direct cause of the following exception")
        if reports > (kind.end is End.REPORT):
            yield f"{reports} tracebacks on stderr"


def compare(output, straight, is_exact=True):
    """How the result of a run differs from the result of an uninterrupted one: in its bits or,
    unless is_exact, by more than rounding in float64 on a different number of ranks."""
    ours, theirs = parts_of(output), parts_of(straight)
    for name in ours:
        if is_exact:
            mine, other = sha256(ours[name])[:12], sha256(theirs[name])[:12]
            if mine != other:
                yield f"{name} differs: sha256 {mine}, not {other}"
        elif (distance := largest_difference(ours[name], theirs[name])) > FLOAT64:
            yield f"{name} differs by {distance:g}"
    for path in output.glob("*.tmp"):
        yield f"{path.name} is left over"


def parts_of(folder):
    """{name: value} of what a run has reached: weights, optimizer, the best epoch, and the rows of
    epochs and steps."""
    checkpoint, best = (read_checkpoint(folder / name) for name in ("last.pt", "best.pt"))
    parts = {name: checkpoint[name] for name in ("model", "optimizer", "scheduler")}
    parts["best"] = [best["epoch"], best["model"]]
    for name in ("metrics", "steps", "audit"):
        path = folder / f"{name}.jsonl"
        rows = map(json.loads, path.read_text().splitlines() if path.exists() else [])
        parts[name] = [
            {k: v for k, v in row.items() if not k.endswith("seconds") and k not in TIMED}
            for row in rows
        ]
    return parts


def largest_difference(ours, theirs):
    """The largest difference between two tensors or plain values, or between those in dicts and
    lists of them; infinity if they are not alike."""
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        return largest_difference(list(ours.values()), [theirs[name] for name in ours])
    if isinstance(ours, list | tuple) and len(ours) == len(theirs):
        return max(map(largest_difference, ours, theirs), default=0.0)
    if isinstance(ours, torch.Tensor):
        if not isinstance(theirs, torch.Tensor) or ours.shape != theirs.shape:
            return math.inf
        return (ours - theirs).abs().max().item() if ours.numel() else 0.0
    if isinstance(ours, float) and isinstance(theirs, float):
        return abs(ours - theirs)
    return 0.0 if ours == theirs else math.inf


def sha256(value):
    """The checksum of a tensor, a plain value, or dicts and lists of them."""
    digest = hashlib.sha256()

    def update(value):
        if isinstance(value, torch.Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.contiguous().numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                digest.update(f"{key}:".encode())
                update(value[key])
        elif isinstance(value, list | tuple):
            digest.update(f"{len(value)} values".encode())
            for item in value:
                update(item)
        else:
            digest.update(repr(value).encode())

    update(value)
    return digest.hexdigest()


def flip_bit(path, fraction):
    """Flip a bit in the largest record of a checkpoint; elsewhere, there is padding."""
    with zipfile.ZipFile(path) as archive:
        record = max(archive.infolist(), key=lambda info: info.file_size)
    with open(path, "r+b") as file:
        file.seek(record.header_offset + 26)  # the lengths of the name and of the extra field
        lengths = [int.from_bytes(file.read(2), "little") for _ in range(2)]
        place = record.header_offset + 30 + sum(lengths) + int(fraction * record.file_size)
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def _identity(path):
    status = path.stat()
    return status.st_ino, status.st_mtime_ns
