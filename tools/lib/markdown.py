"""Markdown tables and anchors."""

import re


def markdown_table(head, rows):
    """Lists of cells -> a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def anchor(title):
    """The anchor that GitHub gives a heading: "In CI" -> "in-ci"."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
