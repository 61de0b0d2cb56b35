"""python -m tools.readme: write the generated blocks of README.md anew.

A block stands between `<!-- NAME -->` and `<!-- /NAME -->`; a test fails where it is out of date.
"""

import re

from tools.lessons import LADDER, ROOT, changed, lesson


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


BLOCKS = {"ladder": ladder, "lessons": lessons}


def generate(text):
    """README's text with every block as it should be."""
    for name, make in BLOCKS.items():
        pattern = f"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        block = make() + "\n"
        text = re.sub(pattern, lambda m, block=block: m[1] + block + m[2], text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(generate(readme.read_text()))
