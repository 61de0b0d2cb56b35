"""Pages that work offline: HTML with drawings by matplotlib inside, in light and dark."""

import io
import os
import re
from contextlib import suppress
from html import escape
from pathlib import Path

from utils.errors import UserError

INK = "#1f2329"  # stands for the color of the text, which the reader's browser chooses
# Distinguishable to the color-blind (after Okabe and Ito, https://jfly.uni-koeln.de/color), and
# darkened to a contrast of 3:1 with the boxes of the page, in light and in dark.
COLORS = ("#2A86C7", "#C68000", "#009E73", "#C96FA0", "#D55E00", "#8A63D2", "#8A8A8A", "#9C8C00")
MARKERS, SIGNS = "osD^v", "●■◆▲▼"  # for matplotlib, and as text
STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --pale: #59636e; --line: #d0d7de;
  --paper: #ffffff; --box: #f6f8fa; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --pale: #9198a1; --line: #3d444d;
  --paper: #0d1117; --box: #151b23; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px 16px 64px; max-width: 1240px; background: var(--paper);
  color: var(--ink); overflow-wrap: anywhere;
  font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 40px 0 12px; }
p { max-width: 75ch; } .pale { color: var(--pale); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 12px; border-bottom: 1px solid var(--line);
  white-space: nowrap; } th:first-child, td:first-child { text-align: left; padding-left: 0; }
.grid { display: grid; gap: 16px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 460px),
  1fr)); } figure { margin: 0; padding: 12px; background: var(--box); border-radius: 8px; }
figcaption { font-weight: 600; } svg { display: block; width: 100%; height: auto; }
.key { display: flex; flex-wrap: wrap; gap: 4px 20px; margin: 12px 0; padding: 0; }
.key li { list-style: none; } .swatch { display: inline-block; width: 14px; height: 14px;
  border-radius: 3px; margin-right: 6px; vertical-align: -2px; line-height: 14px; }
.line { display: inline-block; width: 26px; border-top: 2px solid; margin-right: 6px;
  vertical-align: 4px; } .dashed { border-top-style: dashed; }
.cross { border: 0; width: auto; vertical-align: 0; } .cross::before { content: "×"; }
.whole { white-space: nowrap; }
.by { display: none; } #samples:checked ~ .samples, #time:checked ~ .time { display: block; }
label { margin-right: 16px; } details { margin: 12px 0; } summary { cursor: pointer; }
"""


def page(title, subtitle, body):
    """A whole page. title, subtitle: text; body: HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f'<p class="pale">{escape(subtitle)}</p>\n{body}\n</body>\n</html>\n'
    )


def table(head, rows):
    """A table, which scrolls within its own box. head: texts; rows: lists of texts."""
    cells = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    lines = [f"<tr>{cells}</tr>"]
    for first, *others in rows:
        cells = "".join(f"<td>{escape(text)}</td>" for text in others)
        lines.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
    return f'<div class="wide"><table>\n{chr(10).join(lines)}\n</table></div>'


def key(names, has_markers=False):
    """Which color, or which color and marker, stands for which of the names."""
    items = []
    for number, name in enumerate(names):
        style, text = f"background: {color_of(number)}", ""
        if has_markers:
            style = f"color: {color_of(number)}"
            text = SIGNS[number % len(SIGNS)]
        swatch = f'<span class="swatch" style="{style}">{text}</span>'
        items.append(f"<li>{swatch}{escape(name)}</li>")
    return f'<ul class="key">{"".join(items)}</ul>'


def key_of_lines(names):
    """What the kinds of lines mean. names: {a class of STYLE: text}."""
    items = (f'<li><span class="line {kind}"></span>{text}</li>' for kind, text in names.items())
    return f'<ul class="key">{"".join(items)}</ul>'


def color_of(number):
    """The color of a run, or of a part."""
    return COLORS[number % len(COLORS)]


def marker_of(number):
    """The marker of a run, which tells it apart without colors."""
    return MARKERS[number % len(MARKERS)]


def drawing(width, height, plots=(1, 1)):
    """(a matplotlib Figure of this size in inches, its axes). Raises UserError if matplotlib is not
    installed."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("drawings need the package matplotlib: pip install matplotlib") from None
    settings = {name: INK for name in ("text.color", "axes.labelcolor", "axes.edgecolor")}
    settings |= {"xtick.color": INK, "ytick.color": INK, "font.size": 11, "axes.titlesize": 12}
    with rc_context(settings | {"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure((width, height), layout="constrained")
        axes = figure.subplots(*plots, squeeze=False)
    for axis in axes.flat:
        axis.set_facecolor("none")
        axis.set_axisbelow(True)
        axis.grid(color=INK, alpha=0.12, linewidth=0.6)
    return figure, axes


def figure(drawn, caption):
    """A drawing within a page. The same drawing gives the same text."""
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.hashsalt": "", "svg.fonttype": "path"}):
        drawn.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    # The drawings of a page use the same names: in one that is hidden, they have no effect.
    prefix = re.sub("[^a-z]+", "-", caption.lower())
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<svg [^>]*viewBox", "<svg viewBox", svg.replace("\n", " "), count=1)
    return (
        f'<figure role="img" aria-label="{escape(caption)}"><figcaption>{escape(caption)}'
        f"</figcaption>{svg}</figure>"
    )


def save_picture(drawn, path):
    """Write a drawing as a picture on white, in the format that the name of the file ends with."""
    from matplotlib import rc_context

    file = io.BytesIO()
    kind = Path(path).suffix.removeprefix(".") or "png"
    fixed = {"metadata": {"Date": None}} if kind == "svg" else {}
    with rc_context({"svg.hashsalt": "", "svg.fonttype": "path"}):
        drawn.savefig(file, format=kind, dpi=120, facecolor="white", **fixed)
    write_file(path, file.getvalue())


def write_file(path, contents):
    """Replace a file as a whole. contents: text or bytes. Raises UserError if it fails."""
    path = Path(path).resolve()  # the file that a link leads to
    temporary = path.with_name(f".{path.name}.tmp")
    if isinstance(contents, str):
        contents = contents.encode()
    try:
        if path.exists() and not path.is_file():  # such as /dev/stdout; a folder is an error
            path.write_bytes(contents)
            return
        temporary.write_bytes(contents)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise UserError(f"cannot write {path}: {error.strerror}") from None
