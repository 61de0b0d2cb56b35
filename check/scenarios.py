"""Runs a script under observation: on one process, on two, killed, and started again."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from check import confinement
from check.events import Run
from check.mirror import MOST_BYTES, changes, put_back, survey, writable_links
from check.processes import INSIDE, CannotRun, Processes, signal_marked, with_observers

IDLE = 60.0  # seconds without an event or output, after which a run is taken to hang
GRACE = 3.0
DENIED = "[Pp]ermission denied|cannot be opened|readonly database|unable to open database"
NEEDS_GPU = "CUDA error|Found no NVIDIA driver|not compiled with CUDA|CUDA_HOME|nvcc|[Tt]riton"
RANK_ARGUMENT = "(required|unrecognized).*(rank|world[-_]size)|local_rank"
NO_DATA = "Dataset not found|urlopen error|Error downloading|Hugging Face Hub|[Nn]ame resolution"
PUT_BACK = "Modes and owners are now as before, and times where the contents are known to be."
CHANGED = "Files of yours were changed while the check ran, by the script or by something else:"
UNUSED = "Expected to have finished reduction in the prior iteration"


@dataclass
class Options:
    """What to run, and how."""

    command: list  # after the interpreter: ["train.py", "--lr", "0.1"] or ["-m", "module"]
    source: Path  # the folder that is copied for each run
    subfolder: str = "."  # of it, in which the script runs
    rank_arguments: list = field(default_factory=list)  # of each rank, such as "--rank={rank}"
    by_hand: bool = False  # the ranks are started without torchrun
    processes: int = 2  # of the runs on several
    steps: int = 4
    epochs: int = 2
    timeout: float = 300.0
    device: str = "mapped"
    launch: str = "auto"
    environment: dict = field(default_factory=dict)
    resume_arguments: list = field(default_factory=list)
    hidden: list = field(default_factory=list)
    limit_data: int = 0  # samples per dataset; 0: all
    fake_data: dict | None = None  # name of a dataset -> its columns or sizes
    most_bytes: int = MOST_BYTES  # of the files that are copied for each run
    linked: list = field(default_factory=list)  # patterns of names that the script only reads
    writable: list = field(default_factory=list)  # folders in which it may write, too


@dataclass
class Checked:
    """The runs of a check, by name; those that were not made are not there."""

    options: Options
    runs: dict
    not_run: dict  # name -> reason
    launch: str
    writable: list | None = None  # the only folders that could be written, if the kernel sees to it

    def __getitem__(self, name):
        return self.runs.get(name)


class OriginalsChanged(CannotRun):
    """Files of the user, of which the script had a copy, are no longer what they were."""


def run_all(options, work, processes=None, tell=lambda text: None):
    """Run the script in all the ways that it can be run. Raises CannotRun if it fails by itself.

    processes: where the processes of several checks come from; the default is new ones.
    """
    with starting(options, work, processes) as start:
        checked = _run_each(options, start.work, start, tell)
        checked.writable = start.writable
        return checked


@contextlib.contextmanager
def starting(options, work, processes=None):
    """A context with a Start, which makes runs in copies of the script's folder. Raises CannotRun
    if a run could write to the originals, or has done so. See run_all()."""
    if processes is None:
        with (
            Processes(_environment(options)) as processes,
            starting(options, work, processes) as start,
        ):
            yield start
        return
    source, work = options.source.resolve(), work.resolve()
    originals = survey(source, work, options.hidden, options.linked, options.most_bytes)
    is_protected = confinement.is_protected(originals, options.writable)
    if not is_protected:
        _refuse_links(originals, options)
    before = originals.state()
    try:
        yield Start(options, originals, work, processes)
    finally:
        changed = changes(before, originals.state(), is_protected)
        if changed:
            if is_protected:
                put_back(before, changed)
            texts = [f"  {path}: {text}" for path, text in changed.items()]
            raise OriginalsChanged("\n".join([CHANGED, *texts[:20], PUT_BACK * is_protected]))


def _refuse_links(originals, options):
    """Large files are links to the originals, which native code would write through."""
    links = writable_links(originals, options.linked)
    if links:
        total = sum(size for size, _ in links) / 1e9
        names = ", ".join(f"{name} ({size / 1e9:.3g} GB)" for size, name in links[:-4:-1])
        raise CannotRun(
            f"{len(links)} files or folders, {total:.3g} GB in all, are too large for a copy in "
            f"each run, and this kernel cannot protect them (Landlock, Linux 6.2): {names}. "
            "If the script does not need them: --hide PATTERN; if it only reads them: "
            f"--link PATTERN; or a larger --copy-limit than {options.most_bytes / 1e9:.3g} GB."
        )


def _run_each(options, work, start, tell):
    """The runs of a check. Returns a Checked."""
    runs, not_run = {}, {}

    def run(name, launch, world, root=None, **plan):
        tell(name)
        runs[name] = start.run(name, launch, world, root, **plan)
        return runs[name]

    launch = "torchrun" if options.launch == "auto" else options.launch
    one = run("one", launch, 1)
    if options.launch == "auto" and one.spawned:
        launch = "python"  # it starts its own processes
    if UNUSED in one.output and one.any("step"):
        reason = "DistributedDataParallel ended it on one process"
        return Checked(options, runs, dict.fromkeys(("exact-two", "killed"), reason), launch)
    cannot_import = any(event["imports"] for event in one.any("exception"))
    if cannot_import and not one.any("step"):  # no number of processes makes up for that
        raise CannotRun(_failure(one, options))
    trains_alone = one.ended and one.any("step")
    if one.timed_out or (launch == "python" and not trains_alone):
        raise CannotRun(_failure(one, options))
    several = options.processes
    two = run("two", launch, several)
    if options.launch == "auto" and launch == "torchrun" and two.spawned:
        launch = "python"  # it starts its own processes where there are several GPUs
        two = run("two", launch, several)
    distributed = two.world_size > 1
    if not trains_alone:
        if one.ended and not two.ended:
            raise CannotRun(
                _failure(two, options)
            )  # on one process it only says that it needs more
        if not (distributed and two.ended and two.any("step")):
            raise CannotRun(_failure(one, options))
        not_run["exact-two"] = "the script trains on several processes only"
    elif one.world_size > 1:
        not_run["exact-two"] = f"the script always starts {one.world_size} ranks"
    elif distributed and two.ended:
        _compare_exactly(run, runs, not_run, launch, work, several)
    elif not two.ended:
        not_run["exact-two"] = "the script did not end on two processes"
    else:
        not_run["exact-two"] = "the script joins no process group"
    whole = two if distributed else one
    if not whole.ended:
        not_run["killed"] = "the script did not end on two processes"
        return Checked(options, runs, not_run, launch)
    saved = first_save(whole)
    if saved is None:
        not_run["killed"] = (
            f"the script wrote no checkpoint in {options.epochs} epochs of {options.steps} steps"
        )
        return Checked(options, runs, not_run, launch)
    world = several if distributed else 1
    killed = run("killed", launch, world, kill_step=saved + 2, epochs=options.epochs + 2)
    if not killed.any("killed"):
        not_run["resumed"] = "the script ended before it could be killed after a checkpoint"
    else:
        arguments = options.resume_arguments
        run("resumed", launch, world, root=killed.root, more=arguments, epochs=options.epochs)
    return Checked(options, runs, not_run, launch)


def _compare_exactly(run, runs, not_run, launch, work, several):
    if how := runs["two"].parts:
        not_run["exact-two"] = f"the ranks hold parts of one model ({how})"
        return
    exact = work / "exact"
    exact.mkdir()
    plan = {"exact": str(exact), "most_steps": 3}
    plan["joins_statistics"] = _joins_statistics(runs["one"], runs["two"])
    two = run("exact-two", launch, several, **plan)
    reasons = {event["why"] for event in two.any("not_exact")}
    if not two.ended or not two.any("gradients"):
        not_run["exact-one"] = next(iter(reasons), "the script made no comparable step")
        return
    turns = _accumulates_more(runs["one"], runs["two"], several)
    run("exact-one", launch, 1, **plan, ranks=several, turns=turns)


def _joins_statistics(one, two):
    """Whether two ranks have a SyncBatchNorm of the script's own, in place of BatchNorm."""
    calls = [sum(step["batch_norms"] for step in run.any("step")) for run in (one, two)]
    joins = any(event["in_forward"] for event in two.any("collective"))
    return joins and calls[0] > 0 == calls[1]


def _accumulates_more(one, two, several):
    """Whether one process reads as many batches per step as several do together."""

    def batches(run):
        counts = [sum(s["batches"].values()) for rank in run.ranks for s in rank.steps[:2]]
        return max(counts, default=0)

    return batches(one) == several * batches(two) > 0


def first_save(run):
    """The number of steps that had been made when the first checkpoint was written, or None."""
    for kind in ("save", "dump"):
        for rank in run.ranks:
            for event, steps in rank.with_steps(kind):
                if steps and event["model"] is not False:
                    return steps
    return None


def last_save(run):
    """The number of steps that had been made when the last checkpoint was written; 0 without."""
    saves = [
        steps
        for rank in run.ranks
        for kind in ("save", "dump")
        for event, steps in rank.with_steps(kind)
        if event["model"] is not False
    ]
    return max(saves, default=0)


def _environment(options, root="."):
    """The environment of the script in a copy of its folder, without what a launcher adds."""
    environment = os.environ | {
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        **confinement.services(root),
        **options.environment,
    }
    if options.device != "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


class Start:
    """Starts runs of the script, each in a copy of its folder."""

    def __init__(self, options, originals, work, processes):
        self.options = options
        self.originals = originals
        self.work = work
        self.processes = processes
        folders = [*options.writable, processes.temporary]
        self.writable = confinement.writable_folders(originals, folders, work)

    def run(self, name, launch, world, root=None, more=(), command=None, **plan):
        """Start the script's processes, and wait for them; none of them is left. Returns a Run.
        command: in place of the options' command."""
        options = self.options
        folder = self.work / f"{name}.events"
        remove(folder)  # of a run with this name that was started in a different way
        folder.mkdir()
        if root is None:
            remove(self.work / name)
            root = self.work / name / self.originals.source.name
            self.originals.copy_to(root)
        epochs = plan.get("epochs", options.epochs)
        defaults = {
            "run": name,
            "folder": str(folder),
            "root": os.path.realpath(root),
            "steps": options.steps,
            "limit_data": options.limit_data,
            "epochs": epochs,
            "most_steps": 3 * options.steps * epochs,
            "kill_step": None,
            "device": options.device,
            "devices": world,
            "world": world,
            "exact": None,
            "joins_statistics": False,
            "ranks": world,
            "turns": False,
            "fake_data": options.fake_data,
            "diff": None,
        }
        environment = with_observers(_environment(options, root))
        paths = environment["PYTHONPATH"].split(os.pathsep)
        paths = [_moved(path, self.originals.source, Path(root)) for path in paths]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        command = [*(command or options.command), *more]
        name_length = 2 if command[0] == "-m" else 1
        started = time.monotonic()
        # Ranks that somebody starts by hand have no agent, and neither has one process alone.
        has_agent = launch == "torchrun" and world > 1 and not options.by_hand
        stores = []
        if has_agent:
            store, port = self.processes.host_store()
            stores.append(store)
        else:
            port = _free_port()
        if launch == "torchrun":
            ranks = [_torchrun_environment(rank, world, port, has_agent) for rank in range(world)]
        else:
            ranks = [{"MASTER_PORT": str(port)} if "MASTER_PORT" in environment else {}]
            for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
                environment.pop(variable, None)
        # An agent has a port of its own, whatever the script says.
        plan = defaults | plan | {"port": None if has_agent else port}
        environment["TOOLS_CHECK_PLAN"] = json.dumps(plan)
        logs = [folder / f"output-{rank}.txt" for rank in range(len(ranks))]
        first = name == "resumed"  # the ranks change places after a restart
        started_processes = []
        try:
            for rank, variables in enumerate(ranks):
                own = of_rank(options.rank_arguments, rank, world)
                started_processes.append(
                    self.processes.start(
                        rank + first,
                        [*command[:name_length], *own, *command[name_length:]],
                        root / options.subfolder,
                        environment | variables,
                        logs[rank],
                        self.writable,
                        (str(self.originals.source), str(root)),
                    )
                )
            timed_out = _wait(started_processes, folder, logs, options.timeout)
            stacks = stacks_of(folder) if timed_out else {}
        finally:
            self.processes.end([*started_processes, *stores])
        codes = [process.poll() for process in started_processes]
        output = "\n".join(log.read_text(encoding="utf-8", errors="replace") for log in logs)
        code = next((code for code in codes if code), 0)
        seconds = time.monotonic() - started
        return Run(name, folder, Path(root), code, output, seconds, timed_out, stacks, codes)


def _moved(path, source, root):
    """A path in the folder of the script, in a copy of it; any other path as it is."""
    is_inside = Path(path).is_relative_to(source) and path != str(INSIDE)
    return str(root / Path(path).relative_to(source)) if is_inside else path


def of_rank(arguments, rank, world):
    """The arguments that a launcher gives to one rank."""
    numbers = {"{rank}": rank, "{local_rank}": rank, "{world_size}": world}
    for name, number in numbers.items():
        arguments = [argument.replace(name, str(number)) for argument in arguments]
    return arguments


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def _torchrun_environment(rank, world, port, has_agent):
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # Without one, a process may be the parent of others, with a different address.
        "TORCHELASTIC_USE_AGENT_STORE": str(has_agent),
        "TORCHELASTIC_RUN_ID": "check",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def _wait(processes, folder, logs, timeout):
    """Wait until all have ended, or one has failed. Returns "", or why they are to be ended: "idle"
    if they do nothing, "limit" if they are too slow."""
    end = time.monotonic() + timeout
    size, changed = None, time.monotonic()
    failed = None
    while any(process.poll() is None for process in processes):
        now = time.monotonic()
        new = sum(path.stat().st_size for path in [*folder.glob("*.jsonl"), *logs])
        if new != size:
            size, changed = new, now
        if now - changed > IDLE:
            return "idle"
        if now > end:
            return "limit"
        if any(process.poll() for process in processes):
            failed = failed or now
            if now - failed > GRACE:  # as torchrun does, the others are ended
                return ""
        time.sleep(0.05)
    return ""


def stacks_of(folder):
    """The stacks of processes that hang, by process id: PyTorch's main thread last."""
    for path in folder.glob("*.stacks"):
        signal_marked(int(path.stem), signal.SIGUSR2)
    time.sleep(1.0)
    return {int(path.stem): path.read_text(encoding="utf-8") for path in folder.glob("*.stacks")}


def _failure(run, options):
    where = "on one process" if run.name == "one" else "on two processes"
    if run.timed_out:
        return _not_ended(run, options, where)
    if run.ended:
        return f"The script took no step of an optimizer {where}." + _already_done(run)
    text = f"The script failed {where} (exit code {run.code}):\n{shortened(run.output)}"
    return "\n".join([text, *_remedies(run.output[-3000:], options)])


def _not_ended(run, options, where):
    """Why a run was ended by the check, how far it had come, and what it was doing."""
    steps = max((len(rank.steps) for rank in run.ranks), default=0)
    lines = [line for text in run.stacks.values() for line in own_lines(text)]
    doing = "\n".join(["It was at:", *dict.fromkeys(lines)][:12]) if lines else ""
    if run.timed_out == "limit":
        why = (
            f"The script needed more than --timeout {options.timeout:.0f} s {where}, in which it "
            f"made {steps} steps: give it arguments for a smaller model and smaller batches, or "
            "the check a longer --timeout or fewer --steps."
        )
    else:
        why = f"The script hangs {where}: nothing happened for {IDLE:.0f} s, after {steps} steps."
    return "\n".join(filter(None, [why, doing, "Its output ends with:", run.output[-1500:]]))


def own_lines(stacks):
    """The lines of a dump of stacks that are of the user's code, the innermost one first."""
    lines = [line.strip() for line in stacks.splitlines() if line.strip().startswith("File")]
    return [
        line
        for line in lines
        if not any(part in line for part in ("site-packages", "/lib/python", "check_inside"))
    ]


def shortened(output):
    """The start, where the first error of several ranks is, and the end."""
    if len(output) <= 9000:
        return output
    return f"{output[:3000]}\n[... {len(output) - 9000} characters ...]\n{output[-6000:]}"


def _remedies(output, options):
    """Options that may help a script with this output."""
    if re.search(NEEDS_GPU, output):
        yield (
            "What only a GPU can do (a CUDA graph, a custom kernel) is not mapped to the CPU: "
            "--device cpu takes the script's own path for CPUs."
        )
    if re.search(RANK_ARGUMENT, output) and not options.rank_arguments:
        yield (
            "A launcher may give each rank different arguments, such as --local_rank: "
            "--rank-args='--local_rank={local_rank}' ({rank} and {world_size} are known, too)."
        )
    if re.search(NO_DATA, output) and options.fake_data is None:
        yield "Without its data: --fake-data puts small random data in place of datasets."
    if re.search(DENIED, output):
        yield (
            "The script may write only in a copy of its folder, in temporary folders and caches: "
            "--writable FOLDER names one more. Files above --copy-limit, and folders that --link "
            "names, can only be read: --hide PATTERN if the script should not find them."
        )


def _already_done(run):
    loaded = sorted({event["path"] for event in run.any("load")})
    if loaded:
        names = ", ".join(os.path.basename(path) for path in loaded[:3])
        return f" It read {names}: if that ends it at once, hide it: --hide '{names}'."
    return " Its output ends with:\n" + run.output[-1500:]


def remove(work):
    """Remove the copies and events of a check."""
    shutil.rmtree(work, ignore_errors=True)
