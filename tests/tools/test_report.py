"""tools.report: what is on the page, in a real browser too, and what it does with broken runs."""

import builtins
import fcntl
import http.server
import json
import os
import re
import shutil
import subprocess
import threading
import warnings
from contextlib import contextmanager
from functools import partial
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
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(not BROWSER, reason="needs Chromium: apt-get install chromium")


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


def test_run_without_rows_of_steps_has_those_of_epochs(tmp_path):
    run = read_run(write(tmp_path / "a", [epoch(0, 2.0), epoch(1, 1.0)]), "a")
    found = curves(run)
    assert [p.value for p in found["loss"]["train"]] == [2.0, 1.0]
    assert [p.value for p in found["samples/s"]["train"]] == [10.0, 10.0]
    assert skipped_steps(run) == [] and rank_times(run) == {} and run.notes == []
    assert "What the time was spent on" not in report([run])


def test_times_of_ranks_add_up_over_epochs(full):
    times = rank_times(read_run(full, "full"))
    assert times["computing"] == [18.0, 12.0] and times["communicating"] == [2.0, 8.0]
    assert "data" not in times
    text = report([read_run(full, "full")])
    assert LIMIT in text and "18.0 s" in text


def test_page_says_which_epoch_is_the_best(full):
    torch.save({"epoch": 1}, full / "best.pt")
    text = report([read_run(full, "full")])
    best = text[text.index("Best epoch") : text.index("Curves")]
    assert re.findall("<t[hd][^>]*>(.*?)</t", best) == [
        *("run", "val accuracy", "val loss", "train accuracy", "train loss", "epoch"),
        *("full", "0.5000", "2.0000", "0.5000", "2.0000", "0"),
    ]
    for kind in ("solid", "dashed", "cross"):
        assert f'class="line {kind}"' in text
    (full / "best.pt").write_bytes(b"damaged")
    assert "Best epoch" not in report([read_run(full, "full")])


def test_best_that_holds_code_is_not_executed(full, tmp_path):
    class Payload:
        def __reduce__(self):
            return Path.touch, (tmp_path / "executed",)

    torch.save({"epoch": Payload()}, full / "best.pt")
    assert read_run(full, "full").best is None and not (tmp_path / "executed").exists()


def test_only_settings_that_differ_are_listed(tmp_path):
    rows = [epoch(0, 2.0)]
    one = write(tmp_path / "one", rows, lr=0.1, seed=3, model="<b>vit</b>")
    two = write(tmp_path / "two", rows, lr=0.2, seed=3, model="resnet")
    text = report([read_run(one, "one"), read_run(two, "two")])
    table = text[text.index("Settings that differ") :]
    assert re.findall('<th scope="row">(.*?)</th>', table) == ["lr", "model"]
    assert "&lt;b&gt;vit" in text and "<b>vit" not in text


def test_tasks_with_different_metrics(tmp_path):
    rows = [{k.replace("accuracy", "perplexity"): v for k, v in epoch(0, 2.0).items()}]
    runs = [read_run(write(tmp_path / "text", rows), "text")]
    runs.append(read_run(write(tmp_path / "images", [epoch(0, 2.0)]), "images"))
    text = report(runs)
    assert "perplexity over samples" in text and "accuracy over samples" in text
    assert "val accuracy" in text


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
    assert "share short" in report([run])


def test_task_without_a_metric(tmp_path):
    rows = [{k: v for k, v in epoch(0, 2.0).items() if "accuracy" not in k}]
    runs = [read_run(write(tmp_path / "bare", rows), "bare")]
    assert list(curves(runs[0])) == ["loss", "learning rate", "samples/s"]
    assert len(picture(runs).axes) == 3
    runs.append(read_run(write(tmp_path / "full", [epoch(0, 2.0)]), "full"))
    titles = [axis.get_title() for axis in picture(runs).axes]
    assert titles == ["loss", "learning rate", "samples/s", "accuracy"]


def test_only_a_large_range_has_a_logarithmic_scale(tmp_path):
    def scales(*losses):
        rows = [epoch(number, loss) for number, loss in enumerate(losses)]
        run = read_run(write(tmp_path / "run", rows), "run")
        return [axis.get_yscale() for axis in picture([run]).axes]

    assert scales(2.0, 0.1) == ["linear"] * 4
    assert scales(0.9, 0.001) == ["linear"] * 4
    assert scales(float("nan"), 2.0, 0.01) == ["log", "linear", "linear", "linear"]


def test_names_tell_folders_apart(tmp_path):
    folders = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    assert names_of(folders) == ["a/run", "b/run"] and names_of(folders[:1]) == ["run"]


def test_runs_are_told_apart_without_colors(tmp_path):
    runs = [read_run(write(tmp_path / name, [epoch(0, 2.0)]), name) for name in "abc"]
    drawn = picture(runs)
    lines = [line for line in drawn.axes[0].lines if line.get_linestyle() != "None"]
    assert [line.get_marker() for line in lines] == list("oossDD")
    assert [line.get_marker() for line in drawn.legends[0].get_lines()][:3] == list("osD")
    assert all(sign in report(runs) for sign in "●■◆")


@pytest.mark.parametrize("name", ["a$x^{$b", "_x", "图片", os.fsdecode(b"caf\xe9"), "<script>"])
def test_odd_names_of_folders(tmp_path, name, capfd):
    folder = write(tmp_path / name, [epoch(0, 2.0)])
    output, image = tmp_path / "r.html", tmp_path / "r.png"
    with warnings.catch_warnings(action="error"):  # of characters that the font lacks
        main([str(folder), "-o", str(output), "--png", str(image)])
    assert image.exists() and capfd.readouterr().err == ""
    shown = name.replace("<", "&lt;").replace(">", "&gt;").replace("\udce9", "\ufffd")
    assert f"<h1>{shown}</h1>" in output.read_text()
    legend = picture([read_run(folder, "_x")]).legends[0]
    assert [text.get_text() for text in legend.get_texts()] == ["_x", "training", "validation"]


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


@pytest.mark.parametrize("name", ["run.png", "run.svg"])
def test_picture(full, tmp_path, name):
    main([str(full), "-o", str(tmp_path / "r.html"), "--png", str(tmp_path / name)])
    assert (tmp_path / name).stat().st_size > 10_000


def test_report_of_a_real_run(tmp_path):
    flags = {"timing": True, "log_steps": 2, "output_dir": tmp_path / "run"}
    assert fork_script("train_ddp.py", 2, **flags).code == 0
    run = read_run(tmp_path / "run", "run")
    assert len(curves(run)["loss"]["train"]) == 8 and run.notes == []
    assert len(rank_times(run)["computing"]) == 2
    best = max(run.rows, key=lambda row: row["val_accuracy"])
    assert run.best == best["epoch"]
    assert "over time" in report([run])


def test_time_of_other_names_and_without_a_sentence(tmp_path):
    rows = [epoch(0, 2.0, time={"total": 5.0, "computing": [3.0]})]  # on one process
    for number in (1, 2):
        time = {"total": 3.0, "computing": [1.0, 2.0], "dreaming": [2.0, 1.0]}
        rows.append(epoch(number, 2.0, time=time))
    run = read_run(write(tmp_path / "run", rows), "run")
    assert rank_times(run) == {"computing": [2.0, 4.0], "dreaming": [4.0, 2.0]}
    assert "dreaming" in report([run])


def test_page_of_many_ranks_is_not_endless(tmp_path):
    time = {"total": 3.0, "computing": [3.0] * 256}
    run = read_run(write(tmp_path / "run", [epoch(0, 2.0, time=time)]), "run")
    text = report([run])
    bars = text[text.index("What the time was spent on") :]
    assert float(re.search(r'viewBox="0 0 \S+ (\S+)"', bars)[1]) < 700


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
    assert "has no number 'epoch'" in error_of("steps.jsonl", "[7]\n")


NESTED = "\n".join(
    ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12))]
)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (NESTED, ""),
        ("a: &a [*a]", ""),
        ("? [1, 2]\n: 3\n1: 2\nepochs: many", ""),
        ("- a\n- b", ""),
        ("a: " + "[" * 5000 + "]" * 5000, "config.yaml"),
    ],
    ids=["aliases of aliases", "recursive", "keys", "list", "deep"],
)
def test_settings_of_anybody_neither_hang_nor_crash(tmp_path, settings, error, capfd):
    folder = write(tmp_path / "run", [epoch(0, 2.0)])
    (folder / "config.yaml").write_text(settings)
    assert_page_or_line(folder, error, capfd)


def assert_page_or_line(folder, error, capfd):
    """The report is written, or there is one line that names what is wrong."""
    output = folder / "r.html"
    if not error:
        main([str(folder), "-o", str(output)])
        assert output.exists()
        return
    with pytest.raises(SystemExit):
        main([str(folder), "-o", str(output)])
    said = capfd.readouterr().err
    assert said.startswith("error") and said.count("\n") == 1 and error in said


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"val_accuracy": None, "train_accuracy": "x"}, ""),
        ({"train_accuracy": [1], "note": {"a": [1]}}, ""),
        ({"train_seconds": 0.0}, ""),
        ({"train_samples": 0}, ""),
        ({"train_loss": 1e308, "val_loss": -1e308, "train_seconds": 1e308}, ""),
        ({"train_samples": 10**400, "val_seconds": float("nan"), "lr": float("inf")}, ""),
        ({"time": 5, "skipped_steps": 5}, ""),
        ({"time": {}, "skipped_steps": "ab"}, ""),
        ({"time": {"computing": 3}}, ""),
        ({"time": {"computing": [], "data": [1.0]}}, ""),
        ({"time": {"computing": [1e308, float("inf")]}, "limited_by": 3}, ""),
        ({"epoch": 0.5}, "'epoch'"),
        ({"epoch": -1}, "'epoch'"),
        ({"world_size": True}, "'world_size'"),
    ],
)
def test_rows_of_anybody_neither_hang_nor_crash(tmp_path, more, error, capfd):
    folder = write(tmp_path / "run", [epoch(0, 2.0, **more), epoch(1, 1.0)])
    assert_page_or_line(folder, error, capfd)


@pytest.mark.parametrize(
    "row",
    [
        step(10**9, 1, 2.0),
        step(0, 1, 2.0) | {"samples_per_second": 0.0, "accuracy": None},
    ],
)
def test_rows_of_steps_of_anybody_neither_hang_nor_crash(row, tmp_path, capfd):
    rows = [epoch(0, 2.0, train_samples=0, skipped_steps=[10**9]), epoch(1, 1.0)]
    folder = write(tmp_path / "run", rows, [row], global_batch_size="many")
    assert_page_or_line(folder, "", capfd)


def test_json_that_python_cannot_read_is_one_line(tmp_path, capfd):
    folder = write(tmp_path / "run", [epoch(0, 2.0)])
    for line in ("[" * 100_000, "\0\0"):
        with open(folder / "metrics.jsonl", "w") as file:
            file.write(f"{line}\n{json.dumps(epoch(0, 2.0))}\n")
        assert_page_or_line(folder, "line 1", capfd)


def test_missing_run_is_an_error(tmp_path, capfd):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(SystemExit):
            main([str(folder), "-o", str(tmp_path / "x.html")])
        error = capfd.readouterr().err
        assert error.startswith("error") and error.count("\n") == 1
        assert f"no run in {folder}" in error
    assert not (tmp_path / "x.html").exists()
    write(tmp_path / "new", [], epochs=3)
    with pytest.raises(SystemExit):
        main([str(tmp_path / "new")])
    error = capfd.readouterr().err
    assert f"{tmp_path / 'new'} " in error and "first epoch" in error


def test_incomplete_line_and_unfinished_run_are_noted(full):
    with open(full / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 2, "tr')
    notes = read_run(full, "full").notes
    assert len(notes) == 2
    assert "metrics.jsonl is incomplete" in notes[0] and "after 2 of 3 epochs" in notes[1]


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


def test_output_that_is_no_ordinary_file(full, tmp_path, capfd):
    """A device stays one, and a link leads to the file."""
    main([str(full), "-o", "/dev/null"])
    assert Path("/dev/null").is_char_device()
    (tmp_path / "link.html").symlink_to("page.html")
    main([str(full), "-o", str(tmp_path / "link.html")])
    assert (tmp_path / "link.html").is_symlink() and (tmp_path / "page.html").stat().st_size
    with pytest.raises(SystemExit):
        main([str(full), "-o", str(tmp_path)])
    assert f"cannot write {tmp_path}: Is a directory" in capfd.readouterr().err


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


# In a browser

# Measures the page in a frame of a given width, and writes what it finds into the document.
WRAPPER = """<!DOCTYPE html><html><body><iframe id="frame" src="page.html" width="%d" height="900">
</iframe><script>
frame.onload = () => {
  const page = frame.contentDocument, root = page.documentElement, found = {errors: [], svgs: []};
  for (const kind of ["samples", "time"]) {
    page.getElementById(kind).click();
    for (const svg of page.querySelectorAll("svg")) {
      const box = svg.getBoundingClientRect(), inside = svg.viewBox.baseVal;
      if (!box.width) continue;
      found.svgs.push(kind);
      for (const part of svg.querySelectorAll("g[id*=text_], g[id*=line2d], g[id*=patch]")) {
        const b = part.getBoundingClientRect();
        if (b.left < box.left - 1 || b.right > box.right + 1 || b.top < box.top - 1 ||
            b.bottom > box.bottom + 1) found.errors.push("cut off: " + part.id);
      }
    }
  }
  if (root.scrollWidth > root.clientWidth) found.errors.push("wider than the window");
  found.color = getComputedStyle(page.body).color;
  found.paper = getComputedStyle(page.body).backgroundColor;
  found.ink = getComputedStyle(page.querySelector("svg g[id*=text_] g")).fill;
  document.body.textContent = "RESULT" + JSON.stringify(found) + "END";
};
</script></body></html>"""


@contextmanager
def served(folder):
    """The URL of a folder."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    handler = partial(Handler, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def browse(folder, width, is_dark):
    """What WRAPPER finds in folder/page.html, and what the browser says on its console."""
    (folder / "wrapper.html").write_text(WRAPPER % width)
    with served(folder) as address:
        command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        command += [f"--user-data-dir={folder}/profile", "--window-size=1400,1000"]
        command += [f"--blink-settings=preferredColorScheme={0 if is_dark else 1}"]
        command += ["--enable-logging=stderr", "--virtual-time-budget=10000"]
        command.append(f"{address}/wrapper.html")
        run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert "RESULT" in run.stdout, run.stderr
    result = json.loads(run.stdout.partition("RESULT")[2].partition("END")[0])
    return result, [line for line in run.stderr.splitlines() if "CONSOLE" in line]


def test_link_in_place_of_the_temporary_file_is_not_followed(tmp_path):
    """In a folder that others can write to."""
    (tmp_path / "victim").write_text("mine")
    (tmp_path / ".page.html.tmp").symlink_to(tmp_path / "victim")
    write_file(tmp_path / "page.html", "text")
    assert (tmp_path / "victim").read_text() == "mine"
    assert (tmp_path / "page.html").read_text() == "text"


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize(("width", "is_dark"), [(1280, False), (400, True)])
def test_page_in_a_browser(full, tmp_path, width, is_dark):
    other = write(full.parent / ("long" * 30), [epoch(0, 2.0), epoch(1, 1.2)], lr=0.2)
    main([str(full), str(other), "-o", str(tmp_path / "page.html")])
    result, console = browse(tmp_path, width, is_dark)
    assert result["errors"] == [] and console == []
    assert result["svgs"].count("samples") == result["svgs"].count("time") == 5
    paper, ink = "rgb(255, 255, 255)", "rgb(31, 35, 40)"
    if is_dark:
        paper, ink = "rgb(13, 17, 23)", "rgb(230, 237, 243)"
    assert (result["paper"], result["color"], result["ink"]) == (paper, ink, ink)


@needs_browser
@pytest.mark.slow
def test_browser_finds_what_is_wrong(full, tmp_path):
    """The test above can fail."""
    main([str(full), "-o", str(tmp_path / "page.html")])
    text = (tmp_path / "page.html").read_text().replace('viewBox="0 0 ', 'viewBox="60 0 ')
    text += "<script>nonsense()</script><div style='width: 3000px'>wide</div>"
    (tmp_path / "page.html").write_text(text)
    result, console = browse(tmp_path, 1280, False)
    assert "wider than the window" in result["errors"]
    assert any(error.startswith("cut off") for error in result["errors"])
    assert any("nonsense" in line for line in console)
