"""python -m lab.screen: run `make train`, and draw docs/figures/run.svg, the terminal in the last
epoch, and docs/figures/report.png, the curves of the report.
"""

import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from fcntl import ioctl
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


def record(command, moment):
    """Run a command on a terminal to its end. Returns the lines that the terminal showed when the
    last of them first matched the pattern `moment`; an empty list if none did."""
    leader, follower = pty.openpty()
    ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    streams = {"stdin": subprocess.DEVNULL, "stdout": follower, "stderr": follower}
    process = subprocess.Popen(command, cwd=ROOT, **streams)
    os.close(follower)
    output, lines = b"", []
    with suppress(OSError):  # raised at the end of the output
        while received := os.read(leader, 4096):
            for piece in re.split(rb"(?=[\r\n])", received):  # several may arrive together
                output += piece
                now = shown(output.decode(errors="replace"))
                if not lines and re.search(moment, now[-1]):
                    lines = now
    process.wait()
    os.close(leader)
    return lines


def shown(text):
    """The lines of a text: in each, what follows its last carriage return. A bar also moves the
    cursor, which changes nothing here."""
    text = re.sub(r"\x1b\[[0-9]*[A-Z]", "", text.replace("\r\n", "\n"))
    return [line.split("\r")[-1].rstrip() for line in text.split("\n")]


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
    lines = record(command, r"^epoch 3 .* [34][0-9]/64, loss .* left")
    if not lines:
        sys.exit("error: the run has not shown its last epoch: see  make train")
    PATH.write_text(draw("make train", lines))
    save_picture(picture([read_run(FOLDER, FOLDER.name)]), REPORT)


if __name__ == "__main__":
    main()
