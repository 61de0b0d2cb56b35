"""Checkpoints of a run, in one form for every script: rank 0 writes while training continues.

The form of the files is described in utils/checkpoint_file.py.
"""

import copy
import errno
import shutil
import textwrap
import uuid
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.tensor import DTensor

from utils.batches import map_tensors, same_values, tensors_of
from utils.checkpoint_file import (
    FORMAT,
    keep_newest,
    newest_good_checkpoint,
    parts_module,
    prepare_folder,
    read_checkpoint,
    refuse_unreadable,
    save_atomically,
    with_plain_numbers,
)
from utils.distributed import all_gather_object, fail_together, is_main_process, is_restart_of
from utils.errors import UserError, warn
from utils.files import link_atomically
from utils.hooks import FileForm
from utils.metrics import read_metrics


class Wrapper(nn.Module):
    """Base of modules that hold a model as `module`, and leave no trace of it in checkpoints."""

    module: nn.Module

    def count_trainable(self) -> int:
        """The number of trainable parameters of the whole model."""
        return count_trainable(self.module)


def count_trainable(model: nn.Module) -> int:
    """The number of trainable parameters of a model, also of those that other ranks hold."""
    if isinstance(model, Wrapper):
        return model.count_trainable()
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def unwrap(model: nn.Module) -> nn.Module:
    """The plain model inside DistributedDataParallel, DataParallel and Wrappers."""
    kinds = nn.parallel.DistributedDataParallel, nn.DataParallel, Wrapper
    while isinstance(model, kinds):
        model = model.module
    return model


class Checkpointer:
    """Saves and resumes a run in cfg.output_dir. All ranks call each method together.

    state: {name: an object with state_dict() and load_state_dict(), or a plain value}; "model",
    "optimizer" and "loader" must be among them, and "data" holds plain facts about the data, which
    must not change when the run is resumed. hooks: a list of utils.hooks.Hook.
    """

    def __init__(self, cfg: Any, state: Mapping[str, Any], hooks: Iterable[Any] = ()) -> None:
        self.cfg, self.state, self.hooks = cfg, state, list(hooks)
        names = [type(hook).__name__ for hook in self.hooks]  # of their states in a checkpoint
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"two hooks are of classes named {name}: rename one of the classes")
        self.forms = [hook for hook in self.hooks if isinstance(hook, FileForm)]
        self.folder = Path(cfg.output_dir)
        self.model, self.optimizer = unwrap(state["model"]), state["optimizer"]
        self.others = {k: v for k, v in state.items() if k not in ("model", "optimizer")}
        self.is_sharded = any(isinstance(p, DTensor) for p in self.model.parameters())
        self.epoch = 0  # epochs done
        self.were_hooks_called = False  # since the last step
        self.is_requested = False  # a hook asks for a save after this step
        self.is_save_due = False  # after the last step
        self.ends_run = False  # after the next save, or the current one
        self.pending: Future[None] | None = None  # of the file that is being written
        self.writer = ThreadPoolExecutor(1)
        groups = [dict(group, params=[]) for group in self.optimizer.param_groups]
        self.initial_groups = with_plain_numbers(copy.deepcopy(groups))

    def load(self) -> int:
        """Load `state` from the newest valid checkpoint. With --resume never, move the files of the
        run before to output_dir/previous-TIME instead, unless a job that did so is restarted.

        Returns the epochs done, 0 without a checkpoint. A damaged checkpoint is skipped with a
        warning, and the one before it is used. Raises UserError if no checkpoint can be read, if
        the settings, the data or the model differ, or if `state` holds what could not be read from
        a checkpoint.
        """
        newest = None
        with fail_together():
            if is_main_process():
                starts = read_metrics(self.folder / "starts.jsonl")
                prepare_folder(self.folder, "always" if is_restart_of(starts) else self.cfg.resume)
                newest = newest_good_checkpoint(self.folder)
        path = all_gather_object(newest and newest[0])[0]
        contents: dict[str, Any] = {}
        with fail_together():
            if path:
                path, contents = newest or self._read_like_rank_0(path.name)
            elif self.cfg.resume == "always":
                raise UserError(f"there is no checkpoint in {self.folder} to resume from")
        seen = all_gather_object([contents.get("epoch"), contents.get("id")])
        if other := [i for i, identity in enumerate(seen) if identity != seen[0]]:
            raise UserError(
                f"{path} is a file of epoch {seen[0][0]} on rank 0, and a different one, of epoch "
                f"{seen[other[0]][0]}, on rank {other[0]}: start the run again in a minute, when "
                f"the file system shows the same file to all nodes"
            )
        with fail_together():
            if path:
                self._load_state(path, contents)
        for hook in self.hooks:
            hook.after_load(self)
        # A whole checkpoint will have plain dicts in place of others in the model's extra state.
        model = map_tensors(lambda tensor: tensor, dsd.get_model_state_dict(self.model))
        contents = {"model": model} | self._gather_others()
        with fail_together():
            refuse_unreadable(contents)
        return self.epoch

    def note_hooks_called(self) -> None:
        """Called by Hooks.after_step(): step() refuses a loop that does not call the hooks."""
        self.were_hooks_called = True

    def request_save(self, ends_run: bool) -> None:
        """Save after this step, or at the end of the epoch, if this step is its last. All ranks
        call it together. ends_run: the caller ends the run after that save."""
        self.is_requested, self.ends_run = True, self.ends_run or ends_run

    def is_due(self) -> bool:
        """Whether a save, or the end of the epoch, follows this step."""
        loader = self.state["loader"]
        return self._asks_for_save() or loader.step == len(loader)

    def _asks_for_save(self):
        every = self.cfg.save_steps
        return self.is_requested or (every > 0 and self.state["loader"].step % every == 0)

    def step(self) -> None:
        """Call after each optimizer step: saves within the epoch when a save is due."""
        if self.hooks and not self.were_hooks_called:
            raise UserError("call hooks.after_step(checkpoint) before checkpoint.step()")
        self.were_hooks_called = False
        self.is_save_due, self.is_requested = self._asks_for_save(), False
        loader = self.state["loader"]
        is_last = loader.step == len(loader)  # the script saves at the end of the epoch
        if self.is_save_due and not is_last:
            self.save(self.epoch, between_steps=True)

    def save(self, epoch: int, is_best: bool = False, between_steps: bool = False) -> None:
        """Save the state after `epoch` epochs. Returns once it is copied; a thread writes the file.

        Does nothing if cfg.save_epochs leaves this epoch out, unless it is the best so far or its
        last step asked for a save. between_steps: the save is within the next epoch, and writes
        only last.pt. If writing fails, the next save raises UserError; the last save of a run
        raises it itself.
        """
        self.epoch = epoch
        is_last = epoch == self.cfg.epochs
        self.ends_run = self.ends_run or is_last
        if not (self.is_save_due or is_last or epoch % self.cfg.save_epochs == 0):
            is_best_on_rank_0 = all_gather_object(is_best)[0]
            if not is_best_on_rank_0:
                return
        self.wait()
        for hook in self.hooks:
            hook.before_save(self, between_steps)
        with self._file_form():  # until all is copied: the contents may share the model's memory
            contents, copies = self._gather_state()
            for form in self.forms:
                contents = form.to_file(self, contents)
            if is_main_process():
                contents = copy.deepcopy(contents, copies)
        if is_main_process():
            # best.pt first: a run that is killed before the others have changed repeats the epoch.
            names = ["best.pt"] if is_best else []
            if not between_steps:
                names.append(f"epoch-{epoch:04d}.pt")
            must_succeed = self.ends_run or self.cfg.save_errors == "stop"
            names.append("last.pt")
            self.pending = self.writer.submit(self._write, contents, must_succeed, *names)
        if is_last:
            self.wait()
        for hook in self.hooks:
            hook.after_save(self)

    def wait(self) -> None:
        """Wait until the last save is on the disk; raise its error, if any."""
        with fail_together():
            if pending := self.pending:
                pending.exception()  # a signal meanwhile waits for the file, too: preemption.py
                self.pending = None
                pending.result()

    def _gather_state(self):
        """The contents of a checkpoint, and {id of a GPU's tensor in it: its copy on the CPU}."""
        is_whole = not self.cfg.save_sharded
        # Shards are gathered on rank 0's CPU, one tensor after another.
        offload = is_whole and self.is_sharded
        options = dsd.StateDictOptions(full_state_dict=is_whole, cpu_offload=offload)
        for group in self.optimizer.param_groups:  # PyTorch refuses most of NumPy's numbers
            group.update(with_plain_numbers(group))
        try:
            model, optimizer = dsd.get_state_dict(self.model, self.optimizer, options=options)
        except ValueError as error:  # Unexpected value type
            raise UserError(
                f"a checkpoint cannot hold the model or the optimizer: {error}"
            ) from None
        contents = with_plain_numbers({"model": model, "optimizer": optimizer})
        # deepcopy takes these copies: what has been gathered anyway, and a GPU's tensors, which are
        # copied to pinned memory, and waited for once.
        copies = self._gathered(contents) if offload else {}
        contents |= self._gather_others()
        if is_whole and is_main_process():
            tensors = [tensor for tensor in tensors_of(contents) if not tensor.is_cpu]
            copies |= {id(tensor): tensor.to("cpu", non_blocking=True) for tensor in tensors}
            for device in {tensor.device for tensor in tensors}:
                torch.accelerator.synchronize(device)
        with fail_together():
            refuse_unreadable(contents)
        return contents, copies

    def _gathered(self, contents):
        """{id of a tensor: itself}, of those that do not share memory with what is trained."""
        own = tensors_of([self.model.state_dict(), dict(self.optimizer.state)])
        held = {_address(getattr(tensor, "_local_tensor", tensor)) for tensor in own}
        tensors = [t for t in tensors_of(contents) if t.is_cpu and _address(t) not in held]
        return {id(tensor): tensor for tensor in tensors}

    def _gather_others(self):
        """The contents of a checkpoint, except for model and optimizer."""
        contents = {"format": FORMAT, "epoch": self.epoch, "config": vars(self.cfg)}
        contents["id"] = uuid.uuid4().hex  # of this save: see load()
        contents["initial_groups"] = self.initial_groups
        for name, value in self.others.items():
            contents[name] = value.state_dict() if hasattr(value, "state_dict") else value
        contents["hooks"] = {type(hook).__name__: hook.state_dict() for hook in self.hooks}
        return with_plain_numbers(contents)

    @contextmanager
    def _file_form(self):
        with ExitStack() as stack:  # leaves what it has entered if the next one raises
            for form in self.forms:
                stack.enter_context(form.context(self))
            yield

    def _write(self, contents, must_succeed, name, *links):
        path = self.folder / name
        try:
            save_atomically(contents, path)
            for link in links:
                link_atomically(self.folder / link, path)
            if name != "last.pt":
                keep_newest(self.folder, self.cfg.keep_last, contents["epoch"])
            if any(self.folder.glob("*.parts")):
                parts_module(self.folder).remove_unused_parts(self.folder)
        except (OSError, RuntimeError) as error:
            # torch.save hides "disk full" behind a RuntimeError about positions in the file.
            reason = error if isinstance(error, OSError) else error.__context__
            if not isinstance(reason, OSError):
                raise
            message = f"cannot save {path}: {reason.strerror}"
            if reason.errno == errno.ENOSPC:
                needed = sum(tensor.nbytes for tensor in tensors_of(contents))
                free = shutil.disk_usage(self.folder).free
                message += f" ({needed / 1e6:.1f} MB are needed, {free / 1e6:.1f} MB are free)"
            if must_succeed:
                raise UserError(message) from None
            warn(f"{message}; the run continues")

    def _read_like_rank_0(self, name):
        path = self.folder / name
        if not path.exists():
            raise UserError(f"{path} is on rank 0's node only: all nodes must share output_dir")
        return path, read_checkpoint(path, join_parts=False)

    def _load_state(self, path, contents):
        data, saved = self.others.get("data", {}), contents["config"] | contents.get("data", {})
        changed = _differences(self.cfg.fixed_on_resume() | data, saved)
        if changed and not self.cfg.allow_config_change:
            raise UserError(
                f"{path} was written with different settings (now {changed}): pass --resume never "
                f"to start over, a different --output-dir, or --allow-config-change"
            )
        for form in self.forms:
            contents = form.from_file(self, path, contents)
        with self._file_form():
            like = dsd.get_state_dict(self.model, self.optimizer)
            is_whole = "parts" not in contents
            if not is_whole:
                contents = parts_module(path).load_sharded(path, contents, like)
            # PyTorch distributes full tensors to DTensors, but fails on a model on several devices.
            options = dsd.StateDictOptions(full_state_dict=self.is_sharded and is_whole)
            self._load_model(path, contents["model"], like[0], options)
            self._load_optimizer(path, contents, like[1], options)
        changed = _differences({"seed": self.cfg.seed} | data, saved)
        if changed and contents["loader"]["step"]:  # the order of the samples would change
            raise UserError(
                f"{path} was written within an epoch: finish that epoch with the same data and "
                f"seed (now {changed}), or remove the file to repeat the epoch from its start"
            )
        for name, value in self.others.items():
            if name in contents and hasattr(value, "load_state_dict"):
                value.load_state_dict(contents[name])
        for hook in self.hooks:
            if type(hook).__name__ in contents["hooks"]:
                hook.load_state_dict(contents["hooks"][type(hook).__name__])
        self.epoch = contents["epoch"]

    def _load_model(self, path, saved, current, options):
        """saved, current: {name: tensor}."""
        try:
            if missing := current.keys() - saved:  # PyTorch ignores it with FSDP
                raise RuntimeError(f"missing: {', '.join(sorted(missing))}")
            dsd.set_model_state_dict(self.model, saved, options=options)
        except RuntimeError as error:
            difference = textwrap.shorten(str(error), 500)
            raise UserError(f"{path} holds a different model: {difference}") from None

    def _load_optimizer(self, path, contents, current, options):
        """current: a state dict by parameter name."""
        saved = contents["optimizer"]
        groups = saved["param_groups"]
        if len(groups) != len(self.initial_groups):
            raise UserError(
                f"the optimizer of {path} has {len(groups)} groups of parameters, not "
                f"{len(self.initial_groups)}: pass --resume never to start over, or build as many"
            )
        is_same_kind = contents["config"]["optimizer"] == self.cfg.optimizer
        current["state"] = saved["state"] if is_same_kind else {}
        options.strict = False  # a parameter that never had a gradient has no state
        if not current["state"]:
            options.full_state_dict = False  # PyTorch fails: SGD without momentum has no state
        dsd.set_optimizer_state_dict(self.model, self.optimizer, current, options=options)
        for parameter, values in self.optimizer.state.items():
            for key, value in values.items():  # in the parameter's memory format, as a fused step
                if getattr(value, "shape", None) == parameter.shape:  # expects
                    values[key] = torch.empty_like(parameter).copy_(value)
        initial = contents.get("initial_groups", [{}] * len(groups))  # not in older checkpoints
        for group, ours, theirs, found in zip(
            self.optimizer.param_groups, self.initial_groups, initial, groups, strict=True
        ):
            group.update(_settings_of(ours, theirs, found))


def _settings_of(ours, theirs, saved):
    """What a group of parameters continues with, apart from its parameters.

    ours, theirs: the group at the start of this run, and of the saved one; saved: the group in the
    file. Schedules and optimizers change groups, and so all of that continues, except for settings
    that differ at the start, because the user has changed them. The rate always continues: some
    schedulers compute the next one from it, and Schedule knows its own.
    """
    settings = copy.deepcopy(ours)
    for key, value in saved.items():
        before = ours.get(key, ...)
        if key == "lr" or same_values(before, theirs.get(key, ...)):
            are_tensors = isinstance(before, Tensor) and isinstance(value, Tensor)
            settings[key] = value.to(before.device) if are_tensors else value
    del settings["params"]
    return settings


def _address(tensor):
    return tensor.untyped_storage().data_ptr()


def _differences(mine, theirs):
    """What differs between two dicts, as text, for the names that both have."""
    texts = []
    for name in mine:
        if name in theirs and not same_values(mine[name], theirs[name]):
            texts.append(f"{name} {mine[name]!r}, not {theirs[name]!r}")
    return textwrap.shorten("; ".join(texts), 500)
