"""Process-wide settings of torch, and what a run prints when it starts."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import nn

from utils.batches import dtype_for
from utils.checkpoint import unwrap
from utils.distributed import cores_per_rank, dp_world_size, is_main_process, launched_world_size
from utils.errors import UserError, say


def configure_torch(cfg: Any) -> None:
    """Set the number of CPU threads, the precision of float32, and how CUDA picks algorithms.

    The number of threads depends on the cores that the job may use, never on the load, so that the
    same command gives the same bits. Raises UserError if several processes run a script for one.
    """
    if launched_world_size() > 1 and not dist.is_initialized():
        script = os.path.basename(sys.argv[0])
        raise UserError(f"this script is one process: start it with  python {script}")
    # torchrun sets OMP_NUM_THREADS=1, which would leave most cores idle.
    torch.set_num_threads(cfg.num_threads or max(1, cores_per_rank() - max(0, cfg.num_workers)))
    # The older of PyTorch's two interfaces: torch.export fails if only the newer one is used.
    torch.backends.cuda.matmul.allow_tf32 = cfg.dtype == "tf32"
    torch.backends.cudnn.allow_tf32 = cfg.dtype != "ieee"
    # https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html
    torch.use_deterministic_algorithms(cfg.deterministic, warn_only=True)
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if cfg.compile != "none":
        # It splits the graph for each bucket of DistributedDataParallel, so that communication
        # overlaps with backward(). On one process, that only costs speed.
        torch._dynamo.config.optimize_ddp = launched_world_size() > 1


def to_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the model; complex tensors stay complex, in the same precision. model.to() would
    drop their imaginary parts."""
    return model._apply(lambda tensor: tensor.to(dtype_for(tensor, dtype)))


def log_summary(cfg: Any, state: Mapping[str, Any], start_epoch: int) -> None:
    """Print what the run is about to do, and write its settings to output_dir/config.yaml, on the
    main process."""
    model, loader = unwrap(state["model"]), state["loader"]
    if not is_main_process():
        return
    text = yaml.safe_dump(vars(cfg), sort_keys=False)
    Path(cfg.output_dir, "config.yaml").write_text(text, encoding="utf-8")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    say(f"model: {type(model).__name__}, {trained:,} trainable parameters, {cfg.dtype}")
    say(f"data: {type(loader.dataset).__name__}, {len(loader.dataset):,} training samples")
    say(
        f"batch: {cfg.global_batch_size} = {dp_world_size()} replicas x {loader.batch_size} on "
        f"{loader.device.type}, threads per process: {torch.get_num_threads()}"
    )
    say(
        f"epochs: {cfg.epochs} of {len(loader)} steps, from epoch {start_epoch}, step "
        f"{loader.step}, in {cfg.output_dir}"
    )
    if start_epoch >= cfg.epochs:
        say("nothing left to do: pass a different --output-dir to start over")
