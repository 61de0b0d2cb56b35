"""tools.report: what is on the page, and what it does with broken runs."""

import builtins
import fcntl
import json
import os
import re
import warnings
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
from utils.options.timing import NAMES

pytest.importorskip("matplotlib")  # an extra


def epoch(number, loss, **more):
    """A row of metrics.jsonl: 100 samples in ten seconds."""
    row = {"epoch": number, "world_size": 2, "lr": 0.1 / (number + 1)}
    for split, samples in (("train", 100), ("val", 20)):
        row |= {f"{split}_loss": loss, f"{split}_accuracy": 1 - loss / 4}
        row |= {f"{split}_samples": samples, f"{split}_seconds": samples / 10}
    return row | more


def step(number, step, loss):
    """A row of steps.jsonl, in an epoch of ten steps."""
    row = {"epoch": number, "step": step, "samples": 10 * step, "loss": loss, "accuracy": 0.5}
    return row | {"lr": 0.1, "samples_per_second": 20.0, "data_seconds": 0.1, "memory": 10**9}


def write(folder, rows, steps=(), **settings):
    """A run in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("metrics", rows), ("steps", steps)):
        if content:
            text = "".join(json.dumps(row) + "\n" for row in content)
            (folder / f"{name}.jsonl").write_text(text)
    defaults = {"epochs": len(rows), "global_batch_size": 10, "lr": 0.1, "output_dir": str(folder)}
    (folder / "config.yaml").write_text(json.dumps(defaults | settings))
    return folder


LIMIT = "rank 0 computes longer"


@pytest.fixture
def full(tmp_path):
    """A run with everything: two epochs and the start of a third one, on two ranks."""
    times = {name: [0.0, 0.0] for name in NAMES}
    times |= {"total": 12.0, "computing": [9.0, 6.0], "communicating": [1.0, 4.0]}
    times |= {"validation": [2.0, 2.0]}
    rows = [
        epoch(0, 2.0, time=times, limited_by=LIMIT, skipped_steps=[]),
        epoch(1, 1.0, time=times, limited_by=LIMIT, skipped_steps=[3]),
    ]
    steps = [
        step(0, 5, 2.0),
        step(0, 10, 1.5),
        step(1, 5, 1.0),
        step(1, 10, 0.5),
        step(2, 5, 0.5),
    ]
    return write(tmp_path / "full", rows, steps, epochs=3)


# What is on the page


def test_points_lie_where_their_samples_were_trained(full):
    run = read_run(full, "full")
    found = curves(run)
    assert list(found) == ["loss", "accuracy", "learning rate", "samples/s"]
    places = [(p.samples, p.seconds) for p in found["loss"]["train"]]
    # The third epoch has no row yet: its time follows from its speed, 20 samples/s.
    assert places == [(50, 5), (100, 10), (150, 15), (200, 20), (250, 22.5)]
    assert [p.value for p in found["loss"]["train"]] == [2.0, 1.5, 1.0, 0.5, 0.5]
    ends = [(p.samples, p.seconds, p.value) for p in found["accuracy"]["validation"]]
    assert ends == [(100, 10, 0.5), (200, 20, 0.75)]
    assert [p[:2] for p in skipped_steps(run)] == [(130, 13)]


def test_epochs_without_rows_of_steps_have_their_own(tmp_path):
    """As of a run that was resumed without --log-steps."""
    rows = [epoch(number, 2.0 - number / 2) for number in range(3)]
    run = read_run(write(tmp_path / "a", rows, [step(0, 5, 2.5), step(0, 10, 2.2)]), "a")
    points = [(p.samples, p.value) for p in curves(run)["loss"]["train"]]
    assert points == [(50, 2.5), (100, 2.2), (200, 1.5), (300, 1.0)]
    run = read_run(write(tmp_path / "b", rows), "b")
    assert [p.value for p in curves(run)["loss"]["train"]] == [2.0, 1.5, 1.0]
    assert [p.value for p in curves(run)["samples/s"]["train"]] == [10.0, 10.0, 10.0]
    assert skipped_steps(run) == [] and rank_times(run) == {} and run.notes == []


def test_times_of_ranks_add_up_over_epochs(full):
    times = rank_times(read_run(full, "full"))
    assert times["computing"] == [18.0, 12.0] and times["communicating"] == [2.0, 8.0]
    assert "data" not in times


def test_times_of_a_different_number_of_ranks_and_of_other_names(tmp_path):
    rows = [epoch(0, 2.0, time={"total": 5.0, "computing": [3.0]})]  # on one process
    for number in (1, 2):
        time = {"total": 3.0, "computing": [1.0, 2.0], "dreaming": [2.0, 1.0]}
        rows.append(epoch(number, 2.0, time=time))
    run = read_run(write(tmp_path / "run", rows), "run")
    assert rank_times(run) == {"computing": [2.0, 4.0], "dreaming": [4.0, 2.0]}


def test_page_says_which_epoch_is_the_best(full):
    torch.save({"epoch": 1}, full / "best.pt")
    text = report([read_run(full, "full")])
    best = text[text.index("Best epoch") : text.index("Curves")]
    assert re.findall("<t[hd][^>]*>(.*?)</t", best) == [
        *("run", "val accuracy", "val loss", "train accuracy", "train loss", "epoch"),
        *("full", "0.5000", "2.0000", "0.5000", "2.0000", "0"),
    ]
    (full / "best.pt").write_bytes(b"damaged")
    assert read_run(full, "full").best is None


def test_only_settings_that_differ_are_listed(tmp_path):
    rows = [epoch(0, 2.0)]
    one = write(tmp_path / "one", rows, lr=0.1, seed=3, model="<b>vit</b>")
    two = write(tmp_path / "two", rows, lr=0.2, seed=3, model="resnet")
    text = report([read_run(one, "one"), read_run(two, "two")])
    table = text[text.index("Settings that differ") :]
    assert re.findall('<th scope="row">(.*?)</th>', table) == ["lr", "model"]
    assert "&lt;b&gt;vit" in text and "<b>vit" not in text


def test_shares_of_a_mixture_have_curves_and_are_not_its_metric(tmp_path):
    """In the order of a row, they come first."""
    shares = [
        {"train_share_long": 0.75, "train_share_short": 0.25},
        {"train_share_long": 0.5, "train_share_short": 0.5},
    ]
    rows = [{"epoch": number} | more | epoch(number, 1.0) for number, more in enumerate(shares)]
    run = read_run(write(tmp_path / "mixed", rows), "mixed")
    found = curves(run)
    assert list(found)[:4] == ["loss", "accuracy", "share_long", "share_short"]
    assert [point.value for point in found["share_long"]["train"]] == [0.75, 0.5]


def test_task_without_a_metric(tmp_path):
    rows = [{k: v for k, v in epoch(0, 2.0).items() if "accuracy" not in k}]
    runs = [read_run(write(tmp_path / "bare", rows), "bare")]
    assert list(curves(runs[0])) == ["loss", "learning rate", "samples/s"]
    assert len(picture(runs).axes) == 3
    runs.append(read_run(write(tmp_path / "full", [epoch(0, 2.0)]), "full"))
    titles = [axis.get_title() for axis in picture(runs).axes]
    assert titles == ["loss", "learning rate", "samples/s", "accuracy"]


def test_odd_names_of_folders(tmp_path, capfd):
    """Signs of TeX and of HTML, a character that the font lacks, and bytes that are no text."""
    name = "_a$x^{$b<script>图" + os.fsdecode(b"caf\xe9")
    folder = write(tmp_path / name, [epoch(0, 2.0)])
    output, image = tmp_path / "r.html", tmp_path / "r.png"
    with warnings.catch_warnings(action="error"):
        main([str(folder), "-o", str(output), "--png", str(image)])
    assert image.exists() and capfd.readouterr().err == ""
    assert "<h1>_a$x^{$b&lt;script&gt;图caf\ufffd</h1>" in output.read_text()
    legend = picture([read_run(folder, "_x")]).legends[0]
    assert [text.get_text() for text in legend.get_texts()] == ["_x", "training", "validation"]
    assert names_of([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]


def test_page_needs_nothing_else_and_is_the_same_each_time(full, tmp_path, capsys):
    outputs = [tmp_path / "one.html", tmp_path / "two.html"]
    for output in outputs:
        main([str(full), "-o", str(output)])
    text = outputs[0].read_text()
    assert text == outputs[1].read_text() and f"wrote {outputs[0]}" in capsys.readouterr().out
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


# What is broken


def test_broken_rows_are_one_line(full, tmp_path, capfd):
    def error_of(file, text):
        before = (full / file).read_text()
        (full / file).write_text(text)
        with pytest.raises(SystemExit):
            main([str(full), "-o", str(tmp_path / "r.html")])
        (full / file).write_text(before)
        error = capfd.readouterr().err
        assert error.startswith("error") and error.count("\n") == 1
        return error

    metrics = full / "metrics.jsonl"
    first, second = metrics.read_text().splitlines()
    error = error_of("metrics.jsonl", f"{first}\n{second[:30]}\n{second}\n")
    assert f"line 2 of {metrics} is not JSON" in error
    error = error_of("metrics.jsonl", first.replace('"train_loss": 2.0', '"train_loss": null'))
    assert f"line 1 of {metrics} has no number 'train_loss'" in error
    assert "has no number 'epoch'" in error_of("steps.jsonl", "{}\n")


def test_settings_that_a_full_disk_has_lost(full):
    (full / "config.yaml").write_text("")
    assert "full" in report([read_run(full, "full")])


def test_missing_run_is_an_error(tmp_path, capfd):
    write(tmp_path / "new", [], epochs=3)
    for folder, text in ((tmp_path, "no run in"), (tmp_path / "new", "first epoch")):
        with pytest.raises(SystemExit):
            main([str(folder), "-o", str(tmp_path / "x.html")])
        error = capfd.readouterr().err
        assert error.startswith("error") and error.count("\n") == 1
        assert text in error and str(folder) in error
    assert not (tmp_path / "x.html").exists()


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


def test_line_that_is_being_written_is_left_out(full):
    with open(full / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 2, "tr')
    run = read_run(full, "full")
    assert len(run.rows) == 2 and "metrics.jsonl is incomplete" in run.notes[0]


def test_output_that_is_no_ordinary_file(tmp_path):
    """A device stays one, and a link leads to the file."""
    write_file(Path("/dev/null"), "text")
    assert Path("/dev/null").is_char_device()
    (tmp_path / "link.html").symlink_to("page.html")
    write_file(tmp_path / "link.html", "text")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "page.html").read_text() == "text"


def test_other_errors_are_one_line(full, tmp_path, capfd, monkeypatch):
    def error_of(*arguments):
        with pytest.raises(SystemExit):
            main([str(argument) for argument in arguments])
        return capfd.readouterr().err

    other = write(tmp_path / "other", [epoch(0, 2.0)])
    assert f"{full} is given twice" in error_of(other, full, full)
    missing = tmp_path / "missing" / "r.html"
    assert f"cannot write {missing}: No such file" in error_of(full, "-o", missing)
    output = tmp_path / "r.html"
    assert "cannot draw" in error_of(full, "-o", output, "--png", tmp_path / "r.xyz")
    (full / "config.yaml").write_text("a: [")
    assert f"cannot read {full / 'config.yaml'}" in error_of(full, "-o", output)
    (full / "config.yaml").unlink()
    real = builtins.__import__

    def without_matplotlib(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    assert "pip install matplotlib" in error_of(full, "-o", output)
