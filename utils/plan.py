"""What a run is about to do, checked over all ranks and said in one line before it starts."""

from pathlib import Path

import torch

from utils.distributed import UserError, all_gather_object, get_world_size, is_main_process
from utils.replicas import checksum
from utils.split import write_split


def announce(cfg, state, val_loader, start_epoch):
    """Print the plan line; write config.yaml, and split.json if need be, to output_dir.

    state: what the checkpoints hold, filled in already where a run is resumed.

    Raises UserError on every rank where ranks disagree about the config or the data, which would
    end in a hang or in a model of two minds.
    """
    train_loader = state["loader"]
    mine = cfg.must_match() | {
        "number of training images": len(train_loader.dataset),
        "number of validation images": len(val_loader.dataset),
        "checksum of the training labels": checksum(train_loader.dataset.labels).item(),
        "checksum of the validation labels": checksum(val_loader.dataset.labels).item(),
        "classes": train_loader.dataset.classes,
    }
    _refuse_differences(mine)
    if isinstance(state["model"], torch.nn.DataParallel) and cfg.compile != "none":
        raise UserError("the copies of nn.DataParallel would run GPU 0's code: pass --compile none")
    if not is_main_process():
        return
    (Path(cfg.output_dir) / "config.yaml").write_text(cfg.dump())
    if cfg.val_fraction:
        write_split(cfg, val_loader.dataset)
    print(f"plan: {_plan(cfg, state, val_loader, start_epoch)}", flush=True)
    if start_epoch >= cfg.epochs:
        print(
            f"nothing left to do: {cfg.output_dir} holds all {cfg.epochs} epochs "
            f"(--resume never starts anew, in another --output-dir both are kept)",
            flush=True,
        )


def _plan(cfg, state, val_loader, start_epoch):
    model, train_loader = state["model"], state["loader"]
    ranks, device = get_world_size(), train_loader.device
    samples, batch = len(train_loader.dataset), cfg.global_batch(ranks)
    per_process = cfg.per_process_batch_size > 0
    rule = f"{cfg.lr_scaling} lr rule" if per_process else "at any world size"
    threads = f" ({torch.get_num_threads()} threads a rank)" if device.type == "cpu" else ""
    resumed = f" (from step {train_loader.start})" if train_loader.start else ""
    sizes = [parameter.numel() for parameter in model.parameters()]
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    frozen = f", {trained:,} of them trained" if cfg.freeze != "none" else ""
    weights = f", from {cfg.weights}" if cfg.weights else ""
    return "; ".join(
        [
            f"{cfg.model} ({sum(sizes):,} parameters{frozen}{weights})",
            f"{cfg.dataset} ({samples:,} + {len(val_loader.dataset):,} images, "
            f"{len(val_loader.dataset.classes)} classes, loader={train_loader.name})",
            f"world size {ranks} on {device.type}{threads}",
            f"global batch {batch} = {ranks} x {batch // ranks}, peak lr {cfg.peak_lr(ranks):g} "
            f"({rule})",
            f"{len(train_loader)} steps an epoch, {samples - len(train_loader) * batch} samples "
            f"dropped in each",
            f"{cfg.amp_dtype} autocast" if "scaler" in state else cfg.dtype,
            f"epochs {start_epoch}{resumed} to {cfg.epochs - 1}, into {cfg.output_dir}",
        ]
    )


def _refuse_differences(mine):
    for rank, theirs in enumerate(all_gather_object(mine)):
        other = [
            f"{what} {theirs[what]!r}, not {mine[what]!r}"
            for what in mine
            if theirs[what] != mine[what]
        ]
        if other:
            raise UserError(
                f"rank {rank} has {'; '.join(other)}: give every node the same files and flags"
            )
