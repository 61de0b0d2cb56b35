"""Prints where two runs part, and what was compared until then."""


def text(results, steps, worlds, asked, left_out):
    """The report for people."""
    lines = []
    first = next((result for result in results if not result.is_equal), None)
    if first is None:
        count = len({result.step for result in results})
        lines.append(f"The runs are equal in {count} step{'s' * (count != 1)}.")
    else:
        lines.append(f"The runs part in step {first.step}, in the {first.stage}: {first.text}.")
    lines += ["", f"A: {_ranks(worlds[0])}. B: {_ranks(worlds[1])}.", ""]
    for result in results:
        verdict = _verdict(result, result is first)
        lines.append(f"  step {result.step}  {result.stage:<27} {verdict}")
    for letter, found in zip("AB", steps, strict=True):
        if len(found) < asked:
            lines.append(f"{letter} made {len(found)} of {asked} steps.")
    if left_out:
        lines.append(f"{left_out} outputs of modules were too many to compare.")
    return "\n".join(lines)


def _ranks(count):
    return f"{count} rank{'s' * (count != 1)}"


def _verdict(result, is_first):
    if result.text and is_first:
        verdict = "DIFFERENT, see above"
    elif result.text:
        verdict = f"different: {result.text}"
    elif result.compared:
        verdict = f"equal ({result.compared} compared, largest difference {result.largest:.0e})"
    else:
        return f"not compared: {result.skipped or 'there are none'}"
    return f"{verdict}; not compared: {result.skipped}" if result.skipped else verdict


def as_json(results, worlds, left_out):
    """The results as plain values."""
    first = next((result for result in results if not result.is_equal), None)
    return {
        "equal": first is None,
        "first": None if first is None else _result(first),
        "ranks": {"a": worlds[0], "b": worlds[1]},
        "stages": [_result(result) for result in results],
        "outputs left out": left_out,
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
            {"name": c.name, "difference": str(c.difference), "how": c.how}
            for c in result.different
        ],
    }
