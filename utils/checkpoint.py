"""One checkpoint format for every script. Needs torch, distributed.py, saving.py and sharded.py.

A checkpoint is a dict of tensors, numbers, strings, lists and dicts, which torch.load reads with
weights_only=True: "model" (plain names, no "module." or "_orig_mod."), "optimizer", "scheduler",
whatever else `state` holds, and "epoch" (epochs done), "world_size", "torch", "format".

output_dir/epoch-0007.pt   after 7 epochs; the newest keep_last of them are kept
output_dir/last.pt         the newest of them, or a newer one from within an epoch
output_dir/best.pt         the one with the best validation accuracy
output_dir/*.parts/        tensors of sharded checkpoints, whose .pt holds all the rest
"""

import fcntl
import os
import shutil
import socket
import sys
import uuid
import zipfile
from contextlib import suppress
from pathlib import Path

import torch

from utils.distributed import (
    UserError,
    all_gather_object,
    fail_together,
    get_world_size,
    is_main_process,
)
from utils.saving import finish_saving, save_on_master
from utils.sharded import (
    check_parts,
    join_tensors,
    load_parts,
    placed_like,
    save_parts,
    split_tensors,
    stored_tensors,
    whole,
)

FORMAT = 1
_locks = {}  # held while this process lives


def unwrap(model):
    """The plain model inside DistributedDataParallel, DataParallel and torch.compile."""
    while (inner := getattr(model, "module", getattr(model, "_orig_mod", None))) is not None:
        model = inner
    return model


def save_checkpoint(
    output_dir, state, epoch, is_best=False, keep_last=2, sharded=False, between_steps=False
):
    """Write `state` after `epoch` epochs, by rank 0, while training goes on: see save_on_master().

    state: {name: an object with state_dict(), or a plain value}; "model" and "optimizer" may be
    sharded. sharded: each rank writes its part of their tensors, and training waits for it.
    between_steps: in the middle of the next epoch, into last.pt alone. All ranks call it together.
    """
    finish_saving()  # or it would take the parts to come for a killed run's
    checkpoint = {"format": FORMAT, "epoch": epoch, "world_size": get_world_size()}
    checkpoint |= {"torch": str(torch.__version__)}
    for name, value in state.items():
        value = unwrap(value) if name == "model" else value
        checkpoint[name] = value.state_dict() if hasattr(value, "state_dict") else value
    folder = Path(output_dir)
    path = folder / ("last.pt" if between_steps else f"epoch-{epoch:04d}.pt")
    if sharded:
        # Always a new folder: parts written over older ones and cut short would load as a mix.
        parts = all_gather_object(folder / f"epoch-{epoch:04d}-{uuid.uuid4().hex[:8]}.parts")[0]
        tensors, checkpoint = split_tensors(checkpoint)
        checkpoint["parts"] = {"folder": parts.name, "files": save_parts(parts, tensors)}
    else:
        checkpoint = whole(checkpoint)

    def then():
        for name in ["best.pt"] * is_best + ["last.pt"] * (not between_steps):
            _point(folder / name, path)
        for old in sorted(folder.glob("epoch-*.pt"), key=_number)[:-keep_last]:
            old.unlink()
        _remove_unused_parts(folder)

    save_on_master(checkpoint, path, then)


def load_checkpoint(output_dir, state, resume="auto", must_match=None):
    """Fill `state` from the newest good checkpoint in `output_dir`; return the epochs done.

    resume: "auto": 0 where there is none; "always": that is an error; "never": move what is there
    to output_dir/previous-N and start anew. must_match: {setting: value} that the "config" in the
    checkpoint must equal.
    A checkpoint that cannot be read is passed over with a warning for the one before it.
    Raises UserError where none can be read, where settings differ, or the model is another.
    """
    folder = Path(output_dir)
    finish_saving()
    with fail_together():
        if is_main_process():
            _claim(folder)
            if resume == "never":
                _set_aside(folder)
    found = None
    with fail_together():
        if is_main_process():
            found = _newest_good(folder)
    name = all_gather_object(found and found[0].name)[0]
    with fail_together():
        if name is None:
            if resume == "always":
                raise UserError(f"there is no checkpoint in {folder} to resume from")
            return 0
        path = folder / name
        checkpoint = found[1] if found else _read_like_rank_0(path)
        _check_config(path, checkpoint.get("config", {}), must_match or {})
        _fill(state, checkpoint, path)
    return checkpoint["epoch"]


def read_checkpoint(path, join=True):
    """A checkpoint as a dict on the CPU. UserError where it is damaged or none of ours.

    The checksum of each record is verified: torch.load alone would take a flipped bit for a
    weight. join: the parts of a sharded checkpoint, too, are checked and put together.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged:
            raise UserError(f"{path} is damaged: {damaged} fails its checksum")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except UserError:
        raise
    except Exception as error:  # zip, pickle and OS errors of many kinds, all of one meaning
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} cannot be read as a checkpoint: {reason}") from None
    if not isinstance(checkpoint, dict) or checkpoint.get("format") != FORMAT:
        raise UserError(f"{path} is not a checkpoint of format {FORMAT}")
    if join and "parts" in checkpoint:
        folder = _check_parts(path, checkpoint)
        tensors = {n: torch.empty_like(t, device="cpu") for n, t in stored_tensors(folder).items()}
        load_parts(folder, tensors)
        checkpoint = join_tensors(tensors, checkpoint)
    return checkpoint


def _check_parts(path, checkpoint):
    parts = checkpoint["parts"]
    check_parts(path.parent / parts["folder"], parts["files"])
    return path.parent / parts["folder"]


def _remove_unused_parts(folder):
    """Of checkpoints that are gone, and of runs that were killed while saving."""
    unused = set(folder.glob("*.parts"))
    for path in folder.glob("*.pt") if unused else ():
        with suppress(Exception):  # a damaged checkpoint needs no parts
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            unused.discard(folder / saved["parts"]["folder"])
    for path in unused:
        shutil.rmtree(path)


def _number(path):
    return int(path.stem.removeprefix("epoch-"))


def _newest_good(folder):
    """(path, checkpoint), or None where there is no file at all."""
    paths = sorted(folder.glob("epoch-*.pt"), key=_number, reverse=True)
    if (folder / "last.pt").exists():
        paths.insert(0, folder / "last.pt")
    problems = []
    for path in paths:
        try:
            checkpoint = read_checkpoint(path, join=False)
            if "parts" in checkpoint:
                _check_parts(path, checkpoint)
        except UserError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            print(f"warning: {problem}; resuming from {path}", file=sys.stderr, flush=True)
        return path, checkpoint
    if problems:
        raise UserError(f"{'; '.join(problems)}. Pass --resume never to start anew")
    return None


def _read_like_rank_0(path):
    if not path.exists():
        raise UserError(
            f"{socket.gethostname()} does not see {path}, which rank 0 resumes from: "
            f"output_dir must lie on a file system that all nodes share"
        )
    return read_checkpoint(path, join=False)


def _check_config(path, saved, must_match):
    missing = object()
    changes = [
        f"{key} was {saved[key]!r} and is {value!r}"
        for key, value in must_match.items()
        if saved.get(key, missing) not in (value, missing)
    ]
    if changes:
        raise UserError(
            f"the run in {path.parent} had other settings: {'; '.join(changes)}. Pass another "
            f"--output-dir, or --allow-config-change to go on with the new ones"
        )


def _fill(state, checkpoint, path):
    groups = state["optimizer"].param_groups if "optimizer" in state else []
    tensors, rest = split_tensors(checkpoint)
    folder = path.parent / checkpoint["parts"]["folder"] if "parts" in checkpoint else None
    if folder:
        tensors = stored_tensors(folder)
    like = _like(tensors, unwrap(state["model"]).state_dict(), groups, path)
    if folder:
        placed = {n: torch.empty_like(like[n], dtype=tensors[n].dtype) for n in like}
        load_parts(folder, placed)
    else:
        placed = {name: placed_like(tensors[name], like[name]) for name in like}
    checkpoint = join_tensors(placed, rest)
    for saved, own in zip(
        checkpoint["optimizer"]["param_groups"] if groups else (), groups, strict=True
    ):
        # How to compute is for this run to say: FSDP's parameters have no fused step.
        saved |= {key: own[key] for key in ("fused", "foreach", "capturable") if key in own}
    for name, value in state.items():
        value = unwrap(value) if name == "model" else value
        if hasattr(value, "load_state_dict") and name in checkpoint:
            value.load_state_dict(checkpoint[name])


def _like(tensors, model, groups, path):
    """{name: what the tensor of that name shall be like}, for all that this run can use."""
    weights = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
    _check_model(model, weights, path)
    like = {f"model.{name}": tensor for name, tensor in model.items()}
    parameters = [parameter.detach() for group in groups for parameter in group["params"]]
    for name in (name for name in tensors if groups and name.startswith("optimizer.")):
        parameter, tensor = parameters[int(name.split(".")[1])], tensors[name]
        number = torch.empty(tensor.shape, dtype=tensor.dtype)  # Adam's count of steps, say
        like[name] = parameter if parameter.shape == tensor.shape else number
    return like


def _check_model(ours, theirs, path):
    """UserError names the tensors that differ: strict=False would hide them."""
    differences = [f"{key} is missing" for key in ours if key not in theirs]
    differences += [f"{key} is not in this model" for key in theirs if key not in ours]
    differences += [
        f"{key} is {tuple(theirs[key].shape)}, here {tuple(ours[key].shape)}"
        for key in ours
        if key in theirs and theirs[key].shape != ours[key].shape
    ]
    if differences:
        more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise UserError(f"{path} holds another model: {'; '.join(differences[:5])}{more}")


def _claim(folder):
    """Make the folder, and lock it against a second run for as long as this process lives."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        key = folder.resolve()
        if key not in _locks:
            _locks[key] = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(_locks[key], fcntl.LOCK_EX | fcntl.LOCK_NB)
        for leftover in folder.glob("*.tmp"):  # of a run that was killed
            leftover.unlink()
    except BlockingIOError:
        raise UserError(f"another run is writing to {folder}: pass another --output-dir") from None
    except OSError as error:
        raise UserError(
            f"cannot write to {folder}: {error.strerror}; pass another --output-dir"
        ) from None


def _set_aside(folder):
    keep = (".lock", "previous-")
    old = [path for path in folder.iterdir() if not path.name.startswith(keep)]
    if old:
        number = 1 + len(list(folder.glob("previous-*")))
        aside = folder / f"previous-{number}"
        aside.mkdir()
        for path in old:
            path.rename(aside / path.name)


def _point(name, path):
    """Make `name` a second name of the file `path`, at once; a copy where links are not known."""
    temporary = name.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(path, temporary)
    except OSError:
        shutil.copyfile(path, temporary)
    os.replace(temporary, name)
