"""The scripts of one_file/ in verify, which know nothing of settings, metrics.jsonl or audits."""

import re

import torch

from tools.lib.edits import changed
from tools.lib.ladder import ROOT
from tools.lib.runs import last_line
from tools.verify.judge import Evidence

FLAGS = {"epochs": "epochs", "global_batch_size": "global_batch", "lr": "lr"}  # ours: theirs
FLAGS |= {name: name for name in ("clip_norm", "micro_batches", "workers")}
TASK = """
from tools.verify import one_file_task

build_model, blocks = one_file_task.small_model, list


def build_datasets(args):
    return one_file_task.recorded_datasets(Images, args.seed)


"""
ROW = re.compile(r"epoch (\d+): train loss (\S+), val loss (\S+), accuracy (\S+)")
ERROR = re.compile(r"^(?:\[rank\d+\]: )?(\w+Error.*)", re.MULTILINE)
NAMES = ("train_loss", "val_loss", "val_accuracy")


def with_task(path):
    """The text of a script that trains one_file_task, as a user would edit it, prints all digits,
    and checks for signals after each step."""
    changes = {
        "class EpochSampler(": f"{TASK}class EpochSampler(",
        "        scheduler.step()\n": "        one_file_task.end_step(run.epoch, run.step)\n"
        "        scheduler.step()\n",
        "SIGNAL_CHECK_INTERVAL = 10": "SIGNAL_CHECK_INTERVAL = 1",
    }
    text = changed(path.read_text(encoding="utf-8"), changes.items(), path)
    return text.replace(":.4f}", ":.17g}")


def reference(folder):
    """train_1gpu.py with this task, in a folder. Returns its path."""
    change = "import tasks.images as task", "import tools.verify.one_file_task as task"
    path = folder / "train_1gpu_one_file.py"
    path.write_text(
        changed((ROOT / "train_1gpu.py").read_text(encoding="utf-8"), [change], "train_1gpu.py"),
        encoding="utf-8",
    )
    return path


def flags_of(flags, output_dir):
    """The flags of a run, from the flags of the ladder's scripts."""
    own = {FLAGS[name]: value for name, value in flags.items() if name in FLAGS}
    return {"workers": 0, "checkpoint": output_dir / "checkpoint.pt"} | own


def keep(run, reads, output_dir):
    """Add what a run has printed and read to its folder, where a resumed run continues it.

    reads: the file that one_file_task has written, if the run came that far."""
    texts = {
        "stdout": run.stdout,
        "reads": reads.read_text(encoding="utf-8") if reads.exists() else "",
    }
    for name, text in texts.items():
        with open(output_dir / name, "a", encoding="utf-8") as file:
            file.write(text)


def checkpoint_of(output_dir):
    """The checkpoint, or None."""
    path = output_dir / "checkpoint.pt"
    return torch.load(path, weights_only=True) if path.exists() else None


def error_of(run):
    """The exception that ended a Run. tools.launch's own line comes after it."""
    return (ERROR.findall(run.stderr) or [last_line(run.stderr)])[0]


def evidence_of(run, suite, output_dir, resumed_at, writers):
    """The Evidence of a Run, and of the one that it has resumed after `resumed_at` steps."""
    printed = ROW.findall((output_dir / "stdout").read_text(encoding="utf-8"))
    reads = [
        line.split() for line in (output_dir / "reads").read_text(encoding="utf-8").splitlines()
    ]
    validated = len({index for part, _, index in reads if part == "val"})
    metrics, audit = [], []
    for epoch, *values in printed:
        own = [index for part, number, index in reads if (part, number) == ("train", epoch)]
        row = {"epoch": int(epoch), "train_samples": len(own), "val_samples": validated}
        metrics.append(row | dict(zip(NAMES, map(float, values), strict=True)))
        row = {"epoch": int(epoch), "samples": len(own), "repeated": len(own) - len(set(own))}
        row["dropped"] = suite.trained + suite.dropped - len(set(own))
        audit.append(row | {"resumed_at_step": resumed_at})
    checkpoint = checkpoint_of(output_dir) or {}
    return Evidence(
        run.code,
        seconds=run.seconds,
        metrics=metrics,
        audit=audit,
        writers=writers,
        state=tuple(checkpoint),
        weights=checkpoint.get("model", {}),
    )
