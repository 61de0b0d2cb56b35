"""Prints where two runs part, and what was compared until then."""

from check.diff.factors import EQUAL


def headline(outcome):
    """The first difference, in a sentence; or that there is none."""
    first, resumed = outcome.first, outcome.resumed_after
    if first and resumed is not None and first.step > resumed:
        return (
            f"The runs are equal until the resume after step {resumed}, and part in step "
            f"{first.step}, in the {first.stage}: {first.text}."
        )
    if first:
        return f"The runs part in step {first.step}, in the {first.stage}: {first.text}."
    largest = max(outcome.results, key=lambda result: result.largest)
    rounding = f", except for rounding: {largest.largest:.0e} in the {largest.stage}"
    rounding = rounding if largest.largest > EQUAL else ""
    count = len({result.step for result in outcome.results})
    return f"The runs are equal in {count} step{'s' * (count != 1)}{rounding}."


def text(outcome, asked):
    """The report for people."""
    lines, first, worlds = [headline(outcome)], outcome.first, outcome.worlds
    if first and first.advice:
        lines.append(first.advice)
    lines += ["", f"A: {_ranks(worlds[0])}. B: {_ranks(worlds[1])}.", ""]
    for result in outcome.results:
        said = "DIFFERENT, see above" if result is first else verdict(result)
        lines.append(f"  step {result.step}  {result.stage:<27} {said}")
    if outcome.resumed_after is not None:
        lines.append(f"B is A until step {outcome.resumed_after}, and then the resumed run.")
    for letter, found in zip("AB", outcome.steps, strict=True):
        if len(found) < asked:
            lines.append(f"{letter} made {len(found)} of {asked} steps.")
    one, two = outcome.per_epoch
    if None not in (one, two) and one != two:
        lines.append(f"An epoch has {one} steps in A, {two} in B.")
    if outcome.left_out:
        lines.append(f"{outcome.left_out} outputs of modules were too many to compare.")
    return "\n".join(lines)


def _ranks(count):
    return f"{count} rank{'s' * (count != 1)}"


def verdict(result):
    """What a comparison of one stage has yielded, and what it has left out."""
    if result.text:
        said = f"different: {result.text}"
    elif result.compared:
        said = f"equal ({result.compared} compared, largest difference {result.largest:.0e})"
    else:
        return f"not compared: {result.skipped or 'there are none'}"
    return f"{said}; not compared: {result.skipped}" if result.skipped else said


def as_json(outcome):
    """The results as plain values."""
    first = outcome.first
    return {
        "equal": first is None,
        "first": None if first is None else _result(first),
        "ranks": dict(zip("ab", outcome.worlds, strict=True)),
        "stages": [_result(result) for result in outcome.results],
        "resumed after": outcome.resumed_after,
        "outputs left out": outcome.left_out,
    }


def _result(result):
    return {
        "step": result.step,
        "stage": result.stage,
        "equal": result.is_equal,
        "compared": result.compared,
        "largest difference": result.largest,
        "text": result.text,
        "not compared": result.skipped,
        "different": [
            {"name": c.name, "kind": c.kind, "difference": str(c.difference), "how": c.how}
            for c in result.different
        ],
    }
