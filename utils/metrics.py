"""Loss and accuracy over all ranks, and where they are logged. Needs torch and distributed.py."""

import json
import math
import os
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from utils import errors
from utils.distributed import all_gather_object, all_reduce, dp_rank, dp_world_size, is_main_process
from utils.errors import UserError


class Meter:
    """Running sums of loss and correct predictions, kept on the device.

    There is no .item() in a step, because it would make the CPU wait for the GPU, and only one
    reduction per epoch. A checkpoint within an epoch holds the sums so far.
    """

    def __init__(self, device):
        self.device = device
        self._set()

    def _set(self, loss=0.0, correct=0.0, samples=0, seconds=0.0):
        self.sums = torch.tensor([loss, correct], dtype=torch.float64, device=self.device)
        self.samples, self.seconds = samples, seconds
        self.start()

    def start(self):
        """Start the clock: the time before this call does not count."""
        self.clock = time.perf_counter()

    def update(self, loss, outputs, labels):
        """loss: mean over this batch; outputs: (n, classes); labels: int64 (n,)."""
        correct = (outputs.argmax(1) == labels).sum()
        self.sums += torch.stack([loss.detach().double() * len(labels), correct.double()])
        self.samples += len(labels)

    def compute(self):
        """Mean loss, accuracy, samples and seconds, over all ranks; resets the sums to 0.

        The sums are reduced, not the ranks' means, which would overweight the samples of a rank
        that has fewer of them.
        """
        samples = self.sums.new_tensor([self.samples])
        loss, correct, samples = all_reduce(torch.cat([self.sums, samples])).tolist()
        seconds = self.seconds + time.perf_counter() - self.clock
        self._set()
        return {
            "loss": loss / samples,
            "accuracy": correct / samples,
            "samples": int(samples),
            "seconds": seconds,
        }

    def state_dict(self):
        """The sums of every rank; all ranks call it together."""
        seconds = self.seconds + time.perf_counter() - self.clock if self.samples else 0.0
        ranks = all_gather_object([*self.sums.tolist(), self.samples, seconds])
        return {"ranks": ranks[:: len(ranks) // dp_world_size()]}  # one of each replica

    def load_state_dict(self, state):
        """Each rank takes its own sums; if the number of ranks has changed, rank 0 takes all."""
        ranks = state["ranks"]
        if len(ranks) == dp_world_size():
            self._set(*ranks[dp_rank()])
        elif dp_rank() == 0:
            loss, correct, samples, seconds = zip(*ranks, strict=True)
            self._set(sum(loss), sum(correct), sum(samples), max(seconds))


@torch.no_grad()
def evaluate(model, loader, meter):
    """Loss and accuracy over the samples of `loader.dataset`, each counted exactly once.

    DistributedSampler repeats samples until every rank has the same number. The repeated
    samples are computed, because a forward pass may communicate and so must run on all ranks, but
    not counted: rank r holds the samples r, r + world size, ..., and its repeated ones come last.
    Raises RuntimeError if the number of samples counted is not the dataset's.
    """
    model.eval()
    meter.start()
    left = len(range(dp_rank(), len(loader.dataset), dp_world_size()))
    for images, labels in loader:
        outputs = model(images)[:left]
        labels = labels[:left].to(outputs.device)
        left -= len(labels)
        if len(labels):
            meter.update(cross_entropy(outputs, labels), outputs, labels)
    result = meter.compute()
    if result["samples"] != len(loader.dataset):
        raise RuntimeError(f"evaluated {result['samples']} of {len(loader.dataset)} samples")
    return result


class MetricLogger:
    """One line per epoch: as JSON in output_dir/metrics.jsonl, and on the main process's console.

    start_epoch: rows of this epoch and later are dropped from the file; the run continues there.
    """

    def __init__(self, output_dir, start_epoch=0):
        self.path = Path(output_dir) / "metrics.jsonl"
        self.rows = [row for row in read_metrics(self.path) if row["epoch"] < start_epoch]
        write_rows(self.path, self.rows)

    def log(self, epoch, train, val, lr):
        """Log the results of Meter.compute() for an epoch. Returns whether the validation accuracy
        is the best so far (on the main process, which alone saves and knows).

        Raises UserError, on all ranks, if a loss is not finite, and on rank 0 if the file cannot be
        written.
        """
        if not math.isfinite(train["loss"] + val["loss"]):
            raise UserError(
                f"the training loss is {train['loss']}, the validation loss {val['loss']}: try a "
                f"smaller --lr, or --clip-norm 1"
            )
        row = {"epoch": epoch, "world_size": int(os.environ.get("WORLD_SIZE") or 1), "lr": lr}
        for split, result in (("train", train), ("val", val)):
            row |= {f"{split}_{name}": value for name, value in result.items()}
        best = max((row["val_accuracy"] for row in self.rows), default=-1.0)
        self.rows.append(row)
        write_rows(self.path, self.rows)
        if is_main_process():
            with suppress(BrokenPipeError):  # of  ... | head: the epoch is still to be saved
                print(
                    f"epoch {epoch}: train loss {train['loss']:.4f} accuracy "
                    f"{train['accuracy']:.2%}, val loss {val['loss']:.4f} accuracy "
                    f"{val['accuracy']:.2%}, {train['samples'] / train['seconds']:.0f} images/s",
                    flush=True,
                )
        return val["accuracy"] > best


def write_rows(path, rows):
    """Replace a .jsonl file as a whole, on the main process. Raises UserError if it fails."""
    temporary = path.with_suffix(".tmp")
    try:
        if is_main_process():
            temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
            os.replace(temporary, path)
    except OSError as error:
        errors.save_failed(f"cannot write {path}: {error.strerror}")


def read_metrics(path):
    """The rows of a metrics.jsonl, if any, up to the first line that a crash has truncated."""
    rows = []
    with suppress(FileNotFoundError, json.JSONDecodeError):
        for line in Path(path).read_text().splitlines():
            rows.append(json.loads(line))
    return rows
