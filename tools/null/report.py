"""What the processes of a run on the null device have counted: read, compared, and as a text."""

import json
import re
from collections import Counter

KINDS = "kernel", "graph", "copy", "wait", "collective"


def read(folder):
    """The reports of a run's processes, in the order of their ranks."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return sorted(found, key=lambda report: report["rank"])


def ordinary_step(report):
    """The counts of a step that neither starts nor ends an epoch: {kind: {name: [number, bytes]}}.
    Empty if there are fewer than three steps.

    Of the four before the last, the one that waits least: a save waits, and so does a line about
    the progress, which comes every 15 seconds."""
    steps = reversed(report["steps"][1:-1][-4:])
    return min(steps, key=lambda step: number(step, "wait")) if len(report["steps"]) > 2 else {}


def number(counts, kind):
    """How many operations of a kind there are."""
    return sum(count for count, _ in counts.get(kind, {}).values())


def size(counts, kind):
    """The bytes of the operations of a kind."""
    return sum(size for _, size in counts.get(kind, {}).values())


FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')
NOT_A_CAUSE = "/torch/", "/tools/null/inside/", "<frozen", "/contextlib.py"


def cause(wait):
    """(the call that waited, file:line of the innermost frame that is not PyTorch's) of the name of
    a wait."""
    call, _, frames = wait.partition(";")
    for file, line, _ in FRAME.findall(frames):
        if not any(part in file for part in NOT_A_CAUSE):
            return call, f"{file}:{line}"
    return call, "a thread of PyTorch, for example of backward()"


def short_name(kernel):
    """A kernel's name without its template arguments, but with the operation among them."""
    text = re.sub(r"\((?:[^()]|\([^()]*\))*\)$", "", kernel)
    operation = re.search(r"(\w+?)_?(?:kernel_cuda|[Ff]unctor\w*|Op\b)", text)
    name = re.sub(r"<.*", "", text).split()[-1].rpartition("::")[2]
    detail = operation[0] if operation and operation[0] not in name else ""
    return f"{name} ({detail})" if detail else name


def differences(reports):
    """Texts that say where the ranks called different collectives, which would make NCCL hang or
    mix up data."""
    logs = {}
    for report in reports:
        for communicator, calls in report["calls"].items():
            logs.setdefault(communicator, {})[report["rank"]] = calls
    found = []
    for communicator, ranks in logs.items():
        collectives = {
            r: [c for c in calls if not _is_point_to_point(c)] for r, calls in ranks.items()
        }
        found += _first_difference(communicator, collectives)
        found += _unmatched(communicator, ranks)
    return found


def _is_point_to_point(call):
    return call.startswith(("send", "receive"))


def _first_difference(communicator, ranks):
    (first, expected), *others = sorted(ranks.items())
    for rank, calls in others:
        for i in range(max(len(expected), len(calls))):
            ours, theirs = ((c[i] if i < len(c) else "nothing") for c in (expected, calls))
            if ours != theirs:
                yield (
                    f"communicator {communicator}, collective {i + 1}: rank {first} calls {ours}, "
                    f"rank {rank} {theirs}"
                )
                break


def _unmatched(communicator, ranks):
    """Messages that only one side knows. In communicators of which all ranks reported: peers are
    numbered within the communicator."""
    members = dict(enumerate(sorted(ranks)))
    if f"of {len(members)} ranks" not in communicator:
        return
    sent, received = Counter(), Counter()
    for member, rank in members.items():
        for call in filter(_is_point_to_point, ranks[rank]):
            kind, what, peer = re.fullmatch(r"(\w+) of (.*) (?:to|from) (\d+)", call).groups()
            pair = (member, int(peer)) if kind == "send" else (int(peer), member)
            (sent if kind == "send" else received)[pair, what] += 1
    for missing, text in ((sent - received, "is not received"), (received - sent, "is not sent")):
        for (source, target), what in sorted(missing):
            pair = f"from rank {members.get(source)} to rank {members.get(target)}"
            yield f"communicator {communicator}: a message of {what} {pair} {text}"


def text_of(reports, kernels=0):
    """The report of a run, as lines. kernels: how many kinds of kernels to list."""
    for report in reports:
        head = f"rank {report['rank']} of {report['world_size']}: {len(report['steps'])} steps"
        peak = max(report["peak_memory"], default=0)
        yield f"{head}, peak memory {peak / 2**20:,.1f} MiB"
        counts = ordinary_step(report)
        if not counts:
            yield "  fewer than three steps: what follows is the whole run"
            counts = total([*report["steps"], report["end"]])
        for kind in KINDS:
            yield from _lines(kind, counts, kernels)
    different = differences(reports)
    if different:
        yield "the ranks call different collectives:"
        yield from (f"  {text}" for text in different)


def total(parts):
    """The sum of several counts."""
    sums = {}
    for counts in parts:
        for kind, names in counts.items():
            for name, (count, size) in names.items():
                entry = sums.setdefault(kind, {}).setdefault(name, [0, 0])
                entry[0] += count
                entry[1] += size
    return sums


def _lines(kind, counts, kernels):
    plural = {"copy": "copies"}.get(kind, f"{kind}s")
    yield f"  {number(counts, kind):,} {plural}"
    named = Counter()
    for name, (count, size) in counts.get(kind, {}).items():
        if kind == "kernel":
            named[short_name(name)] += count
        elif kind == "wait":
            named["{}, {}".format(*cause(name))] += count
        else:
            named[f"{name}, {size:,} bytes" if size else name] += count
    for name, count in named.most_common(kernels if kind == "kernel" else None):
        yield f"    {count:6,} {name}"
