"""docs/recipes/metrics.md: metrics of all outputs, which are not means over ranks."""

from functools import partial

import pytest

from tests.forked import ROUNDING, killed_at
from tests.recipes import applied, run_to_end

NAMES = ("val_auc", "val_f1", "val_loss", "val_accuracy", "val_samples")


def numbers(run):
    return [row[name] for row in run.rows for name in NAMES]


@pytest.mark.slow
def test_metrics_do_not_depend_on_the_number_of_ranks(tmp_path):
    pytest.importorskip("torchmetrics")
    script = applied("metrics", tmp_path / "copy") / "train_ddp.py"
    train = partial(run_to_end, synthetic_samples=155, global_batch_size=12)
    one = numbers(train(script, 1, tmp_path / "one")[0])
    assert len(set(one)) > 8
    train(script, 2, tmp_path / "run", killed_at(1, 3), save_steps=2)
    run, _ = train(script, 3, tmp_path / "run")
    assert numbers(run) == pytest.approx(one, rel=ROUNDING)
