"""Runs the cases in parallel and collects the files that each has written."""

import json
import os
import random
import re
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from tasks.images.small_models import ResNet20
from tools.copy import ANY_TASK_LINE, TASK_LINE, with_task
from tools.lib.edits import changed
from tools.lib.ladder import LADDER, ROOT
from tools.lib.runs import (
    finish_run,
    kill_family,
    kill_within_second_epoch,
    last_line,
    read_rows,
    start_run,
)
from tools.shards import of_synthetic, write_json_lines, write_tars
from tools.verify import one_file
from tools.verify.cases import (
    AUTOCAST_COPY,
    BEFORE_SAVE,
    COPIES,
    EPOCH_END,
    GPU_PER_RANK,
    IMAGES,
    ONE_FILE,
    ONE_FILE_COPY,
    RECIPES,
    matrix_cases,
)
from tools.verify.judge import Evidence, Problem, Row, judge
from tools.verify.one_file_task import STOP
from utils.checkpoint import read_checkpoint
from utils.errors import UserError

# Records which rank opens which file for writing. Python calls this hook for every open(); for a
# file name, torch.save opens the file in C++.
SPY = """
import os, sys
log = os.open({log!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def record(path):
    if isinstance(path, str) and {folder!r} in os.path.abspath(path):
        os.write(log, os.environ.get("RANK", "0").encode() + b"\\n")
def spy_on_torch(core):
    original = core.PyTorchFileWriter
    def open_writer(path, *args):
        record(path)
        return original(path, *args)
    core.PyTorchFileWriter = open_writer
def hook(event, args):
    if event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR):
        record(args[0])
    elif event == "import" and args[0].startswith("utils"):  # torch has been imported by then
        core = sys.modules["torch"]._C if "torch" in sys.modules else None
        if isinstance(getattr(core, "PyTorchFileWriter", None), type):
            spy_on_torch(core)
sys.addaudithook(hook)
"""


MODULES = ("utils", "tasks", "sources")  # the folders from which scripts import
WORDS = ["train", "the", "same", "model", "on", "every", "rank", "with", "one", "seed"]


class Cores:
    """The CPU cores that runs may take for themselves."""

    def __init__(self):
        self.free, self.changed = set(os.sched_getaffinity(0)), threading.Condition()
        self.count = len(self.free)

    def take(self, count):
        """Wait until `count` cores are free, and take them."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.free) >= count)
            return [self.free.pop() for _ in range(count)]

    def give_back(self, cores):
        """Free cores."""
        with self.changed:
            self.free.update(cores)
            self.changed.notify_all()


def is_trained(weights, first):
    """Whether a parameter that the optimizer has differs from that in the checkpoint `first`; also
    if that cannot be told, since the script saves no such file, or a damaged one."""
    try:
        checkpoint = read_checkpoint(first)
    except (OSError, UserError):
        return True
    before = checkpoint["model"]
    names = {name for g in checkpoint["optimizer"]["param_groups"] for name in g["params"]}
    names &= weights.keys() & before.keys()
    return not names or any(not torch.equal(weights[name], before[name]) for name in names)


class Verifier:
    """Runs cases of a Suite in parallel, on the cores that this process may use.

    root: the folder of the scripts; default: a copy of the project's, with the suite's task.
    scripts: {the name of a script: the path of a copy to run in its place}. device: of all
    processes; with "cuda:0" they share one GPU, over gloo, except for the scripts in GPU_PER_RANK.
    cores, references: shared with other Verifiers. clean: the folder of the references; default:
    such a copy, too. paths: folders from which modules are imported before `root`. start: what
    starts a run, as tools.lib.runs.start_run() does.
    """

    def __init__(
        self,
        folder,
        suite=IMAGES,
        root=None,
        scripts=None,
        device="cpu",
        cores=None,
        references=None,
        clean=None,
        paths=(),
        start=start_run,
    ):
        self.folder, self.suite, self.scripts = Path(folder), suite, scripts or {}
        self.clean = clean or project_with_task(suite.task, self.folder / "project")
        self.paths, self.start = paths, start
        self.root = root or self.clean
        self.device, self.cores = device, cores or Cores()
        self.references = {} if references is None else references  # {name: Evidence}
        self.processes, self.ended = [], False  # of all runs; whether they were killed
        self.folder.mkdir(parents=True, exist_ok=True)

    def run(self, cases, report=lambda row: None):
        """The Rows of the cases; report(row) as soon as each is known."""
        killed = {case.resumes.name: case.resumes for case in cases if case.resumes}
        self._write_data([*cases, *killed.values()])
        with self._threads() as pool:
            started = {name: pool.submit(self._kill, case) for name, case in killed.items()}
            self.run_references(cases)
            rows = [pool.submit(self._row, case, report, started) for case in cases]
            return [row.result() for row in rows]

    def run_references(self, cases):
        """Run the references of the cases, except for those that are known."""
        names = {case.reference for case in cases} - self.references.keys()
        needed = [case for case in self.suite.references if case.name in names]
        self._write_data(cases + needed)
        with self._threads() as pool:
            for future in [pool.submit(self._reference, case) for case in needed]:
                future.result()

    @contextmanager
    def _threads(self):
        """A pool of threads. An exception, such as Ctrl-C, ends the runs that they wait for."""
        with ThreadPoolExecutor(self.cores.count) as pool:
            try:
                yield pool
            except BaseException:
                self.ended = True
                pool.shutdown(wait=False, cancel_futures=True)
                for process in self.processes:
                    kill_family(process.run_tag)
                raise

    def _write_data(self, cases):
        """What cases run and read. Several may, in threads, as soon as it exists."""
        for script in {case.script for case in cases} & COPIES.keys():
            original, name = COPIES[script]
            root = self.clean if original == "train_1gpu.py" else self.root
            if not (self.folder / script).exists():  # otherwise, a run may be reading it
                changed_copy(root / original, self.folder / script, name)
        for script in {case.script for case in cases} & RECIPES.keys():
            original, recipe = RECIPES[script]
            root = self.clean if original == "train_1gpu.py" else self.root
            if not (folder := self.folder / "recipes" / script).exists():
                shutil.copytree(root, folder)
                change_by_recipe(folder / original, recipe, self.suite.task)
        weights, shards = self.folder / "weights.pth", self.folder / "shards"
        if any("weights" in case.flags for case in cases) and not weights.exists():
            save_pretrained_weights(weights)
        if any("data_dir" in case.flags for case in cases) and not shards.exists():
            write_shards(shards, self.suite.base)
        texts = self.folder / "texts"
        if any(case.flags.get("text_file") == "FOLDER" for case in cases) and not texts.exists():
            write_text_shards(texts, self.suite)
        text = self.folder / "text.txt"
        if self.suite.base.get("text_file") == "FILE" and not text.exists():
            write_text(text)

    def _row(self, case, report, started):
        """Run a case. started: {name: the future output_dir of a killed run}."""
        output_dir = self._output_dir(case)
        try:
            if case.resumes:
                shutil.copytree(started[case.resumes.name].result(), output_dir)
            if case.moment == EPOCH_END:
                _back_to_first_epoch(output_dir)
            evidence = self._train(case, output_dir, self.root, self._script(case))
            row = judge(self.suite, case, evidence, self.references.get(case.reference))
        except AssertionError as error:  # it did not end or save, or left processes behind
            details = str(error).splitlines()[0]
            row = Row(case.name, problem=Problem.FAILED, details=details)
        if not self.ended:
            report(row)
        return row

    def _script(self, case):
        script = self.scripts.get(case.script, case.script)
        if script in COPIES:
            return self.folder / script
        if script in RECIPES:
            return self.folder / "recipes" / script / RECIPES[script][0]
        if case.script in ONE_FILE and script != case.script:
            copy = self.folder / Path(case.script).name
            copy.write_text(one_file.with_task(script), encoding="utf-8")
            return copy
        return script

    def _output_dir(self, case):
        return self.folder / case.name.replace(" ", "-").replace(",", "")

    def _reference(self, case):
        """Run a reference, without a planted bug and not with the user's script."""
        writers = {
            AUTOCAST_COPY: autocast_copy,
            ONE_FILE_COPY: one_file.reference,
        }
        is_copy = case.script in (*COPIES, *RECIPES)
        script = self._script(case) if is_copy else case.script
        if script in writers:
            script = writers[script](self.folder)
        evidence = self._train(case, self._output_dir(case), self.clean, script)
        assert evidence.code == 0, f"{case.name} failed: {evidence.error}"
        self.references[case.name] = evidence

    def _kill(self, case):
        """Run a case, and kill it within its second epoch, so that a resumed run must know both the
        epoch and the position in it; if the kill comes too late, try again.
        Returns its output_dir."""
        if case.script in ONE_FILE:
            return self._stop(case)
        if case.moment == BEFORE_SAVE:
            output_dir = self._output_dir(case)
            run = self._launch(case, output_dir, self.root, self._script(case), finish_run)
            assert run.code, f"{case.name}: the run did not save a second epoch"
            return output_dir
        for attempt in range(5):
            output_dir = self._output_dir(case).with_suffix(f".{attempt}")
            script = self._script(case)
            # An epoch of somebody's own task may take a few milliseconds (tools/verify/own.py).
            slowed = {"SLOWED": "0.1"}
            self._launch(case, output_dir, self.root, script, kill_within_second_epoch, slowed)
            checkpoint = read_checkpoint(output_dir / "last.pt")
            if checkpoint["epoch"] == 1 and 0 < checkpoint["loader"]["step"] < self.suite.steps:
                return output_dir
        raise AssertionError(
            "five runs finished their second epoch before they were killed: it needs two steps at "
            "least, of 18 samples each"
        )

    def _stop(self, case):
        """Run a case, in which one rank receives SIGTERM within the second epoch. Returns its
        output_dir."""
        output_dir = self._output_dir(case)
        environment = {"STOPS": "SIGTERM"}
        self._launch(case, output_dir, self.root, self._script(case), finish_run, environment)
        checkpoint = one_file.checkpoint_of(output_dir) or {"epoch": 0, "step": 0}
        place = checkpoint["epoch"], checkpoint["step"]
        assert place == (STOP[1], STOP[2] + 1), f"after SIGTERM, epoch and step are {place}"
        return output_dir

    def train(self, case):
        """Run a case to its end, with the user's script, if any. Returns its Evidence."""
        return self._train(case, self._output_dir(case), self.root, self._script(case))

    def _train(self, case, output_dir, root, script):
        """Run a script to its end. Returns its Evidence."""
        before = one_file.checkpoint_of(output_dir) or {"step": 0}
        rows_before = read_rows(output_dir)
        run = self._launch(case, output_dir, root, script, finish_run)
        audit, last = output_dir / "audit.jsonl", output_dir / "last.pt"
        best = output_dir / "best.pt"
        if run.code:
            own = case.script in ONE_FILE
            error = one_file.error_of(run) if own else last_line(run.stderr)
            return Evidence(run.code, error, run.seconds)
        rows = audit.read_text(encoding="utf-8").splitlines() if audit.exists() else []
        writers = self._hooks(output_dir) / "writers"
        ranks = writers.read_text(encoding="utf-8").split() if writers.exists() else []
        ranks = sorted(set(map(int, ranks)))
        if case.script in ONE_FILE:
            return one_file.evidence_of(run, self.suite, output_dir, before["step"], ranks)
        checkpoint = read_checkpoint(last) if last.exists() else {}
        weights = checkpoint.get("model", {})
        return Evidence(
            run.code,
            seconds=run.seconds,
            metrics=run.rows,
            audit=[json.loads(line) for line in rows],
            writers=ranks,
            state=tuple(checkpoint),
            weights=weights,
            best=read_checkpoint(best)["epoch"] if best.exists() else None,
            is_trained=is_trained(weights, output_dir / "epoch-0001.pt"),
            continues=run.rows[:1] == rows_before[:1] or not rows_before,
        )

    def _hooks(self, output_dir):
        return self.folder / f"hooks-{output_dir.name}"

    def _device(self, case):
        """The device of a case, and the environment that hides the GPUs which it must not use."""
        shared = "cuda:" in self.device and (case.nproc or 1) > 1
        if self.device == "cpu" or (shared and case.script in GPU_PER_RANK):
            return "cpu", {"CUDA_VISIBLE_DEVICES": ""}
        if case.script != "train_dp.py":
            return self.device, {}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(64))))
        index = torch.device(self.device).index or 0  # DataParallel would use all that it sees
        return "cuda", {"CUDA_VISIBLE_DEVICES": visible.split(",")[index]}

    def _launch(self, case, output_dir, root, script, wait, environment=None):
        if case.script in RECIPES:
            root = script.parent
        hooks = self._hooks(output_dir)
        hooks.mkdir()
        spy = SPY.format(log=str(hooks / "writers"), folder=str(output_dir))
        (hooks / "sitecustomize.py").write_text(spy, encoding="utf-8")
        # ROOT is for tools.launch; a copy of the project in `root` precedes it.
        path = os.pathsep.join(map(str, (hooks, *self.paths, root, ROOT)))
        device, hidden = self._device(case)
        environment = {"PYTHONPATH": path, "MOMENT": case.moment} | hidden | (environment or {})
        flags = self.suite.base | case.flags | {"output_dir": output_dir, "device": device}
        if "devices" in flags:
            flags["devices"] = f"{self.device},{self.device}"
        if flags.get("weights") == "FILE":
            flags["weights"] = self.folder / "weights.pth"
        if flags.get("data_dir") == "FILES":
            flags["data_dir"] = self.folder / "shards"
        if flags.get("text_file") == "FOLDER":
            flags["text_file"] = self.folder / "texts"
        elif flags.get("text_file") == "FILE":
            flags["text_file"] = self.folder / "text.txt"
        if case.script in ONE_FILE:
            output_dir.mkdir(exist_ok=True)
            flags = one_file.flags_of(flags, output_dir)
            environment["READS"] = str(hooks / "reads")
        ranks = case.nproc or case.flags.get("spawn_processes", 1)
        cores = self.cores.take(min(self.cores.count, ranks))
        try:
            assert not self.ended, "the runs were ended"
            process = self.start(
                script,
                case.nproc,
                flags,
                environment,
                root,
                cores,
                launcher="tools.launch",
            )
            self.processes.append(process)
            run = wait(process, output_dir)
        finally:
            self.cores.give_back(cores)
        if case.script in ONE_FILE:
            one_file.keep(run, hooks / "reads", output_dir)
        return run


def project_with_task(task, folder):
    """A copy of the scripts and of their modules in `folder`, in which the scripts train the task.
    Returns the folder."""
    folder = Path(folder)
    for path in [
        *(ROOT / rung.script for rung in LADDER),  # not a script of the user's
        *(path for name in MODULES for path in (ROOT / name).rglob("*.py")),
    ]:
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(
            with_task(path, task) if path.parent == ROOT else path.read_text(encoding="utf-8"),
            encoding="utf-8",
        )
    for page in ROOT.glob("docs/recipes/*.md"):
        copy = folder / page.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    for path in ROOT.glob("one_file/*.py"):
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(one_file.with_task(path), encoding="utf-8")
    return folder


def write_text(path, train=125, val=13):
    """Write a text with that many paragraphs for training and for validation, which is every tenth;
    their lengths differ widely. Returns its path."""
    generator = random.Random(0)
    paragraphs = []
    for number in range(train + val):
        words = [generator.choice(WORDS) for _ in range(generator.choice((1, 1, 2, 4)))]
        paragraphs.append(" ".join([str(number), *words])[:24])
    path.write_text("\n\n".join(paragraphs), encoding="utf-8")
    return path


def write_text_shards(folder, suite):
    """Write documents of very different lengths, 13 in each file, that fill as many pieces as the
    suite has samples; the last piece of a split is shorter."""
    folder.mkdir()
    generator, context = random.Random(0), suite.base["context"]
    for split, pieces in (("train", suite.trained + suite.dropped), ("val", suite.validated)):
        left, documents = context * pieces - 7, []  # each takes a byte more than its text
        while left:
            length = min(left - 1, generator.choice((0, 1, 9, 30, 90)))
            words = " ".join(generator.choices(WORDS, k=30))
            documents.append({"text": words[:length]})
            left -= length + 1
        write_json_lines(folder, split, documents, per_shard=13)


def autocast_copy(folder):
    """train_1gpu.py under autocast, as a reference for train_ddp_amp.py."""
    text = (ROOT / "train_1gpu.py").read_text(encoding="utf-8")
    forward = (
        "        outputs = model(inputs)\n"
        "        loss_sum = task.loss(outputs, targets)  # over the targets\n"
    )
    evaluation = "        val_result = evaluate(model, val_loader, task)\n"
    for lines, device in ((forward, "inputs.device"), (evaluation, "device")):
        assert text.count(lines) == 1
        autocast = f"        with torch.autocast({device}.type, torch.bfloat16):\n"
        text = text.replace(lines, autocast + lines.replace("        ", " " * 12))
    path = Path(folder) / AUTOCAST_COPY
    path.write_text(text, encoding="utf-8")
    return path


def write_shards(folder, base):
    """Write the synthetic images of the flags `base` into shards of 13."""
    folder.mkdir()
    samples, _ = of_synthetic(base["synthetic_samples"], base["image_size"], seed=0)
    for split in samples:
        write_tars(folder, split, samples[split], per_shard=13)


ORDERS = {  # {name: (an import, the sampler)}
    "shards": (
        "from sources.samplers import ShardOrder",
        "ShardOrder(train_set.shard_sizes, 3, 20)",
    ),
    "stream": (
        "from torch.utils.data import SequentialSampler",
        "SequentialSampler(train_set)",
    ),
    "weighted": (
        "from torch.utils.data import WeightedRandomSampler",
        "WeightedRandomSampler(1.0 + train_set.labels, len(train_set), replacement=False)",
    ),
    "buckets": (
        "from sources.samplers import LengthBuckets",
        "LengthBuckets(list(map(len, train_set.pieces)), cfg.global_batch_size, 2)",
    ),
}


def changed_copy(script, path, name):
    """Write a copy of a script with one of ORDERS (docs/streams.md, docs/recipes/samplers.md); or,
    with the name "terms", that trains terms_task."""
    if name == "terms":
        change = TASK_LINE.format("images"), "import tools.verify.terms_task as task"
        text = changed(script.read_text(encoding="utf-8"), [change], script)
        path.write_text(text, encoding="utf-8")
        return
    line, sampler = ORDERS[name]
    anchor = "from utils.checkpoint import Checkpointer\n"
    imports = f"from sources.samplers import DistributedSamplerWrapper\n{line}\n{anchor}"
    text = changed(script.read_text(encoding="utf-8"), [(anchor, imports)], script)
    train_sampler = f"train_sampler = DistributedSamplerWrapper({sampler}, cfg.seed)"
    text, count = re.subn(r"train_sampler = \w+Sampler\(.*\)", train_sampler, text)
    assert count == 1
    path.write_text(text, encoding="utf-8")


def apply_recipe(page, folder):
    """Apply the diffs of a page to a copy of the project."""
    # A repository around the folder would change what git applies.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(Path(folder).parent)}
    subprocess.run(["git", "apply", str(page)], cwd=folder, env=environment, check=True)


def change_by_recipe(script, recipe, task):
    """Apply a page to a script, in a copy of the project, that trains the task. The page may change
    the script's line that names a task: it expects the images."""
    _set_task(script, "images")
    apply_recipe(script.parent / "docs" / "recipes" / f"{recipe}.md", script.parent)
    _set_task(script, task)


def _set_task(path, task):
    text = ANY_TASK_LINE.sub(TASK_LINE.format(task), path.read_text(encoding="utf-8"))
    path.write_text(text, encoding="utf-8")


def save_pretrained_weights(path):
    """Weights of BASE's model for other classes, with BatchNorm statistics other than 0 and 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = ResNet20(num_classes=7)
        for _ in range(20):
            model(torch.randn(18, 3, 16, 16))
    torch.save(model.state_dict(), path)


def _back_to_first_epoch(folder):
    """Leave the checkpoint that a run has written after its first epoch."""
    for path in [*folder.glob("epoch-0002*"), folder / "last.pt", folder / "best.pt"]:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    shutil.copyfile(folder / "epoch-0001.pt", folder / "best.pt")


def run_matrix(folder, report, scripts=None, device="cpu", suite=IMAGES, start=start_run):
    """Train one epoch with each script (default: all) and finish it with each: a Row per pair."""
    cases = matrix_cases(suite, scripts)
    shared = {"device": device, "start": start}
    first = Verifier(folder / "first", suite, **shared)
    rows = first.run(cases, report)
    second = Verifier(folder / "second", suite, references=first.references, **shared)
    pairs = []
    for first_case in cases:
        for case in cases:
            pair = case._replace(name=f"{first_case.name} then {case.name}")
            copy = second._output_dir(pair)
            shutil.copytree(first._output_dir(first_case), copy)
            _back_to_first_epoch(copy)
            pairs.append(pair)
    return rows + second.run(pairs, report)
