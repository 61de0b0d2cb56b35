"""python -m lab.screen: run `make train`, and draw docs/figures/run.svg, the terminal at its end,
and docs/figures/report.png, the curves of the report.
"""

import shutil
import subprocess
import sys
from html import escape

from tools.lib.ladder import ROOT
from tools.lib.page import save_picture
from tools.report import picture, read_run

PATH = ROOT / "docs" / "figures" / "run.svg"
REPORT = ROOT / "docs" / "figures" / "report.png"
FOLDER = ROOT / "runs" / "quickstart"
COLUMNS = 112
LINE, CHARACTER, MARGIN = 20, 7.83, 16  # pixels, of a font of 13 pixels
BACKGROUND, TEXT, PROMPT = "#0d1117", "#e6edf3", "#7ee787"


def record(command):
    """The lines that a command prints."""
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return run.stdout.decode().splitlines()


def draw(command, lines):
    """The SVG text of a terminal with a command and its output."""
    width = 2 * MARGIN + COLUMNS * CHARACTER
    height = 2 * MARGIN + (len(lines) + 1) * LINE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" '
        f'width="{width:g}" height="{height}" font-size="13" '
        f'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace">',
        f"<title>{escape(command)}</title>",
        f'<rect width="{width:g}" height="{height}" rx="8" fill="{BACKGROUND}"/>',
    ]
    for number, line in enumerate([f"$ {command}", *lines]):
        color = TEXT if number else PROMPT
        y = MARGIN + number * LINE + 14
        parts.append(
            f'<text x="{MARGIN}" y="{y}" fill="{color}" xml:space="preserve">{escape(line)}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def main():
    shutil.rmtree(FOLDER, ignore_errors=True)
    command = ["make", "--silent", "train", f"PYTHON={sys.executable}"]
    lines = record(command)
    ends = [number for number, line in enumerate(lines, 1) if line.startswith("best: ")]
    if not ends:
        sys.exit("error: the run has not ended: see  make train")
    PATH.write_text(draw("make train", lines[: ends[0]]))
    save_picture(picture([read_run(FOLDER, FOLDER.name)]), REPORT)


if __name__ == "__main__":
    main()
