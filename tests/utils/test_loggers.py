"""--logger: rows for other programs, which never stop or slow a run."""

import json
import os
import subprocess
import sys
import time

import pytest

from tests.forked import FIVE_STEPS, fork_script, killed_at
from tests.processes import run_script
from utils.checkpoint import read_checkpoint
from utils.config import ConfigError
from utils.errors import UserError
from utils.options import loggers
from utils.options.loggers import Logger, build_logger

FLAGS = FIVE_STEPS | {"log_steps": 2}


class Recording(Logger):
    """Notes its calls in a file of output_dir."""

    file = "calls.jsonl"

    def start(self, folder, settings, run_id, step):
        self.path = folder / self.file
        self._note("start", settings["epochs"], run_id, step)
        return run_id or "the id"

    def log(self, values, step):
        self._note("log", step, values)

    def finish(self):
        self._note("finish")

    def _note(self, *call):
        with open(self.path, "a") as file:
            file.write(json.dumps(call) + "\n")


class Second(Recording):
    file = "second.jsonl"


class Failing(Recording):
    def log(self, values, step):
        raise ConnectionError("no\nnetwork")


class Hanging(Recording):
    def start(self, folder, settings, run_id, step):
        time.sleep(600)


class Exiting(Recording):
    def start(self, folder, settings, run_id, step):
        sys.exit(1)


def logger(kind):
    return f"tests.utils.test_loggers:{kind.__name__}"


def calls(folder, kind=Recording):
    return [json.loads(line) for line in (folder / kind.file).read_text().splitlines()]


def test_rows_of_steps_and_epochs_are_logged_once_per_job(tmp_path):
    flags = FLAGS | {"output_dir": tmp_path / "run", "logger": logger(Recording), "timing": True}
    run = fork_script("train_ddp.py", 2, **flags)
    assert (run.code, run.stderr) == (0, "")
    start, *logged, finish = calls(run.output_dir)
    assert (start, finish) == (["start", 2, None, 0], ["finish"])
    assert [step for _, step, _ in logged] == [2, 4, 5, 7, 9, 10]
    steps = [json.loads(line) for line in (run.output_dir / "steps.jsonl").read_text().splitlines()]
    losses = [values["loss"] for _, _, values in logged if "loss" in values]
    assert losses == [row["loss"] for row in steps]
    values, row = logged[-1][2], run.rows[-1]
    assert values["val_accuracy"] == row["val_accuracy"]
    assert values["time_total"] == row["time"]["total"]
    assert values["time_computing"] == pytest.approx(sum(row["time"]["computing"]) / 2)
    assert all(isinstance(value, int | float) for value in values.values())
    assert not {"epoch", "step", "world_size"} & logged[0][2].keys()


def test_resumed_run_continues_its_curves(tmp_path):
    """Killed after step 4 of the second epoch, and resumed from step 3, with a second logger, which
    gets the rows from the start on."""
    flags = FLAGS | {"output_dir": tmp_path / "run", "save_steps": 3}
    dead = fork_script("train_1gpu.py", None, killed_at(1, 4), logger=logger(Recording), **flags)
    assert dead.code == -9
    killed = calls(dead.output_dir)
    run = fork_script("train_1gpu.py", logger=f"{logger(Recording)},{logger(Second)}", **flags)
    assert (run.code, run.stderr) == (0, "")

    start, *logged, finish = calls(run.output_dir)[len(killed) :]
    assert start[:3] == ["start", 2, "the id"]
    assert finish == ["finish"]
    before = [call[1] for call in killed if call[0] == "log"]
    after = [step for _, step, _ in logged]
    assert sorted({*before, *after}) == [2, 4, 5, 7, 9, 10]
    assert before == sorted(set(before))
    assert after == sorted(set(after))
    assert set(before) & set(after) <= {7, 9}  # on their way, or after the checkpoint

    start, *logged, finish = calls(run.output_dir, Second)
    assert (start, finish) == (["start", 2, None, 0], ["finish"])
    assert [step for _, step, _ in logged] == [2, 4, 5, 7, 9, 10]


def test_loggers_that_fail_cost_a_warning_each(tmp_path):
    def before():
        loggers.SECONDS_TO_FINISH = 2.0  # also on a busy machine

    kinds = [Failing, Exiting, Hanging]
    names = ",".join(logger(kind) for kind in [*kinds, Second])
    run = fork_script("train_1gpu.py", None, before, output_dir=tmp_path, logger=names, **FLAGS)
    assert run.code == 0 and len(run.rows) == 2
    warnings = run.stderr.splitlines()
    assert len(warnings) == 3
    for kind, reason in zip(kinds, ["no network", "SystemExit: 1", "in time"], strict=True):
        (warning,) = [line for line in warnings if logger(kind) in line]
        assert warning.startswith("warning: ")
        assert reason in warning
    assert calls(tmp_path, Second)[-1] == ["finish"]


@pytest.mark.slow
def test_run_that_is_stopped_by_an_error_is_finished(tmp_path):
    flags = FLAGS | {"output_dir": tmp_path / "run", "logger": logger(Recording), "lr": 1e9}
    run = run_script("train_1gpu.py", None, 180, **flags)
    assert run.code == 1 and "inf or NaN" in run.stderr
    assert calls(tmp_path / "run")[-1] == ["finish"]


def test_unknown_loggers_and_missing_packages_are_named(monkeypatch):
    with pytest.raises(ConfigError, match="wand "):
        build_logger("wand")
    with pytest.raises(ConfigError, match="Recorder"):
        build_logger("tests.utils.test_loggers:Recorder")
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UserError, match="package mlflow"):
        build_logger("mlflow")


@pytest.mark.slow
def test_tensorboard_files_have_the_curves(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = FLAGS | {"output_dir": tmp_path / "run", "logger": "tensorboard", "save_steps": 3}
    assert fork_script("train_1gpu.py", None, killed_at(1, 4), **flags).code == -9
    run = fork_script("train_1gpu.py", **flags)
    assert (run.code, run.stderr) == (0, "")
    events = EventAccumulator(str(run.output_dir / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [2, 4, 7, 9]
    losses = [(event.step, event.value) for event in events.Scalars("val_loss")]
    expected = [(5 * i + 5, pytest.approx(row["val_loss"])) for i, row in enumerate(run.rows)]
    assert losses == expected


def resumed_with(name, folder, **environment):
    """A run of one epoch, which is then resumed for a second one. Returns the second run."""
    flags = FLAGS | {"output_dir": folder / "run", "logger": name, "allow_config_change": True}
    for epochs in (1, 2):
        run = run_script("train_1gpu.py", None, 180, environment, **flags | {"epochs": epochs})
        assert run.code == 0 and "warning: --logger" not in run.stderr, run.stderr
    return run


def test_mlflow_has_the_curves(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    resumed_with("mlflow", tmp_path, MLFLOW_TRACKING_URI=uri, MLFLOW_EXPERIMENT_NAME="ours")
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("ours").experiment_id])
    assert (run.info.status, run.data.params["global_batch_size"]) == ("FINISHED", "12")
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [metric.step for metric in history] == [2, 4, 7, 9]


def test_trackio_has_the_curves(tmp_path):
    pytest.importorskip("trackio")
    folder = tmp_path / "trackio"
    run = resumed_with("trackio", tmp_path, TRACKIO_DIR=str(folder))
    name = read_checkpoint(run.output_dir / "last.pt")["guards"]["Loggers"]["trackio"][0]
    code = "import json, sys; from trackio.sqlite_storage import SQLiteStorage as storage; "
    code += "print(json.dumps(storage.get_logs('runs', sys.argv[1])))"
    command = [sys.executable, "-c", code, name]
    environment = os.environ | {"TRACKIO_DIR": str(folder)}
    read = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    rows = json.loads(read.stdout.splitlines()[-1])
    assert [row["step"] for row in rows if "loss" in row] == [2, 4, 7, 9]
    assert [row["val_loss"] for row in rows if "val_loss" in row] == [
        pytest.approx(row["val_loss"]) for row in run.rows
    ]


def test_wandb_continues_its_run_offline(tmp_path):
    pytest.importorskip("wandb")
    run = resumed_with("wandb", tmp_path, WANDB_MODE="offline", WANDB_SILENT="true")
    files = sorted((run.output_dir / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and files[0].name == files[1].name  # one id
