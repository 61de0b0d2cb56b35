"""The picture of a terminal in README.md."""

import sys
import xml.etree.ElementTree as ET

from lab.screen import PATH, REPORT, draw, record, shown
from tools.lib.ladder import ROOT

SVG = "{http://www.w3.org/2000/svg}"


def test_lines_are_what_a_terminal_shows():
    text = "a\r\nbar 1\rbar 2\x1b[A\r\n\rlast "
    assert shown(text) == ["a", "bar 2", "last"]


def test_record_keeps_the_first_moment_and_runs_to_the_end(tmp_path):
    code = "import pathlib, sys; print('one\\n\\rstep 1\\rstep 2', sys.stderr.isatty());"
    code += f"pathlib.Path('{tmp_path}/end').touch()"
    assert record([sys.executable, "-c", code], "^step [0-9]") == ["one", "step 1"]
    assert record([sys.executable, "-c", code], "^step 2 True") == ["one", "step 2 True"]
    assert (tmp_path / "end").exists()
    assert record([sys.executable, "-c", "print(1)"], "never") == []


def test_picture_of_a_run_is_in_the_readme():
    """With the settings of today, if not with the same figures."""
    readme, index = ((ROOT / path / "README.md").read_text() for path in ("", "docs"))
    assert "](docs/figures/run.svg)" in readme and "](figures/report.png)" in index
    assert REPORT.stat().st_size > 20_000
    svg = ET.fromstring(PATH.read_text())
    lines = [text.text for text in svg.iter(f"{SVG}text")]
    assert lines[0] == "$ make train"
    (line,) = [line for line in lines if line.startswith("epochs: ")]
    assert "4 of 64 steps" in line and line.endswith(" runs/quickstart")
    assert lines[-1].startswith("epoch 3 ") and "/64, loss " in lines[-1]
    assert max(map(len, lines)) <= 112
    redrawn = ET.fromstring(draw("make train", lines[1:]))
    assert [text.text for text in redrawn.iter(f"{SVG}text")] == lines
