"""What lab.gpu runs: jobs of about a minute, each in its own processes."""

import os
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp

import torch

from lab.bench import peers
from lab.bench.peers import Contestant
from lab.bench.report import EPOCH
from lab.bench.rows import Row
from lab.bench.runner import Runner
from tools.lib.ladder import ONE_PROCESS, ROOT
from tools.lib.runs import finish_run, last_line, start_run
from utils.distributed import cores_per_rank
from utils.errors import UserError

BATCH, SEEDS, EPOCHS = 256, 5, 5
MODES = {"eager": "none", "compiled": "default", "compiled, CUDA graphs": "reduce-overhead"}
SECONDS = {"none": 30, "default": 70, "reduce-overhead": 80}  # that a run is expected to take


@dataclass(frozen=True)
class Job:
    """A measurement. run(limit): returns a dict; raises TooSlow if it takes more than `limit`
    seconds, another Exception if it fails. seconds: an estimate of how long it takes."""

    stage: str
    name: str
    seconds: float
    run: Callable[[float], dict]


class Jobs:
    """The jobs for this machine. folder: for reports; scratch: a temporary folder; data: flags of
    the dataset; small: tiny jobs."""

    def __init__(self, folder, scratch, data, *, small):
        self.folder, self.scratch, self.data, self.small = folder, scratch, data, small
        self.device = "cuda:0" if torch.cuda.is_available() else "cpu"
        self.models, self.batch = ("resnet50", "resnet18"), BATCH
        if small:
            self.models, self.batch = ("resnet18",), 4
        self.steps = 3 if small else EPOCH // BATCH

    def all(self):
        """Every Job, the most valuable first."""
        first, *others = self.models
        jobs = [*self.speeds(first), *self.recipe(), self.tests(), self.verify()]
        jobs += self.profiles(first)
        for model in others:
            jobs += [*self.speeds(model), *self.profiles(model)]
        return [*jobs, *self.reports(), *self.memory()]

    def tests(self):
        """tests/gpu, except for the test that runs tools.verify."""
        selected = "channels_last" if self.small else "not verify_passes"
        arguments = ["-m", "pytest", "tests/gpu", "-p", "no:cacheprovider", "-k", selected]
        if find_spec("xdist"):
            arguments += ["-n", max(1, cores_per_rank() // 2)]
        return Job("tests", "tests/gpu", 180, partial(self._command, arguments))

    def verify(self):
        """All scripts train the same model, on the GPU."""
        arguments = ["-m", "tools.verify", "--device", self.device]
        arguments += ["--write", self.folder / "verify.md"]
        if self.small:
            arguments += ["--only", "1gpu"]
        return Job("verify", "make verify", 120, partial(self._command, arguments))

    def speeds(self, model):
        """Seconds per epoch: of the scripts in each precision, and of plain PyTorch."""
        flags = self._flags("bench.yaml") | self.data
        flags |= {"model": model}
        graph, script = "whole step as one CUDA graph", "train_1gpu_graph.py"
        fastest = {"amp_dtype": "bfloat16", "compile": "default"}
        rows = [
            (f"bfloat16, compiled, {graph}", script, fastest),
            (f"bfloat16, {graph}", script, {"amp_dtype": "bfloat16"}),
            *self._modes("bfloat16", "train_ddp_amp.py", {"amp_dtype": "bfloat16"}),
            *self._modes("float32 (TF32 convolutions)", "train_1gpu.py", {"dtype": "float32"}),
            (f"float32 (TF32 convolutions), {graph}", script, {}),
            ("float32 (TF32 convolutions), DDP, eager", "train_ddp.py", {}),
        ]
        larger = {"global_batch_size": 2 * self.batch}
        more = [
            (f"bfloat16, compiled, {graph}, batch {2 * self.batch}", script, fastest | larger),
            (f"float32 (TF32 convolutions), compiled, {graph}", script, {"compile": "default"}),
            *self._modes("float16", "train_ddp_amp.py", {"amp_dtype": "float16"}),
            *self._modes("float32, strict", "train_1gpu.py", {"dtype": "ieee"}),
            (f"float32, strict, {graph}", script, {"dtype": "ieee"}),
            (f"TF32, {graph}", script, {"dtype": "tf32"}),
        ]
        if self.small:
            rows = [row for row in rows if row[2].get("compile", "none") == "none"]
        for row in rows:
            yield self._speed(model, flags, *row)
        yield from self._plain(model, flags)
        if not self.small:
            for row in more:
                yield self._speed(model, flags, *row)

    def _modes(self, precision, script, settings):
        for mode, compiler in MODES.items():
            yield f"{precision}, {mode}", script, settings | {"compile": compiler}

    def _speed(self, model, flags, name, script, settings):
        run = partial(self._epochs, flags, Row(name, script, 1, settings))
        return Job("speed", f"{model}: {name}", SECONDS[settings.get("compile", "none")], run)

    def _plain(self, model, flags):
        cores = cores_per_rank()
        settings = [("tutorial", "float32", "10!")]
        settings += [("tutorial", "float32", str(n)) for n in (cores // 2, cores)]
        settings += [("tuned", "bfloat16", str(n)) for n in (cores // 2, cores)]
        if self.small:
            settings = [settings[0], settings[-1]]
        for peer, precision, workers in settings:
            contestant = Contestant(peer, 1, precision, workers, peer)
            words = f"{workers.replace('!', ' restarted')} workers"
            run = partial(self._peer, flags, contestant)
            yield Job("speed", f"{model}: {peer} PyTorch, {precision}, {words}", 40, run)

    def profiles(self, model):
        """How the time of a step is divided (--profile)."""
        cases = [
            ("bfloat16, eager", "train_ddp_amp.py", {}),
            ("bfloat16, compiled, CUDA graphs", "train_ddp_amp.py", {"compile": "reduce-overhead"}),
            ("float32, one CUDA graph", "train_1gpu_graph.py", {}),
        ]
        if self.small:
            cases = cases[:1]
        for name, script, flags in cases:
            run = partial(self._profile, model, script, flags)
            yield Job("profile", f"{model}: {name}", 90 if flags else 45, run)

    def recipe(self):
        """configs/cifar10-94.yaml, over several seeds. Needs CIFAR-10."""
        if "data_dir" not in self.data:
            return
        flags = self._flags("cifar10-94.yaml") | self.data
        for seed in range(1 if self.small else SEEDS):
            row = Row("recipe", "train_ddp_amp.py", 1, {"seed": seed})
            run = partial(self._epochs, flags, row, count=24)
            yield Job("recipe", f"seed {seed}", 45, run)

    def reports(self):
        """The benchmarks of loading and saving, which write their own reports."""
        loader, checkpoint, repeats = ["--images", 1024], ["--steps", 100], 3
        if self.small:
            loader, repeats = ["--images", 64], 1
            checkpoint = ["--steps", 4, "--set", f"global_batch_size={self.batch}"]
            checkpoint += ["--set", "num_threads=1"]
        checkpoint += ["--models", self.models[0]]
        for module, seconds, arguments in (("loader", 90, loader), ("checkpoint", 60, checkpoint)):
            arguments = ["-m", f"lab.bench.{module}", *arguments, "--repeats", repeats]
            run = partial(self._command, [*arguments, "--output", self.folder])
            yield Job("reports", f"{module}.md", seconds, run)

    def memory(self):
        """Peak memory of each technique, on one GPU."""
        flags = self._flags("bench.yaml") | {"model": self.models[0]}
        cases = [
            ("one GPU", "train_1gpu.py", {}),
            ("DDP", "train_ddp.py", {}),
            ("autocast", "train_ddp_amp.py", {}),
            ("4 micro-batches", "train_ddp_accum.py", {"micro_batches": 4}),
            ("FSDP", "train_fsdp.py", {}),
        ]
        if self.small:
            cases = cases[:2]
        for name, script, settings in cases:
            run = partial(self._memory, flags, Row(name, script, 1, settings))
            yield Job("memory", f"{self.models[0]}: {name}", 30, run)

    def _flags(self, config):
        """The flags for a file of configs/."""
        flags = {"config": ROOT / "configs" / config}
        if self.small:
            flags |= {"global_batch_size": self.batch, "num_threads": 1}
        return flags

    def _command(self, arguments, limit):
        process = start_run(arguments, None, {}, cores=_cores())
        run = finish_run(process, self.folder, limit)
        if run.code:
            raise RuntimeError(f"{run.stdout}\n{run.stderr}")
        return {"seconds": run.seconds, "last_line": last_line(run.stdout)}

    def _epochs(self, flags, row, limit, count=EPOCHS):
        runner = Runner(flags, mkdtemp(dir=self.scratch), self.steps, limit)
        return runner.epochs(row, 2 if self.small else count)

    def _peer(self, flags, contestant, limit):
        if self.small:
            contestant = Contestant(contestant.name, 1, contestant.precision, "1", contestant.peer)
        runner = Runner(flags, mkdtemp(dir=self.scratch), self.steps, limit)
        sample = peers.sample(runner, contestant)
        samples = self.steps * self.batch
        return sample | {"train": samples / sample["images_per_second"], "samples": samples}

    def _memory(self, flags, row, limit):
        return Runner(flags, mkdtemp(dir=self.scratch), min(self.steps, 12), limit).row(row)

    def _profile(self, model, script, flags, limit):
        folder = Path(mkdtemp(dir=self.scratch))
        flags = self._flags("bench.yaml") | flags | {"model": model, "epochs": 2}
        flags |= {"synthetic_samples": 40 * self.batch}
        flags |= {"output_dir": folder, "save_minutes": 0, "resume": "never"}
        flags |= {"profile": "49:68"}  # in the second epoch
        nproc = None if script in ONE_PROCESS else 1
        process = start_run(script, nproc, flags, cores=_cores(), launcher="tools.launch")
        run = finish_run(process, folder, limit)
        if run.code:
            raise RuntimeError(run.stderr)
        text = (folder / "profile" / "summary.txt").read_text()
        return {"summary": text.splitlines()[0], "text": f"```\n{text}```\n"}


def _cores():
    return sorted(os.sched_getaffinity(0))


def dataset_flags(source, folder):
    """The settings that read CIFAR-10 from `source`: a folder with train/ and test/, which hold a
    folder per class; one with cifar-10-batches-py; or a .tar archive of either, which is extracted
    into `folder`.

    Without a source, the images are synthetic. Raises UserError if there are no such images.
    """
    if not source:
        return {"dataset": "synthetic"}
    place = Path(source).resolve()
    if place.is_file():
        place = _extracted(place, Path(folder).resolve())
    inside = [path for path in place.iterdir() if path.is_dir()] if place.is_dir() else []
    if len(inside) == 1 and inside[0].name not in ("cifar-10-batches-py", "train"):
        place = inside[0]  # an archive of one folder
    if (place / "cifar-10-batches-py").is_dir():
        return {"dataset": "cifar10", "data_dir": place}
    if (place / "train").is_dir():
        return {"dataset": "imagefolder", "data_dir": place, "image_size": 32}
    raise UserError(f"--data {source}: {place} has neither cifar-10-batches-py nor train")


def _extracted(archive, folder):
    """The folder with the contents of an archive, in `folder`."""
    target = folder / f"{archive.name}.extracted"
    if not target.exists():
        print(f"extracting {archive} to {target}", flush=True)
        with tarfile.open(archive) as file:
            file.extractall(f"{target}.tmp", filter="data")
        os.replace(f"{target}.tmp", target)
    return target
