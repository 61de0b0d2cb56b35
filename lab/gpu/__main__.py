"""Measure what only a GPU can show, in calls of limited length.

    python -m lab.gpu --minutes 9

The stages, most valuable first: seconds per epoch of ResNet-50 in each precision, eager, compiled
and with CUDA graphs, and with plain PyTorch; the recipe for 94 % over five seeds; the GPU tests;
`make verify` on the GPU; a profile; the same of ResNet-18; loading JPEG files and saving
checkpoints; memory. Then the speed runs are repeated, interleaved.

A call starts no job that is likely to outlast it. The next call with the same --output continues,
until everything is measured; --output then holds gpu.md, gpu.json and the reports of the stages.
Only pytest has to be installed besides what the scripts need.
"""

import argparse
import json
import signal
import tempfile
import time
from pathlib import Path

from lab.bench.runner import machine
from lab.gpu.jobs import Jobs, dataset_flags
from lab.gpu.report import Monitor, driver, write
from tools.doctor import check_limits
from tools.lib.ladder import ROOT
from tools.lib.runs import TooSlow, last_line
from utils.errors import UserError
from utils.reports import report_errors

TURNS = 3  # of the stage "speed"
ATTEMPTS = 2  # for a job that a call had to stop


class Results:
    """Samples and errors of the jobs, kept in a file. Keys are "stage: name".

    setup: what the results depend on. Raises UserError if the file was written with a different
    one.
    """

    def __init__(self, path, setup=None):
        self.path = path
        self.data = {"setup": setup, "samples": {}, "errors": {}, "stopped": {}}
        if path.exists():
            self.data |= json.loads(path.read_text())
        if self.data["setup"] != setup:
            raise UserError(
                f"{path} has results of {self.data['setup']}, not {setup}: pass another --output"
            )

    def samples(self, job):
        """The samples of a job so far."""
        return self.data["samples"].get(f"{job.stage}: {job.name}", [])

    def needs(self, job, turn):
        """Whether this turn of the job still has to be measured."""
        failed = f"{job.stage}: {job.name}" in self.data["errors"]
        return not failed and len(self.samples(job)) <= turn

    def seconds(self, job):
        """How long the job is likely to take."""
        return max((sample["job_seconds"] for sample in self.samples(job)), default=job.seconds)

    def run(self, job, limit):
        """Run a job, and keep its sample or its error. Returns what to print."""
        key, start = f"{job.stage}: {job.name}", time.monotonic()
        try:
            with Monitor() as monitor:
                sample = job.run(limit)
        except TooSlow as error:
            count = self.data["stopped"][key] = self.data["stopped"].get(key, 0) + 1
            if count == ATTEMPTS:
                self.data["errors"][key] = str(error)
            text = f"stopped after {limit:.0f} s"
        except Exception as error:
            self.data["errors"][key] = str(error)
            text = f"failed: {last_line(str(error))}"
        else:
            sample |= monitor.readings()
            sample["job_seconds"] = time.monotonic() - start
            self.data["samples"].setdefault(key, []).append(sample)
            text = f"{sample['job_seconds']:.0f} s"
        self.save()
        return f"{key}: {text}"

    def save(self):
        """Write the file atomically."""
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.data))
        temporary.replace(self.path)


def plan(jobs, turns):
    """(job, turn) in the order in which they run: everything once, then the speeds again."""
    repeated = [(job, turn) for turn in range(1, turns) for job in jobs if job.stage == "speed"]
    return [(job, 0) for job in jobs] + repeated


def run_call(jobs, turns, results, seconds):
    """Run what is missing and fits into the rest of this call. Returns the number of jobs left.

    Raises UserError if there is something left, but nothing that fits into a whole call.
    """
    end, started = time.monotonic() + seconds, False
    for job, turn in plan(jobs, turns):
        left = end - time.monotonic()
        if results.needs(job, turn) and results.seconds(job) <= left:
            started = True
            print(results.run(job, left), flush=True)
    missing = [job for job, turn in plan(jobs, turns) if results.needs(job, turn)]
    if missing and not started:
        job = min(missing, key=results.seconds)
        raise UserError(
            f"{job.stage}: {job.name} takes about {results.seconds(job):.0f} s: pass more --minutes"
        )
    return len(missing)


def interrupt(*_):
    """End the jobs on SIGTERM as on Ctrl-C."""
    raise KeyboardInterrupt


@report_errors
def main():
    parser = argparse.ArgumentParser(prog="python -m lab.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call (default: 9)")
    parser.add_argument(
        "--data",
        help="CIFAR-10: a folder with train/<class>/ and test/<class>/, or with "
        "cifar-10-batches-py, or a .tar of either; without it, images are synthetic, and the "
        "recipe is left out",
    )
    parser.add_argument(
        "--output", help="folder of the results (default: runs/gpu, runs/gpu-small with --small)"
    )
    parser.add_argument(
        "--retry", action="store_true", help="repeat the jobs that failed; once, in this call"
    )
    parser.add_argument(
        "--small", action="store_true", help="tiny jobs, to try the command; no GPU is needed"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, interrupt)
    start, facts = time.monotonic(), machine() | {"driver": driver()}
    if not facts["gpus"] and not args.small:
        raise UserError("no GPU is visible (nvidia-smi lists them); --small runs without one")
    for finding in check_limits():  # too small a /dev/shm kills the loader workers of the peers
        if finding.level != "ok":
            print(finding, flush=True)
    default = "runs/gpu-small" if args.small else "runs/gpu"
    folder = Path(args.output or default).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    setup = {name: facts[name] for name in ("gpus", "torch", "commit")}
    data = dataset_flags(args.data, ROOT / "data")
    setup |= {"small": args.small, "data": str(data.get("data_dir", "synthetic"))}
    results = Results(folder / "gpu.json", setup)
    results.data["machine"] = facts
    if args.retry:
        results.data |= {"errors": {}, "stopped": {}}
    turns = 1 if args.small else TURNS
    try:
        with tempfile.TemporaryDirectory(prefix="gpu-") as scratch:
            jobs = list(Jobs(folder, scratch, data, small=args.small).all())
            seconds = 60 * args.minutes - (time.monotonic() - start) - 5  # to write the report
            left = run_call(jobs, turns, results, seconds)
    finally:
        results.save()
        write(results.data, folder)
    errors = results.data["errors"]
    print(f"{folder}/gpu.md: {len(errors)} failed, {left} left")
    if left:
        print("run the same command again, without --retry, to continue")
    if errors:
        raise UserError(f"these jobs failed: {', '.join(errors)} (gpu.md shows why; see --retry)")


if __name__ == "__main__":
    main()
