"""--logger: rows for TensorBoard, Weights & Biases, trackio or MLflow, or for a class of your own.

Each logger runs in a thread of rank 0: one that fails, hangs or has lost the network costs the run
a warning. It is given the rows of metrics.jsonl and, with --log-steps, of steps.jsonl.

The checkpoint holds the id that the run has with each logger, and the last row that the logger has
been given; a resumed run continues with the next. The rows that a killed run has passed on after
its last checkpoint are passed on again when their steps are repeated, with the same values.
"""

import atexit
import importlib
import json
import math
import os
import queue
import statistics
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from utils.config import ConfigError
from utils.distributed import is_main_process
from utils.errors import UserError, warn
from utils.guards import Guard

SECONDS_TO_FINISH = 30.0  # for all loggers together, when the run ends
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


class Loggers(Guard):
    """Passes the rows of a run on to its loggers, on the main process.

    known: {name of a logger: [the run's id, the place of the last row that it has got]}.
    """

    def __init__(self) -> None:
        self.known: dict[str, list[Any]] = {}
        self.threads: list[_Thread] = []
        self.epochs = self.position = 0  # rows of epochs, and bytes of steps.jsonl, read so far

    def state_dict(self) -> dict[str, Any]:
        return self.known | {thread.title: list(thread.known) for thread in self.threads}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.known = state

    def at_start(self, checkpoint: Any) -> None:
        """Start the threads; they also get the rows that a killed run has not passed on."""
        cfg, length = checkpoint.cfg, len(checkpoint.state["loader"])
        loggers = {name: build_logger(name) for name in cfg.logger.split(",")}
        if not is_main_process() or checkpoint.epoch == cfg.epochs:
            return
        for name, logger in loggers.items():
            known = self.known.get(name, [None, [0, 0]])
            self.threads.append(_Thread(name, logger, checkpoint.folder, vars(cfg), length, known))
        for thread in self.threads:
            thread.start()
        self._pass_on(checkpoint)
        atexit.register(self._finish, 5.0)  # also if the run is stopped by an error or a signal

    def after_step(self, checkpoint: Any) -> None:
        every, has_row = checkpoint.cfg.log_steps, self.epochs < checkpoint.epoch
        if self.threads and (has_row or (every and checkpoint.state["loader"].step % every == 0)):
            self._pass_on(checkpoint)

    def before_save(self, checkpoint: Any, between_steps: bool) -> None:
        if self.threads:
            self._pass_on(checkpoint)
        if checkpoint.epoch == checkpoint.cfg.epochs:
            self._finish(SECONDS_TO_FINISH)

    def _pass_on(self, checkpoint):
        """Give the threads the rows that are new."""
        rows = checkpoint.state["metrics"].rows[self.epochs :]
        self.epochs += len(rows)
        path = checkpoint.folder / "steps.jsonl"
        if checkpoint.cfg.log_steps and path.exists():
            with open(path, "rb") as file:
                file.seek(self.position)
                lines = file.read().splitlines()
                self.position = file.tell()
            rows = sorted([*rows, *map(json.loads, lines)], key=_place)
        for thread in self.threads:
            for row in rows:
                thread.add(row)

    def _finish(self, seconds):
        """Let the threads log what they still have, for this long at most."""
        end = time.monotonic() + seconds
        for thread in self.threads:
            thread.rows.put(None)
        for thread in self.threads:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                thread.fail("it has not finished in time")
            self.known[thread.title] = list(thread.known)
        self.threads = []


def _place(row):
    """[epoch, step] of a row; of that of an epoch, after all steps."""
    return [row["epoch"], row.get("step", math.inf)]


def _numbers(row):
    """{name: number} of a row: its numbers, and the means over the ranks of what --timing adds."""
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
    for name, seconds in row.get("time", {}).items():
        numbers[f"time_{name}"] = statistics.mean(seconds) if name != "total" else seconds
    return {name: value for name, value in numbers.items() if name not in PLACES}


class _Thread(threading.Thread):
    """Starts a logger, and logs row after row. length: steps of an epoch."""

    def __init__(self, title, logger, folder, settings, length, known):
        super().__init__(daemon=True)
        self.title, self.logger, self.folder, self.settings = title, logger, folder, settings
        self.length, self.known = length, known
        self.rows = queue.SimpleQueue()
        self.has_failed = False

    def add(self, row):
        if not self.has_failed:
            self.rows.put(row)

    def run(self):
        try:
            run_id, place = self.known
            run_id = self.logger.start(self.folder, self.settings, run_id, self._step_at(place))
            self.known = [run_id, place]
            while row := self.rows.get():
                place = _place(row)
                if place > self.known[1]:  # not logged by the run that was resumed
                    self.logger.log(_numbers(row), self._step_at(place))
                    self.known = [run_id, place]
            self.logger.finish()
        except (Exception, SystemExit) as error:
            self.fail(f"{type(error).__name__}: {error}")

    def _step_at(self, place):
        """Optimizer steps from the start of the run."""
        epoch, step = place
        return epoch * self.length + min(step, self.length)

    def fail(self, reason):
        if not self.has_failed:
            self.has_failed = True
            reason = " ".join(reason.split())
            warn(f"--logger {self.title} has failed, and the run continues without it: {reason}")
