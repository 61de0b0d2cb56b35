"""python -m tools.readme: write the generated blocks of README.md and docs/traps.md anew.

A block stands between `<!-- NAME -->` and `<!-- /NAME -->`; a test fails where it is out of date.
"""

import re

from tools.bench_report import EPOCH
from tools.lessons import LADDER, ROOT, changed, lesson
from tools.plants import BUGS


def ladder():
    """The table of the rungs."""
    rows = ["| script | builds on | adds | changed lines |", "|---|---|---|---|"]
    for rung in LADDER:
        parent = f"`{rung.parent}`" if rung.parent else ""
        count = changed(rung) if rung.parent else ""
        rows.append(f"| [`{rung.script}`]({rung.script}) | {parent} | {rung.adds} | {count} |")
    return "\n".join(rows)


def lessons():
    """Each rung's whole difference from its parent."""
    return "\n\n".join(
        f"<details><summary><code>{rung.parent}</code> to <code>{rung.script}</code></summary>\n\n"
        "```diff\n" + "\n".join(_without_numbers(lesson(rung))) + "\n```\n\n</details>"
        for rung in LADDER
        if rung.parent
    )


def _without_numbers(lines):
    return ["@@" if line.startswith("@@") else line for line in lines]


def verify():
    """The table that `make verify` has written."""
    return (ROOT / "docs" / "results" / "verify.md").read_text().split("\n\n")[-1].strip()


def _columns(page, names, wanted=lambda row: True):
    """These columns of the table of a page of docs/results, and of the rows that are wanted."""
    text = (ROOT / "docs" / "results" / page).read_text().split("\n\n")[-1].strip()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    numbers = [rows[0].index(name) for name in names]
    kept = [[row[i] for i in numbers] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in kept if wanted(row))


def bench():
    """What `make bench` has written, without the parts of the steps."""
    names = ["row", "global batch", f"s / {EPOCH:,} images", "images/s", "speed-up", "of limit"]
    return _columns("bench.md", [*names, "limited by"])


def peers():
    """What `make bench-peers` has written of our rows and of the tutorial as published."""
    names = ["row", "precision", "images/s", "ratio to best peer"]
    return _columns("peers.md", names, lambda row: row[-1] or "as published" in row[0])


def traps():
    """An entry a bug that can be planted."""
    return "\n\n".join(
        f"## {bug.name}\n\n{bug.wrong}\n\n"
        f"- **From outside**: {bug.outside}\n"
        f"- **Caught by** the row `{bug.row}`.\n"
        f"- **Prevented by**: {bug.prevents}\n\n"
        f"```diff\n# {bug.file}\n{_marked('-', bug.line)}\n{_marked('+', bug.instead)}\n```"
        for bug in BUGS
    )


def _marked(sign, text):
    return "\n".join(f"{sign}{line}" for line in text.splitlines())


BLOCKS = {block.__name__: block for block in (ladder, lessons, verify, bench, peers, traps)}
PAGES = [ROOT / "README.md", ROOT / "docs" / "traps.md"]


def generate(text):
    """A page's text with every block as it should be."""
    for name, make in BLOCKS.items():
        pattern = f"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        text = re.sub(pattern, lambda m, make=make: m[1] + make() + "\n" + m[2], text, flags=re.S)
    return text


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(generate(page.read_text()))
