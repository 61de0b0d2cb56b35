"""One run of a script as one rank of N on the null device, and what it needed."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tools.lib.runs import last_line
from tools.null import report
from tools.null.__main__ import environment

WARNING = re.compile(r"^(\[rank\d+\]:)?\[?W\d{4} |Warning: ")  # of PyTorch's C++, or of Python
STEPS = 2  # the second one is like those that follow: the optimizer has its state
SPARE = 0.04  # of the host's memory: a run that leaves less is ended
OWN = 0.1  # of the host's memory: a run that takes less is not the cause
FITS, OUT_OF_MEMORY, STOPPED = "fits", "out of memory", "stopped"


running = set()  # processes that go on


def end_all():
    """End the runs that go on."""
    for process in list(running):
        _kill_session(process)


class Machine(NamedTuple):
    """GPUs that a run is to fit on. memory: GiB of each that PyTorch's allocator can have."""

    gpus: int
    node: int
    memory: float


class Job(NamedTuple):
    """A script, its arguments, and how it is started. ranks: 0 for one process with all GPUs."""

    script: Path
    arguments: tuple
    ranks: int
    machine: Machine
    folders: tuple = ()  # where Python looks for modules, besides the script's folder


class Result(NamedTuple):
    """How a run has ended. reason: of what stopped it, in a line. counts: of its last step, as in
    tools.null.report. memory: what inside/null_memory.py reports."""

    outcome: str
    reason: str
    counts: dict
    memory: dict
    batch: int | None  # the global one, of a script of this project
    seconds: float

    @property
    def step(self):
        """The memory of the second step."""
        return self.memory["steps"][STEPS - 1]

    @property
    def retries(self):
        """How often the allocator has had to give memory back in the second step."""
        first, second = self.memory["steps"][:STEPS]
        return second["retries"] - first["retries"]

    @property
    def peak_of_step(self):
        """The largest number of bytes that tensors have taken in the second step."""
        return self.step["peak"]

    @property
    def parts(self):
        """The memory of all steps, and of what follows the last one."""
        return [*self.memory["steps"], self.memory["end"]] if self.memory else []

    @property
    def peak(self):
        """The largest number of bytes that tensors have taken, from the start on."""
        return max((part["peak"] for part in self.parts), default=0)

    @property
    def reserved(self):
        """The largest number of bytes that the allocator has had, from the start on."""
        return max((part["reserved"] for part in self.parts), default=0)

    @property
    def share_of_convolutions(self):
        """Their share of all operations, from the start on."""
        total = sum(sum(part["operations"].values()) for part in self.parts)
        return sum(part["of_convolutions"] for part in self.parts) / max(1, total)


def run(job, library, limit):
    """Run a Job. library: see tools.null.build. limit: seconds."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fit-") as folder:
        env = environment(library, folder, **_device(job), steps=STEPS)
        env["NULL_FIT"] = "1"
        env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], *map(str, job.folders)])
        env.setdefault("OMP_NUM_THREADS", "1")
        words = [word.replace("{folder}", folder) for word in job.arguments]
        with open(f"{folder}/output", "w+b") as output, open(f"{folder}/errors", "w+b") as errors:
            process = subprocess.Popen(
                [sys.executable, str(job.script), *words],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
            stopped = _watch(process, start + limit)
            texts = [_text_of(file) for file in (output, errors)]
        reports = report.read(Path(folder))
    return _result(process.returncode, stopped, texts, reports, time.monotonic() - start)


def _device(job):
    gpus, node, memory = job.machine
    return {"gpus": node if job.ranks else gpus, "memory": memory, "ranks": job.ranks}


def _text_of(file):
    file.seek(0)
    return file.read().decode(errors="replace")


def _watch(process, end):
    """Wait until a process ends. Ends it, and returns why, if it takes too long, or nearly all of
    the host's memory."""
    reason = ""
    running.add(process)
    try:
        while process.poll() is None and not reason:
            if time.monotonic() > end:
                reason = "no second step in time: pass a larger --limit"
            elif _fills_memory(process.pid):
                reason = (
                    "this machine's memory is not enough for what the script keeps on the CPU: run "
                    "it where there is more"
                )
            time.sleep(0.05)
    finally:
        running.discard(process)
        if process.poll() is None or reason:
            _kill_session(process)
    return reason


def _kill_session(process):
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _fills_memory(pid):
    total, available = _host_memory()
    return available < SPARE * total and _resident(pid) > OWN * total


def _host_memory():
    """(bytes of the host's memory, bytes of it that are available)."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    sizes = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return sizes["MemTotal"], sizes["MemAvailable"]


def _resident(pid):
    try:
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]
    except (OSError, IndexError):  # it has ended
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _result(code, stopped, texts, reports, seconds):
    first = reports[0] if reports else {}
    memory = first.get("memory") or {}
    steps = first.get("steps", [])
    batch = first.get("global_batch_size")
    done = len(memory.get("steps", ())) >= STEPS
    if done and not stopped:
        return Result(FITS, "", steps[STEPS - 1], memory, batch, seconds)
    reason = stopped or _reason(code, texts, reports)
    is_out = "CUDA out of memory" in texts[1] + texts[0] and not stopped
    if is_out and not _lacks_addresses(reports):
        return Result(OUT_OF_MEMORY, reason, {}, memory, batch, seconds)
    return Result(STOPPED, reason, {}, memory, batch, seconds)


def _lacks_addresses(reports):
    counts = [c for one in reports for c in (*one["steps"], one["end"])]
    return any("no address space" in counts_of.get("memory", {}) for counts_of in counts)


def _reason(code, texts, reports):
    """What stopped a run, in a line."""
    said = [line for line in texts[1].splitlines() if not WARNING.search(line)]
    error = last_line("\n".join(said) or texts[0])
    if _lacks_addresses(reports):
        return (
            "this machine has no address space for the memory of such a GPU: raise ulimit -v, or "
            "run it elsewhere"
        )
    of_host = "MemoryError" in error.replace("OutOfMemoryError", "")  # which is of the GPU
    if "DefaultCPUAllocator" in texts[1] or code == -signal.SIGKILL or of_host:
        return (
            f"this machine's memory is not enough for what the script keeps on the CPU: run it "
            f"where there is more ({error})"
        )
    if code:
        return error
    steps = max((len(one["steps"]) for one in reports), default=0)
    if not reports:
        return "the script has ended without using CUDA: let it use a GPU if there is one"
    if not steps:
        return (
            "the script has ended before its first step: no optimizer of torch.optim has been "
            "called; does it train by default?"
        )
    return f"the script has ended after step {steps}, and {STEPS} are needed: give it more data"
