"""Markdown tables."""


def markdown_table(head, rows):
    """Lists of cells -> a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])
