"""tools.report: what is on the page, and what it does with runs that have not ended well."""

import builtins
import fcntl
import json
import re
from pathlib import Path

import pytest
import torch

from tests.forked import fork_script
from tools.lib.page import write_file
from tools.report import (
    curves,
    main,
    names_of,
    picture,
    rank_times,
    read_run,
    report,
    skipped_steps,
)
from utils.errors import UserError

pytest.importorskip("matplotlib")  # an extra


def epoch(number, loss, **more):
    """A row of metrics.jsonl: 100 samples in ten seconds, and 20 of validation in two."""
    return {
        "epoch": number,
        "world_size": 2,
        "lr": 0.1,
        "train_loss": loss,
        "train_accuracy": 1 - loss / 4,
        "train_samples": 100,
        "train_seconds": 10.0,
        "val_loss": loss,
        "val_accuracy": 1 - loss / 4,
        "val_samples": 20,
        "val_seconds": 2.0,
    } | more


def step(number, step, loss):
    """A row of steps.jsonl, in an epoch of ten steps."""
    return {
        "epoch": number,
        "step": step,
        "samples": 10 * step,
        "loss": loss,
        "accuracy": 0.5,
        "lr": 0.1,
        "samples_per_second": 20.0,
    }


def write(folder, rows, steps=(), **settings):
    """A run in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("metrics", rows), ("steps", steps)):
        if content:
            lines = [json.dumps(row) + "\n" for row in content]
            (folder / f"{name}.jsonl").write_text("".join(lines))
    settings = {"epochs": len(rows), "global_batch_size": 10} | settings
    (folder / "config.yaml").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def full(tmp_path):
    """A run with everything: two epochs and the start of a third one, on two ranks."""
    time = {"total": 12.0, "computing": [9.0, 6.0], "communicating": [1.0, 4.0], "data": [0.0, 0.0]}
    rows = [epoch(0, 2.0, time=time, skipped_steps=[]), epoch(1, 1.0, time=time, skipped_steps=[3])]
    steps = [step(0, 5, 2.0), step(0, 10, 1.5), step(1, 5, 1.0), step(1, 10, 0.5), step(2, 5, 0.5)]
    return write(tmp_path / "full", rows, steps, epochs=3)


# What is on the page


def test_points_lie_where_their_samples_were_trained(full):
    run = read_run(full, "full")
    found = curves(run)
    assert list(found) == ["loss", "accuracy", "learning rate", "samples/s"]
    assert found["loss"]["train"] == [
        (50, 5, 2.0),
        (100, 10, 1.5),
        (150, 15, 1.0),
        (200, 20, 0.5),
        (250, 22.5, 0.5),  # an epoch without a row: its time follows from its speed, 20 samples/s
    ]
    assert found["accuracy"]["validation"] == [(100, 10, 0.5), (200, 20, 0.75)]
    assert [point[:2] for point in skipped_steps(run)] == [(130, 13)]


def test_epochs_without_rows_of_steps_have_their_own(tmp_path):
    """As of a run that was resumed without --log-steps."""
    rows = [epoch(0, 2.0), epoch(1, 1.5)]
    run = read_run(write(tmp_path / "a", rows, [step(0, 5, 2.5), step(0, 10, 2.2)]), "a")
    assert curves(run)["loss"]["train"] == [(50, 5, 2.5), (100, 10, 2.2), (200, 20, 1.5)]
    run = read_run(write(tmp_path / "b", rows), "b")
    assert curves(run)["loss"]["train"] == [(100, 10, 2.0), (200, 20, 1.5)]
    assert curves(run)["samples/s"]["train"] == [(100, 10, 10.0), (200, 20, 10.0)]
    assert rank_times(run) == {} and run.notes == []


def test_epoch_that_was_not_evaluated(tmp_path):
    """As docs/editing.md allows."""
    row = {name: value for name, value in epoch(1, 1.0).items() if not name.startswith("val_")}
    run = read_run(write(tmp_path / "run", [epoch(0, 2.0), row]), "run")
    assert curves(run)["loss"]["validation"] == [(100, 10, 2.0)]
    assert "0:00:22" in report([run])


def test_times_of_ranks_add_up_over_epochs(full):
    times = rank_times(read_run(full, "full"))
    assert times == {"computing": [18.0, 12.0], "communicating": [2.0, 8.0]}


def test_times_of_a_different_number_of_ranks_do_not_count(tmp_path):
    rows = [epoch(0, 2.0, time={"total": 5.0, "computing": [3.0]})]
    rows.append(epoch(1, 2.0, time={"total": 3.0, "computing": [1.0, 2.0]}))
    run = read_run(write(tmp_path / "run", rows), "run")
    assert rank_times(run) == {"computing": [1.0, 2.0]}


def test_page_says_which_epoch_is_the_best(full):
    torch.save({"epoch": 1}, full / "best.pt")
    text = report([read_run(full, "full")])
    best = text[text.index("Best epoch") : text.index("Curves")]
    head = ["run", "val accuracy", "val loss", "train accuracy", "train loss", "epoch"]
    row = ["full", "0.5000", "2.0000", "0.5000", "2.0000", "0"]
    assert re.findall("<t[hd][^>]*>(.*?)</t", best) == [*head, *row]
    (full / "best.pt").write_bytes(b"damaged")
    assert read_run(full, "full").best is None


def test_only_settings_that_differ_are_listed(tmp_path):
    rows = [epoch(0, 2.0)]
    one = write(tmp_path / "a" / "run", rows, lr=0.1, seed=3, model="<b>vit</b>")
    two = write(tmp_path / "b" / "run", rows, lr=0.2, seed=3, model="resnet")
    names = names_of([one, two])
    assert names == ["a/run", "b/run"]
    text = report([read_run(one, names[0]), read_run(two, names[1])])
    table = text[text.index("Settings that differ") :]
    assert re.findall('<th scope="row">(.*?)</th>', table) == ["lr", "model"]
    assert "&lt;b&gt;vit" in text and "<b>vit" not in text


def test_shares_of_a_mixture_have_curves_and_are_not_its_metric(tmp_path):
    """In the order of a row, they come first."""
    row = {"train_share_long": 0.75, "train_share_short": 0.25} | epoch(0, 1.0)
    found = curves(read_run(write(tmp_path / "mixed", [row]), "mixed"))
    assert list(found)[:4] == ["loss", "accuracy", "share_long", "share_short"]
    assert found["share_long"]["train"] == [(100, 10, 0.75)]


def test_runs_with_and_without_a_metric_in_one_picture(tmp_path):
    row = {name: value for name, value in epoch(0, 2.0).items() if "accuracy" not in name}
    bare = read_run(write(tmp_path / "_bare", [row]), "_bare")
    full = read_run(write(tmp_path / "full", [epoch(0, 2.0)]), "full")
    drawn = picture([bare, full])
    titles = [axis.get_title() for axis in drawn.axes]
    assert titles == ["loss", "learning rate", "samples/s", "accuracy"]
    texts = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert texts == ["_bare", "full", "training", "validation"]


def test_page_needs_nothing_else_and_is_the_same_each_time(full, tmp_path):
    one, two, image = tmp_path / "one.html", tmp_path / "two.html", tmp_path / "one.png"
    main([str(full), "-o", str(one), "--png", str(image)])
    main([str(full), "-o", str(two)])
    text = one.read_text()
    assert text == two.read_text() and image.exists()
    links = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert links and all(link.startswith(("#", "data:")) for link in links)
    identifiers = re.findall(r'\bid="([^"]*)"', text)
    assert len(identifiers) == len(set(identifiers))


@pytest.mark.slow
def test_report_of_a_real_run(tmp_path):
    flags = {"timing": True, "log_steps": 2, "output_dir": tmp_path / "run"}
    assert fork_script("train_ddp.py", 2, **flags).code == 0
    run = read_run(tmp_path / "run", "run")
    assert len(curves(run)["loss"]["train"]) == 8 and run.notes == []
    assert len(rank_times(run)["computing"]) == 2
    best = max(run.rows, key=lambda row: row["val_accuracy"])
    assert run.best == best["epoch"]
    assert "over time" in report([run])


# Runs that have not ended well


def test_broken_row_is_named(full):
    metrics = full / "metrics.jsonl"
    first, second = metrics.read_text().splitlines()
    metrics.write_text(f"{first}\n{second[:30]}\n{second}\n")
    with pytest.raises(UserError, match=f"line 2 of {metrics} is not JSON"):
        read_run(full, "full")


def test_line_that_is_being_written_is_left_out(full):
    with open(full / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 2, "tr')
    run = read_run(full, "full")
    assert len(run.rows) == 2 and "metrics.jsonl is incomplete" in run.notes[0]


def test_settings_that_a_full_disk_has_lost(full):
    (full / "config.yaml").write_text("")
    assert read_run(full, "full").settings == {}


def test_missing_run_is_an_error_of_one_line(tmp_path, capfd):
    with pytest.raises(SystemExit):
        main([str(tmp_path), "-o", str(tmp_path / "x.html")])
    error = capfd.readouterr().err
    assert error.startswith("error") and error.count("\n") == 1
    assert f"no run in {tmp_path}" in error
    assert not (tmp_path / "x.html").exists()
    new = write(tmp_path / "new", [], epochs=3)
    with pytest.raises(UserError, match="first epoch"):
        read_run(new, "new")


def test_running_run_in_its_first_epoch(tmp_path):
    folder = write(tmp_path / "new", [], [step(0, 5, 2.0)], epochs=3)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = read_run(folder, "new")
    running, first = run.notes
    assert running == "still running" and "first epoch" in first
    assert "still running" in report([run])
    (stopped,) = read_run(folder, "new").notes
    assert "after 0 of 3 epochs" in stopped


# The command


def test_output_that_is_no_ordinary_file(tmp_path):
    """A device stays one, and a link leads to the file."""
    write_file(Path("/dev/null"), "text")
    assert Path("/dev/null").is_char_device()
    (tmp_path / "link.html").symlink_to("page.html")
    write_file(tmp_path / "link.html", "text")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "page.html").read_text() == "text"


def test_run_that_is_given_twice_is_refused(tmp_path):
    with pytest.raises(UserError, match="given twice"):
        names_of([tmp_path, tmp_path])


def test_matplotlib_is_asked_for(full, monkeypatch):
    real = builtins.__import__

    def without_matplotlib(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(UserError, match="pip install matplotlib"):
        report([read_run(full, "full")])
