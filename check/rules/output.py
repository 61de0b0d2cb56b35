"""Rules about what is printed."""

import re

from check.findings import Finding, NotChecked
from check.rules.common import two_ranks, where


def repeated(checked):
    """Lines with numbers that each rank prints."""
    ranks = two_ranks(checked)
    if ranks is None:
        return
    templates = []
    for rank in ranks:
        lines = {}
        for event in rank.of("print"):
            text = event["text"]
            if re.search(r"\d", text) and not re.search(
                r"rank|gpu|cuda:|worker", text, re.IGNORECASE
            ):
                lines.setdefault(re.sub(r"[\d.e+-]+", "#", text), event)
        templates.append(lines)
    for template, event in templates[0].items():
        if all(template in lines for lines in templates[1:]):
            yield Finding(
                "printed-by-every-rank",
                where(event),
                f"{len(ranks)} ranks print {event['text'].strip()[:60]!r}",
            )
            return


def observers(checked):
    """What could not be observed, since the check has made a mistake."""
    for run in checked.runs.values():
        for event in run.any("observer_failed"):
            why = f"a mistake of the check itself in {event['what']}: {event['why']}"
            yield NotChecked("a part of what the script does", why)


RULES = [repeated, observers]
