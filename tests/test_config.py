"""Settings: where they come from, and that every mistake is one line that helps."""

from dataclasses import fields

import pytest

from tests.launch import ROOT
from utils.config import Config, load_config


def test_defaults_then_file_then_flags(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("lr: 1e-3\nepochs: 7\nsync_bn: no\n")
    cfg = load_config([f"--config={path}", "--epochs", "9", "--nesterov"])
    assert (cfg.lr, cfg.epochs, cfg.sync_bn, cfg.nesterov) == (0.001, 9, False, True)
    assert cfg.momentum == Config().momentum
    again = tmp_path / "b.yaml"
    again.write_text(cfg.dump())
    assert load_config([f"--config={again}"]) == cfg
    assert load_config([f"--config={again}", "--sync-bn", "--no-nesterov"]).sync_bn


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("epochs: 1\nlrr: 1", [":2:", "unknown key 'lrr'", "did you mean 'lr'"]),
        ("lr: 1\nlr: 2", [":2:", "'lr' is given twice"]),
        ("epochs: ten", [":1:", "epochs takes a whole number, not 'ten'"]),
        ("lr: .nan", ["lr takes a number"]),
        ("lr: nan", ["lr takes a number, not 'nan'"]),
        ("lr:", ["lr takes a number, not ''"]),
        ("sync_bn: 2", ["sync_bn takes true or false"]),
        ("epochs: 0", ["epochs must be at least 1, not 0"]),
        ("loader: devices", ["one of auto, workers, device", "did you mean 'device'"]),
        ("resume: no", ["resume is one of auto, always, never, not 'no'"]),
        ("lr: [1, 2]", ["lr takes one value"]),
        ("- 1", ["must hold a mapping"]),
        ("", ["must hold a mapping"]),
        ("a: b: c", ["is not YAML"]),
        ("augment: resized_crop\nloader: device", ["needs loader=workers"]),
    ],
)
def test_a_mistake_in_the_file(text, parts, tmp_path, capsys):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    complains([f"--config={path}"], parts, capsys)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--lrr", "1"], ["--lrr", "did you mean '--lr'"]),
        (["--epochs"], ["--epochs", "expected one argument"]),
        (["--epochs", "1.5"], ["--epochs: epochs takes a whole number"]),
        (["--config", "/no/such.yaml"], ["/no/such.yaml", "No such file"]),
        (["--per-process-batch-size=-1"], ["must be at least 0"]),
    ],
)
def test_a_mistake_in_a_flag(flags, parts, capsys):
    complains(flags, parts, capsys)


def complains(flags, parts, capsys):
    with pytest.raises(SystemExit) as caught:
        load_config(flags)
    text = capsys.readouterr().err
    assert caught.value.code == 2
    assert text.startswith("error: ") and text.count("\n") == 1
    for part in parts:
        assert part in text


@pytest.mark.parametrize("name", [f.name for f in fields(Config)])
def test_every_name_is_checked_and_explained(name, tmp_path, capsys):
    path = tmp_path / "a.yaml"
    path.write_text(f"{name}x: 1")
    complains([f"--config={path}"], [f"did you mean {name!r}"], capsys)
    with pytest.raises(SystemExit):
        load_config(["--help"])
    assert f"--{name.replace('_', '-')}" in capsys.readouterr().out


def test_a_mistake_is_told_once_a_node(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as caught:
        load_config(["--lrr=1"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == ""


def test_open_settings_are_filled_in(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/x/train_ddp.py"])
    assert load_config([]).output_dir == "runs/train_ddp"
    assert load_config([f"--data-dir={tmp_path}"]).dataset == "synthetic"
    (tmp_path / "cifar-10-batches-py").mkdir()
    assert load_config([f"--data-dir={tmp_path}"]).dataset == "cifar10"


def test_batch_and_rate_by_both_conventions():
    ours = Config(global_batch_size=256, lr=0.1)
    assert [ours.global_batch(n) for n in (1, 4)] == [256, 256]
    assert [ours.peak_lr(n) for n in (1, 4)] == [0.1, 0.1]
    tutorial = Config(per_process_batch_size=256, lr=0.1)
    assert [tutorial.global_batch(n) for n in (1, 4)] == [256, 1024]
    assert [tutorial.peak_lr(n) for n in (1, 4)] == [0.1, 0.4]
    assert Config(per_process_batch_size=256, lr=0.1, lr_scaling="none").peak_lr(4) == 0.1


def test_only_what_changes_the_weights_binds_a_resumed_run():
    bound = Config().must_match()
    assert {"lr", "seed", "epochs", "global_batch_size", "augment", "dtype"} <= bound.keys()
    assert not {"loader", "num_workers", "output_dir", "device", "timeout"} & bound.keys()
    assert Config(allow_config_change=True).must_match() == {}


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_the_configs_load(path):
    assert load_config([f"--config={path}"]).epochs >= 1
