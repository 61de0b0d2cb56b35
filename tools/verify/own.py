"""Your own script, edited or with your own task: the same weights on 1, 2 and 3 processes, stopped
and resumed anywhere, and if it evaluates within an epoch?

All runs are compared with a run of the script on one process. They take place in its folder, with a
copy of the script whose task has few samples.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from tools.copy import TASK_LINE, TASKS
from tools.lib import update
from tools.lib.ladder import ONE_PROCESS, ROOT
from tools.lib.prune import without
from tools.lib.runs import last_line
from tools.verify.cases import BEFORE_SAVE, EPOCH_END, WITHIN_EPOCH, Case, Suite
from tools.verify.judge import Problem
from tools.verify.run import Verifier

# Six steps per epoch, and five samples that do not fill a seventh one.
BASE = {"epochs": 2, "global_batch_size": 18, "dtype": "float64", "timeout": 60, "audit": True}
STEPS, VALIDATED = 6, 31
# Of scripts that divide what may not be a multiple of every number: heads, experts, positions.
PROCESSES = dict.fromkeys(("train_tp.py", "train_pp.py", "train_ep.py", "train_cp.py"), (1, 2))
PROCESSES |= {"train_fsdp_tp.py": (2, 4)}
ACCUMULATED = "train_ddp_accum.py"
DROPOUT = "has-dropout"  # a file, if the model has an nn.Dropout
EVALUATED = "has-evaluated"  # a file, if evaluate() was called within an epoch

# Stands in for the task, whose first samples it takes. A Subset would hide methods of the dataset.
SHIM = """
import copy
import functools
import os
import signal
import sys
import time
from pathlib import Path

from torch.nn.modules.dropout import _DropoutNd

import {task} as task
from utils.checkpoint import Checkpointer

globals().update({{name: value for name, value in vars(task).items() if name[:2] != "__"}})


def few(dataset, count):
    if len(dataset) <= count:
        return dataset
    if isinstance(dataset, (list, tuple)):
        return dataset[:count]
    kind, result = type(dataset), copy.copy(dataset)
    result.__class__ = type(kind.__name__, (kind,), {{"__len__": lambda self: count}})
    return result


def build_datasets(cfg):
    train_set, val_set = task.build_datasets(cfg)
    return few(train_set, {steps} * cfg.global_batch_size + 5), few(val_set, {validated})


def act_at_moment(script):
    save, step, calls = Checkpointer.save, Checkpointer.step, []

    def killed(checkpoint, *args, **kwargs):
        if checkpoint.epoch == 1 and not kwargs.get("between_steps"):
            checkpoint.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return save(checkpoint, *args, **kwargs)

    def recorded(*args, **kwargs):
        calls.append((args, kwargs))
        return evaluate(*args, **kwargs)

    def evaluated(checkpoint):
        step(checkpoint)
        if calls:
            evaluate(*calls[0][0], **calls[0][1])
            Path(__file__).with_name("{evaluated}").touch()

    if os.environ.get("MOMENT") == "{before_save}":
        Checkpointer.save = killed
    if os.environ.get("MOMENT") == "{within_epoch}" and hasattr(script, "evaluate"):
        evaluate, script.evaluate, Checkpointer.step = script.evaluate, recorded, evaluated


def build_model(cfg, train_set):
    act_at_moment(sys.modules["__main__"])
    model = task.build_model(cfg, train_set)
    if any(isinstance(part, _DropoutNd) and part.p for part in model.modules()):
        Path(__file__).with_name("{dropout}").touch()
    return model


@functools.wraps(task.loss)
def loss(outputs, targets):
    time.sleep(float(os.environ.get("SLOWED", 0)))  # a run that is to be killed within an epoch
    return task.loss(outputs, targets)
"""


class CannotVerify(Exception):
    """The script cannot be run in this way; the message says why."""


def own_task(script, of_project=False):
    """The module that a script imports as its task; None if it is one of the project's, unless
    of_project."""
    found = re.search(r"^import (\S+) as task\b", script.read_text(encoding="utf-8"), re.MULTILINE)
    known = [TASK_LINE.format(name).split()[1] for name in TASKS]
    return found[1] if found and (of_project or found[1] not in known) else None


def parse_flags(arguments):
    """The arguments of a script, --name=value, --name value and --[no-]name, as {name: value}."""
    flags, rest = {}, list(arguments)
    while rest:
        name, has_value, value = rest.pop(0).removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if has_value:
            flags[name] = value
        elif rest and not rest[0].startswith("--"):
            flags[name] = rest.pop(0)
        else:
            flags[name.removeprefix("no_")] = not name.startswith("no_")
    return flags


def verify_own(script, like, task, flags, folder, report, device="cpu", only=""):
    """Run a script on several processes. Returns its Rows and its Suite.

    script: the path of a copy of the project's script `like`. task: its module. flags: {name:
    value} of all runs. report(row): called as soon as a Row is known. only: part of a case's name.
    Raises CannotVerify.
    """
    overlay, left_out = write_overlay(script, like, task, Path(folder) / "overlay")
    suite = Suite(
        task=task,
        base=BASE | flags,
        steps=STEPS,
        trained=0,
        dropped=0,
        validated=0,
        cases=[],
        references=[],
        best=best_of_task(overlay, script.parent),
        exact=(),
        left_out=left_out,
    )
    scripts = {name: overlay / name for name in (like, ACCUMULATED)}

    def verifier_of(suite, references):
        return Verifier(
            folder,
            suite,
            script.parent,
            scripts,
            device,
            references=references,
            clean=script.parent,
            paths=[overlay],
        )

    first, *cases = cases_of(like, left_out)
    try:
        evidence = verifier_of(suite, {}).train(first)
    except AssertionError as error:
        raise CannotVerify(str(error).splitlines()[0]) from None
    if evidence.code:
        raise CannotVerify(f"{script} fails on its own ({first.name}): {evidence.error}")
    if any(name.endswith("num_batches_tracked") for name in evidence.weights):
        cases = [case for case in cases if case.script == like]
        left_out["accumulation"] = "BatchNorm's statistics come from a micro-batch"
    audit = evidence.audit[0]
    validated = [row["val_samples"] for row in evidence.metrics if "val_samples" in row]
    suite = suite._replace(
        trained=audit["samples"], dropped=audit["dropped"], validated=max(validated, default=0)
    )
    cases = [case for case in cases if only in case.name]

    def report_with_cause(row):
        if row.problem is Problem.WEIGHTS and (overlay / DROPOUT).exists():
            cause = "; nn.Dropout draws by rank, not by sample: see docs/random-numbers.md"
            row = replace(row, details=row.details + cause)
        report(row)

    print(f"compared with {first.name}, in {evidence.seconds:.0f} s:")
    rows = verifier_of(suite, {first.name: evidence}).run(cases, report_with_cause)
    if any(case.moment == WITHIN_EPOCH for case in cases) and not (overlay / EVALUATED).exists():
        left_out[WITHIN_EPOCH] = "the first epoch has no call of the script's evaluate()"
    return rows, suite


def write_overlay(script, like, task, folder):
    """A folder with the script and its accumulating twin, with few samples, and with the modules
    that the script's own folder lacks. Returns the folder, and {what it could not make: why}."""
    folder.mkdir(parents=True)
    shim = SHIM.format(
        task=task,
        steps=STEPS,
        validated=VALIDATED,
        dropout=DROPOUT,
        evaluated=EVALUATED,
        before_save=BEFORE_SAVE,
        within_epoch=WITHIN_EPOCH,
    )
    (folder / "few_samples.py").write_text(shim, encoding="utf-8")
    own, ours = script.parent / "utils", ROOT / "utils"
    if own.is_dir():
        shutil.copytree(ours, folder / "utils")
        shutil.copytree(own, folder / "utils", dirs_exist_ok=True)
    line = f"import {task} as task"
    text = script.read_text(encoding="utf-8").replace(line, "import few_samples as task")
    (folder / like).write_text(text, encoding="utf-8")
    left_out = {}
    if like == "train_ddp.py":
        record = update.read_record(script.parent) or update.new_record(None)
        ours = {name: (ROOT / name).read_bytes() for name in (like, ACCUMULATED)}
        merged = merge(text, without(ours, record["without"]), like, ACCUMULATED)
        if merged is None:
            left_out["accumulation"] = (
                f"your changes overlap with {ACCUMULATED}'s, or git is missing"
            )
        else:
            (folder / ACCUMULATED).write_text(merged, encoding="utf-8")
    elif like != ACCUMULATED:
        left_out["accumulation"] = f"{like} does not accumulate"
    return folder, left_out


def merge(text, files, base, other):
    """The text, a changed form of files[base], with what files[other] changes in that. None where
    the changes overlap, or without git."""
    names = "yours", base, other
    try:
        merged, conflicts = update.merge(text.encode(), files[base], files[other], names)
    except FileNotFoundError:
        return None
    return None if conflicts else merged.decode()


def best_of_task(overlay, folder):
    """BEST of the task. Raises CannotVerify if it cannot be imported."""
    program = "import few_samples as t, json; print(json.dumps([t.BEST[0], t.BEST[1].__name__]))"
    path = os.pathsep.join(map(str, (overlay, folder)))
    found = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    if found.returncode:
        raise CannotVerify(f"the task cannot be imported: {last_line(found.stderr)}")
    metric, name = json.loads(found.stdout.splitlines()[-1])
    return metric, {"min": min, "max": max}[name]


def cases_of(like, left_out):
    """The Cases of a script, of which the first is the reference."""
    name = like.removeprefix("train_").removesuffix(".py")
    if like in ONE_PROCESS:
        first = Case(name, like, None, {})
        sizes = [None]
    else:
        sizes = PROCESSES.get(like, (1, 2, 3))
        cases = [Case(f"{name} x{count}", like, *started(like, count)) for count in sizes]
        first, *others = [case._replace(reference=f"{name} x{sizes[0]}") for case in cases]
    if like in ONE_PROCESS:
        others = []
    if "accumulation" not in left_out:
        flags = {"micro_batches": 3}
        others.append(Case("accum x2", ACCUMULATED, 2, flags, reference=first.name))
    nproc, flags = started(like, sizes[min(1, len(sizes) - 1)])
    killed = Case("killed", like, nproc, flags | {"save_steps": 1})  # an epoch may have two steps
    late = killed._replace(name=BEFORE_SAVE, moment=BEFORE_SAVE)
    for name, size, moment, before in (
        ("killed, resumed", sizes[-1], "", killed),
        ("resumed at an epoch's end", sizes[0], EPOCH_END, killed),
        ("killed before a save", sizes[-1], "", late),
        ("evaluating in between", sizes[-1], WITHIN_EPOCH, None),
    ):
        case = Case(f"{name} x{size or 1}", like, *started(like, size), reference=first.name)
        others.append(case._replace(resumes=before, moment=moment))
    return [first, *others]


def started(like, count):
    """(nproc, flags) that start a script on that many processes."""
    if like == "train_ddp_spawn.py":
        return None, {"spawn_processes": count}
    return count, {"fsdp_size": count // 2} if like == "train_fsdp_tp.py" else {}
