"""--audit: which samples were used for training in each epoch, and how often.

Writes output_dir/audit.jsonl, one row per epoch: "epoch"; the number of samples that were used
for training ("samples"), were not ("dropped") and were used more than once ("repeated");
"resumed_at_step": the step at which a resumed run continued the epoch, or 0. Samples of steps that
were skipped (--max-skipped-steps, or float16) count as used.
"""

import json
from typing import Any

import torch
from torch import Tensor

from utils.distributed import all_gather_object, dp_world_size, is_main_process
from utils.errors import UserError, say
from utils.guards import Guard


class Audit(Guard):
    """Reports, at the end of each epoch, which samples it has trained on. Raises UserError, on all
    ranks, if one was used more than once.

    rows: of the file, which is only written. seen: the indices of this rank's samples in the
    current epoch, as a list of int64 tensors; None if the start of the epoch is unknown.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.seen: list[Tensor] | None = []

    def at_start(self, checkpoint: Any) -> None:
        self.resumed_at_step, self.epoch = checkpoint.state["loader"].step, checkpoint.epoch
        if self.resumed_at_step and self.seen == []:
            self.seen = None  # the checkpoint was written without --audit

    def after_step(self, checkpoint: Any) -> None:
        loader = checkpoint.state["loader"]
        if self.epoch != checkpoint.epoch:  # a `break` has ended one that was not saved
            self.seen, self.resumed_at_step, self.epoch = [], 0, checkpoint.epoch
        if self.seen is not None:
            self.seen.append(loader.indices)  # not copied from the device yet
        if loader.step == len(loader):
            self._report(checkpoint)

    def before_save(self, checkpoint: Any, between_steps: bool) -> None:
        if not between_steps and self.seen != []:  # a `break` has ended the epoch
            self._report(checkpoint)

    def state_dict(self) -> dict[str, Any]:
        """The samples of the epoch so far; all ranks call it together."""
        return {"rows": list(self.rows), "seen": self._seen_by_all()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Rank 0 takes the samples of all ranks."""
        self.rows, seen = state["rows"], state["seen"]
        if seen is not None and len(seen):
            self.seen = [seen if is_main_process() else seen[:0]]

    def _seen_by_all(self):
        if self.seen is None:
            return None
        local = [indices.cpu() for indices in self.seen]
        ranks = all_gather_object(torch.cat([torch.tensor([], dtype=torch.int64), *local]))
        return torch.cat(ranks[:: len(ranks) // dp_world_size()])  # one of each replica

    def _report(self, checkpoint):
        seen, loader = self._seen_by_all(), checkpoint.state["loader"]
        resumed_at_step, self.resumed_at_step, self.seen = self.resumed_at_step, 0, []
        if seen is None:
            if is_main_process():
                say(f"audit: epoch {loader.epoch} began without --audit: its samples are unknown")
            return
        times = seen.bincount(minlength=len(loader.dataset))
        dropped, repeated = (times == 0).nonzero()[:, 0], (times > 1).nonzero()[:, 0]
        row = {"epoch": loader.epoch, "samples": len(seen), "resumed_at_step": resumed_at_step}
        self.rows.append(row | {"dropped": len(dropped), "repeated": len(repeated)})
        if is_main_process():
            text = "".join(json.dumps(row) + "\n" for row in self.rows)
            (checkpoint.folder / "audit.jsonl").write_text(text, encoding="utf-8")
        if len(repeated):
            raise UserError(
                f"audit: epoch {loader.epoch} trained on {len(repeated)} samples more than once: "
                f"{_some(repeated)}. Check that each rank takes its own share"
            )
        if is_main_process():
            say(
                f"audit: epoch {loader.epoch} trained on {len(seen)} of {len(times)} samples "
                f"exactly once and dropped {len(dropped)}: {_some(dropped)}".rstrip(": ")
            )


def _some(indices):
    more = f" and {len(indices) - 20} more" if len(indices) > 20 else ""
    return ", ".join(str(i) for i in indices[:20].tolist()) + more
