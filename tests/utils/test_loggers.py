"""--logger: rows for other programs, which never stop or slow a run."""

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from tests.forked import FIVE_STEPS, fork_script, killed_at
from tests.processes import run_script
from utils.config import Config
from utils.options import loggers
from utils.options.loggers import Logger, build_logger
from utils.settings import ConfigError

FLAGS = FIVE_STEPS | {"log_steps": 2}


class Recording(Logger):
    """Notes its calls in output_dir/calls.jsonl."""

    def start(self, folder, settings, run_id, step):
        self.path = folder / "calls.jsonl"
        self._note("start", settings["epochs"], run_id)
        return run_id or "the id"

    def log(self, values, step):
        self._note("log", step, values)

    def finish(self):
        self._note("finish")

    def _note(self, *call):
        with open(self.path, "a") as file:
            file.write(json.dumps(call) + "\n")


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


def calls(folder):
    return [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]


def test_rows_of_steps_and_epochs_are_logged_once_per_job(tmp_path):
    flags = FLAGS | {"output_dir": tmp_path / "run", "logger": logger(Recording)}
    run = fork_script("train_ddp.py", 2, timing=True, **flags)
    assert (run.code, run.stderr) == (0, "")
    start, *logged, finish = calls(run.output_dir)
    assert (start, finish) == (["start", 2, None], ["finish"])
    assert [step for _, step, _ in logged] == [2, 4, 5, 7, 9, 10]
    steps = [json.loads(line) for line in (run.output_dir / "steps.jsonl").read_text().splitlines()]
    assert [values["loss"] for _, _, values in logged if "loss" in values] == [
        row["loss"] for row in steps
    ]
    assert logged[-1][2]["val_accuracy"] == run.rows[-1]["val_accuracy"]
    assert not {"epoch", "step", "world_size"} & logged[0][2].keys()
    values, seconds = logged[-1][2], run.rows[-1]["time"]
    assert values["time_total"] == seconds["total"]
    assert values["time_computing"] == pytest.approx(sum(seconds["computing"]) / 2)
    assert all(isinstance(value, int | float) for value in values.values())


def test_resumed_run_continues_its_curves(tmp_path):
    flags = FLAGS | {"output_dir": tmp_path / "run", "logger": logger(Recording), "save_steps": 3}
    dead = fork_script("train_1gpu.py", None, killed_at(1, 4), **flags)
    assert dead.code == -9
    killed = calls(dead.output_dir)
    run = fork_script("train_ddp.py", 2, **flags)
    assert (run.code, run.stderr) == (0, "")
    resumed = calls(run.output_dir)[len(killed) :]
    assert resumed[0] == ["start", 2, "the id"]
    before, after = ([call[1] for call in part if call[0] == "log"] for part in (killed, resumed))
    assert before + after in ([2, 4, 5, 7, 9, 10], [2, 4, 5, 7, 9, 9, 10], [2, 4, 5, 7, 7, 9, 10])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Failing, "ConnectionError: no network"),
        (Exiting, "SystemExit: 1"),
        (Hanging, "in time"),
    ],
)
def test_logger_that_fails_costs_a_warning(kind, reason, tmp_path):
    def before():
        loggers.SECONDS_TO_FINISH = 0.5

    names = f"{logger(kind)},{logger(Recording)}"
    run = fork_script("train_1gpu.py", None, before, output_dir=tmp_path, logger=names, **FLAGS)
    assert run.code == 0 and len(run.rows) == 2
    assert run.stderr.startswith(f"warning: --logger {logger(kind)} ")
    assert run.stderr.endswith(f"{reason}\n") and run.stderr.count("\n") == 1
    assert "the run continues" in run.stderr
    assert calls(tmp_path)[-1] == ["finish"]


def test_slow_logger_holds_a_limited_number_of_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loggers, "MOST_ROWS", 3)
    released = threading.Event()

    class Slow(Logger):
        def start(self, folder, settings, run_id, step):
            released.wait(60)

    thread = loggers._Thread("slow", Slow(), hook=None)
    monkeypatch.setattr(thread, "hook", loggers.Loggers.__new__(loggers.Loggers))
    thread.hook.known, thread.hook.folder, thread.hook.settings = {}, tmp_path, {}
    for step in range(10):
        thread.add("step", {"loss": 1.0}, step)
    released.set()
    (warning,) = capsys.readouterr().err.splitlines()
    assert "--logger slow " in warning and warning.endswith(" 3 rows")


def test_rows_that_a_killed_run_has_not_passed_on_are_logged_by_the_next(tmp_path):
    """The logger of the killed run has not even started; a second one is new."""
    flags = FLAGS | {"output_dir": tmp_path / "run", "save_steps": 3}
    dead = fork_script("train_1gpu.py", None, killed_at(1, 4), logger=logger(Hanging), **flags)
    assert dead.code == -9
    run = fork_script("train_1gpu.py", logger=logger(Recording), **flags)
    assert (run.code, run.stderr) == (0, "")
    start, *logged, finish = calls(run.output_dir)
    assert (start, finish) == (["start", 2, None], ["finish"])
    assert [step for _, step, _ in logged] == [2, 4, 5, 7, 9, 10]


class Listing(Logger):
    """Notes the steps that it logs; slow to start, as most are."""

    def __init__(self):
        self.started, self.steps = threading.Event(), []

    def start(self, folder, settings, run_id, step):
        assert self.started.wait(60)

    def log(self, values, step):
        self.steps.append(step)


def resumed(folder, monkeypatch, epoch=0, length=5):
    """The Loggers of a run that continues with this epoch, and its Listing."""
    logger = Listing()
    monkeypatch.setattr(loggers, "build_logger", lambda name: logger)
    cfg = Config(output_dir=str(folder), logger="listing", epochs=9)
    hook = loggers.Loggers(cfg, {"loader": range(length)})
    hook.after_load(SimpleNamespace(cfg=cfg, epoch=epoch))
    return hook, logger


def test_resumed_run_may_have_more_rows_than_wait_for_a_logger(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loggers, "MOST_ROWS", 3)
    epochs = [[{"epoch": i, "step": step, "loss": 1.0} for step in range(1, 6)] for i in range(3)]
    for epoch, expected in ((2, list(range(1, 11))), (3, list(range(11, 16)))):
        rows = itertools.chain(*epochs[:epoch])
        (tmp_path / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        hook, logger = resumed(tmp_path, monkeypatch, epoch)
        hook.after_row({"epoch": epoch, "loss": 1.0})
        logger.started.set()
        hook.finish(60.0)
        assert logger.steps == [*expected, 5 * epoch + 5]  # what the file has, once; the new row
    assert capsys.readouterr().err == ""


def test_steps_continue_if_epochs_have_another_length(tmp_path, monkeypatch):
    """With a larger global batch: fewer steps. The killed run had logged a step of the epoch that
    is repeated."""
    logged = []
    for epoch, length, steps in ((0, 12, 12), (1, 12, 1), (1, 4, 4), (2, 6, 6)):
        hook, logger = resumed(tmp_path, monkeypatch, epoch, length)
        logger.started.set()
        for step in range(1, steps + 1):
            hook.after_row({"epoch": epoch, "step": step, "loss": 1.0})
        if steps == length:
            hook.after_row({"epoch": epoch, "val_loss": 1.0})
        hook.finish(60.0)
        logged.append(logger.steps)
    assert logged == [[*range(1, 13), 12], [13], [14, 15, 16, 17, 17], [*range(18, 24), 23]]


def test_run_that_is_stopped_by_an_error_is_finished(tmp_path):
    flags = FLAGS | {"output_dir": tmp_path / "run", "logger": logger(Recording), "lr": 1e9}
    run = fork_script("train_1gpu.py", None, **flags)
    assert run.code == 1 and "no longer finite" in run.stderr
    assert calls(tmp_path / "run")[-1] == ["finish"]


def test_unknown_loggers_are_refused():
    with pytest.raises(ConfigError, match=r"--logger wand .*tensorboard, wandb, .*MODULE:CLASS"):
        build_logger("wand")
    with pytest.raises(ConfigError, match="has no attribute 'Recorder'"):
        build_logger("tests.utils.test_loggers:Recorder")


def test_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    run = fork_script("train_1gpu.py", output_dir=tmp_path, logger="mlflow", **FLAGS)
    assert run.code == 1
    assert run.stderr.startswith("error: --logger mlflow ") and run.stderr.count("\n") == 1
    assert "package mlflow" in run.stderr and "install" in run.stderr


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
    name = json.loads((run.output_dir / "loggers.json").read_text())["trackio"]["id"]
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


def test_wandb_has_the_curves_offline(tmp_path):
    pytest.importorskip("wandb")
    run = resumed_with("wandb", tmp_path, WANDB_MODE="offline", WANDB_SILENT="true")
    files = sorted((run.output_dir / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and files[0].name == files[1].name  # one id
    assert [wandb_steps(file, "loss") for file in files] == [[2, 4], [7, 9]]


def wandb_steps(path, name):
    """The steps at which an offline run of Weights & Biases has logged a value: its records are in
    the log format of LevelDB, in blocks of 32 KiB after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, place, record, steps = path.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # complete, or the last part
            parsed = wandb_internal_pb2.Record.FromString(record)
            items = {i.key or i.nested_key[0]: i.value_json for i in parsed.history.item}
            if name in items:
                steps.append(int(items["_step"]))
            record = b""
        if length == 0 and kind == 0:
            break
    return steps
