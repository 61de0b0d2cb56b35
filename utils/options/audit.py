"""--audit: which samples were used for training in each epoch, and how often.

Writes output_dir/audit.jsonl, one row per epoch: "epoch"; the number of samples that were used
for training ("samples"), were not ("dropped") and were used more than once ("repeated");
"resumed_at_step": the step at which a resumed run continued the epoch, or 0. Samples of steps that
were skipped (--max-skipped-steps, or float16) count as used.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from utils.distributed import all_gather_object, dp_world_size, fail_together, is_main_process
from utils.errors import UserError, say
from utils.hooks import Checkpoint, Hook
from utils.metrics import write_rows


class Audit(Hook):
    """Reports, at the end of each epoch, which samples it has trained on.

    seen: the indices of this rank's samples in the current epoch, as a list of int64 tensors; None
    if the start of the epoch is unknown.
    """

    def __init__(self, cfg: Any, state: Mapping[str, Any]) -> None:
        self.loader = state["loader"]
        self.folder = Path(cfg.output_dir)
        self.seen: list[Tensor] | None = []
        self.resumed_at_step = 0

    def after_load(self, checkpoint: Checkpoint) -> None:
        self.resumed_at_step = self.loader.start
        if self.resumed_at_step and self.seen == []:
            self.seen = None  # the checkpoint was written without --audit

    def after_step(self, checkpoint: Checkpoint) -> None:
        if self.seen is not None:
            self.seen.append(self.loader.indices)  # not copied from the device yet
        if self.loader.step == len(self.loader):
            report(self._seen_by_all(), self.loader, self.folder, self.resumed_at_step)
            self.seen, self.resumed_at_step = [], 0

    def state_dict(self) -> dict[str, Any]:
        """The samples of the epoch so far; all ranks call it together."""
        seen = self._seen_by_all()
        return {} if seen is None or len(seen) == 0 else {"seen": seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Rank 0 takes the samples of all ranks."""
        if "seen" in state:
            self.seen = [state["seen"] if is_main_process() else state["seen"][:0]]

    def _seen_by_all(self):
        if self.seen is None:
            return None
        local = [indices.cpu() for indices in self.seen]
        ranks = all_gather_object(torch.cat([torch.tensor([], dtype=torch.int64), *local]))
        return torch.cat(ranks[:: len(ranks) // dp_world_size()])  # one of each replica


def report(seen: Tensor | None, loader: Any, folder: Path, resumed_at_step: int = 0) -> None:
    """Print a line and write a row of folder/audit.jsonl, on rank 0. All ranks call it together.

    seen: the indices of the samples that all ranks trained on, int64 (n,), or None if unknown.
    Raises UserError, on all ranks, if a sample was used more than once.
    """
    epoch, dataset_size = loader.epoch, len(loader.dataset)
    if seen is None:
        text = "was resumed from a checkpoint written without --audit, so its samples are unknown"
    else:
        times = seen.bincount(minlength=dataset_size)
        dropped, repeated = (times == 0).nonzero()[:, 0], (times > 1).nonzero()[:, 0]
        row = {"epoch": epoch, "samples": len(seen), "resumed_at_step": resumed_at_step}
        row |= {"dropped": len(dropped), "repeated": len(repeated)}
        with fail_together():
            if is_main_process():
                _write_row(folder / "audit.jsonl", row)
        if len(repeated):
            raise UserError(
                f"audit: epoch {epoch} trained on {len(repeated)} samples more than once: "
                f"{_some(repeated)}. Check that the sampler drops the last incomplete batch and "
                f"that each rank takes its own share"
            )
        text = f"trained on {len(seen)} of {dataset_size} samples exactly once and dropped "
        text += f"{len(dropped)}{': ' if len(dropped) else ''}{_some(dropped)}"
    if is_main_process():
        say(f"audit: epoch {epoch} {text}")


def _write_row(path, row):
    """Append a row; rows of this epoch or later are from an earlier attempt, and are dropped."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kept = [old for old in map(json.loads, lines) if old["epoch"] < row["epoch"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"cannot write {path}: {error}; remove it or free some space") from None
    write_rows(path, [*kept, row])


def _some(indices):
    more = f" and {len(indices) - 20} more" if len(indices) > 20 else ""
    return ", ".join(str(i) for i in indices[:20].tolist()) + more
