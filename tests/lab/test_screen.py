"""The picture of a terminal in README.md."""

import xml.etree.ElementTree as ET

from lab.screen import PATH, draw
from tools.lib.ladder import ROOT

SVG = "{http://www.w3.org/2000/svg}"


def test_picture_of_a_run_is_in_the_readme():
    """With the settings of today, if not with the same figures."""
    readme, index = ((ROOT / path / "README.md").read_text() for path in ("", "docs"))
    assert "](docs/figures/run.svg)" in readme and "](figures/report.png)" in index
    svg = ET.fromstring(PATH.read_text())
    lines = [text.text for text in svg.iter(f"{SVG}text")]
    assert lines[0] == "$ make train"
    (line,) = [line for line in lines if line.startswith("epochs: ")]
    assert "4 of 64 steps" in line and line.endswith(" runs/quickstart")
    assert lines[-1].startswith("best: epoch ")
    redrawn = ET.fromstring(draw("make train", lines[1:]))
    assert [text.text for text in redrawn.iter(f"{SVG}text")] == lines
