"""The settings of training, of tasks and of scripts, together."""

import inspect
import subprocess
import sys
from dataclasses import dataclass, fields, is_dataclass

import pytest
import torch
import yaml

import tasks.diffusion
import tasks.images
import tasks.moe
import tasks.segmentation
import tasks.text
from tools.lib.ladder import LADDER, ROOT
from utils.config import Config, Machine, Saving, Watching, load_config
from utils.settings import rules_of

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
IMAGES = tasks.images.Settings
OTHER_TASKS = (tasks.text, tasks.moe, tasks.segmentation, tasks.diffusion)
TASKS = (IMAGES, *(task.Settings for task in OTHER_TASKS))
SCRIPTS = {rung.script: rung.settings_class() for rung in LADDER if rung.settings}


def names(kind):
    return {field.name for field in fields(kind)}


def assert_refused(capfd, parts, *arguments):
    """load_config(*arguments) exits with code 2 and prints one line that contains all `parts`."""
    with pytest.raises(SystemExit) as caught:
        load_config(*arguments)
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


# Training


def test_flags_override_file_and_file_overrides_defaults(yaml_file, monkeypatch):
    flag = yaml_file("lr: 1e-3\nepochs: 7\nsync_bn: no\n")
    cfg = load_config(argv=[flag, "--epochs", "9", "--audit"])
    assert (cfg.lr, cfg.epochs, cfg.sync_bn, cfg.audit) == (0.001, 9, False, True)
    assert cfg.momentum == Config().momentum
    monkeypatch.setattr(sys, "argv", ["train_ddp.py", "--epochs=3"])
    assert load_config().epochs == 3


def test_dumped_config_loads_as_the_same_config(yaml_file):
    cfg = load_config(IMAGES, argv=["--lr=1e-5", "--no-sync-bn", "--output-dir=a: b", "--seed=3"])
    assert load_config(IMAGES, argv=[yaml_file(cfg.dump())]) == cfg


def test_output_dir_has_the_name_of_the_script(monkeypatch):
    for path, folder in (("/x/train_ddp.py", "runs/train_ddp"), ("", "runs/python")):
        monkeypatch.setattr(sys, "argv", [path])
        assert load_config(argv=[]).output_dir == folder


def test_dtype_names_a_torch_dtype():
    dtypes = {"float32": torch.float32, "tf32": torch.float32, "float64": torch.float64}
    assert {name: Config(dtype=name).torch_dtype for name in dtypes} == dtypes


def test_fixed_on_resume_holds_what_decides_the_weights():
    fixed = IMAGES(lr=0.3).fixed_on_resume()
    assert fixed["lr"] == 0.3
    assert {"seed", "epochs", "global_batch_size", "augment", "dtype", "model"} <= fixed.keys()
    free = {"loader", "num_workers", "output_dir", "device", "timeout", "data_dir", "audit"}
    assert not free & fixed.keys()
    assert {"context", "width"} <= tasks.text.Settings().fixed_on_resume().keys()


# Tasks


def test_unset_settings_of_images_are_filled_in(tmp_path, capfd):
    cfg = load_config(IMAGES, argv=[f"--data-dir={tmp_path}"])
    assert (cfg.dataset, cfg.image_size) == ("synthetic", 32)
    assert cfg.cache_folder == tmp_path / ".cache"
    (tmp_path / "cifar-10-batches-py").mkdir()
    assert load_config(IMAGES, argv=[f"--data-dir={tmp_path}"]).dataset == "cifar10"
    for flags, parts in (
        (["--freeze=backbone"], ["--freeze backbone", "--weights"]),
        (["--val-fraction=1"], ["val_fraction=1.0", "nothing to train"]),
        (["--augment=resized_crop", "--loader=device"], ["resized_crop", "loader=workers"]),
        (
            ["--dataset=fake"],
            ["dataset", "auto, cifar10, imagefolder, shards, synthetic", "'fake'"],
        ),
        (["--weights=/no/file"], ["--weights '/no/file'", "not a file"]),
    ):
        assert_refused(capfd, parts, IMAGES, None, flags)


def test_flag_undoes_the_weights_of_a_file(yaml_file):
    flag = yaml_file("model: resnet18\nweights: DEFAULT\nfreeze: backbone\n")
    assert load_config(IMAGES, argv=[flag]).image_size == 224
    cfg = load_config(IMAGES, argv=[flag, "--weights", "", "--freeze", "none"])
    assert (cfg.weights, cfg.freeze, cfg.image_size) == ("", "none", 32)


def test_settings_are_frozen():
    """Each one multiplies what can be combined. A new one names the one that it replaces, or its
    reason, in its commit."""
    training = """epochs global_batch_size optimizer lr momentum weight_decay warmup_epochs
        lr_schedule clip_norm seed"""
    machine = """device dtype sync_bn compile cudnn_benchmark deterministic loader num_workers
        num_threads timeout"""
    saving = """output_dir resume allow_config_change save_epochs save_steps save_minutes keep_last
        save_sharded save_errors"""
    watching = "check_replicas_every log_steps logger timing profile audit max_skipped_steps"
    images = """dataset data_dir synthetic_samples image_size augment model val_fraction cache_dir
        on_bad_sample weights freeze"""
    general = [*training.split(), *machine.split(), *saving.split(), *watching.split()]
    assert names(Config) == set(general)
    assert names(IMAGES) == {*general, *images.split()}


def test_flags_are_parsed_without_the_watchers():
    """utils.config needs neither process groups nor what a run watches."""
    program = "import sys, utils.config; print(*sorted(m for m in sys.modules if 'utils' in m))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    ours = {name for name in done.stdout.split() if name.startswith("utils.")}
    assert ours == {"utils.config", "utils.errors", "utils.reports", "utils.settings"}


def test_task_may_change_a_default(yaml_file):
    for kind in TASKS[1:]:
        cfg = load_config(kind, argv=[])
        assert cfg.optimizer == "adamw" != Config().optimizer
        assert cfg.lr == kind().lr != Config().lr
        assert load_config(kind, argv=[yaml_file("lr: 0.5"), "--optimizer=sgd"]).lr == 0.5
        assert names(kind) > names(Config) > names(Machine)


def test_settings_of_a_task_are_unknown_to_another(capfd):
    for kind in TASKS:
        for field in fields(kind):
            if field.name not in names(Config):
                flag = f"--{field.name.replace('_', '-')}"
                assert_refused(capfd, ["unknown", flag], Config, None, [flag, "1"])
    assert_refused(capfd, ["unknown", "--model=resnet18"], TASKS[1], None, ["--model=resnet18"])


def test_misspelled_name_gets_the_name_as_a_hint(yaml_file, capfd):
    for kind in TASKS:
        for name in names(kind) - (names(Config) if kind is not IMAGES else set()):
            parts = ["a.yaml:1: ", f"'{name}x'", f"'{name}'"]
            assert_refused(capfd, parts, kind, None, [yaml_file(f"{name}x: 1")])


# Scripts


def test_settings_of_a_script_combine_with_those_of_any_task(yaml_file, capfd):
    assert len(set(SCRIPTS.values())) >= 6
    for script in set(SCRIPTS.values()):
        added = [field for field in fields(script) if field.name not in names(Config)]
        assert added
        for task in TASKS:
            cfg = load_config(task, script, [])
            assert isinstance(cfg, task) and isinstance(cfg, script)
            assert cfg.lr == task().lr
        for field in added:
            key = yaml_file(f"{field.name}: {field.default}")
            assert_refused(capfd, ["a.yaml:1: ", "unknown", f"'{field.name}'"], IMAGES, None, [key])
            assert getattr(load_config(IMAGES, script, [key]), field.name) == field.default


def test_script_and_task_and_options_resolve_together(yaml_file, monkeypatch, capfd):
    @dataclass(frozen=True)
    class Two(SCRIPTS["train_ddp_amp.py"], SCRIPTS["train_ddp_accum.py"]):
        """Mixed precision with accumulation."""

    monkeypatch.setenv("WORLD_SIZE", "2")
    text = "global_batch_size: 16\nmicro_batches: 4\namp_dtype: float16\nmodel: resnet20\n"
    cfg = load_config(IMAGES, Two, [yaml_file(text), "--dtype=tf32"])
    assert (cfg.global_batch_size, cfg.micro_batches) == (16, 4)
    assert (cfg.autocast_dtype, cfg.precision) == (torch.float16, "float16 autocast, tf32")
    assert (cfg.dataset, cfg.model) == ("synthetic", "resnet20")
    assert vars(load_config(IMAGES, Two, [yaml_file(cfg.dump())])) == vars(cfg)
    too_many = [yaml_file(text), "--micro-batches=9"]
    assert_refused(capfd, ["8 samples", "9 micro-batches"], IMAGES, Two, too_many)
    skipping = [yaml_file(text), "--max-skipped-steps=0"]
    parts = ["--max-skipped-steps", "--amp-dtype float16"]
    assert_refused(capfd, parts, IMAGES, Two, skipping)


def test_help_groups_settings_by_whose_they_are(capfd):
    """The script, the task, training, options; each setting once, with a text."""
    for script in {None, *SCRIPTS.values()}:
        for task in TASKS if script is None else (IMAGES,):
            with pytest.raises(SystemExit) as caught:
                load_config(task, script, ["--help"])
            usage, _, out = capfd.readouterr().out.partition("\noptions:\n")
            assert caught.value.code == 0 and "--config FILE" in usage
            groups = [kind for kind in (script, task, Config, Machine, Saving, Watching) if kind]
            titles = [inspect.getdoc(kind).partition("\n")[0].rstrip(".") for kind in groups]
            starts = [out.index(f"\n{title}:\n") for title in titles]
            assert starts == sorted(starts)
            for kind, start, end in zip(groups, starts, [*starts[1:], len(out)], strict=True):
                inherited = [names(base) for base in kind.__mro__[1:] if is_dataclass(base)]
                if kind is script:  # it may change a default, too
                    inherited.append(names(Config))
                for name in names(kind).difference(*inherited):
                    assert out[start:end].count(f"\n  --{name.replace('_', '-')}") >= 1, name
            texts = [rules_of(kind, name)["help"] for kind in groups[:-4] for name in names(kind)]
            assert all(len(text) > 5 and not text.endswith(".") for text in texts)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_file_loads(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # no run to resume
    keys = yaml.safe_load(path.read_text()).keys()
    kinds = [None, *SCRIPTS.values()]  # a file may hold the settings of one script
    fits = [kind for kind in kinds if keys <= names(IMAGES) | (names(kind) if kind else set())]
    cfg = load_config(IMAGES, fits[0], [f"--config={path}"])
    assert cfg.epochs >= 1
    assert cfg.dataset in ("cifar10", "synthetic", "imagefolder")  # whatever data_dir holds
