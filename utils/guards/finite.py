"""Keeps the last good checkpoint when training diverges."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from utils.distributed import all_gather_object
from utils.errors import UserError
from utils.guards import Guard


class RefuseNonFinite(Guard):
    """Raises UserError before a save if a trainable parameter or the sum of the losses since the
    epoch began is inf or NaN: a run that resumes there could not finish its epoch."""

    def before_save(self, checkpoint: Any, between_steps: bool) -> None:
        trained = [p.detach() for p in checkpoint.model.parameters() if p.requires_grad]
        parts = [p.to_local() if isinstance(p, DTensor) else p for p in trained]
        meter = checkpoint.state["meter"]
        parts.append(meter.sums(meter.vector, 0.0).get("loss", meter.vector))
        # Each is inf or NaN if an element is. A sum in float16 might overflow.
        sums = [part.abs().sum(dtype=torch.float64) for part in parts]
        is_finite = torch.stack([s.to(sums[0].device) for s in sums]).isfinite().all()
        if not all(all_gather_object(bool(is_finite))):
            raise UserError("the model or loss is inf or NaN: try a smaller --lr, or --clip-norm 1")
