"""Loss and accuracy over all ranks, and where they are written. Needs torch and distributed.py."""

import json
import math
import os
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from utils.distributed import (
    UserError,
    all_gather_object,
    all_reduce,
    get_rank,
    get_world_size,
    is_main_process,
)


class Meter:
    """Running sums of loss and correct predictions, kept on the device.

    No .item() a step, which would make the CPU wait for the GPU; one reduction an epoch. A
    checkpoint within an epoch holds the sums so far, so that a resumed epoch counts all of it.
    """

    def __init__(self, device):
        self.device = device
        self._set(0.0, 0.0, 0, 0.0)

    def _set(self, loss, correct, samples, seconds):
        self.sums = torch.tensor([loss, correct], dtype=torch.float64, device=self.device)
        self.samples, self.seconds = samples, seconds
        self.start()

    def start(self):
        """Start the clock: the time before this call does not count."""
        self.clock = time.perf_counter()

    def update(self, loss, outputs, labels):
        """loss: mean over this batch; outputs: (n, classes); labels: int64 (n,)."""
        with torch.no_grad():
            correct = (outputs.argmax(1) == labels).sum()
            self.sums += torch.stack([loss.double() * len(labels), correct.double()])
        self.samples += len(labels)

    def compute(self):
        """Over the samples of all ranks: loss and accuracy (means), samples, seconds; then from 0.

        The sums are reduced, not the ranks' means: those would count a short shard's samples
        for more than the others'.
        """
        samples = self.sums.new_tensor([self.samples])
        loss, correct, samples = all_reduce(torch.cat([self.sums, samples])).tolist()
        seconds = self.seconds + time.perf_counter() - self.clock
        self._set(0.0, 0.0, 0, 0.0)
        return {
            "loss": loss / samples,
            "accuracy": correct / samples,
            "samples": int(samples),
            "seconds": seconds,
        }

    def state_dict(self):
        """The sums of every rank; all ranks call it together.

        Raises UserError, on all of them, where the loss is not a number.
        """
        seconds = self.seconds + time.perf_counter() - self.clock if self.samples else 0.0
        ranks = all_gather_object([*self.sums.tolist(), self.samples, seconds])
        _refuse_nan(sum(loss for loss, *_ in ranks))
        return {"ranks": ranks}

    def load_state_dict(self, state):
        """Each rank takes its own sums; where the number of ranks has changed, rank 0 takes all."""
        rank, ranks = get_rank(), state["ranks"]
        if len(ranks) == get_world_size():
            self._set(*ranks[rank])
        elif rank == 0:
            loss, correct, samples, seconds = zip(*ranks, strict=True)
            self._set(sum(loss), sum(correct), sum(samples), max(seconds))


def _refuse_nan(loss):
    if not math.isfinite(loss):
        raise UserError(
            f"the training loss is {loss}: the last checkpoint stays as it is; try a smaller --lr, "
            f"or --clip-norm 1"
        )


@torch.no_grad()
def evaluate(model, loader, device, meter=None):
    """Loss and accuracy over the samples of `loader.dataset`, each counted exactly once.

    DistributedSampler repeats samples until every rank has as many as the others: they are
    computed, because a forward pass may communicate and so must happen on all ranks alike, and
    not counted. Rank r holds the samples r, r + world size, ...; its repeats come last.
    meter: what counts (default: a new Meter). Raises RuntimeError where that did not count each
    sample once.
    """
    model.eval()
    meter = meter or Meter(device)
    left = len(range(get_rank(), len(loader.dataset), get_world_size()))
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        outputs, labels = model(images)[:left], labels[:left]
        left -= len(labels)
        if len(labels):
            meter.update(cross_entropy(outputs, labels), outputs, labels)
    result = meter.compute()
    if result["samples"] != len(loader.dataset):
        raise RuntimeError(
            f"evaluation counted {result['samples']} samples of a set of {len(loader.dataset)}"
        )
    return result


class MetricLogger:
    """One line an epoch: as JSON in output_dir/metrics.jsonl, and on the main process's console.

    start_epoch: rows of this epoch and later are dropped from the file: the run continues there.
    """

    def __init__(self, output_dir, start_epoch=0):
        self.path = Path(output_dir) / "metrics.jsonl"
        self.best = -1.0
        if is_main_process():
            rows = read_metrics(self.path) if self.path.exists() else []
            rows = [row for row in rows if row["epoch"] < start_epoch]
            self.best = max((row["val_accuracy"] for row in rows), default=-1.0)
            temporary = self.path.with_suffix(".tmp")
            temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
            os.replace(temporary, self.path)

    def log(self, epoch, train, val, lr):
        """Write the row of an epoch (results of Meter.compute()); True if it is
        the best so far (on the main process, which alone saves).

        Raises UserError, on all ranks, where the loss is not a number: such weights are no
        checkpoint.
        """
        _refuse_nan(train["loss"])
        row = {"epoch": epoch, "world_size": get_world_size(), "lr": lr}
        for split, result in (("train", train), ("val", val)):
            row |= {f"{split}_{name}": value for name, value in result.items()}
        if is_main_process():
            with open(self.path, "a") as file:
                file.write(json.dumps(row) + "\n")
            print(
                f"epoch {epoch}: train loss {train['loss']:.4f} accuracy {train['accuracy']:.2%}, "
                f"val loss {val['loss']:.4f} accuracy {val['accuracy']:.2%}, "
                f"{train['samples'] / train['seconds']:.0f} images/s",
                flush=True,
            )
        is_best, self.best = val["accuracy"] > self.best, max(self.best, val["accuracy"])
        return is_best


def read_metrics(path):
    """The rows of a metrics.jsonl. A line that a crash cut short is left out."""
    rows = []
    for line in Path(path).read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
