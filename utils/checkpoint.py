"""Checkpoints of a run, in one form for every script: rank 0 writes while training continues.

A file is a dict of tensors, numbers, strings, lists and dicts, for torch.load(weights_only=True):
"model" (plain names, full tensors), "optimizer" (by parameter name), whatever else a script's
`state` holds, "guards" (by class), and "config", "epoch" (epochs done), "format".

output_dir/epoch-0007.pt   after 7 epochs; the newest cfg.keep_last of them are kept
output_dir/last.pt         the newest checkpoint, possibly from within an epoch
output_dir/best.pt         the one with the best validation metric
"""

import os
import shutil
import textwrap
import zipfile
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.tensor import DTensor, Replicate

from utils.batches import map_tensors
from utils.data import Loader
from utils.distributed import all_gather_object, fail_together, is_main_process, require_same
from utils.errors import UserError, required_by, warn

FORMAT = 4
OWN = {"format", "epoch", "config", "data", "guards", "model", "optimizer", "parts"}
# Keys of an optimizer's groups that are not taken from a file: DDP's SGD is fused, FSDP's is not.
CHOSEN_BY_SCRIPT = {"params", "fused", "foreach", "capturable", "differentiable"}
# Names of files. After a whole epoch: EPOCH_NAME and the number of epochs done.
EPOCH_NAME, LAST, BEST = "epoch-", "last.pt", "best.pt"
RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")  # of this job


class Wrapper(nn.Module):
    """Base of modules that hold a model as `module`, and leave no trace of it in checkpoints."""

    module: nn.Module


def unwrap(model: nn.Module) -> nn.Module:
    """The plain model inside DistributedDataParallel, DataParallel and Wrappers."""
    while isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel | Wrapper):
        model = model.module
    return model


@contextmanager
def _replacing(path):
    """Yields the name of a file that replaces `path`, if the body succeeds in writing it."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        # torch.save raises a RuntimeError of its own over that of the disk.
        cause = error.__context__ if isinstance(error, RuntimeError) else error
        raise UserError(f"cannot write {path}: {cause or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def save_atomically(obj: Any, path: Path, check: bool = False) -> None:
    """torch.save to a file that replaces `path` once it is complete and on the disk. check: and
    only if it can be read as a checkpoint."""
    with _replacing(path) as temporary:
        with open(temporary, "wb") as file:
            torch.save(obj, file)
            file.flush()
            os.fsync(file.fileno())
        if check:
            read_checkpoint(temporary, join_parts=False)


def link_atomically(name: Path, path: Path) -> None:
    """Make `name` a second name of the file `path`; a copy where links do not work."""
    with _replacing(name) as temporary:
        with suppress(OSError):
            os.link(path, temporary)
        if not temporary.exists():
            shutil.copyfile(path, temporary)


def read_checkpoint(path: str | Path, join_parts: bool = True) -> dict[str, Any]:
    """A checkpoint as a dict on the CPU. join_parts: read the tensors of a sharded one, too.

    Raises UserError if it is damaged: the checksum of each record is verified, because torch.load
    alone would not notice a flipped bit. Raises OSError if it cannot be read now.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} fails its checksum")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # of zipfile, pickle and torch
        lines = str(error).splitlines()  # weights_only has many
        reason = next((line for line in lines if "Unpickler" in line), "".join(lines[:1]))
        raise UserError(f"{path} cannot be read as a checkpoint: {reason.strip()}") from None
    if not isinstance(checkpoint, dict) or checkpoint.get("format") != FORMAT:
        raise UserError(
            f"{path} is not a checkpoint of format {FORMAT}: finish its run with the version that "
            f"wrote it, or pass a different --output-dir"
        )
    if "parts" in checkpoint:
        sharded = sharded_files()
        sharded.check_parts(path.parent, checkpoint)
        if join_parts:
            checkpoint = sharded.join_parts(path.parent, checkpoint)
    return checkpoint


def sharded_files() -> Any:
    """The module for checkpoints whose tensors are in files of each rank."""
    with required_by("--save-sharded"):
        import utils.options.sharded as sharded
    return sharded


def epoch_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of whole epochs in a folder, the oldest first."""
    paths = folder.glob(f"{EPOCH_NAME}*.pt")
    numbers = {path: path.stem.removeprefix(EPOCH_NAME) for path in paths}
    epochs = {path: int(number) for path, number in numbers.items() if number.isdecimal()}
    return sorted(epochs, key=lambda path: epochs[path])


def newest_good_checkpoint(folder: Path) -> tuple[Path, dict[str, Any] | None]:
    """The newest checkpoint that can be read, and its contents, without the tensors of its parts;
    these are None if there is no file. Raises UserError if all are damaged."""
    paths = [*folder.glob(LAST), *reversed(epoch_checkpoints(folder))]
    for path in paths:
        try:
            return path, read_checkpoint(path, join_parts=False)
        except UserError as error:
            warn(f"{error}; trying the checkpoint before it")
    if paths:
        raise UserError(f"no checkpoint in {folder} can be read: pass a different --output-dir")
    return folder / LAST, None


class Weights:
    """The tensors of model and optimizer, by the names of the plain model's parameters.

    For a model that is divided among ranks, the file holds full tensors, which are gathered on rank
    0's CPU, one after another. gather=False: state_dict() returns DTensors, each rank's own part.
    All ranks call each method together.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, gather: bool = True
    ) -> None:
        self.model, self.optimizer, self.gather = unwrap(model), optimizer, gather
        is_sharded = any(isinstance(p, DTensor) for p in self.model.parameters())
        self.options = dsd.StateDictOptions(full_state_dict=is_sharded, cpu_offload=is_sharded)

    def state_dict(self) -> dict[str, Any]:
        """{"model": {name: tensor}, "optimizer": a state dict by parameter name}; they may share
        memory with what is trained."""
        options = self.options if self.gather else None
        both = dsd.get_state_dict(self.model, self.optimizer, options=options)
        return dict(zip(("model", "optimizer"), both, strict=True))

    def load_state_dict(self, contents: dict[str, Any], with_groups: bool = True) -> None:
        """Continue from the contents of a checkpoint. with_groups: take the settings of the
        optimizer's groups from it. Raises UserError if it holds a different model."""
        mine, saved = dsd.get_model_state_dict(self.model), contents["model"]
        if different := _shapes(mine) ^ _shapes(saved):
            names = ", ".join(sorted({name for name, _ in different})[:5])
            raise UserError(f"the checkpoint holds a different model, which differs in {names}")
        shards = {name: tensor for name, tensor in mine.items() if isinstance(tensor, DTensor)}
        placed = {name: placed_like(tensor, saved[name]) for name, tensor in shards.items()}
        dsd.set_model_state_dict(self.model, saved | placed)
        self._load_optimizer(contents["optimizer"], with_groups)

    def _load_optimizer(self, saved, with_groups):
        """Not by PyTorch's set_optimizer_state_dict, which casts each state to the dtype of its
        parameter, and calls optimizer.step(), with its hooks, to create the states."""
        groups, theirs = self.optimizer.param_groups, saved["param_groups"]
        if with_groups:
            if len(theirs) != len(groups):
                raise UserError(f"the checkpoint's optimizer has {len(theirs)} parameter groups")
            for group, values in zip(groups, theirs, strict=True):
                group.update({k: v for k, v in values.items() if k not in CHOSEN_BY_SCRIPT})
        names = {p: _plain_name(self.model, name) for name, p in self.model.named_parameters()}
        for group in groups:
            is_on_device = group.get("fused") or group.get("capturable")  # the number of steps, too
            for parameter in group["params"]:
                state = {}
                for key, value in saved["state"].get(names.get(parameter), {}).items():
                    is_placed = isinstance(value, Tensor) and (key != "step" or is_on_device)
                    state[key] = placed_like(parameter, value) if is_placed else value
                if state:  # otherwise, what the optimizer has created itself stays
                    self.optimizer.state[parameter] = state


def _shapes(tensors):
    return {(name, getattr(value, "shape", None)) for name, value in tensors.items()}


def _plain_name(model, name):
    """Without the prefixes of activation checkpointing and torch.compile, as in the file."""
    (plain,) = dsd._get_fqns(model, name)
    return plain


def placed_like(parameter: Tensor, value: Tensor) -> Tensor:
    """`value` on the device of a parameter. One of the same shape, which all ranks have, is divided
    among them, and laid out in memory, as the parameter is."""
    if value.shape != parameter.shape:
        return value.to(parameter.device)
    place = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
    if not isinstance(place, DTensor):
        return place.copy_(value)
    mesh, placements = place.device_mesh, place.placements
    if not isinstance(value, DTensor):
        whole = [Replicate()] * mesh.ndim
        value = DTensor.from_local(value.to(place.device), mesh, whole, run_check=False)
    # Not place.copy_(value), which refuses fewer rows than ranks (torch 2.14).
    place.to_local().copy_(value.redistribute(mesh, placements).to_local())
    return place


def _copied_to_cpu(tensor):
    if isinstance(tensor, DTensor):  # each rank would load rank 0's part
        raise UserError("a state_dict() holds a DTensor: return its full_tensor(), on all ranks")
    return tensor.detach().to("cpu", copy=True)


class Checkpointer:
    """Saves and resumes a run in cfg.output_dir. All ranks call each method together.

    state: {name: an object with state_dict() and load_state_dict()}; "model", "optimizer" and
    "loader" must be among them, and "data" holds plain facts about the data instead, which must not
    change when the run is resumed. guards: a list of utils.guards.Guard. form: a function that
    wraps the Weights in an object with the same methods, to change what the file holds.
    """

    def __init__(
        self,
        cfg: Any,
        state: dict[str, Any],
        guards: Iterable[Any] = (),
        form: Callable[[Any], Any] = lambda weights: weights,
    ) -> None:
        self.cfg, self.state, self.guards = cfg, state, list(guards)
        self.folder = Path(cfg.output_dir)
        self.model, self.optimizer = unwrap(state["model"]), state["optimizer"]
        self.weights = form(Weights(self.model, self.optimizer, gather=not cfg.save_sharded))
        if cfg.save_sharded:
            self.weights = sharded_files().ShardedWeights(self.weights, self.folder)
        self.others = {k: v for k, v in state.items() if k not in ("model", "optimizer", "data")}
        for name, value in self.others.items():
            if not hasattr(value, "load_state_dict"):
                raise UserError(f"state[{name!r}] has no load_state_dict(), and would be lost")
        self.stateful = [guard for guard in self.guards if hasattr(guard, "state_dict")]
        if len({type(guard).__name__ for guard in self.stateful}) < len(self.stateful):
            raise UserError("a second guard of a class would replace the state of the first")
        self.loaders = [value for value in state.values() if isinstance(value, Loader)]
        self.epoch = 0  # epochs done
        self.is_requested = False  # a guard asks for a save
        self.is_first = True  # the next file is the first of this process
        self.pending: Future[None] | None = None  # the file that is being written
        self.writer = ThreadPoolExecutor(1)

    def load(self) -> int:
        """Load `state` from the newest valid checkpoint. Returns the epochs done, 0 without one.

        A damaged checkpoint is skipped with a warning. Raises UserError if none can be read, or if
        the settings, the data, the model or the names in `state` differ.
        """
        contents: dict[str, Any] | None = None
        with fail_together(patient=True):
            self.folder.mkdir(parents=True, exist_ok=True)
            path, contents = newest_good_checkpoint(self.folder)
            is_restart = any(int(os.environ.get(name, 0)) for name in RESTARTS)
            if contents and self.cfg.resume == "never" and not is_restart:
                raise UserError(f"{self.folder} holds a run: remove it, or pass --output-dir")
            if contents is None and self.cfg.resume == "always":
                raise UserError(f"there is no checkpoint in {self.folder} to resume from")
        place = contents and (contents["epoch"], contents["loader"]["step"])
        require_same(
            ": all nodes must share the folder", **{f"newest file of {self.folder}": place}
        )
        with fail_together(patient=True):
            if contents:
                self._load(contents)
        for guard in self.guards:
            guard.at_start(self)
        if is_main_process() and path.name != LAST:  # which is damaged, or gone
            link_atomically(self.folder / LAST, path)
        return self.epoch

    def _load(self, contents):
        ours = self.cfg.fixed_on_resume() | self.state["data"]
        saved = contents["config"] | contents["data"]
        changed = {name for name in ours.keys() & saved if ours[name] != saved[name]}
        if changed and not self.cfg.allow_config_change:
            remedy = "pass a different --output-dir, or --allow-config-change"
            raise UserError(f"{self.folder}: {_differences(ours, saved, changed)}: {remedy}")
        order = changed & {"seed", *self.state["data"]}
        if order and contents["loader"]["step"]:  # the samples of this epoch would change
            remedy = "finish the epoch without this change"
            raise UserError(f"{self.folder}: {_differences(ours, saved, order)}: {remedy}")
        self._refuse_renamed(contents)
        if "parts" in contents:
            sharded = sharded_files()
            contents = sharded.join_parts(self.folder, contents, self.model)
        if saved["optimizer"] != self.cfg.optimizer:
            contents["optimizer"]["state"] = {}
        self.weights.load_state_dict(contents, with_groups=not changed)
        for name, value in self.others.items():
            if name in contents:
                value.load_state_dict(contents[name])
        for guard in self.guards:
            if type(guard).__name__ in contents["guards"]:
                guard.load_state_dict(contents["guards"][type(guard).__name__])
        self.epoch = contents["epoch"]

    def _refuse_renamed(self, contents):
        """An entry without a state, such as a disabled GradScaler's, may be on one side only."""
        ours = [n for n, value in self.others.items() if n in contents or value.state_dict()]
        theirs = [n for n in contents if n in self.others or (n not in OWN and contents[n])]
        if different := set(ours) ^ set(theirs):
            raise UserError(
                f"{self.folder} and the script's `state` differ in {', '.join(sorted(different))}: "
                f"the file has {', '.join(theirs)}, the script {', '.join(ours)}"
            )

    def request_save(self) -> None:
        """Save after this step, or at the end of the epoch, if this step is its last. All ranks
        call it together."""
        self.is_requested = True

    def is_due(self) -> bool:
        """Whether the loop pauses after this step: for a save, or for the end of the epoch."""
        step, every = self.state["loader"].step, self.cfg.save_steps
        is_last = step == len(self.state["loader"])
        return self.is_requested or is_last or (every > 0 and step % every == 0)

    def step(self) -> None:
        """Call after each optimizer step: calls the guards, and saves if a save is due."""
        loader = self.state["loader"]
        before = loader.step
        if self.loaders and not any([loader.advance() for loader in self.loaders]):  # each of them
            raise UserError("no loader of `state` has been read since the last checkpoint.step()")
        if loader.step < before:
            raise UserError("call checkpoint.save() after each pass over the training set")
        for guard in self.guards:
            guard.after_step(self)
        if self.is_due() and loader.step < len(loader):  # the script saves at the end of the epoch
            self.save(self.epoch, between_steps=True)

    def save(self, epoch: int, is_best: bool = False, between_steps: bool = False) -> None:
        """Save the state after `epoch` epochs. Returns once it is copied; a thread writes the file.

        Does nothing if cfg.save_epochs leaves this epoch out, unless it is the best so far or a
        guard has asked for a save. between_steps: within the next epoch; writes only last.pt. If
        writing fails, the next save raises the error; the last save of a run raises it itself.
        """
        if epoch <= self.epoch and not between_steps:
            raise UserError(f"epoch {epoch - 1} was over: begin where checkpoint.load() says")
        self.epoch, is_last = epoch, epoch == self.cfg.epochs
        if not between_steps:
            for loader in self.loaders:
                loader.end_epoch()
        is_whole_epoch = is_best or is_last or epoch % self.cfg.save_epochs == 0
        if not (between_steps or is_whole_epoch or self.is_requested):
            return
        self.is_requested = False
        self.wait()
        for guard in self.guards:
            guard.before_save(self, between_steps)
        with fail_together():
            contents = self._contents()
        if is_main_process():
            # best.pt first: a run that is killed before the others have changed repeats the epoch.
            names = [BEST] * is_best + [f"{EPOCH_NAME}{epoch:04d}.pt"] * (not between_steps)
            self.pending = self.writer.submit(self._write, contents, *names, LAST)
        if is_last:
            self.wait()
        for guard in self.guards:
            guard.after_save(self)

    def _contents(self):
        contents = {"format": FORMAT, "epoch": self.epoch, "config": vars(self.cfg)}
        contents |= {"data": self.state["data"]} | self.weights.state_dict()
        contents |= {name: value.state_dict() for name, value in self.others.items()}
        contents["guards"] = {type(guard).__name__: guard.state_dict() for guard in self.stateful}
        if is_main_process():
            return map_tensors(_copied_to_cpu, contents)

    def _write(self, contents, name, *links):
        # The first time, fail if torch.load refuses what a script's `state` holds.
        save_atomically(contents, self.folder / name, check=self.is_first)
        self.is_first = False
        for link in links:
            link_atomically(self.folder / link, self.folder / name)
        for path in epoch_checkpoints(self.folder)[: -self.cfg.keep_last]:
            path.unlink()
        if "parts" in contents:
            sharded_files().remove_unused_parts(self.folder)

    def wait(self) -> None:
        """Wait until the last save is on the disk; raise its error, if any."""
        pending, self.pending = [self.pending] if self.pending else [], None
        # Not in one wait: the other ranks would take rank 0 for dead if its disk is slow.
        while any(all_gather_object(bool(wait(pending, self.cfg.timeout / 10).not_done))):
            pass
        with fail_together():
            for written in pending:
                written.result()


def _differences(ours, saved, names):
    texts = [f"{name} is {ours[name]!r}, but was {saved[name]!r}" for name in sorted(names)]
    return textwrap.shorten("; ".join(texts), 500)
