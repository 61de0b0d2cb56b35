"""Loss and metrics over all ranks, and where they are logged."""

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from utils.batches import on_device_of
from utils.distributed import (
    all_gather_object,
    all_reduce,
    dp_rank,
    dp_world_size,
    is_main_process,
    launched_world_size,
)
from utils.errors import UserError, say


class Task(Protocol):
    """What a Meter needs of a task, such as a module of tasks/: see docs/own-task.md."""

    def loss(self, outputs: Any, targets: Any, /) -> Tensor: ...
    def count(self, targets: Any, /) -> Tensor | float: ...
    def measure(self, outputs: Any, targets: Any, /) -> dict[str, Tensor]: ...
    def summarize(self, sums: dict[str, Tensor], /) -> Mapping[str, Tensor | float]: ...


def mean_loss(loss_sum: Tensor, count: Tensor | float) -> Tensor:
    """loss_sum / count, 0-dim; 0 if nothing counts, so that such a batch has gradients of 0. A loss
    of several terms, a 1-dim tensor: the sum of their means, each over its own count."""
    mean = loss_sum / (count + (count == 0))  # never 0 / 0
    return mean.sum() if mean.dim() else mean


class Meter:
    """Running sums of the loss and of what the task measures, in float64 on the device.

    There is no .item() in a step, because it would make the host wait for the device, and only one
    reduction per epoch. Sums are reduced, not the ranks' means, which would overweight the targets
    of a rank that has fewer of them. A checkpoint within an epoch holds the sums so far.

    vector: the sums, one after another; shapes: {name: shape} of what it holds; count: of targets,
    where the task counts them with plain numbers, which stay on the host.
    """

    def __init__(self, task: Task, loader: Any) -> None:
        self.task, self.loader = task, loader
        self.reset()

    def reset(self) -> None:
        """Set all sums to 0."""
        self.vector = torch.zeros(0, dtype=torch.float64)
        self.shapes: dict[str, torch.Size] = {}
        self.count = 0.0
        self.seconds = 0.0  # before the run was resumed

    def update(self, loss_sum: Tensor, outputs: Any, targets: Any) -> None:
        """Add a batch, or a part of one. loss_sum: task.loss(outputs, targets)."""
        self.add({"loss": loss_sum, **self.task.measure(outputs, targets)}, targets)

    def add(self, sums: dict[str, Tensor], targets: Any) -> None:
        """Add the sums of a batch, {name: tensor}: the loss, and what the task measures. Raises
        UserError if their names or shapes change."""
        count = self.task.count(targets)
        if isinstance(count, Tensor):
            sums = sums | {"count": count}
        elif self.loader.counts:
            self.count += count
        device, parts = sums["loss"].device, {}
        for name, value in sorted(sums.items()):
            parts[name] = torch.as_tensor(value, dtype=torch.float64, device=device).detach()
        shapes = {name: part.shape for name, part in parts.items()}
        if self.shapes not in ({}, shapes):
            raise UserError(f"measure() must return the same sums for each batch, not {shapes}")
        vector = torch.cat([part.reshape(-1) for part in parts.values()])
        if not self.loader.counts:  # a batch that this rank computes only because the others do
            vector = torch.zeros_like(vector)
        if self.shapes:
            vector += self.vector.to(device)
        self.vector, self.shapes = vector, shapes

    def sums(self, vector: Tensor, count: float) -> dict[str, Tensor]:
        """{name: tensor} of what a vector of this Meter, or of several added up, holds."""
        pieces = vector.split([shape.numel() for shape in self.shapes.values()])
        named = zip(self.shapes.items(), pieces, strict=True)
        counted = {"count": torch.as_tensor(count, dtype=vector.dtype)}
        return counted | {name: piece.reshape(shape) for (name, shape), piece in named}

    def summarize(self) -> dict[str, float]:
        """{name: number}: what the task makes of this rank's sums so far. Waits for the device."""
        return _summary(self.task, self.sums(self.vector.cpu(), self.count))

    def compute(self) -> dict[str, float]:
        """{name: number} over all ranks: task.summarize() of the sums, and the numbers of "samples"
        and "seconds". Resets the sums.

        Raises UserError, on all ranks, if a training loss is not finite, so that the last good
        checkpoint stays; RuntimeError if an evaluation has not counted each sample once.
        """
        seconds, loader = self._seconds(), self.loader
        numbers = self.vector.new_tensor([loader.samples, self.count])
        samples, count, *_ = totals = all_reduce(torch.cat([numbers, self.vector])).cpu()
        result = _summary(self.task, self.sums(totals[2:], count.item()))
        if not loader.train and samples != len(loader.dataset):
            raise RuntimeError(f"evaluated {samples:.0f} of {len(loader.dataset)} samples")
        self.reset()
        if loader.train and not math.isfinite(result["loss"]):
            raise UserError(f"the loss is {result['loss']}: try a smaller --lr, or --clip-norm 1")
        return result | {"samples": int(samples), "seconds": seconds}

    def _seconds(self):
        return self.seconds + time.perf_counter() - self.loader.started

    def state_dict(self) -> dict[str, Any]:
        """The sums of every replica; all ranks call it together."""
        shapes = {name: list(shape) for name, shape in self.shapes.items()}
        ranks = all_gather_object((self.vector.tolist(), self.count, self._seconds()))
        return {"ranks": ranks[:: len(ranks) // dp_world_size()], "shapes": shapes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Each rank takes its own sums; if the number of ranks has changed, rank 0 takes all."""
        self.reset()
        ranks = state["ranks"]
        if len(ranks) == dp_world_size():
            ranks = [ranks[dp_rank()]]
        elif dp_rank() != 0:  # the rest of the epoch may have no batch
            zeros = [0.0] * len(ranks[0][0])
            ranks = [(zeros, 0.0, 0.0)]
        vectors, counts, seconds = zip(*ranks, strict=True)
        self.vector = torch.tensor(vectors, dtype=torch.float64).sum(0)
        self.shapes = {name: torch.Size(shape) for name, shape in state["shapes"].items()}
        self.count = sum(counts)
        self.seconds = max(seconds) if self.shapes else 0.0


def _summary(task, sums):
    return {name: float(value) for name, value in task.summarize(sums).items()}


@torch.no_grad()
def evaluate(model: nn.Module, loader: Any, task: Task) -> dict[str, float]:
    """The task's metrics over the samples of `loader.dataset`, each counted exactly once. Modules
    keep the mode that they had, so that it may be called within an epoch."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    meter = Meter(task, loader)
    for inputs, targets in loader:
        outputs = model(inputs)
        targets = on_device_of(outputs, targets)
        meter.update(task.loss(outputs, targets), outputs, targets)
    for module, mode in modes.items():
        module.training = mode
    return meter.compute()


class MetricLogger:
    """One line per epoch: as JSON in output_dir/metrics.jsonl, and on the main process's console.

    It is part of the checkpoint, so that a resumed run knows which epoch was the best; the file is
    only written. columns: functions of a row, {name: value}, that may add to it before it is
    written, on all ranks.
    """

    def __init__(self, cfg: Any) -> None:
        self.folder, self.epochs = Path(cfg.output_dir), cfg.epochs
        self.rows: list[dict[str, Any]] = []
        self.columns: list[Callable[[dict[str, Any]], None]] = []

    def log(self, epoch: int, train: dict[str, float], val: dict[str, float], lr: float) -> None:
        """Log the results of Meter.compute() for an epoch. val may be empty, as of an epoch without
        an evaluation."""
        row: dict[str, Any] = {"epoch": epoch, "world_size": launched_world_size(), "lr": float(lr)}
        for split, result in (("train", train), ("val", val)):
            row |= {f"{split}_{name}": value for name, value in result.items()}
        for column in self.columns:
            column(row)
        self.rows.append(row)
        if is_main_process():
            text = "".join(json.dumps(row) + "\n" for row in self.rows)
            (self.folder / "metrics.jsonl").write_text(text, encoding="utf-8")
            speed = train["samples"] / train["seconds"]
            text = f"train {_text(train)}, " + (f"val {_text(val)}, " if val else "")
            say(f"epoch {epoch}: {text}{speed:.0f} samples/s")

    def is_best(self, name: str, best_of: Callable[[list[float]], float]) -> bool:
        """Whether the last epoch is the best(). At the end of the run, says which one is."""
        best = self.best(name, best_of)
        if best >= 0 and self.rows[-1]["epoch"] + 1 == self.epochs and is_main_process():
            row, path = self.rows[best], self.folder / "best.pt"
            say(f"best: epoch {row['epoch']}, {name} {row[f'val_{name}']:.4f}, in {path}")
        return best == len(self.rows) - 1

    def best(self, name: str, best_of: Callable[[list[float]], float]) -> int:
        """The index of the row with the best validation metric `name`, the first of equal ones; -1
        if there is none yet: inf and NaN never are, nor is a row without one. best_of: max or min.
        """
        values = [row.get(f"val_{name}", math.nan) for row in self.rows]
        numbers = [value for value in values if math.isfinite(value)]
        return values.index(best_of(numbers)) if numbers else -1

    def state_dict(self) -> dict[str, Any]:
        return {"rows": list(self.rows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]


def _text(result):
    names = [name for name in result if name not in ("samples", "seconds")]
    return " ".join(f"{name} {result[name]:.4f}" for name in names)
