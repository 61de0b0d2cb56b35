"""Mutants of the core: which of its lines may change without a test that fails?

    python -m lab.mutants [--count 100] [--seed 0] [--jobs 1] [--only utils/data]

Draws statements and conditions within the functions of the modules that a default run of
train_ddp.py loads (lab/results/loaded.json). In a copy of the project, one at a time is deleted or
negated, and the tests of its module run, but for the slow ones, until one fails. A mutant that none
notices is listed: a test is missing, the line is not needed, or it changes nothing that a test of a
CPU could see, such as speed. About 20 s per mutant, after the tests have run once as they are.
"""

import argparse
import ast
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = (
    Path(__file__).resolve().parents[1]
)  # nothing of the project: a fork imports that of its copy
SCRIPT = "train_ddp.py"
IGNORED = shutil.ignore_patterns(".*", "__pycache__", "runs", "data", "figures")
# Besides the tests with the module's name.
MORE = {
    "tasks/images/": ["tasks/test_images_task.py", "tasks/test_arrays.py"],
    "utils/batches.py": ["utils/test_data.py"],
    "utils/checkpoint.py": ["utils/test_guards.py", "utils/test_preemption.py", "test_edits.py"],
    "utils/distributed.py": ["utils/test_metrics.py", "utils/test_reports.py"],
    "utils/errors.py": ["utils/test_reports.py", "utils/test_distributed.py"],
    "utils/options/": ["utils/test_step_log.py"],
    "utils/guards/": ["utils/test_guards.py", "utils/test_checkpoint.py"],
    "utils/seeds.py": ["utils/test_data.py"],
    "utils/signals.py": ["utils/test_preemption.py", "utils/test_data.py"],
}
WHOLE_RUNS = [
    "test_resume.py::test_killed_and_resumed_run_matches_an_uninterrupted_one",
    "test_resume.py::test_default_run_prints_no_warning",
    "test_same_curve.py::test_script_trains_the_same_weights",
]
STATEMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Delete, ast.Expr, ast.Raise, ast.Return)
STATEMENTS += (ast.Break, ast.Continue)
SLOW_IMPORTS = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"]
SLOW_IMPORTS += ["torch.distributed.pipelining", "torchvision.transforms.v2"]


class Mutant(NamedTuple):
    path: str
    line: int
    kind: str  # deleted or negated
    code: str
    text: str  # of the whole file


def mutants_of(path, text):
    """Each statement within a function deleted, and each condition there negated."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    places = {(node.lineno, node.col_offset, kind): node for kind, node in _places(ast.parse(text))}
    for (_, _, kind), node in sorted(places.items(), key=lambda place: place[0]):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        code = text.encode()[start:end].decode()
        instead = "pass" if kind == "deleted" else f"(not ({code}))"
        mutated = text.encode()[:start] + instead.encode() + text.encode()[end:]
        yield Mutant(path, node.lineno, kind, " ".join(code.split()), mutated.decode())


def _places(tree):
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    statements = [statement for function in functions for statement in function.body]
    for node in [node for statement in statements for node in ast.walk(statement)]:
        if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
            yield "negated", node.test
        elif isinstance(node, ast.comprehension):
            yield from (("negated", condition) for condition in node.ifs)
        elif isinstance(node, STATEMENTS) and not _does_nothing(node):
            yield "deleted", node


def _does_nothing(node):
    """A docstring, or an annotation alone; and `yield`, without which every call fails."""
    value = getattr(node, "value", None)
    if isinstance(node, ast.Expr):
        return isinstance(value, ast.Constant | ast.Yield)
    return isinstance(node, ast.AnnAssign) and value is None


def files_that_test(path):
    """The tests of a module, those with its name first, and of whole runs."""
    room, *_, name = Path(path).with_suffix("").parts
    own = f"{room}/test_{name}.py"
    more = [file for start, files in MORE.items() if path.startswith(start) for file in files]
    files = [file for file in dict.fromkeys([own, *more]) if (ROOT / "tests" / file).exists()]
    return [f"tests/{file}" for file in [*files, *WHOLE_RUNS]]


class Recorder:
    """A plugin of pytest: writes the seconds of each file, and the tests that fail, as JSON."""

    def __init__(self, file):
        self.file, self.seconds, self.failed = file, Counter(), []

    def pytest_collectreport(self, report):
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid.partition("::")[0]] += report.duration
        if report.outcome == "failed":
            self.failed.append(report.nodeid)

    def pytest_sessionfinish(self):
        self.file.write_text(json.dumps([self.seconds, self.failed]))


def start(folder, arguments):
    """Fork a process that runs the tests of the copy in `folder`. Returns its id.

    This process has imported torch, which takes as long as many a test.
    """
    (folder / "result.json").unlink(missing_ok=True)
    if pid := os.fork():
        return pid
    try:
        os.setsid()
        output = os.open(folder / "output", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        for number in (1, 2):
            os.dup2(output, number)
        os.chdir(folder / "copy")
        sys.path[0] = str(folder / "copy")
        del sys.modules["lab"]
        import pytest

        options = ["-q", "-p", "no:cacheprovider", "-m", "not slow", f"--basetemp={folder}/tmp"]
        pytest.main([*options, *arguments], plugins=[Recorder(folder / "result.json")])
        sys.stdout.flush()
    finally:
        os._exit(0)


def stop(pid):
    """End what a fork may have left."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def result_of(folder):
    """The seconds of each file of tests, and what failed; the process itself may have died."""
    file = folder / "result.json"
    return json.loads(file.read_text()) if file.exists() else ({}, ["the process ended"])


def run_unchanged(folder, files):
    """The seconds of each file of tests, and the tests that fail already."""
    pid = start(folder, files)
    os.waitpid(pid, 0)
    stop(pid)
    return result_of(folder)


def run(mutants, folders, seconds, failing):
    """Yields each mutant with the test that noticed it, or None, and the seconds that it took."""
    waiting, running, free = list(reversed(mutants)), {}, list(folders)
    while waiting or running:
        while waiting and free:
            mutant, folder = waiting.pop(), free.pop()
            (folder / "copy" / mutant.path).write_text(mutant.text)
            files = files_that_test(mutant.path)
            pid = start(folder, ["-x", *(f"--deselect={test}" for test in failing), *files])
            limit = 60 + 4 * sum(seconds.get(file.partition("::")[0], 0) for file in files)
            running[pid] = mutant, folder, time.monotonic(), limit
        time.sleep(0.05)
        for pid, (mutant, folder, started, limit) in list(running.items()):
            taken = time.monotonic() - started
            has_ended = os.waitpid(pid, os.WNOHANG)[0]
            if not has_ended and taken < limit:
                continue
            stop(pid)
            if not has_ended:
                os.waitpid(pid, 0)
            failed = result_of(folder)[1] if has_ended else [f"nothing for {limit:.0f} s"]
            shutil.copy2(ROOT / mutant.path, folder / "copy" / mutant.path)
            del running[pid]
            free.append(folder)
            yield mutant, failed[0] if failed else None, taken


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--only", default="", help="draw from files whose path begins with this")
    args = parser.parse_args()
    paths = json.loads((ROOT / "lab" / "results" / "loaded.json").read_text())[SCRIPT]
    every = [
        mutant
        for path in paths
        if path.startswith(args.only)
        for mutant in mutants_of(path, (ROOT / path).read_text())
    ]
    chosen = random.Random(args.seed).sample(every, min(args.count, len(every)))
    print(f"{len(chosen)} of {len(every)} mutants of {len(paths)} files", flush=True)
    for module in SLOW_IMPORTS:
        __import__(module)

    noticed = 0
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder) / str(number) for number in range(args.jobs)]
        for each in folders:
            shutil.copytree(ROOT, each / "copy", ignore=IGNORED)
        files = sorted({file for mutant in chosen for file in files_that_test(mutant.path)})
        seconds, failing = run_unchanged(folders[0], files)
        print(f"unchanged: {sum(seconds.values()):.0f} s; failing: {failing or 'none'}", flush=True)
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # by its time, of a mutant of the same second
        for mutant, test, taken in run(chosen, folders, seconds, failing):
            verdict = f"noticed by {test}" if test else "NOT NOTICED"
            print(f"{taken:4.0f} s  {describe(mutant)}: {verdict}", flush=True)
            noticed += test is not None
    print(f"{noticed} of {len(chosen)} mutants are noticed")


def describe(mutant):
    code = mutant.code if len(mutant.code) <= 70 else mutant.code[:67] + "..."
    return f"{mutant.path}:{mutant.line} {mutant.kind}: {code}"


if __name__ == "__main__":
    main()
