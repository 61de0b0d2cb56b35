"""What happens between two steps and at an epoch's end: saving, checks of the ranks, the audit."""

import time

import torch

from utils.checkpoint import save_checkpoint
from utils.distributed import UserError, all_gather_object, is_main_process
from utils.replicas import check_replicas
from utils.runtime import progress

STEPS_BETWEEN_CLOCKS = 16  # the ranks must agree on the time, and to agree is to wait


def supervise(loader, epoch, state, cfg):
    """The batches of `loader`, with progress shown; between two of them, whenever it is due, the
    replicas are checked and `state` is saved.

    What runs between two batches runs after the whole step with the first of them.
    """
    saved = time.monotonic()
    for batch in progress(loader, f"epoch {epoch}", loader.start):
        yield batch
        step = loader.step
        if step == len(loader):
            continue  # the epoch's end checks and saves
        if cfg.check_replicas_every and step % cfg.check_replicas_every == 0:
            check_replicas(state["model"], state["optimizer"], between_steps=True)
        due = cfg.save_steps and step % cfg.save_steps == 0
        if cfg.save_minutes and step % STEPS_BETWEEN_CLOCKS == 0:
            minutes = (time.monotonic() - saved) / 60
            due |= all_gather_object(minutes)[0] >= cfg.save_minutes  # rank 0's clock
        if due:
            check_replicas(state["model"], state["optimizer"], between_steps=True)
            save_checkpoint(
                cfg.output_dir, state, epoch, sharded=cfg.save_sharded, between_steps=True
            )
            saved = time.monotonic()


def finish_epoch(epoch, state, val, cfg):
    """Check that all ranks hold the same model; with --audit, say which samples were trained.

    val: what evaluate() returned. Returns the audit's numbers for the metrics: {"dropped",
    "repeated"}, or {} without --audit. Raises UserError on all ranks where the ranks differ or a
    sample was trained twice.
    """
    check_replicas(state["model"], state["optimizer"])
    loader = state["loader"]
    if not loader.audit:
        return {}
    if loader.seen is None:
        if is_main_process():
            print(f"audit: epoch {epoch} was begun without --audit: nothing is known of its start")
        return {}
    ranks, count = all_gather_object([seen.cpu() for seen in loader.seen]), len(loader.dataset)
    times = torch.bincount(torch.cat([s for rank in ranks for s in rank]), minlength=count)
    dropped, repeated = (times == 0).nonzero()[:, 0], (times > 1).nonzero()[:, 0]
    if len(repeated):
        raise UserError(
            f"audit: epoch {epoch} trained {len(repeated)} samples more than once: "
            f"{_some(repeated)}. Is drop_last set, is each rank's sampler its own share?"
        )
    if is_main_process():
        print(
            f"audit: epoch {epoch} trained {count - len(dropped)} of {count} samples, each exactly "
            f"once, and dropped {len(dropped)}{': ' * bool(len(dropped))}{_some(dropped)}; "
            f"evaluation counted exactly {val['samples']}",
            flush=True,
        )
    return {"dropped": len(dropped), "repeated": 0}


def _some(indices):
    more = f" and {len(indices) - 20} more" if len(indices) > 20 else ""
    return ", ".join(str(i) for i in indices[:20].tolist()) + more
