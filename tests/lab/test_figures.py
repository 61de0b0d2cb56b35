"""The figures of docs/: current, valid, and nothing in them overlaps."""

import xml.etree.ElementTree as ET

import pytest

import lab.screen
from lab.figures import FIGURES, FOLDER, draw, parse, path_of
from tools.lib.ladder import LADDER, ROOT


def test_every_script_has_a_figure_on_its_page():
    assert set(FIGURES) == {rung.script for rung in LADDER}
    drawn = set(FOLDER.glob("*.svg")) - {lab.screen.PATH}
    assert {path_of(script) for script in FIGURES} == drawn
    for script in FIGURES:
        page = ROOT / "docs" / script.replace(".py", ".md")
        assert f"(figures/{path_of(script).name})" in page.read_text()


@pytest.mark.parametrize("script", FIGURES)
def test_figure_is_current_and_nothing_leaves_it(script):
    drawn = path_of(script).read_text()
    assert drawn == draw(FIGURES[script]), "run: python -m lab.figures"
    svg = ET.fromstring(drawn)
    width, height = float(svg.get("width")), float(svg.get("height"))
    boxes = list(svg.iter("{http://www.w3.org/2000/svg}rect"))
    assert len(boxes) > 10
    for box in boxes:
        x, y, w, h = (float(box.get(name)) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= width - w
        assert 0 <= y <= height - h
    for name, spec in FIGURES[script].lanes.items():
        place = 0
        for start, end, *_ in sorted(parse(spec)):
            assert place <= start < end <= 100, name  # no overlap
            place = end


def test_text_that_does_not_fit_is_refused():
    figure = FIGURES["train_1gpu.py"]._replace(lanes={"cuda:0": "0-5 forward much too long"})
    with pytest.raises(ValueError, match="does not fit"):
        draw(figure)
