"""--audit: which samples were trained in each epoch, and how often.

Writes output_dir/audit.jsonl, one row per epoch: "epoch"; the number of samples that were trained
("samples"), left out ("dropped") and trained more than once ("repeated"); "resumed_at_step": where
a resumed run continued the epoch, or 0.
"""

import json
import os
from pathlib import Path

import torch

from utils.data import Loader
from utils.distributed import all_gather_object, fail_together, is_main_process
from utils.errors import UserError


class AuditedLoader(Loader):
    """A Loader that reports, at the end of each epoch, which samples it has yielded."""

    def __init__(self, dataset, sampler, batch_size, device, cfg, train):
        super().__init__(dataset, sampler, batch_size, device, cfg, train)
        self.audit, self.output_dir = Audit(), cfg.output_dir

    def __iter__(self):
        for batch in super().__iter__():
            self.audit.add(self.indices)
            yield batch
        self.audit.finish(self.epoch, len(self.dataset), self.output_dir)

    def state_dict(self):
        """As Loader's, with the samples of the epoch so far."""
        return super().state_dict() | ({"seen": self.audit.state()} if self.step else {})

    def load_state_dict(self, state):
        """As Loader's."""
        super().load_state_dict(state)
        self.audit.load(state.get("seen") if self.start else [], self.start)


class Audit:
    """The indices of the samples that this rank has trained with in the current epoch."""

    def __init__(self):
        self._indices = []  # int64 tensors; None if the start of the epoch is unknown
        self._resumed_at_step = 0

    def add(self, indices):
        """Record a batch. indices: int64 (n,), on any device, and not copied from it yet."""
        if self._indices is not None:
            self._indices.append(indices)

    def state(self):
        """The indices of all ranks, for a checkpoint: int64 (n,), or None if some are unknown.

        All ranks call it together.
        """
        if self._indices is None:
            return None
        ranks = all_gather_object(torch.cat([torch.tensor([], dtype=torch.int64), *self._local()]))
        return torch.cat(ranks)

    def load(self, indices, step=0):
        """Continue an epoch. indices: what state() returned; [] for a new epoch; or None if the
        checkpoint was written within an epoch that was not audited. step: where it continues."""
        self._resumed_at_step = step
        if indices is None:
            self._indices = None
        else:
            indices = torch.as_tensor(indices, dtype=torch.int64)
            self._indices = [indices] if is_main_process() else []

    def finish(self, epoch, dataset_size, output_dir):
        """Report the epoch and start the next one. All ranks call it together.

        Prints one line and writes a row of audit.jsonl, on rank 0. Raises UserError, on all ranks,
        if a sample was trained with more than once.
        """
        indices, step = self.state(), self._resumed_at_step
        self._indices, self._resumed_at_step = [], 0
        if indices is None:
            if is_main_process():
                print(
                    f"audit: epoch {epoch} was resumed from a checkpoint written without --audit, "
                    f"so the samples before it are unknown",
                    flush=True,
                )
            return
        times = indices.bincount(minlength=dataset_size)
        dropped, repeated = (times == 0).nonzero()[:, 0], (times > 1).nonzero()[:, 0]
        row = {"epoch": epoch, "samples": len(indices), "resumed_at_step": step}
        row |= {"dropped": len(dropped), "repeated": len(repeated)}
        with fail_together():
            if is_main_process():
                _write_row(Path(output_dir) / "audit.jsonl", row)
        if len(repeated):
            raise UserError(
                f"audit: epoch {epoch} trained {len(repeated)} samples more than once: "
                f"{_some(repeated)}. Check that the sampler drops the last incomplete batch and "
                f"that each rank takes its own share"
            )
        if is_main_process():
            print(
                f"audit: epoch {epoch} trained {len(indices)} of {dataset_size} samples exactly "
                f"once and dropped {len(dropped)}{': ' if len(dropped) else ''}{_some(dropped)}",
                flush=True,
            )

    def _local(self):
        return [indices.cpu() for indices in self._indices]


def _write_row(path, row):
    """Append a row; rows of this epoch or later are of an earlier attempt, and are dropped."""
    try:
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in lines if json.loads(line)["epoch"] < row["epoch"]]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(f"{line}\n" for line in [*kept, json.dumps(row)]))
        os.replace(temporary, path)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"cannot write {path}: {error}; remove it or free some space") from None


def _some(indices):
    more = f" and {len(indices) - 20} more" if len(indices) > 20 else ""
    return ", ".join(str(i) for i in indices[:20].tolist()) + more
