"""Checkpoints: one format for every script, written by rank 0 while training continues.

A checkpoint is a dict of tensors, numbers, strings, lists and dicts, which torch.load reads with
weights_only=True: "model" (plain names, full tensors), "optimizer" (by parameter name), whatever
else `state` holds, and "config", "epoch" (epochs done), "format".

output_dir/epoch-0007.pt   after 7 epochs; the newest cfg.keep_last of them are kept
output_dir/last.pt         the newest checkpoint, possibly from within an epoch
output_dir/best.pt         the one with the best validation accuracy
output_dir/*.parts/        the tensors of sharded checkpoints (utils/sharded.py)
"""

import copy
import errno
import os
import shutil
import sys
import textwrap
import zipfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.distributed.checkpoint import state_dict as dsd

from utils import errors
from utils.distributed import all_gather_object, fail_together, is_main_process
from utils.errors import UserError, option

FORMAT = 2


def unwrap(model):
    """The plain model inside DistributedDataParallel, DataParallel or MicroBatches."""
    while hasattr(model, "module"):
        model = model.module
    return model


class Checkpointer:
    """Saves and resumes a run in cfg.output_dir. All ranks call each method together.

    state: {name: an object with state_dict() and load_state_dict(), or a plain value}; "model",
    "optimizer" and "loader" must be among them. compare_ranks: raise UserError if ranks differ in
    settings, data or code; and, at the start and before each save, in their replicas of the model.
    """

    def __init__(self, cfg, state, compare_ranks=False):
        self.cfg, self.state, self.folder = cfg, state, Path(cfg.output_dir)
        self.replicas = self.pending = None
        if compare_ranks and cfg.check_replicas_every >= 0 and os.environ.get("WORLD_SIZE") != "1":
            with option("comparing the ranks (pass --check-replicas-every -1 to go without)"):
                import utils.replicas
            self.replicas = utils.replicas
        self.model, self.optimizer = unwrap(state["model"]), state["optimizer"]
        self.others = {k: v for k, v in state.items() if k not in ("model", "optimizer")}
        self.facts = cfg.fixed_on_resume() | state.get("data", {})  # what must not change
        self.sharded = any(hasattr(p, "full_tensor") for p in self.model.parameters())
        self.epoch, self.due = 0, False
        self.writer = ThreadPoolExecutor(1)
        self.write_file, self.after_step = save_atomically, lambda wait: None
        self.is_due = self.after_save = lambda: False
        if cfg.save_sharded:
            with option("--save-sharded"):
                from utils.sharded import save_sharded
            self.save_sharded = save_sharded
        if cfg.save_minutes > 0:
            with option("--save-minutes"):
                from utils.preemption import Interrupts
            self.interrupts = Interrupts(self)

    def load(self):
        """Load `state` from the newest valid checkpoint; return the epochs done, 0 without one.

        A damaged checkpoint is skipped with a warning, and the one before it is used. Raises
        UserError if none can be read, or if the settings or the model differ.
        """
        newest = None
        with fail_together():
            if is_main_process():
                if self.cfg.resume == "never" or find_spec("utils.run_folder"):
                    with option("--resume never"):
                        from utils.run_folder import claim
                    claim(self.folder, self.cfg.resume)
                self.folder.mkdir(parents=True, exist_ok=True)
                newest = _newest_good(self.folder)
        path = all_gather_object(newest and newest[0])[0]
        with fail_together():
            if self.replicas:
                self.replicas.check_setup(self.facts, self.state["loader"])
            if path:
                self._fill(*(newest or _read_like_rank_0(self.folder / path.name)))
            elif self.cfg.resume == "always":
                raise UserError(f"there is no checkpoint in {self.folder} to resume from")
            if is_main_process():
                (self.folder / "config.yaml").write_text(self.cfg.dump())
        if isinstance(model := self.state["model"], torch.nn.parallel.DistributedDataParallel):
            settle_ddp_buckets(model)
        self._compare_replicas()
        if hasattr(self.cfg, "tolerate"):  # utils/tolerance.py
            self.cfg.tolerate(self)
        return self.epoch

    def step(self):
        """Call after each optimizer step: saves within the epoch when a save is due."""
        cfg, loader = self.cfg, self.state["loader"]
        step, every = loader.step, cfg.check_replicas_every
        last = step == len(loader)  # the script saves at the end of the epoch
        self.due = self.is_due() or (cfg.save_steps and not step % cfg.save_steps)
        self.after_step(wait=last or self.due)
        if every > 0 and not step % every and not last:
            self._compare_replicas(between_steps=True)
        if self.due and not last:
            self.save(self.epoch, between_steps=True)

    def save(self, epoch, is_best=False, between_steps=False):
        """Save the state after `epoch` epochs. Returns once it is copied; a thread writes the file.
        Does nothing if cfg.save_epochs leaves this epoch out and it is not the best.

        If writing fails, the next save raises UserError; the last save of a run raises it itself.
        between_steps: the save is within the next epoch, and writes only last.pt.
        """
        self.epoch = epoch
        due = self.due or epoch == self.cfg.epochs or not epoch % self.cfg.save_epochs
        if not due and not all_gather_object(is_best)[0]:
            return
        self._compare_replicas(between_steps)
        self.wait()
        checkpoint = {"format": FORMAT, "epoch": epoch, "config": vars(self.cfg)}
        whole = not self.cfg.save_sharded
        # Shards are gathered on rank 0's CPU, one tensor after another.
        options = dsd.StateDictOptions(full_state_dict=whole, cpu_offload=whole and self.sharded)
        state_dicts = dsd.get_state_dict(self.model, self.optimizer, options=options)
        checkpoint["model"], checkpoint["optimizer"] = state_dicts
        # CUDA tensors are copied to pinned memory, without waiting; deepcopy takes these copies.
        tensors = _tensors(checkpoint) if whole and is_main_process() else []
        copies = {id(t): t.to("cpu", non_blocking=True) for t in tensors if t.is_cuda}
        with fail_together():  # reads a value from each device, and so waits for the copies, too
            _refuse_non_finite(checkpoint)
        for name, value in self.others.items():
            checkpoint[name] = value.state_dict() if hasattr(value, "state_dict") else value
        if not whole:
            checkpoint = self.save_sharded(checkpoint, self.folder)
        if is_main_process():
            name = "last.pt" if between_steps else f"epoch-{epoch:04d}.pt"
            links = [] if between_steps else ["last.pt", "best.pt"][: 1 + is_best]
            checkpoint = copy.deepcopy(checkpoint, copies)
            self.pending = self.writer.submit(self._write, checkpoint, name, links)
        if epoch == self.cfg.epochs:
            self.wait()
        self.after_save()  # a run that was asked to stop ends here

    def wait(self):
        """Wait until the last save is on the disk; raise its error, if any."""
        with fail_together():
            pending, self.pending = self.pending, None
            if pending:
                pending.result()

    def _write(self, checkpoint, name, links):
        path = self.folder / name
        try:
            self.write_file(checkpoint, path)
            for link in links:
                _link(self.folder / link, path)
            for old in _by_epoch(self.folder)[: -self.cfg.keep_last]:
                old.unlink()
            if any(self.folder.glob("*.parts")):
                from utils.sharded import remove_unused_parts

                remove_unused_parts(self.folder)
        except (OSError, RuntimeError) as error:
            # torch.save hides "disk full" behind a RuntimeError about positions in the file.
            reason = error if isinstance(error, OSError) else error.__context__
            if not isinstance(reason, OSError):
                raise
            text = f"cannot save {path}: {reason.strerror}"
            if reason.errno == errno.ENOSPC:
                needed = sum(tensor.nbytes for tensor in _tensors(checkpoint))
                free = shutil.disk_usage(self.folder).free
                text += f" ({needed / 1e6:.1f} MB are needed, {free / 1e6:.1f} MB are free)"
            errors.save_failed(text)

    def _compare_replicas(self, between_steps=False):
        if self.replicas:
            self.replicas.check_replicas(self.state["model"], self.optimizer, between_steps)

    def _fill(self, path, checkpoint):
        changed = _differences(self.facts, checkpoint["config"] | checkpoint.get("data", {}))
        if changed and not self.cfg.allow_config_change:
            raise UserError(
                f"{path} was written with other settings (now {changed}): pass another "
                f"--output-dir, or --allow-config-change"
            )
        model, optimizer = dsd.get_state_dict(self.model, self.optimizer)
        if "parts" in checkpoint:
            with option(f"reading {path}"):
                from utils.sharded import load_sharded
            checkpoint = load_sharded(path, checkpoint, (model, optimizer))
        same = checkpoint["config"]["optimizer"] == self.cfg.optimizer  # the kind of optimizer
        optimizer["state"] = checkpoint["optimizer"]["state"] if same else {}
        groups = optimizer["param_groups"], checkpoint["optimizer"]["param_groups"]
        for group, saved in zip(*groups, strict=True):
            group["lr"] = saved["lr"]  # some schedulers compute the next value from it
        # PyTorch distributes full tensors to DTensors, but fails on a model on several devices.
        whole = self.sharded and "parts" not in checkpoint
        options = dsd.StateDictOptions(full_state_dict=whole)
        try:
            if missing := model.keys() - checkpoint["model"]:  # PyTorch ignores it with FSDP
                raise RuntimeError(f"missing: {', '.join(sorted(missing))}")
            dsd.set_model_state_dict(self.model, checkpoint["model"], options=options)
        except RuntimeError as error:
            difference = textwrap.shorten(str(error), 500)
            raise UserError(f"{path} holds another model: {difference}") from None
        options.strict = False  # a parameter that never had a gradient has no state
        options.full_state_dict &= bool(optimizer["state"])  # SGD without momentum has none at all
        dsd.set_optimizer_state_dict(self.model, self.optimizer, optimizer, options=options)
        for parameter, values in self.optimizer.state.items():
            for key, value in values.items():  # in the parameter's memory format, as a fused step
                if getattr(value, "shape", None) == parameter.shape:  # expects
                    values[key] = torch.empty_like(parameter).copy_(value)
        for name, value in self.others.items():
            if name in checkpoint and hasattr(value, "load_state_dict"):
                value.load_state_dict(checkpoint[name])
        self.epoch = checkpoint["epoch"]


def _tensors(checkpoint):
    """The values of the model and the optimizer: tensors, this rank's shards, and numbers."""
    states = checkpoint["optimizer"].get("state", {}).values()
    values = [*checkpoint["model"].values(), *(value for s in states for value in s.values())]
    return [v.to_local() if hasattr(v, "to_local") else torch.as_tensor(v) for v in values]


def _refuse_non_finite(checkpoint):
    values = [v for v in _tensors(checkpoint) if v.is_floating_point() and v.numel()]
    if not torch.nn.utils.get_total_norm(values, torch.inf).isfinite():  # waits once per device
        raise UserError("the model is no longer finite: try a smaller --lr, or --clip-norm 1")


def settle_ddp_buckets(model):
    """Give DistributedDataParallel's gradient buckets their final order before the first step.

    DDP sorts its buckets after the first backward pass, by the order in which the gradients became
    ready; so the first step of a run, and of a resumed one, would sum in a different order from
    all later steps. This runs that first pass, on the sum of all parameters instead of the model.
    """
    inner, parameters = model.module, [p for p in model.parameters() if p.requires_grad]
    device, dtype = parameters[-1].device, parameters[-1].dtype
    model.module = torch.nn.Sequential(inner)  # its forward, as hooks of `inner` expect an input
    model.module.forward = lambda: sum(p.sum().to(device, dtype) for p in parameters)
    model().backward()
    model.module = inner
    model.zero_grad(set_to_none=True)


def save_atomically(obj, path):
    """torch.save to a temporary file, flushed to the disk and renamed: a crash at any moment leaves
    the previous file or the new one."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(obj, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)  # the rename itself
        os.close(folder)
    finally:
        temporary.unlink(missing_ok=True)


def read_checkpoint(path, join_parts=True):
    """A checkpoint as a dict on the CPU. Raises UserError if it is damaged or in another format.

    The checksum of each record is verified: torch.load alone would not notice a flipped bit.
    join_parts: whether to read the tensors of a sharded checkpoint, too.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} fails its checksum")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # zip, pickle and OS errors of many kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} cannot be read as a checkpoint: {reason}") from None
    if not isinstance(checkpoint, dict) or checkpoint.get("format") != FORMAT:
        raise UserError(f"{path} is not a checkpoint of format {FORMAT}")
    if "parts" in checkpoint:
        with option(f"reading {path}"):
            from utils.sharded import check_sharded, load_sharded
        check_sharded(path, checkpoint)
        if join_parts:
            checkpoint = load_sharded(path, checkpoint)
    return checkpoint


def _by_epoch(folder):
    return sorted(folder.glob("epoch-[0-9]*.pt"), key=lambda path: int(path.stem.split("-")[1]))


def _newest_good(folder):
    """(path, checkpoint), or None where there is no file at all."""
    existing = [*folder.glob("last.pt"), *_by_epoch(folder)[::-1], *folder.glob("best.pt")]
    for path in existing:
        try:
            return path, read_checkpoint(path, join_parts=False)
        except UserError as error:
            print(f"warning: {error}; trying the checkpoint before it", file=sys.stderr)
    if existing:
        raise UserError(f"no checkpoint in {folder} can be read: pass --resume never to start over")
    return None


def _read_like_rank_0(path):
    if not path.exists():
        raise UserError(f"{path} is on rank 0's node only: all nodes must share output_dir")
    return path, read_checkpoint(path, join_parts=False)


def _differences(mine, theirs):
    """What differs between two dicts, as text, for the names that both have."""
    texts = (
        f"{name} {mine[name]!r}, not {theirs[name]!r}"
        for name in mine
        if name in theirs and mine[name] != theirs[name]
    )
    return textwrap.shorten("; ".join(texts), 500)


def _link(name, path):
    """Make `name` a second name of the file `path`, atomically; a copy if links do not work."""
    temporary = name.with_name(f"{name.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(path, temporary)
    except OSError:
        shutil.copyfile(path, temporary)
    os.replace(temporary, name)
