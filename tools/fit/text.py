"""What tools.fit has found, as JSON and as text."""

from tools.fit import bounds
from tools.fit.run import FITS, OUT_OF_MEMORY
from tools.lib.markdown import markdown_table
from tools.null import report

ORDER = "parameters", "gradients", "optimizer", "buffers", "gathered", "activations"
ORDER += "in backward", "in optimizer", "other"
UNKNOWN = """
Not known: what CUDA, NCCL and kernels take, for which 5 % of each GPU is left (--allowance GIB),
cuDNN's workspaces, fragmentation in a long run, and time beyond the bounds. See docs/fit.md."""


def facts(result, node):
    """A Result, as for --json."""
    found = {"outcome": result.outcome, "seconds": round(result.seconds, 1)}
    found["share_of_convolutions"] = result.share_of_convolutions
    found["inputs"] = result.memory.get("inputs")
    if result.outcome != FITS:
        last = result.memory.get("end") if result.memory else None
        where = {"module": last["module"], "phase": last["phase"]} if last else {}
        return found | {"reason": result.reason, "peak": result.peak, **where}
    step, counts = result.step, result.counts
    kernels = report.number(counts, "kernel")
    names = "kind", "ranks", "apart", "calls", "sent", "seconds"
    rows = bounds.collectives(counts, node)
    return found | {
        "peak": step["peak"],
        "reserved": step["reserved"],
        "retries": result.retries,
        "parts": step["parts"],
        "module": step["module"],
        "phase": step["phase"],
        "held": result.memory["held"],
        "start": {k: result.memory["steps"][0][k] for k in ("peak", "reserved", "module", "phase")},
        "kernels": kernels,
        "graphs": report.number(counts, "graph"),
        "waits": waits(counts),
        "collectives": [dict(zip(names, row, strict=True)) for row in rows],
        "operations": step["operations"],
        "bounds": bounds.seconds(step["operations"], counts, kernels, node),
    }


def waits(counts):
    """{the call and the line that waits: number}."""
    found = {}
    for name, (number, _) in counts.get("wait", {}).items():
        text = ", ".join(report.cause(name))
        found[text] = found.get(text, 0) + number
    return found


def gib(size):
    """Bytes as a text."""
    if size < 2**30:
        return f"{size / 2**20:,.1f} MiB"
    return f"{size / 2**30:,.2f} GiB" if size < 10 * 2**30 else f"{size / 2**30:,.1f} GiB"


def seconds(number):
    """Seconds as a text."""
    return f"{number:.2f} s" if number >= 1 else f"{number * 1e3:.2f} ms"


def place(found):
    """The place where Python was, as text."""
    module = found.get("module") or "the script's own code"
    return f"{module}, {found['phase']}" if found.get("phase") else module


def lines(question, found):
    """The answer for a number of GPUs."""
    batch = found["batch"]
    size = f", {question.batch} {batch}" if batch else ""
    head = f"{question.script.name} on {found['gpus']} x {question.args.memory:g} GiB{size}"
    yield ""
    if "missing" in found:
        yield f"{head}: within the allowance"
        missing = gib(found["missing"])
        yield f"  needs {missing} more than the allowance leaves, and not more than a GPU has:"
        yield "    what CUDA, NCCL and kernels take decides, which the allowance assumes"
    elif found["outcome"] != FITS:
        yield f"{head}: {found['outcome']}"
        yield f"  {found['reason']}"
        if found["outcome"] == OUT_OF_MEMORY:
            yield f"  tensors took {gib(found['peak'])} before that, most in {place(found)}"
    else:
        yield f"{head}: fits"
        yield from _facts(found)
    if found["inputs"]:
        yield from _inputs(**found["inputs"])
    if found["share_of_convolutions"]:
        share = f"{found['share_of_convolutions']:.1%} of the operations"
        yield f"  convolutions, {share}, run without cuDNN here: on a GPU, with cuDNN, they have"
        yield "    other kernels and buffers, so that the peaks and the numbers of kernels differ"
    if "largest" in found:
        yield "  " + _largest(question, found)
    if found["candidates"]:
        yield from _candidates(found)


def _inputs(shapes, drawn):
    yield "  with a batch of " + ", ".join(" x ".join(map(str, shape)) for shape in shapes)
    if drawn and drawn[0] < drawn[1]:
        text = f"{drawn[0]} samples, while the loader's batch size is {drawn[1]}"
        yield f"    which has {text}: give it more data, or a full batch takes more"


def _facts(found):
    yield f"  peak per rank {gib(found['peak'])}, in {place(found)}"
    parts = [(name, found["parts"].get(name)) for name in ORDER]
    yield "    " + ", ".join(f"{name} {gib(size)}" for name, size in parts if size)
    yield f"  reserved by the allocator {gib(found['reserved'])}"
    if found["retries"]:
        yield f"    it gives memory back {found['retries']} times per step, for which the GPU waits"
    start = found["start"]
    if start["peak"] > found["peak"]:
        yield f"  more at the start: {gib(start['peak'])}, in {place(start)}"
    waits = sum(found["waits"].values())
    graphs = f", {found['graphs']} graphs" if found["graphs"] else ""
    yield f"  a step launches {found['kernels']:,} kernels{graphs}, and waits {waits} times"
    for cause, number in found["waits"].items():
        yield f"    {number:,} {cause}"
    for row in found["collectives"]:
        apart = f", {row['apart']} apart" if row["apart"] > 1 else ""
        group = f"{row['ranks']} ranks{apart}"
        yield f"    sends {gib(row['sent'])} in {row['calls']:,} {row['kind']} of {group}"
    bound = found["bounds"]
    text = ", ".join(f"{name} {seconds(value)}" for name, value in bound.items() if value)
    yield f"  time of a step, lower bounds: {text}"


def _largest(question, found):
    largest = found["largest"]
    number, unit = largest["per_replica"], found["unit"]
    if not number:
        return f"largest batch: not even {unit} fits {largest['reason']}".rstrip()
    text = f"largest batch: {question.batch} {number * unit}"
    if unit > 1:
        text += f" ({number} x {unit})"
    if largest["next"]:
        text += f"; {largest['next'] * unit} does not fit"
    else:
        text += " or more"
    return f"{text}; {largest['reason']}".rstrip("; ")


HEAD = ["way", "script", "fits", "peak", "sent", "kernels", "step, at least"]


def _candidates(found):
    rows, fitting = [], []
    for one in found["candidates"]:
        flags = " ".join(f"--{k.replace('_', '-')} {v}" for k, v in one["way"]["flags"].items())
        row = [one["way"]["name"], f"{one['way']['script']} {flags}".strip()]
        if one["outcome"] == FITS:
            bound = max(one["bounds"].values())
            fitting.append((bound, one["bounds"]["compute"], one["peak"], row[0]))
            sent = sum(r["sent"] for r in one["collectives"])
            fits = "barely" if one["retries"] else "yes"
            cells = [fits, gib(one["peak"]), gib(sent), f"{one['kernels']:,}", seconds(bound)]
        elif one["outcome"] == OUT_OF_MEMORY:
            cells = ["no", f"> {gib(one['peak'])}", "", "", ""]
        else:
            cells = [one["reason"], "", "", "", ""]
        rows.append(row + cells)
    yield "  The same batch in other ways, one run each:"
    yield markdown_table(HEAD, rows)
    if fitting:
        yield f"  The lowest bound of those that fit: {min(fitting)[-1]}."
    else:
        yield "  None of them fits."
