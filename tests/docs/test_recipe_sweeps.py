"""docs/recipes/sweeps.md: trials that finish, are pruned, or fail."""

import sqlite3

import pytest

from tests.processes import SMALL
from tests.recipes import applied
from tools.lib.edits import changed
from tools.lib.ladder import ROOT
from tools.lib.runs import finish_run, start_run

pytest.importorskip("optuna")
PATH = {"PYTHONPATH": ROOT}  # for tools.launch
FLAGS = SMALL | {"synthetic_samples": 60, "image_size": 8, "epochs": 2, "num_threads": 1}


@pytest.mark.slow
@pytest.mark.rare
def test_trials(tmp_path):
    folder = applied("sweeps", tmp_path / "copy")
    script = folder / "sweep.py"
    text = script.read_text()

    def sweep(flags, pruner):
        changes = [
            ("n_trials=20", "n_trials=1"),
            ("time.sleep(1)", "time.sleep(0.05)"),
            ("create_study(", f"create_study(pruner=optuna.pruners.{pruner}, "),
        ]
        script.write_text(changed(text, changes, script))
        run = finish_run(start_run(script, None, flags, PATH, folder), folder)
        assert run.code == 0, run.stderr
        return run

    sweep(FLAGS, "NopPruner()")
    stderr = sweep(FLAGS | {"epochs": 1000}, "ThresholdPruner(lower=2)").stderr
    assert "Traceback" not in stderr
    assert "exit code 1" in sweep(FLAGS | {"global_batch_size": 13}, "NopPruner()").stderr
    with sqlite3.connect(folder / "sweep.db") as database:
        states = database.execute("select number, state from trials order by number").fetchall()
        reported = database.execute("select step from trial_intermediate_values where trial_id = 1")
        assert reported.fetchall() == [(0,), (1,)]
    assert states == [(0, "COMPLETE"), (1, "PRUNED"), (2, "FAIL")]
    assert (folder / "runs" / "sweep" / "1" / "last.pt").exists()
