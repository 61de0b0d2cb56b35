"""Options: what they do to the config, and the one table of hooks that they select."""

import sys
from types import SimpleNamespace

import pytest
import torch

from utils.config import Config, load_config
from utils.errors import UserError
from utils.options import build_hooks

# --per-process-batch-size: the global batch and the learning rate follow from the processes


def load(world_size, monkeypatch, *flags):
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    return load_config(argv=["--lr=0.1", *flags])


def test_global_batch_size_means_the_same_on_any_number_of_processes(monkeypatch):
    for world_size in (1, 4):
        cfg = load(world_size, monkeypatch, "--global-batch-size=256")
        assert (cfg.global_batch_size, cfg.peak_lr) == (256, 0.1)
        assert cfg.fixed_on_resume()["global_batch_size"] == 256


def test_batch_and_learning_rate_grow_with_the_processes(monkeypatch):
    for world_size, batch, rate in ((1, 256, 0.1), (4, 1024, 0.4)):
        cfg = load(world_size, monkeypatch, "--per-process-batch-size=256")
        assert (cfg.global_batch_size, cfg.peak_lr, cfg.lr) == (batch, rate, 0.1)
    cfg = load(4, monkeypatch, "--per-process-batch-size=256", "--lr-scaling=none")
    assert (cfg.global_batch_size, cfg.peak_lr) == (1024, 0.1)
    monkeypatch.delenv("WORLD_SIZE")
    assert load_config(argv=["--per-process-batch-size=8"]).global_batch_size == 8


def test_run_may_be_resumed_by_another_number_of_processes(monkeypatch, tmp_path):
    one, four = (load(n, monkeypatch, "--per-process-batch-size=256") for n in (1, 4))
    assert one.fixed_on_resume() == four.fixed_on_resume()
    assert one.fixed_on_resume()["per_process_batch_size"] == 256
    assert "lr_scaling" in one.fixed_on_resume() and "seed" in one.fixed_on_resume()
    (tmp_path / "config.yaml").write_text(one.dump())
    again = load(4, monkeypatch, f"--config={tmp_path / 'config.yaml'}")
    assert again.global_batch_size == 1024


def test_zero_selects_the_global_batch_size(monkeypatch, tmp_path, capfd):
    (tmp_path / "a.yaml").write_text("per_process_batch_size: 64\n")
    flag = f"--config={tmp_path / 'a.yaml'}"
    assert load(2, monkeypatch, flag).global_batch_size == 128
    cfg = load(2, monkeypatch, flag, "--per-process-batch-size=0")
    assert (cfg.global_batch_size, cfg.peak_lr) == (Config().global_batch_size, 0.1)
    with pytest.raises(SystemExit, match="2"):
        load(2, monkeypatch, flag, "--per-process-batch-size=-3")
    assert "per_process_batch_size must be at least 0 and" in capfd.readouterr().err


# The hooks

TABLE = [  # flags, the hooks that they select, and the module that holds the last of them
    ([], ["Interrupts", "Progress"], None),
    (["--save-minutes=0"], ["Progress"], None),
    (["--audit"], ["Interrupts", "Audit", "Progress"], "audit"),
    (["--max-skipped-steps=0"], ["Interrupts", "SkippedSteps", "Progress"], "skipped_steps"),
    (["--max-skipped-steps=3"], ["Interrupts", "SkippedSteps", "Progress"], "skipped_steps"),
    (["--log-steps=5"], ["Interrupts", "StepLog", "Progress"], "step_log"),
    (["--logger=tensorboard"], ["Interrupts", "Loggers", "Progress"], "loggers"),
    (["--save-errors=warn"], ["Interrupts", "WarnOfSaveErrors", "Progress"], "save_errors"),
    (["--save-sharded"], ["Interrupts", "ShardedFiles", "Progress"], "sharded"),
    (["--verify-saves"], ["Interrupts", "VerifiedFiles", "Progress"], "verified_saves"),
    (["--audit", "--save-sharded"], ["Interrupts", "Audit", "ShardedFiles", "Progress"], "sharded"),
]


def make_state():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rest = {"loader": None, "meter": SimpleNamespace(), "scheduler": None}
    return {"model": model, "optimizer": optimizer, **rest}


@pytest.mark.parametrize(("flags", "names", "module"), TABLE, ids=lambda value: str(value))
def test_settings_select_hooks(flags, names, module, monkeypatch):
    cfg = load_config(argv=flags)
    hooks = build_hooks(cfg, make_state())
    assert [type(hook).__name__ for hook in hooks] == names
    if module:  # as in a copy without it
        monkeypatch.setitem(sys.modules, f"utils.options.{module}", None)
        text = rf"^{flags[-1].split('=')[0]}.* needs utils/options/{module}\.py, which is missing"
        with pytest.raises(UserError, match=text):
            build_hooks(cfg, make_state())


def test_sharded_checkpoints_exclude_options_for_one_file(capfd):
    for flag in ("--save-errors=warn", "--verify-saves"):
        with pytest.raises(SystemExit, match="2"):
            load_config(argv=["--save-sharded", flag])
        assert "--save-errors warn and --verify-saves need" in capfd.readouterr().err
