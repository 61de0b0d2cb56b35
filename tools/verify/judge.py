"""Turns the files that a run has written into a row of the table. Runs nothing."""

from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import NamedTuple

from tools.verify.cases import EPOCH_END, FLOAT64, ONE_FILE, STATE, STATE_OF


class Problem(Enum):
    """Why a case fails."""

    FAILED = "the run failed"
    STATE = "the checkpoint lacks what a resumed run needs"
    NOT_RESUMED = "the run was not resumed where it had ended"
    WRITERS = "ranks other than rank 0 wrote files"
    SAMPLES = "samples were missed or counted twice"
    UNTRAINED = "no weight has changed after the first epoch"
    TENSORS = "the checkpoint has different tensors from the reference"
    LOSS = "a loss differs from the reference"
    METRIC = "a metric differs from the reference"
    WEIGHTS = "weights differ from the reference"
    BEST = "best.pt is missing, or not the epoch with the best validation metric"


class Evidence(NamedTuple):
    """What a run has written."""

    code: int  # its exit code
    error: str = ""  # the last line that it wrote to stderr
    seconds: float = 0.0
    metrics: list = ()  # rows of metrics.jsonl
    audit: list = ()  # rows of audit.jsonl
    writers: list = ()  # the ranks that opened a file in output_dir for writing
    state: tuple = ()  # the names in last.pt
    weights: dict | None = None  # the model in last.pt
    best: int | None = None  # the epochs done in best.pt
    is_trained: bool = True  # a weight has changed after the first epoch
    continues: bool = True  # its first row is that of the run that its folder held, if any


@dataclass(frozen=True)
class Row:
    """A row of the table. `problem` is None where the case passes."""

    case: str
    problem: Problem | None = None
    details: str = ""
    train_loss: float | None = None
    val_metric: float | None = None  # the one that decides which epoch is the best
    loss_difference: float | None = None  # the largest, relative to the reference
    weight_difference: float | None = None
    each_sample_once: bool | None = None
    writers: tuple = ()
    seconds: float = 0.0

    def to_json(self):
        """This object as a dict of plain values."""
        return asdict(self) | {"problem": self.problem and self.problem.name}


def judge(suite, case, run, reference=None):
    """The Row of a case. run, reference: Evidence."""
    row = Row(case.name, seconds=run.seconds)
    metric, best_of = suite.best
    if run.code or len(run.metrics) != suite.epochs:
        details = f"exit code {run.code}: {run.error}"
        if not run.code:
            details = f"{len(run.metrics)} rows in metrics.jsonl of its --output-dir"
        return replace(row, problem=Problem.FAILED, details=details)
    last = run.metrics[-1]
    row = replace(
        row,
        train_loss=last["train_loss"],
        val_metric=last.get(f"val_{metric}"),
        each_sample_once=_each_sample_once(suite, case, run),
        writers=tuple(run.writers),
    )
    problems = []  # the likely causes first
    if missing := set(STATE_OF.get(case.script, STATE)) - set(run.state):
        problems.append((Problem.STATE, ", ".join(sorted(missing))))
    within = case.resumes and case.moment != EPOCH_END
    starts_within = any(row["resumed_at_step"] for row in run.audit)
    if not run.continues or (within and not starts_within):
        problems.append((Problem.NOT_RESUMED, ""))
    if not row.each_sample_once:
        problems.append((Problem.SAMPLES, ""))
    if row.writers != (0,) and not case.flags.get("save_sharded"):
        problems.append((Problem.WRITERS, f"ranks {', '.join(map(str, row.writers))}"))
    if not run.is_trained:
        problems.append((Problem.UNTRAINED, "does the optimizer step?"))
    if case.reference:
        row, differences = _compare(suite, case, run, reference, row)
        problems += differences
    values = {row["epoch"] + 1: row.get(f"val_{metric}") for row in run.metrics}
    known = {done: value for done, value in values.items() if value is not None}
    keeps_best = case.script not in ONE_FILE and known
    if keeps_best and run.best != best_of(known, key=known.get):
        problems.append((Problem.BEST, f"{run.best} epochs done, {metric} {[*values.values()]}"))
    if problems:
        problem, details = problems[0]
        losses = [text for other, text in problems if other is Problem.LOSS]
        if problem is Problem.WEIGHTS and losses:  # Adam hides the factor of a loss from weights
            details += f", {losses[0]}"
        row = replace(row, problem=problem, details=details)
    return row


def _each_sample_once(suite, case, run):
    """Whether each epoch trained every sample at most once and evaluated every one once."""
    audit = {row["epoch"]: row for row in run.audit}
    if sorted(audit) != [row["epoch"] for row in run.metrics]:
        return False
    dropped = suite.dropped if case.dropped is None else case.dropped
    trained = all(
        (row["samples"], row["dropped"], row["repeated"]) == (suite.trained, dropped, 0)
        for row in audit.values()
    )
    counts = {
        (row["train_samples"], row.get("val_samples", suite.validated)) for row in run.metrics
    }
    return trained and counts == {(suite.trained, suite.validated)}


def _compare(suite, case, run, reference, row):
    """The row with its differences from the reference, and the problems that they are."""
    if run.weights.keys() != reference.weights.keys():
        return row, [(Problem.TENSORS, "")]
    losses, metrics, exact_metrics, weights, missing = {}, {}, {}, {}, []
    for ours, theirs in zip(run.metrics, reference.metrics, strict=True):
        epoch = f"of epoch {ours['epoch']}"
        for name in theirs:  # the script may be a copy with a metric more
            split, _, metric = name.partition("_")
            if split not in ("train", "val", "lr") or metric in ("samples", "seconds"):
                continue
            if name not in ours:
                if split == "val":  # one_file/ logs less of the training
                    missing.append((Problem.METRIC, f"there is no {name} {epoch}"))
                continue
            difference = abs(ours[name] / theirs[name] - 1) if theirs[name] else abs(ours[name])
            kind = exact_metrics if metric in suite.exact else metrics
            if metric == "loss":
                kind = losses
            kind[f"{name} {epoch}"] = difference
    for name, expected in reference.weights.items():
        scale = expected.double().abs().max().clamp_min(1e-12)
        weights[name] = float((run.weights[name] - expected).double().abs().max() / scale)
    row = replace(
        row, loss_difference=max(losses.values()), weight_difference=max(weights.values())
    )
    checks = [(Problem.LOSS, losses, case.tolerance)]
    if case.tolerance == FLOAT64:
        checks.insert(0, (Problem.WEIGHTS, weights, case.tolerance))
        checks.append((Problem.METRIC, metrics, case.tolerance))
        checks.append((Problem.METRIC, exact_metrics, 0))  # the same predictions are right
    problems = [
        (problem, f"{name} by {difference:.1e}")
        for problem, differences, tolerance in checks
        for name, difference in differences.items()
        if not difference <= tolerance
    ]
    return row, missing + problems
