"""--per-process-batch-size: the global batch and the learning rate follow from the processes."""

import pytest

from utils.config import load_config


def load(world_size, monkeypatch, *flags):
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    return load_config(argv=["--lr=0.1", *flags])


def test_global_batch_size_means_the_same_on_any_number_of_processes(monkeypatch):
    for world_size in (1, 4):
        cfg = load(world_size, monkeypatch, "--global-batch-size=256")
        assert (cfg.global_batch_size, cfg.peak_lr) == (256, 0.1)
        assert not hasattr(cfg, "per_process_batch_size")


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
    with pytest.raises(SystemExit, match="2"):
        load(2, monkeypatch, flag, "--per-process-batch-size=-3")
    assert "per_process_batch_size must be at least 1 and" in capfd.readouterr().err
