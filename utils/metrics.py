"""Loss and metrics over all ranks, and where they are logged. Needs torch and distributed.py."""

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from utils.batches import on_device_of
from utils.checkpoint_file import with_plain_numbers
from utils.distributed import (
    all_gather_object,
    all_reduce,
    dp_rank,
    dp_world_size,
    is_main_process,
    launched_world_size,
)
from utils.errors import UserError, say, warn
from utils.files import write_text
from utils.hooks import Hook


class Task(Protocol):
    """What a Meter needs of a task, such as a module of tasks/: see docs/own-task.md."""

    def loss(self, outputs: Any, targets: Any, /) -> Tensor: ...
    def count(self, targets: Any, /) -> Tensor | float: ...
    def measure(self, outputs: Any, targets: Any, /) -> dict[str, Tensor]: ...
    def summarize(self, sums: dict[str, Tensor], /) -> Mapping[str, Tensor | float]: ...


def flatten(values: dict[str, Any]) -> tuple[Tensor, dict[str, torch.Size]]:
    """Tensors or numbers by name, with the "loss" among them, as a float64 vector on its device,
    without gradients; and {name: shape}, for unflatten()."""
    device = values["loss"].device
    tensors = {
        name: torch.as_tensor(value, dtype=torch.float64, device=device).detach()
        for name, value in values.items()
    }
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()]), shapes


def unflatten(vector: Tensor, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """{name: tensor}, of these shapes, from a vector of flatten()."""
    pieces = vector.split([shape.numel() for shape in shapes.values()])
    return {n: piece.reshape(shapes[n]) for n, piece in zip(shapes, pieces, strict=True)}


class Meter:
    """Running sums of the loss and of what the task measures, kept on the device.

    There is no .item() in a step, because it would make the host wait for the device, and only one
    reduction per epoch. Sums are reduced, not the ranks' means, which would overweight the targets
    of a rank that has fewer of them. A checkpoint within an epoch holds the sums so far. loader: a
    utils.data.Loader.
    """

    def __init__(self, task: Task, loader: Any) -> None:
        self.task, self.loader = task, loader
        self.noted = {}
        self.reset()

    def reset(self) -> None:
        """Set all sums to 0."""
        self.sums: Any = 0.0  # a float64 vector, from the first update on: see flatten()
        self.shapes = {}  # {name: shape} of what the vector holds
        self.count: float = 0  # of targets, where the task counts them with plain numbers
        self.compared: float = 0  # the part of it that must be the same on every rank
        self.seconds = 0.0  # before the run was resumed

    def update(self, loss_sum: Tensor, outputs: Any, targets: Any) -> None:
        """Add a batch, or a part of one. loss_sum: a 0-dim tensor, task.loss(outputs, targets)."""
        self.add({"loss": loss_sum, **self.task.measure(outputs, targets)}, targets)

    def add(self, values: dict[str, Tensor], targets: Any) -> None:
        """Add the sums of a batch: {name: tensor}, the loss and what the task measures."""
        count = self.task.count(targets)
        if isinstance(count, Tensor):
            values = values | {"count": count}
        elif self.loader.counts:
            self.count += count
            self.compared += count
        sums, shapes = flatten(values)
        if self.shapes and [*self.shapes.items()] != [*shapes.items()]:  # in this order
            raise UserError(
                f"measure() of the task returns {_shapes(shapes)} after {_shapes(self.shapes)}: "
                f"these are sums, so they must have the same names and shapes in every batch"
            )
        self.shapes = shapes
        if not self.loader.counts:  # a batch that this rank computes only because the others do
            sums = torch.zeros_like(sums)
        previous = self.sums
        if isinstance(previous, Tensor):
            previous = previous.to(sums.device)
        self.sums = previous + sums

    def note(self, **values: Tensor) -> None:
        """Keep values of this step that are not sums, for the rows of --log-steps: 0-dim tensors,
        the same on every rank, which stay on the device until a row is due."""
        self.noted |= values

    def restore_where(self, condition: Tensor, sums: Tensor | float) -> None:
        """Go back to `sums`, from an earlier time, if `condition`, a 0-dim bool tensor, is true.
        Does not wait for the device."""
        self.sums = torch.where(condition, sums, self.sums)

    def discount(self, count: float) -> None:
        """Take back plain numbers of targets, which do not count after all."""
        self.count -= count

    def compute(self) -> dict[str, float]:
        """{name: number} over all ranks: task.summarize() of the sums, and the numbers of "samples"
        and "seconds". Resets the sums.

        Raises UserError, on all ranks, if the loss is not finite, or if a count given as a plain
        number differs between the replicas; RuntimeError if an evaluation has not counted each
        sample of the dataset once.
        """
        seconds = self._seconds()
        samples = self.sums.new_full((1,), self.loader.samples)
        totals = all_reduce(torch.cat([samples, self.snapshot()])).cpu()
        samples, totals = int(totals[0]), totals[1:]
        if not self.loader.train and samples != len(self.loader.dataset):
            raise RuntimeError(f"evaluated {samples} of {len(self.loader.dataset)} samples")
        if self.loader.train and len(set(all_gather_object(self.compared))) > 1:
            raise UserError(
                "the task's count() returns a plain number that differs between the ranks, which "
                "would give their targets different weights: return a tensor"
            )
        result, has_targets = self.summarize(totals), self._unflatten(totals)["count"].all()
        self.reset()
        if not math.isfinite(result["loss"]):
            remedy = "try a smaller --lr, or --clip-norm 1"
            if not has_targets:
                remedy = "count() of the task found no targets in it"
            raise UserError(
                f"the {'training' if self.loader.train else 'validation'} loss is "
                f"{result['loss']}: {remedy}"
            )
        return result | {"samples": samples, "seconds": seconds}

    def snapshot(self) -> Tensor:
        """The sums so far, as a float64 vector on the device, for summarize(). Differences and sums
        of such vectors can be summarized, too. Does not wait for the device."""
        return torch.cat([self.sums, self.sums.new_full((1,), self.count)])

    def summarize(self, snapshot: Tensor) -> dict[str, float]:
        """{name: number}: what the task makes of a snapshot, which is on the CPU now."""
        sums = self._unflatten(snapshot)
        return {name: float(value) for name, value in self.task.summarize(sums).items()}

    def _unflatten(self, snapshot):
        """{name: sum} of a snapshot, with the number of targets as "count"."""
        return {"count": snapshot[-1]} | unflatten(snapshot[:-1], self.shapes)

    def _seconds(self):
        return self.seconds + time.perf_counter() - self.loader.started

    def state_dict(self) -> dict[str, Any]:
        """The sums of every rank; all ranks call it together."""
        if isinstance(self.sums, Tensor):
            mine = [self.sums.tolist(), self.count, self._seconds()]
        else:  # between two epochs
            mine = [[], 0, 0.0]
        ranks = all_gather_object(mine)
        shapes = {name: list(shape) for name, shape in self.shapes.items()}
        return {"ranks": ranks[:: len(ranks) // dp_world_size()], "shapes": shapes}  # by replica

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Each rank takes its own sums; if the number of ranks has changed, rank 0 takes all."""
        self.reset()
        ranks = state["ranks"]
        if len(ranks) == dp_world_size():
            ranks = [ranks[dp_rank()]]
        elif dp_rank() != 0:
            return
        sums, counts, seconds = zip(*ranks, strict=True)
        if sums[0]:
            self.sums = torch.tensor(sums, dtype=torch.float64).sum(0)
            self.shapes = {n: torch.Size(shape) for n, shape in state.get("shapes", {}).items()}
        self.count, self.seconds = sum(counts), max(seconds)


@torch.no_grad()
def evaluate(model: nn.Module, loader: Any, task: Task) -> dict[str, float]:
    """The task's metrics over the samples of `loader.dataset`, each counted exactly once."""
    model.eval()
    meter = Meter(task, loader)
    for inputs, targets in loader:
        outputs = model(inputs)
        targets = on_device_of(outputs, targets)
        meter.update(task.loss(outputs, targets), outputs, targets)
    return meter.compute()


class History(Hook):
    """The rows of metrics.jsonl, in each checkpoint: if the file were lost, the next epoch would be
    the best so far."""

    rows: Any = None  # None: the checkpoint is an older one, or there is none

    def after_row(self, row: dict[str, Any]) -> None:
        if "step" not in row:
            self.rows = [*self.rows, row]

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]


class MetricLogger:
    """One line per epoch: as JSON in output_dir/metrics.jsonl, and on the main process's console.

    start_epoch: rows of this epoch and later are dropped from the file; the run continues there.
    hooks: Hooks that are given each row. The earlier rows come from a History among them.
    """

    def __init__(self, cfg: Any, start_epoch: int = 0, hooks: Sequence[Any] = ()) -> None:
        self.path, self.hooks = Path(cfg.output_dir) / "metrics.jsonl", hooks
        self.epochs = cfg.epochs
        history = next((hook for hook in hooks if isinstance(hook, History)), History())
        rows = read_metrics(self.path) if history.rows is None else history.rows
        self.rows = [row for row in rows if row["epoch"] < start_epoch]
        history.rows = [*self.rows]  # not the same list: a script may replace its own
        write_rows(self.path, self.rows)

    def log(self, epoch: int, train: dict[str, float], val: dict[str, float], lr: float) -> None:
        """Log the results of Meter.compute() for an epoch. Warns if the file cannot be written: the
        next checkpoint has the rows, too, and the next epoch writes all of them again."""
        row = {"epoch": epoch, "world_size": launched_world_size(), "lr": lr}
        for split, result in (("train", train), ("val", val)):
            row |= {f"{split}_{name}": value for name, value in result.items()}
        for hook in self.hooks:
            hook.before_row(row)
        row = with_plain_numbers(row)
        self.rows.append(row)
        try:
            write_rows(self.path, self.rows)
        except UserError as error:
            warn(f"{error}; the run continues")
        if is_main_process():
            speed = train["samples"] / train["seconds"]
            text = f"epoch {epoch}: train {_text(train)}, val {_text(val)}, {speed:.0f} samples/s"
            say(text)
        for hook in self.hooks:
            hook.after_row(row)

    def is_best(self, name: str, best_of: Callable[[list[float]], float]) -> bool:
        """Whether the last epoch has the best validation metric `name` so far. best_of: max or min.

        Meaningful on the main process, which alone saves and knows all epochs. At the end of the
        run, says which epoch is the best.
        """
        if f"val_{name}" not in self.rows[-1]:
            raise UserError(f"the task names {name} in BEST, but summarize() does not return it")
        values = {row["epoch"]: row.get(f"val_{name}", math.nan) for row in self.rows}
        epochs = [epoch for epoch in values if not math.isnan(values[epoch])]
        if not epochs:
            return False
        best = best_of([values[epoch] for epoch in epochs])
        first = next(epoch for epoch in epochs if values[epoch] == best)
        last = self.rows[-1]["epoch"]
        if last + 1 == self.epochs and is_main_process():
            say(f"best: epoch {first}, {name} {best:.4f}, in {self.path.with_name('best.pt')}")
        return first == last


def _shapes(shapes):
    return ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())


def _text(result):
    names = [name for name in result if name not in ("samples", "seconds")]
    return " ".join(f"{name} {result[name]:.4f}" for name in names)


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Replace a .jsonl file as a whole, on the main process. Raises UserError if it fails."""
    if is_main_process():
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl file, if any. Damaged rows are left out, with a warning, except for one
    at the end that was cut off when the process was killed. Raises UserError if the file cannot be
    read."""
    try:
        lines = Path(path).read_text(errors="replace", encoding="utf-8").split("\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    rows, damaged = [], []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if row["epoch"] >= 0:
                rows.append(row)
        except (ValueError, TypeError, KeyError):
            damaged.append(number)
    if damaged and damaged[-1] == len(lines):  # or the empty text after the last newline
        damaged.pop()
    if damaged and is_main_process():
        text = ", ".join(map(str, damaged))
        warn(f"{path}: damaged lines are left out: {text}")
    return rows
