"""Settings: where their values come from, and that each mistake is one line that helps."""

from dataclasses import FrozenInstanceError, dataclass, fields

import pytest
import torch
import yaml

from tools.lessons import LADDER, ROOT
from utils.config import Config, load_config, setting
from utils.image_folder import Settings as ImageFolderSettings
from utils.per_process import Settings as PerProcessSettings
from utils.weights import Settings as WeightsSettings

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
OPTIONS = [  # a flag that selects the option, and what the option adds
    ("--dataset=imagefolder", ImageFolderSettings),
    ("--weights=DEFAULT", WeightsSettings),
    ("--per-process-batch-size=8", PerProcessSettings),
]


def names(kind):
    return {field.name for field in fields(kind)}


def assert_refused(argv, parts, capfd, kind=Config):
    """load_config() exits with code 2 and prints one line that contains all `parts`."""
    with pytest.raises(SystemExit) as caught:
        load_config(kind, argv)
    text = capfd.readouterr().err
    assert caught.value.code == 2
    assert text.startswith("error: ") and text.count("\n") == 1
    for part in parts:
        assert part in text


@pytest.fixture
def yaml_file(tmp_path):
    """A function that writes a YAML file and returns the flag that selects it."""

    def write(text):
        (tmp_path / "a.yaml").write_text(text, encoding="utf-8")
        return f"--config={tmp_path / 'a.yaml'}"

    return write


# Values


def test_flags_override_file_and_file_overrides_defaults(yaml_file, monkeypatch):
    flag = yaml_file("lr: 1e-3\nepochs: 7\nsync_bn: no\nmodel: 'resnet50'\n")
    cfg = load_config(argv=[flag, "--epochs", "9", "--audit"])
    assert (cfg.lr, cfg.epochs, cfg.sync_bn, cfg.audit) == (0.001, 9, False, True)
    assert (cfg.model, cfg.momentum) == ("resnet50", Config().momentum)
    assert load_config(argv=[flag, "--sync-bn", "--no-audit"]).sync_bn
    monkeypatch.setattr("sys.argv", ["train_ddp.py", "--epochs=3"])
    assert load_config().epochs == 3


def test_dumped_config_loads_as_the_same_config(yaml_file):
    cfg = load_config(argv=["--lr=1e-5", "--no-sync-bn", "--output-dir=a: b", "--seed=3"])
    assert load_config(argv=[yaml_file(cfg.dump())]) == cfg


def test_config_is_frozen():
    with pytest.raises(FrozenInstanceError):
        load_config(argv=[]).lr = 1.0


def test_open_settings_are_filled_in(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/x/train_ddp.py"])
    cfg = load_config(argv=[f"--data-dir={tmp_path}"])
    assert (cfg.output_dir, cfg.dataset, cfg.image_size) == ("runs/train_ddp", "synthetic", 32)
    monkeypatch.setattr("utils.config.find_spec", lambda name: None)
    assert load_config(argv=[f"--data-dir={tmp_path}"]).dataset == "fake"
    (tmp_path / "cifar-10-batches-py").mkdir()
    assert load_config(argv=[f"--data-dir={tmp_path}"]).dataset == "cifar10"
    monkeypatch.setattr("sys.argv", [""])
    assert load_config(argv=[]).output_dir == "runs/python"


def test_dtype_names_a_torch_dtype():
    dtypes = {"float32": torch.float32, "tf32": torch.float32, "float64": torch.float64}
    assert {name: Config(dtype=name).torch_dtype for name in dtypes} == dtypes


def test_fixed_on_resume_holds_what_decides_the_weights():
    fixed = Config(lr=0.3).fixed_on_resume()
    assert fixed["lr"] == 0.3
    assert {"seed", "epochs", "global_batch_size", "augment", "dtype", "model"} <= fixed.keys()
    assert not {"loader", "num_workers", "output_dir", "device", "timeout"} & fixed.keys()


# Mistakes


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("epochs: 1\nlrr: 1", ["a.yaml:2:", "unknown key 'lrr'", "did you mean 'lr'"]),
        ("lr: 1\nlr: 2", ["a.yaml:2:", "lr must have one value and appear once"]),
        ("epochs: ten", ["a.yaml:1:", "epochs must be a whole number, not 'ten'"]),
        ("lr: .nan", ["lr must be a number"]),
        ("lr: nan", ["lr must be a number, not 'nan'"]),
        ("lr: inf", ["lr must be a number, not 'inf'"]),
        ("lr:", ["lr must be a number, not ''"]),
        ("sync_bn: 2", ["sync_bn must be true or false"]),
        ("epochs: 0", ["epochs must be at least 1 and below 2**32, not 0"]),
        ("loader: devices", ["one of auto, workers, device, not 'devices'"]),
        ("resume: no", ["resume must be one of auto, always, never, not 'no'"]),
        ("lr: [1, 2]", ["lr must have one value"]),
        ("seed: 99999999999999999999", ["seed must be at least 0 and below 2**32, not 9999"]),
        ("warmup_epochs: 1e308", ["warmup_epochs must be at least 0 and below 2**32"]),
        ("timeout: 1e300", ["timeout must be at least 1 and below 2**32"]),
        ("- 1", ["must contain a mapping"]),
        ("", ["must contain a mapping"]),
        ("a: b: c", ["cannot read", "a.yaml as YAML", "line 1"]),
    ],
)
def test_mistake_in_the_file(text, parts, yaml_file, capfd):
    assert_refused([yaml_file(text)], parts, capfd)


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--lrr", "1"], ["--lrr", "did you mean '--lr'"]),
        (["--lrr=1"], ["--lrr", "did you mean '--lr'"]),
        (["--epoch", "1"], ["--epoch", "did you mean '--epochs'"]),  # no abbreviations
        (["--epochs"], ["--epochs", "expected one argument"]),
        (["--epochs", "1.5"], ["--epochs: epochs must be a whole number"]),
        (["--config", "/no/such.yaml"], ["/no/such.yaml", "No such file"]),
        (["train.yaml"], ["unrecognized arguments: train.yaml"]),
        (["--per-process-batch-size=-1"], ["must be at least 1"]),
    ],
)
def test_mistake_in_a_flag(argv, parts, capfd):
    assert_refused(argv, parts, capfd)


def test_config_file_that_is_not_text(tmp_path, capfd):
    (tmp_path / "noise").write_bytes(bytes(range(256)))
    assert_refused([f"--config={tmp_path / 'noise'}"], ["noise as YAML"], capfd)


# Settings of the base, of options and of leaves


def test_base_config_is_small():
    assert len(fields(Config)) <= 36


def test_misspelled_name_gets_the_name_as_a_hint(yaml_file, capfd):
    for name in names(Config):
        assert_refused([yaml_file(f"{name}x: 1")], [f"did you mean {name!r}"], capfd)


def test_help_explains_every_setting(capfd):
    for argv, option in [("", Config), *OPTIONS]:
        with pytest.raises(SystemExit) as caught:
            load_config(argv=[*([argv] if argv else []), "--help"])
        text = capfd.readouterr().out
        assert caught.value.code == 0
        for name in names(Config) | names(option):
            assert f"--{name.replace('_', '-')}" in text
    for kind in {rung.config_class() for rung in LADDER} | {option for _, option in OPTIONS}:
        for field in fields(kind):
            assert len(field.metadata["help"]) > 5 and not field.metadata["help"].endswith(".")


def test_null_is_empty_and_a_tilde_is_the_home_folder(yaml_file, monkeypatch, capfd):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr("sys.argv", ["train_ddp.py"])
    cfg = load_config(argv=[yaml_file("output_dir: null\ndata_dir: ~/images\nweights:")])
    assert (cfg.output_dir, cfg.data_dir) == ("runs/train_ddp", "/home/me/images")
    assert load_config(argv=["--output-dir=~/run"]).output_dir == "/home/me/run"
    assert_refused([yaml_file("epochs: ~")], ["epochs must be a whole number, not ''"], capfd)


@pytest.mark.parametrize(("flag", "option"), OPTIONS)
def test_option_settings_exist_only_where_the_option_is_selected(flag, option, yaml_file, capfd):
    name, _, value = flag.removeprefix("--").partition("=")
    text = f"{name.replace('-', '_')}: {value}\n"
    added = {field.name: field for field in fields(option)}
    added.pop("per_process_batch_size", None)  # selects itself
    assert added and not added.keys() & names(Config)
    for field in added.values():
        unknown = f"--{field.name.replace('_', '-')}={field.default}"
        assert_refused([unknown], ["unrecognized arguments", unknown], capfd)
        key = f"{field.name}: {field.default}"
        assert_refused([yaml_file(key)], [f"unknown key '{field.name}'"], capfd)
        for argv in ([flag, unknown], [yaml_file(text), unknown], [yaml_file(text + key)]):
            cfg = load_config(argv=argv)
            assert isinstance(cfg, Config) and getattr(cfg, field.name) == field.default


def test_options_combine_with_each_other_and_with_a_leaf(yaml_file):
    @dataclass(frozen=True)
    class Leaf(Config):
        width: int = setting(3, "a setting of the script")

    text = "dataset: imagefolder\nweights: DEFAULT\nval_fraction: 0.2\nfreeze: backbone\nwidth: 4"
    cfg = load_config(Leaf, [yaml_file(text), "--per-process-batch-size=8", "--lr-scaling=none"])
    assert isinstance(cfg, Leaf)
    assert (cfg.val_fraction, cfg.freeze, cfg.lr_scaling, cfg.width) == (0.2, "backbone", "none", 4)
    assert vars(load_config(Leaf, [yaml_file(cfg.dump())])) == vars(cfg)


def test_flag_deselects_an_option_of_the_file(yaml_file, capfd):
    flag = yaml_file("dataset: imagefolder\nval_fraction: 0.2")
    assert_refused([flag, "--dataset=synthetic"], ["a.yaml:2", "'val_fraction'"], capfd)


def test_leaf_settings_are_unknown_in_the_base(yaml_file, capfd):
    leaves = {rung.config_class() for rung in LADDER} - {Config}
    assert len(leaves) >= 5
    for kind in leaves:
        added = [field for field in fields(kind) if field.name not in names(Config)]
        assert added
        for field in added:
            key = yaml_file(f"{field.name}: {field.default}")
            assert_refused([key], [f"unknown key '{field.name}'"], capfd)
            assert getattr(load_config(kind, [key]), field.name) == field.default


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_file_loads(path):
    keys = yaml.safe_load(path.read_text()).keys()
    kinds = [rung.config_class() for rung in LADDER]  # a file may hold the settings of one leaf
    special = keys & (set().union(*map(names, kinds)) - names(Config))
    cfg = load_config(next(kind for kind in kinds if special <= names(kind)), [f"--config={path}"])
    assert cfg.epochs >= 1
    assert cfg.dataset in ("cifar10", "synthetic", "imagefolder")  # whatever data_dir holds
