"""Process-wide settings of torch, and what a run prints. Needs distributed.py."""

import os
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from utils.batches import dtype_for
from utils.checkpoint import count_trainable, unwrap
from utils.distributed import (
    cores_per_rank,
    dp_world_size,
    is_main_process,
    job_ids,
    launched_world_size,
)
from utils.errors import UserError, say, warn
from utils.files import write_text
from utils.metrics import read_metrics, write_rows


def configure_torch(cfg: Any) -> None:
    """Set the number of CPU threads, the precision of float32, and how CUDA picks algorithms.

    The number of threads depends on the cores that the job may use, never on the load, so that the
    same command gives the same bits. Raises UserError if several processes run a script for one.
    """
    if launched_world_size() > 1 and not dist.is_initialized():
        raise UserError(
            f"this script runs as one process, but WORLD_SIZE is {os.environ['WORLD_SIZE']}: start "
            f"it with  python {os.path.basename(sys.argv[0])}, or start train_ddp.py with torchrun"
        )
    # torchrun sets OMP_NUM_THREADS=1, which would leave most cores idle.
    torch.set_num_threads(cfg.num_threads or max(1, cores_per_rank() - max(0, cfg.num_workers)))
    # The older of PyTorch's two interfaces: torch.export fails if only the newer one is used.
    torch.backends.cuda.matmul.allow_tf32 = cfg.dtype == "tf32"
    torch.backends.cudnn.allow_tf32 = cfg.dtype != "ieee"
    torch.backends.cudnn.benchmark = cfg.cudnn_benchmark
    # https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html
    torch.use_deterministic_algorithms(cfg.deterministic, warn_only=True)
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if cfg.compile != "none":
        # For each bucket of DistributedDataParallel, it would make a separate graph, so that
        # communication overlaps with backward(): a loss where there is none.
        torch._dynamo.config.optimize_ddp = launched_world_size() > 1


def to_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """model.to(dtype), which would drop the imaginary parts of complex parameters and buffers, but
    here these stay complex, in the same precision."""
    return model._apply(lambda tensor: tensor.to(dtype_for(tensor, dtype)))


def log_summary(cfg: Any, state: Mapping[str, Any], start_epoch: int) -> None:
    """Print what the run is about to do, on the main process; write its settings to
    output_dir/config.yaml, and add a row to output_dir/starts.jsonl."""
    model, loader = unwrap(state["model"]), state["loader"]
    if not is_main_process():
        return
    for text in cfg.warnings(loader.device):
        warn(text)
    folder = Path(cfg.output_dir)
    write_text(folder / "config.yaml", cfg.dump())
    trained, samples = count_trainable(state["model"]), len(loader.dataset)
    left_out = samples - len(loader) * cfg.global_batch_size
    without = ""
    if 0 < left_out < cfg.global_batch_size:
        without = f" ({left_out} samples are left over in each)"
    replicas = f"{dp_world_size()} replica{'s' * (dp_world_size() > 1)}"
    facts = {
        "model": f"{type(model).__name__}, {trained:,} trainable parameters, {cfg.precision}",
        "data": f"{type(loader.dataset).__name__}, {samples:,} training samples, "
        f"loader={loader.name}",
        "batch": f"{cfg.global_batch_size} = {replicas} x {loader.batch_size} on "
        f"{loader.device.type}, threads per process: {torch.get_num_threads()}, "
        f"peak lr {cfg.lr:g}",
        "epochs": f"{cfg.epochs} of {len(loader)} steps{without}, from epoch {start_epoch}, step "
        f"{loader.start}, in {cfg.output_dir}",
    }
    say("\n".join(f"{name}: {text}" for name, text in facts.items()))
    if start_epoch >= cfg.epochs:
        say("nothing left to do: pass --resume never to start over, or a different --output-dir")
        return
    start = {"time": time.time(), "epoch": start_epoch, "step": loader.start}
    start |= {"steps_per_epoch": len(loader), "world_size": launched_world_size()}
    start |= facts | {"command": shlex.join(sys.argv), "torch": torch.__version__} | job_ids()
    starts = read_metrics(folder / "starts.jsonl")
    write_rows(folder / "starts.jsonl", [*starts, start])
