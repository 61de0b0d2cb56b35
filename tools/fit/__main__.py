"""Tell, before GPUs are rented, whether a training run fits on them: with any script, on no GPU.

    python -m tools.fit train_fsdp.py --gpus 8 64 --memory 80 -- --config configs/cifar10.yaml
    python CLONE/tools/fit --gpus 1 -- their_train.py --batch-size 32   # in their folder

Runs the script for two steps as one rank of N, on a GPU that computes nothing (docs/fit.md), and
prints what its tensors take, the largest batch that fits, what a step launches and sends, and which
changes would fit. What follows `--` is the script's own. The exit code is 1 if it does not fit.
"""

import argparse
import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

if __package__ in (None, ""):  # started by its path, from the folder of the script
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tools.fit import candidates, search, text
from tools.fit.run import FITS, OUT_OF_MEMORY, Job, Machine, end_all, run
from tools.lib.ladder import ONE_PROCESS, ROOT
from tools.lib.output import may_be_closed
from tools.lib.runs import end_runs_on_sigterm
from tools.null.build import Unsupported, build

GLOBAL_BATCH = "global_batch_size"
ALLOWANCE = 0.05  # of a GPU's memory: see text.UNKNOWN
# For scripts of the ladder: nothing is read or left from other runs, and nothing is saved.
OWN_FLAGS = {"output_dir": "{folder}/run", "resume": "never", "save_minutes": "0"}


class Question:
    """A script with its arguments, and the GPUs that it may fit on."""

    def __init__(self, script, arguments, args, library, folder):
        self.script, self.arguments, self.args = script, arguments, args
        self.library, self.folder = library, folder
        self.of_ladder = candidates.is_of_ladder(script)
        self.batch = args.batch.replace("-", "_") or self._batch_setting()

    def _batch_setting(self):
        """The name of the setting that says how large a batch is, or ""."""
        if self.of_ladder:
            return GLOBAL_BATCH
        flags = [candidates.name_of(word) for word in self.arguments if word.startswith("--")]
        return next((name for name in flags if "batch" in name), "")

    def machine(self, gpus, is_whole=False):
        """The GPUs, of whose memory a part is not for tensors, unless it is to be whole."""
        allowance = self.args.allowance
        if allowance is None:
            allowance = ALLOWANCE * self.args.memory
        memory = self.args.memory - (0 if is_whole else allowance)
        return Machine(gpus, min(self.args.node, gpus), memory)

    def run(self, gpus, batch=None, candidate=None, is_whole=False):
        """Run the script, or a candidate in its place, with this value of the batch setting."""
        script, arguments = self.script, self.arguments
        task = self.args.task
        if candidate:
            script = candidates.find(candidate.script, script.parent)
            arguments = candidates.arguments_for(candidate, self.script.name, arguments)
            named = candidates.TASK_LINE.search(self.script.read_text(encoding="utf-8"))
            task = task or named[1]
        if batch is not None:
            arguments = candidates.without(arguments, {self.batch})
            arguments += [f"--{self.flag()}", str(batch)]
        if self.of_ladder:
            arguments = candidates.without(arguments, OWN_FLAGS.keys())
            for name, value in OWN_FLAGS.items():
                arguments += [f"--{name.replace('_', '-')}", value]
        ranks = 0 if script.name in ONE_PROCESS and self.of_ladder else gpus
        recomputes = candidate is not None and candidate.recomputes
        path = candidates.write(script, self.folder, task, recomputes)
        # Whoever has a package `utils` of their own must not get the one of this project.
        folders = (script.parent, self.script.parent, ROOT) if self.of_ladder else ()
        job = Job(path, tuple(arguments), ranks, self.machine(gpus, is_whole), folders)
        size = f" with --{self.flag()} {batch}" if batch is not None else ""
        size += " of which all memory is free" if is_whole else ""
        print(f"running {script.name} for {gpus} GPUs{size}", file=sys.stderr, flush=True)
        return run(job, self.library, self.args.limit)

    def flag(self):
        """The batch setting as the arguments spell it: --batch-size or --batch_size."""
        spelled = (word.partition("=")[0] for word in self.arguments if word.startswith("--"))
        known = {candidates.name_of(word): word.removeprefix("--") for word in spelled}
        return known.get(self.batch, self.batch.replace("_", "-"))

    def unit(self, gpus):
        """The increase of the batch setting if each replica gets one more sample."""
        if self.batch != GLOBAL_BATCH or not self.of_ladder:
            return gpus if "global" in self.batch else 1
        flags = {"fsdp_size": candidates.value_of(self.arguments, "fsdp_size")}
        micro = int(candidates.value_of(self.arguments, "micro_batches") or 1)
        return candidates.replicas(self.script.name, gpus, flags) * micro


def answer(question, gpus, pool):
    """What tools.fit finds for this number of GPUs, as for --json."""
    given = question.run(gpus)
    unit, memory = question.unit(gpus), question.machine(gpus).memory * 2**30
    value = candidates.value_of(question.arguments, question.batch) if question.batch else None
    batch = int(value) if value else given.batch
    found = {"gpus": gpus, "unit": unit, "batch": batch} | text.facts(given, question.args.node)
    if given.outcome == OUT_OF_MEMORY and question.args.allowance != 0:
        whole = question.run(gpus, is_whole=True)
        if whole.outcome == FITS:
            found["missing"] = whole.reserved - memory
    can_search = question.batch and not question.args.no_search
    others = []
    if question.of_ladder and not question.args.no_candidates and batch:
        others = list(candidates.candidates(gpus, question.args.node, batch))
    jobs = [pool.submit(question.run, gpus, batch, candidate) for candidate in others]
    if can_search and given.outcome in (FITS, OUT_OF_MEMORY):
        first = batch and batch // unit
        found["largest"] = search.largest(
            lambda number: question.run(gpus, number * unit), first, given, memory
        )
    found["candidates"] = []
    for candidate, job in zip(others, jobs, strict=True):
        result = text.facts(job.result(), question.args.node)
        found["candidates"].append({"way": candidate._asdict()} | result)
    return found


def parse(words):
    """(arguments of tools.fit, the script, its own arguments)."""
    own, after = words, []
    if "--" in words:
        own, after = words[: words.index("--")], words[words.index("--") + 1 :]
    parser = argparse.ArgumentParser(
        prog="python -m tools.fit",
        usage="%(prog)s [SCRIPT] [options] -- [SCRIPT] [settings of the script]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("script", nargs="?", help="what to run; or the first word after --")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8], help="how many (8)")
    parser.add_argument("--node", type=int, default=8, help="GPUs of a node (8)")
    parser.add_argument("--memory", type=float, default=80.0, help="GiB of a GPU (80)")
    help = "GiB of it that PyTorch's allocator cannot have (5 %% of it)"
    parser.add_argument("--allowance", type=float, help=help)
    parser.add_argument("--task", default="", help="train this module, such as tasks.text")
    help = "the setting that says how large a batch is, if it is not found: batch-size"
    parser.add_argument("--batch", default="", metavar="SETTING", help=help)
    parser.add_argument("--no-search", action="store_true", help="not the largest batch")
    parser.add_argument("--no-candidates", action="store_true", help="only this script")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds per run (600)")
    parser.add_argument("--jobs", type=int, help="runs at a time (cores, at most 4)")
    parser.add_argument("--json", metavar="FILE", help="write what is found")
    args = parser.parse_args(own)
    if args.script is None:
        if not after:
            parser.error("which script? For example: train_fsdp.py --gpus 8 -- --dataset synthetic")
        args.script, *after = after
    return args, Path(args.script), after


def main():
    end_runs_on_sigterm()
    args, script, arguments = parse(sys.argv[1:])
    if script.name in candidates.NOT_ALONE:
        sys.exit(f"error: {script.name}: {candidates.NOT_ALONE[script.name]}")
    try:
        library = build()
    except Unsupported as error:
        sys.exit(f"error: {error}")
    count = max(1, (args.jobs or min(len(os.sched_getaffinity(0)), 4)) - 1)  # and the search
    found = []
    with tempfile.TemporaryDirectory(prefix="fit-") as folder, ThreadPoolExecutor(count) as pool:
        question = Question(script.resolve(), arguments, args, library, folder)
        if args.task and not question.of_ladder:
            sys.exit(f"error: --task is for scripts of this project, and {script} is not one")
        try:
            for gpus in args.gpus:
                found.append(answer(question, gpus, pool))
                print("\n".join(text.lines(question, found[-1])), flush=True)
        except BaseException:  # Ctrl-C, SIGTERM
            pool.shutdown(wait=False, cancel_futures=True)
            end_all()
            raise
    print(text.UNKNOWN)
    if args.json:
        everything = {"script": script.name, "arguments": arguments, "memory": args.memory}
        everything |= {"allocator": question.machine(1).memory, "answers": found}
        Path(args.json).write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
    sys.exit(not all(one["outcome"] == FITS for one in found))


if __name__ == "__main__":
    with may_be_closed():
        main()
