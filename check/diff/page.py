"""One HTML page, without anything from elsewhere: where a difference enters the model, and how it
spreads, as a tree of its modules."""

from html import escape

from check.diff.report import headline, verdict

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em }
h1 { font-size: 1.3em } table { border-collapse: collapse } code { font-size: .95em }
th, td { padding: .1em .8em .1em 0; text-align: left; vertical-align: top; font-weight: normal }
details details, details table { margin-left: 1.4em } summary { cursor: pointer }
.kind { color: #767676 } .mark { padding: 0 .45em; margin-left: .4em; border-radius: .6em }
.mark { font-size: .8em } .equal { background: #dff0df; color: #1d501d }
.different { background: #f6d4d0; color: #7d150a } .first { outline: 2px solid #b3261e }
"""
SCRIPT = """
for (const button of document.querySelectorAll("button"))
  button.onclick = () => {
    for (const part of document.querySelectorAll("details")) part.open = button.value == "open";
  };
"""


def html(outcome, commands):
    """The page, as text."""
    step = outcome.first.step if outcome.first else outcome.results[-1].step
    root = tree([result for result in outcome.results if result.step == step])
    rows = [
        f"<tr><td>step&nbsp;{result.step}<td>{escape(result.stage)}<td>"
        f"{_mark('different' if result.text else 'equal', '') if result.compared else ''}"
        f"<td>{escape(verdict(result))}"
        for result in outcome.results
    ]
    sides = [
        f"<tr><td>{letter}<td>{world} rank{'s' * (world != 1)}<td><code>"
        f"{escape(' '.join(command.words))}</code>"
        for letter, world, command in zip("AB", outcome.worlds, commands, strict=True)
    ]
    return "\n".join(
        [
            "<!doctype html><html lang=en><meta charset=utf-8><title>Where two runs part</title>",
            f"<style>{STYLE}</style><h1>{escape(headline(outcome))}</h1>",
            f"<table>{''.join(sides)}</table>",
            f"<h2>Modules, in step {step}</h2>",
            "<p><button value=open>Open all</button> <button value=close>Close all</button></p>",
            *_lines("the model", root, _first_of(outcome)),
            "<h2>Stages, in the order of causes</h2>",
            f"<table>{''.join(rows)}</table><script>{SCRIPT}</script></html>",
        ]
    )


def tree(results):
    """The modules of all comparisons: {"parts": {name: such a dict}, "found": [(stage,
    Comparison)]}."""
    root = {"parts": {}, "found": []}
    # The modules are in the order in which they run. Settings belong to none of them.
    for result in sorted(results, key=lambda result: result.stage != "outputs of modules"):
        for comparison in result.comparisons if "settings" not in result.stage else ():
            node = root
            for part in comparison.name.split(" (")[0].split(".") if comparison.name else ():
                node = node["parts"].setdefault(part, {"parts": {}, "found": []})
            node["found"].append((result.stage, comparison))
    return root


def _first_of(outcome):
    """The Comparison in which the difference enters, or None."""
    return next(iter(outcome.first.different), None) if outcome.first else None


def _lines(name, node, first):
    """The lines of a module, and of its parts."""
    everything = [*_all(node)]
    stages = {}
    for stage, comparison in everything:
        stages[stage] = stages.get(stage, False) or bool(comparison.how)
    kinds = {comparison.kind for _, comparison in node["found"]} - {""}
    is_open = any(comparison is first for _, comparison in everything)
    marks = "".join(_mark("different" if d else "equal", s) for s, d in stages.items())
    kind = f" <span class=kind>{escape(', '.join(sorted(kinds)))}</span>"
    yield f"<details{' open' * is_open}><summary><b>{escape(name)}</b>{kind}{marks}</summary>"
    if node["found"]:
        yield "<table>"
        for stage, comparison in node["found"]:
            enters = " <span class='mark different first'>enters here</span>"
            what = comparison.how or f"equal, {comparison.difference:.0e}"
            yield (
                f"<tr><td>{escape(stage)}<td>{escape(comparison.name)}"
                f"<td>{escape(what)}{enters * (comparison is first)}"
            )
        yield "</table>"
    for part, child in node["parts"].items():
        yield from _lines(part, child, first)
    yield "</details>"


def _all(node):
    yield from node["found"]
    for child in node["parts"].values():
        yield from _all(child)


def _mark(state, text):
    return f"<span class='mark {state}'>{escape(text or state)}</span>"
