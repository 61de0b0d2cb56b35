"""--logger: rows for TensorBoard, Weights & Biases, trackio or MLflow, or for a class of your own.

Each logger runs in a thread of rank 0: one that fails, hangs or has lost the network costs the run
a warning. It is given the rows of metrics.jsonl and, with --log-steps, of steps.jsonl.

output_dir/loggers.json holds the id that the run has with each logger, the last steps that the
logger has been given, and how many steps epochs have had (a different global batch size changes
that). A resumed run continues its own curves: it logs no step twice, and logs the rows in these
files that the killed run had not passed on. Checkpoints cannot hold this: a killed run may have
logged steps after its last checkpoint.
"""

import copy
import importlib
import itertools
import json
import os
import queue
import statistics
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from utils.distributed import is_main_process
from utils.errors import UserError, warn
from utils.files import write_text
from utils.hooks import Checkpoint, Hook
from utils.metrics import read_metrics
from utils.reports import explain_errors
from utils.settings import ConfigError

SECONDS_TO_FINISH = 30.0  # for all loggers together, when the run ends
MOST_ROWS = 10_000  # that wait for a slow logger
PLACES = ("epoch", "step", "samples", "world_size")  # say where a row belongs: no curves


class Logger:
    """Base class of loggers. All methods are called in one thread, and may raise anything.

    package: what it imports, checked when the run starts.
    """

    package = ""

    def start(
        self, folder: Path, settings: dict[str, Any], run_id: str | None, step: int
    ) -> str | None:
        """Start the run, or continue the one that has this id, if it is not None. Returns the id, a
        string. folder: output_dir, a Path. settings: {name: value}. step: the last one that is
        known to be logged; a run that was killed may have logged one more, which will be repeated.
        """

    def log(self, values: dict[str, float], step: int) -> None:
        """values: {name: number}. step: optimizer steps since the run began."""

    def finish(self) -> None:
        """The run has ended."""


class TensorBoard(Logger):
    """Logs to output_dir/tensorboard (https://docs.pytorch.org/docs/stable/tensorboard.html)."""

    package = "tensorboard"

    def start(self, folder: Path, settings: dict[str, Any], run_id: str | None, step: int) -> str:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(folder / "tensorboard", purge_step=step + 1)
        if run_id is None:
            self.writer.add_hparams(settings, {}, run_name=".")
        return "tensorboard"

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def finish(self) -> None:
        self.writer.close()


class Wandb(Logger):
    """Set by the environment: WANDB_PROJECT, WANDB_MODE and others (https://docs.wandb.ai)."""

    package = "wandb"

    def start(self, folder: Path, settings: dict[str, Any], run_id: str | None, step: int) -> str:
        import wandb

        run_id = run_id or uuid.uuid4().hex
        self.run = wandb.init(
            id=run_id, name=folder.name, config=settings, dir=folder, resume="allow"
        )
        return run_id

    def log(self, values: dict[str, float], step: int) -> None:
        self.run.log(values, step=step)

    def finish(self) -> None:
        self.run.finish()


class Trackio(Logger):
    """Logs to the project "runs", below TRACKIO_DIR (https://huggingface.co/docs/trackio)."""

    package = "trackio"

    def start(self, folder: Path, settings: dict[str, Any], run_id: str | None, step: int) -> str:
        import trackio

        run_id = run_id or f"{folder.name}-{uuid.uuid4().hex[:8]}"
        self.run = trackio.init("runs", name=run_id, config=settings, resume="allow", embed=False)
        return run_id

    def log(self, values: dict[str, float], step: int) -> None:
        self.run.log(values, step=step)

    def finish(self) -> None:
        self.run.finish()


class Mlflow(Logger):
    """Set by MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME (https://mlflow.org/docs/latest)."""

    package = "mlflow"

    def start(self, folder: Path, settings: dict[str, Any], run_id: str | None, step: int) -> str:
        import mlflow
        from mlflow.entities import Param

        self.client = mlflow.MlflowClient()
        if run_id is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
            experiment = mlflow.set_experiment(name).experiment_id
            run = self.client.create_run(experiment, run_name=folder.name)
            run_id = run.info.run_id
            params = [Param(name, str(value)) for name, value in settings.items()]
            self.client.log_batch(run_id, params=params)
        else:
            self.client.update_run(run_id, status="RUNNING")
        self.run_id = run_id
        return run_id

    def log(self, values: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        self.client.log_batch(self.run_id, metrics=metrics)

    def finish(self) -> None:
        self.client.set_terminated(self.run_id)


LOGGERS = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio, "mlflow": Mlflow}


def build_logger(name: str) -> Logger:
    """The Logger of that name, or of the class MODULE:CLASS. Raises ConfigError, or UserError if
    its package is not installed."""
    module, _, kind = name.partition(":")
    if not kind and name not in LOGGERS:
        raise ConfigError(
            f"--logger {name} is not one of {', '.join(LOGGERS)}, nor of the form MODULE:CLASS"
        )
    try:
        logger = getattr(importlib.import_module(module), kind) if kind else LOGGERS[name]
        if logger.package:
            importlib.import_module(logger.package)
    except ModuleNotFoundError as error:
        raise UserError(f"--logger {name} needs the package {error.name}: install it") from None
    except AttributeError as error:
        raise ConfigError(f"--logger {name}: {error}") from None
    return logger()


class Loggers(Hook):
    """Passes the rows of a run on to its loggers, on the main process."""

    def __init__(self, cfg: Any, state: Mapping[str, Any]) -> None:
        self.folder = Path(cfg.output_dir)
        self.settings = vars(cfg)
        self.loader, self.threads = state["loader"], []
        self.lock, self.known = threading.Lock(), {}
        loggers = {name: build_logger(name) for name in cfg.logger.split(",")}
        if is_main_process():
            self.threads = [_Thread(name, logger, self) for name, logger in loggers.items()]
            explain_errors(lambda error: self.finish(5.0))

    def after_load(self, checkpoint: Checkpoint) -> None:
        """Let the threads log the rows that a killed run has written to files, but not yet passed
        on to a logger; with a logger that is new, all rows."""
        with suppress(FileNotFoundError, ValueError):  # damaged
            self.known = json.loads((self.folder / "loggers.json").read_text(encoding="utf-8"))
        self._note_length_of_epochs(checkpoint.epoch)
        rows = read_metrics(self.folder / "steps.jsonl")  # only those that will not be repeated
        rows += [
            row
            for row in read_metrics(self.folder / "metrics.jsonl")
            if row["epoch"] < checkpoint.epoch
        ]
        if checkpoint.epoch == checkpoint.cfg.epochs:
            rows = []
        rows = [self._as_logged(row) for row in sorted(rows, key=self._step_of)]
        for thread in self.threads:
            thread.begin(rows)

    def _note_length_of_epochs(self, epoch):
        """Note a new length of epochs, from this one on: the steps continue from the last."""
        length = len(self.loader)
        lengths = self.known.pop("lengths", [[0, 0, length]])  # of epochs, after that many steps
        entries = [max(entry["epoch"], entry["step"]) for entry in self.known.values()]
        self.known["lengths"] = [part for part in lengths if part[0] <= epoch]
        if self.known["lengths"][-1][2] != length:
            done = max([self._step_of({"epoch": epoch, "step": 0}), *entries])
            earlier = [part for part in lengths if part[0] < epoch]
            self.known["lengths"] = [*earlier, [epoch, done, length]]

    def after_row(self, row: dict[str, Any]) -> None:
        """Let the threads log a row of an epoch, or of a step."""
        for thread in self.threads:
            thread.add(*self._as_logged(row))

    def _as_logged(self, row):
        """(kind, {name: number}, step) of a row."""
        kind = "step" if "step" in row else "epoch"
        values = {name: value for name, value in _numbers(row).items() if name not in PLACES}
        return kind, values, self._step_of(row)

    def _step_of(self, row):
        """Optimizer steps from the start of the run to a row."""
        epoch = row["epoch"]
        first, done, length = [part for part in self.known["lengths"] if part[0] <= epoch][-1]
        return done + (epoch - first) * length + row.get("step", length)

    def before_save(self, checkpoint: Checkpoint, between_steps: bool) -> None:
        if checkpoint.ends_run:
            self.finish(SECONDS_TO_FINISH)

    def finish(self, seconds: float) -> None:
        """Let the threads log what they still have, for this long at most."""
        end = time.monotonic() + seconds
        for thread in self.threads:
            thread.end()
        for thread in self.threads:
            thread.wait(end)
        self.threads = []

    def remember(self, name: str, entry: dict[str, Any]) -> None:
        """Note in loggers.json what a logger has got. Called by its thread."""
        with self.lock:
            self.known[name] = copy.deepcopy(entry)
            write_text(self.folder / "loggers.json", json.dumps(self.known))


def _numbers(row):
    """{name: number} of a row: its numbers, and the means over the ranks of what --timing adds."""
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
    for name, seconds in row.get("time", {}).items():
        numbers[f"time_{name}"] = statistics.mean(seconds) if name != "total" else seconds
    return numbers


class _Thread(threading.Thread):
    """Starts a logger with its first row, and logs row after row."""

    def __init__(self, name, logger, hook):
        super().__init__(daemon=True)
        self.title = name
        self.logger = logger
        self.hook = hook
        self.rows = queue.Queue(MOST_ROWS)
        self.has_failed = False
        self.entry: dict[str, Any] = {"id": None, "epoch": 0, "step": 0}
        self.backlog = []

    def begin(self, rows):
        """Log the rows of a killed run that the logger has not got: any number."""
        self.entry = self.hook.known.get(self.title, self.entry)
        self.backlog = [row for row in rows if row[2] > self.entry[row[0]]]
        if self.backlog:
            self.start()

    def add(self, kind, values, step):
        if self.has_failed:
            return
        if self.ident is None:
            self.start()
        try:
            self.rows.put_nowait((kind, values, step))
        except queue.Full:
            self._fail(f"it has not accepted {MOST_ROWS:,} rows")

    def end(self):
        with suppress(queue.Full):
            self.rows.put_nowait(None)

    def wait(self, end):
        """Wait until all rows are logged, or until time.monotonic() is `end`."""
        if self.ident is None or self.has_failed:
            return
        self.join(max(0.0, end - time.monotonic()))
        if self.is_alive():
            self._fail("it has not finished in time")

    def run(self):
        try:
            entry = self.entry
            entry["id"] = self.logger.start(
                self.hook.folder,
                self.hook.settings,
                entry["id"],
                max(entry["epoch"], entry["step"]),
            )
            self.hook.remember(self.title, entry)
            rows = itertools.chain(self.backlog, iter(self.rows.get, None))
            self.backlog = []  # its memory is free once it is logged
            for kind, values, step in rows:
                if step > entry[kind]:  # not repeated after a resume
                    self.logger.log(values, step)
                    entry[kind] = step
                    self.hook.remember(self.title, entry)
            self.logger.finish()
        except (Exception, SystemExit) as error:
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, reason):
        if not self.has_failed:
            self.has_failed = True
            reason = " ".join(reason.split())
            warn(f"--logger {self.title} has failed, and the run continues without it: {reason}")
