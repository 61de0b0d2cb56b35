"""Settings: defaults, then a YAML file, then flags; each mistake is one line that helps."""

import sys
from dataclasses import dataclass, replace

import pytest
import torch
import yaml

import tasks.images
from tools.lib.runs import ROOT
from utils.config import BaseSettings, Config, ConfigError, free_setting, load_config, setting
from utils.rungs.accumulation import AccumulationSettings
from utils.rungs.amp import AmpSettings
from utils.rungs.fsdp import FsdpSettings
from utils.rungs.graph import GraphSettings
from utils.rungs.model_parallel import StagesSettings
from utils.rungs.pipeline import PipelineSettings

IMAGES = tasks.images.Settings


@dataclass(frozen=True)
class Bread(Config):
    """How to bake. Slowly."""

    loaves: int = setting(10, "how many", low=1)
    heat: float = setting(0.5, "of the oven, in % of its maximum")
    flour: str = setting("wheat", "the grain", choices=("wheat", "rye"))
    salted: bool = setting(True, "with salt")
    shelf: int = free_setting(-1, "which one; -1: any", low=-1)
    folder: str = free_setting("", "for recipes")

    def resolved(self):
        """See BaseSettings."""
        if self.flour == "rye" and not self.salted:
            raise ConfigError("rye needs salt")
        return super(Bread, replace(self, folder=self.folder or "recipes")).resolved()


@dataclass(frozen=True)
class Rolls(Bread):
    """Smaller than loaves."""

    seeds: int = setting(1, "sorts of seeds")
    loaves: int = 40


@dataclass(frozen=True)
class Tray(BaseSettings):
    """Settings of a script."""

    width: int = setting(3, "in rolls", low=1)
    heat: float = 0.75

    def resolved(self):
        """See BaseSettings."""
        if self.width > self.loaves:
            raise ConfigError("too wide")
        return super().resolved()


def load(*argv, task=Bread, script=None):
    return load_config(task, script, argv)


@pytest.fixture
def yaml_file(tmp_path):
    """A function that writes a YAML file and returns the flag that selects it."""

    def write(text):
        (tmp_path / "a.yaml").write_text(text, encoding="utf-8")
        return f"--config={tmp_path / 'a.yaml'}"

    return write


@pytest.fixture
def assert_refused(capsys):
    """A function: these arguments end the program with exit code 2 and a line with all parts."""

    def check(argv, *parts, task=Bread, script=None):
        with pytest.raises(SystemExit) as caught:
            load_config(task, script, argv)
        text = capsys.readouterr().err
        assert caught.value.code == 2 and text.count("\n") == 1
        for part in parts:
            assert part in text

    return check


# Values


def test_flags_override_the_file_and_the_file_the_defaults(yaml_file, monkeypatch):
    flag = yaml_file("heat: 1e-3\nloaves: 7\nsalted: No\nfolder: 'x'\n")
    found = load(flag, "--loaves", "9", "--shelf", "-1")
    assert (found.heat, found.loaves, found.salted, found.folder) == (0.001, 9, False, "x")
    assert (found.flour, found.epochs, type(found.heat)) == ("wheat", Config().epochs, float)
    assert load(flag, "--salted").salted
    assert not load("--no-salted").salted
    assert not load("--no-salted", yaml_file("salted: on")).salted
    assert load(yaml_file("salted: true")).salted
    monkeypatch.setattr(sys, "argv", ["bake.py", "--loaves=3"])
    assert load_config(Bread).loaves == 3


def test_flag_undoes_what_the_file_sets(yaml_file):
    flag = yaml_file("output_dir: somewhere\nflour: rye\n")
    for argv in (["--output-dir", ""], ["--output-dir="]):
        assert load(flag, *argv).output_dir.startswith("runs/")
    for empty in ("", "null", "~", "''"):
        assert load(yaml_file(f"folder: {empty}")).folder == "recipes"


def test_tilde_is_the_home_folder(yaml_file, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert load("--folder=~/run").folder == load(yaml_file("folder: ~/run")).folder
    assert load("--folder=~/run").folder == "/home/me/run"


def test_output_dir_has_the_name_of_the_script(monkeypatch):
    for path, folder in (("/x/train_ddp.py", "runs/train_ddp"), ("", "runs/python")):
        monkeypatch.setattr(sys, "argv", [path])
        assert load().output_dir == folder


def test_written_settings_load_as_the_same_settings(yaml_file):
    cfg = load("--lr=1e-5", "--no-sync-bn", "--output-dir=a: b", "--seed=3", task=IMAGES)
    assert load(yaml_file(yaml.safe_dump(vars(cfg))), task=IMAGES) == cfg


def test_dtype_names_a_torch_dtype():
    assert Config(dtype="float64").torch_dtype == torch.float64
    assert Config(dtype="ieee").torch_dtype == torch.float32


def test_fixed_settings_decide_the_weights():
    fixed = Rolls(heat=0.3).fixed_on_resume()
    assert fixed["heat"] == 0.3
    assert {"seed", "epochs", "global_batch_size", "dtype", "loaves", "seeds"} <= fixed.keys()
    free = {"shelf", "folder", "num_workers", "output_dir", "device", "timeout", "audit"}
    assert not free & fixed.keys()


# Classes


def test_subclass_changes_a_default_and_keeps_the_rules(yaml_file, assert_refused):
    assert load(task=Rolls).loaves == 40
    assert load(yaml_file("loaves: 4\nseeds: 3"), task=Rolls).loaves == 4
    assert_refused(["--loaves=0"], "loaves", "1", task=Rolls)
    assert "folder" not in Rolls().fixed_on_resume()


def test_script_combines_with_any_task(assert_refused):
    cfg = load("--width=4", "--seeds=0", task=Rolls, script=Tray)
    assert isinstance(cfg, Tray) and isinstance(cfg, Rolls)
    assert (cfg.width, cfg.seeds, cfg.loaves, cfg.heat) == (4, 0, 40, 0.75)
    assert cfg.folder == "recipes"
    assert_refused(["--width=41"], "too wide", task=Rolls, script=Tray)
    assert_refused(["--flour=rye", "--no-salted"], "rye needs salt", task=Rolls, script=Tray)


def test_plain_default_is_a_setting(assert_refused):
    @dataclass(frozen=True)
    class Plain(Bread):
        crumbs: int = -3
        jars: "int" = setting(3, "annotated by a text")  # noqa: RUF009

    found = load("--crumbs=-4", "--jars=5", task=Plain)
    assert (found.crumbs, found.jars, load(task=Plain).crumbs) == (-4, 5, -3)
    assert found.fixed_on_resume()["crumbs"] == -4
    assert_refused(["--crumbs=x"], "--crumbs", task=Plain)


def test_default_that_would_be_ignored_is_refused(assert_refused):
    class Forgotten(Bread):
        loaves: int = 3

    @dataclass(frozen=True)
    class Untyped(Bread):
        loaves = 3

    for task in (Forgotten, Untyped):
        assert_refused([], "loaves", task=task)


# Help


def test_help_is_printed_by_rank_0(monkeypatch, capsys):
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit, match="0"):
            load("--help")
    assert capsys.readouterr().out.count("usage:") == 1


# Mistakes


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("loaves: 1\nhaet: 1", ["--haet", "--heat"]),
        ("loaves: ten", ["--loaves", "'ten'"]),
        ("salted: 2", ["--salted"]),
        ("heat: [1, 2]", ["heat"]),
        ("- 1", []),
        ("a: b: c", ["line 1"]),
    ],
)
def test_mistake_in_the_file(text, parts, yaml_file, assert_refused):
    """Also if a flag overrides it."""
    assert_refused([yaml_file(text), "--loaves=3"], "a.yaml", *parts)


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--haet=1"], ["--haet", "--heat"]),
        (["--loaves", "1.5"], ["--loaves", "1.5"]),
        (["--loaves=0"], ["loaves", "1", "0"]),
        (["--flour=ryes"], ["--flour", "ryes", "rye"]),
        (["--config", "/no/such.yaml"], ["/no/such.yaml"]),
        (["--config=a.yaml", "--config=b.yaml"], ["a.yaml", "b.yaml"]),
        (["--output-dir=s3://bucket/run"], ["s3://bucket/run"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_mistake_in_a_flag(argv, parts, assert_refused):
    assert_refused(argv, *parts)


@pytest.mark.parametrize(
    ("script", "argv", "part"),
    [
        # A CUDA graph overwrites the gradients of the micro-batch before.
        (AccumulationSettings, ["--compile=max-autotune", "--micro-batches=2"], "default"),
        (FsdpSettings, ["--compile=max-autotune"], "--compile default"),
        (GraphSettings, ["--compile=max-autotune"], "--compile default"),
        (StagesSettings, ["--compile=default"], "--compile none"),
        (PipelineSettings, ["--compile=default"], "--compile none"),
        (PipelineSettings, ["--no-save-sharded"], "--save-sharded"),
        (PipelineSettings, ["--micro-batches=5"], "--micro-batches 5"),  # of 256 samples
        # The first scale of float16 is meant to overflow; such steps would count.
        (AmpSettings, ["--amp-dtype=float16", "--max-skipped-steps=1"], "bfloat16"),
    ],
    ids=str,
)
def test_settings_of_a_script_that_do_not_fit(script, argv, part, assert_refused):
    assert_refused(argv, part, script=script)


# The settings of the project


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_config_file_loads(path):
    cfg = load(f"--config={path}", task=IMAGES)
    assert vars(cfg).keys() >= yaml.safe_load(path.read_text()).keys()
    assert cfg.dataset != "auto"
