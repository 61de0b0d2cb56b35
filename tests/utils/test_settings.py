"""BaseSettings: where their values come from, and that each mistake is one line that helps."""

import sys
from dataclasses import FrozenInstanceError, dataclass, replace

import pytest

from utils.config import Config, load_config
from utils.settings import (
    OTHER_NAMES,
    BaseSettings,
    ConfigError,
    free_setting,
    parse_settings,
    setting,
)


@dataclass(frozen=True)
class Base(BaseSettings):
    """How to bake."""

    loaves: int = setting(10, "how many", low=1)
    heat: float = setting(0.1, "of the oven, in % of its maximum")
    flour: str = setting("wheat", "the grain", choices=("wheat", "rye"))
    salted: bool = setting(True, "with salt")
    shelf: int = free_setting(-1, "which one; -1: any", low=-1)
    folder: str = free_setting("", "for recipes")

    def resolved(self):
        """See BaseSettings."""
        if self.flour == "rye" and not self.salted:
            raise ConfigError("rye needs salt")
        return super(Base, replace(self, folder=self.folder or "recipes")).resolved()


@dataclass(frozen=True)
class Rolls(Base):
    """Rolls. Smaller than loaves."""

    seeds: int = setting(1, "sorts of seeds", choices=(0, 1, 3))
    loaves: int = 40


@pytest.fixture
def yaml_file(tmp_path):
    """A function that writes a YAML file and returns the flag that selects it."""

    def write(text):
        (tmp_path / "a.yaml").write_text(text, encoding="utf-8")
        return f"--config={tmp_path / 'a.yaml'}"

    return write


def assert_refused(argv, *parts, kind=Base):
    """The error is one line that contains all `parts`."""
    with pytest.raises(ConfigError) as caught:
        parse_settings(kind, argv)
    text = str(caught.value)
    assert "\n" not in text and caught.value.exit_code == 2
    for part in parts:
        assert part in text


# Values


def test_flags_override_file_and_file_overrides_defaults(yaml_file, monkeypatch):
    flag = yaml_file("heat: 1e-3\nloaves: 7\nsalted: no\nfolder: 'x'\n")
    found = parse_settings(Base, [flag, "--loaves", "9", "--shelf", "-1"])
    assert found == Base(loaves=9, heat=0.001, salted=False, folder="x")
    assert (type(found.heat), type(found.loaves)) == (float, int)
    assert parse_settings(Base, [flag, "--salted"]).salted
    assert not parse_settings(Base, ["--no-salted"]).salted
    monkeypatch.setattr(sys, "argv", ["bake.py", "--loaves=3"])
    assert parse_settings(Base) == Base(loaves=3)


def test_flag_can_undo_what_the_file_sets(yaml_file):
    flag = yaml_file("folder: somewhere\nflour: rye\n")
    for argv in ([flag, "--folder", ""], [flag, "--folder="]):
        assert parse_settings(Base, argv) == Base(flour="rye", folder="")


def test_null_is_empty_and_a_tilde_is_the_home_folder(yaml_file, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    for text, folder in (("null", ""), ("", ""), ("~", ""), ("~/a", "/home/me/a")):
        assert parse_settings(Base, [yaml_file(f"folder: {text}")]).folder == folder
    assert parse_settings(Base, ["--folder=~/run"]).folder == "/home/me/run"
    assert_refused([yaml_file("loaves: ~")], "a.yaml:1: loaves ", "whole number", "''")


def test_settings_are_frozen():
    with pytest.raises(FrozenInstanceError):
        parse_settings(Base, []).heat = 1.0


def test_subclass_may_change_a_default(yaml_file, capsys):
    assert parse_settings(Rolls, []) == Rolls(loaves=40, seeds=1)
    assert parse_settings(Rolls, ["--loaves=3"]).loaves == 3
    assert parse_settings(Rolls, [yaml_file("loaves: 4\nseeds: 3")]) == Rolls(loaves=4, seeds=3)
    with pytest.raises(SystemExit):
        parse_settings(Rolls, ["--help"])
    own, _, general = capsys.readouterr().out.partition("How to bake:")
    assert "Rolls. Smaller than loaves:" in own and "--loaves" not in own
    assert "how many (default: 40)" in general
    assert_refused(["--loaves=0"], "at least 1", kind=Rolls)


def test_resolved_passes_through_all_combined_classes():
    order = []

    @dataclass(frozen=True)
    class Tray(BaseSettings):
        width: int = setting(3, "in rolls")

        def resolved(self):
            order.append("Tray")
            return super().resolved()

    both = dataclass(frozen=True)(type("Both", (Tray, Rolls), {}))
    found = parse_settings(both, ["--width=4", "--seeds=0"]).resolved()
    assert (found.width, found.seeds, found.loaves, found.folder) == (4, 0, 40, "recipes")
    assert order == ["Tray"]
    with pytest.raises(ConfigError, match="rye needs salt"):
        parse_settings(both, ["--flour=rye", "--no-salted"]).resolved()


def test_annotations_may_be_strings():
    """As in a module with  from __future__ import annotations"""

    @dataclass(frozen=True)
    class Texts(Base):
        jars: "int" = setting(3, "how many")  # noqa: RUF009
        open: "bool" = setting(False, "the jars")  # noqa: RUF009

    found = parse_settings(Texts, ["--jars=4", "--open", "--loaves=2"])
    assert (found.jars, found.open, found.loaves) == (4, True, 2)
    assert_refused(["--jars=x"], "--jars", "whole number", "'x'", kind=Texts)


def test_help_is_printed_once(monkeypatch, capsys):
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit, match="0"):
            parse_settings(Base, ["--help"])
    assert capsys.readouterr().out.count("usage:") == 1


def test_help_is_grouped_by_class_from_the_most_special_one(capsys):
    @dataclass(frozen=True)
    class Bare(Rolls):
        jars: int = setting(3, "how many")

    with pytest.raises(SystemExit) as caught:
        parse_settings(Bare, ["--help"])
    assert caught.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    parts = ["--config FILE", "Bare:", "--jars INT", "Rolls. Smaller than loaves:"]
    parts += ["--seeds 0|1|3", "How to bake:", "--heat FLOAT of the oven, in % of its maximum"]
    parts += ["(default: 0.1)", "--flour wheat|rye", "--salted, --no-salted", "--shelf INT"]
    places = [out.index(part, out.index("options:")) for part in parts]
    assert places == sorted(places)


# Mistakes


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("loaves: 1\nhaet: 1", ["a.yaml:2: ", "'haet'", "'heat'"]),
        ("heat: 1\nheat: 2", ["a.yaml:2: heat ", "once"]),
        ("loaves: ten", ["a.yaml:1: loaves ", "whole number", "'ten'"]),
        ("heat: .nan", ["a.yaml:1: heat ", "a number", "'.nan'"]),
        ("heat: nan", ["a.yaml:1: heat ", "a number", "'nan'"]),
        ("heat: inf", ["a.yaml:1: heat ", "a number", "'inf'"]),
        ("heat:", ["a.yaml:1: heat ", "a number", "''"]),
        ("salted: 2", ["a.yaml:1: salted ", "true or false", "'2'"]),
        ("loaves: 0", ["a.yaml:1: loaves ", "at least 1 ", "2**32", "not 0"]),
        ("flour: ryes", ["a.yaml:1: flour ", "wheat, rye,", "'ryes'"]),
        ("flour: no", ["a.yaml:1: flour ", "wheat, rye,", "'no'"]),
        ("seeds: 2", ["a.yaml:1: seeds ", "0, 1, 3,", "not 2"]),
        ("heat: [1, 2]", ["a.yaml:1: heat ", "one value"]),
        ("? [a, b]\n: 1", ["a.yaml:1: ", "a key ", "name"]),
        ("seeds: 1\nheat: {a: 2}", ["a.yaml:2: heat ", "one value"]),
        ("shelf: 99999999999999999999", ["a.yaml:1: shelf ", "at least -1 ", "2**32", "not 9999"]),
        ("heat: 1e308", ["a.yaml:1: heat ", "at least 0 ", "2**32"]),
        ("- 1", ["a.yaml ", "mapping"]),
        ("", ["a.yaml ", "mapping"]),
        ("a: b: c", ["a.yaml ", "YAML", "line 1"]),
    ],
)
def test_mistake_in_the_file(text, parts, yaml_file):
    assert_refused([yaml_file(text)], *parts, kind=Rolls)


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--haet", "1"], ["unknown", "--haet ", "'--heat'"]),
        (["--haet=1"], ["unknown", "--haet=1 ", "'--heat'"]),
        (["--loave", "1"], ["unknown", "--loave ", "'--loaves'"]),  # no prefixes
        (["--confg", "a.yaml"], ["unknown", "--confg ", "'--config'"]),
        (["--xyz"], ["unknown", "--xyz"]),
        (["--text-file=x"], ["unknown", "--text-file", "tasks/text.py"]),  # of a different task
        (["--micro-batches", "2"], ["--micro-batches", "utils/rungs/accumulation.py"]),
        (["--salted", "False"], ["unknown", "False", "--salted", "--no-salted"]),
        (["--loaves"], ["--loaves", "expected"]),
        (["--loaves", "1.5"], ["--loaves", "whole number", "'1.5'"]),
        (["--shelf=-2"], ["--shelf", "at least -1 ", "-2"]),
        (["--salted=yes"], ["--salted", "'yes'"]),
        (["--config", "/no/such.yaml"], ["/no/such.yaml", "no such file"]),
        (["bake.yaml"], ["unknown", "bake.yaml"]),
    ],
)
def test_mistake_in_a_flag(argv, parts):
    assert_refused(argv, *parts)


def test_config_file_that_is_not_text(tmp_path):
    (tmp_path / "noise").write_bytes(bytes(range(256)))
    assert_refused([f"--config={tmp_path / 'noise'}"], "/noise ", "YAML")
    assert_refused(["--config=quickstart"], "quickstart", "configs/quickstart.yaml")


def test_names_that_other_trainers_use():
    for name, ours in OTHER_NAMES.items():
        flag = f"--{name.replace('_', '-')}"
        assert_refused([flag, "1"], flag, f"--{ours.replace('_', '-')}", kind=Config)


def test_setting_that_is_gone_leads_to_none_with_a_different_meaning():
    with pytest.raises(ConfigError, match="--per-process-batch-size=8") as error:
        parse_settings(Config, ["--per-process-batch-size=8"])
    assert "did you mean" not in str(error.value)


def test_flag_is_checked_even_where_the_file_is_right(yaml_file):
    assert_refused([yaml_file("loaves: 2"), "--loaves=x"], "--loaves", "whole number", "'x'")
    assert_refused([yaml_file("haet: 2"), "--loaves=3"], "a.yaml:1: ", "'haet'")


def test_field_that_cannot_be_set_is_named():
    """Its type or its declaration, and what would have no effect: a class that is no dataclass,
    and a default without a type."""

    @dataclass(frozen=True)
    class Plain(Base):
        crumbs: int = 3

    @dataclass(frozen=True)
    class Maybe(Base):
        crumbs: int | None = setting(None, "how many")

    class Forgotten(Base):
        loaves: int = setting(3, "how many")

    @dataclass(frozen=True)
    class Untyped(Base):
        loaves = 3

    for kind in (Plain, Maybe):
        assert_refused([], "crumbs ", kind.__name__, "crumbs: int = setting(", kind=kind)
    assert_refused([], "Forgotten", "@dataclass(frozen=True)", kind=Forgotten)
    assert_refused([], "Untyped", "loaves: int = 3", kind=Untyped)


def test_field_that_is_declared_again_keeps_its_rules():
    """Its choices, its lowest value, and whether it may change when a run is resumed."""

    @dataclass(frozen=True)
    class Task(Config):
        optimizer: str = "adamw"
        num_workers: int = setting(0, "of this task")
        epochs: int = setting(3, "of this task", low=2)

    assert load_config(Task, argv=["--num-workers=-1"]).optimizer == "adamw"
    for argument in ("--optimizer=foo", "--num-workers=-2", "--epochs=1"):
        with pytest.raises(ConfigError):
            parse_settings(Task, [argument])
    fixed = Task().fixed_on_resume()
    assert "num_workers" not in fixed and "optimizer" in fixed
