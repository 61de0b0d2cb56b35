"""How fully_shard() shall shard, from the config."""

import atexit
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm

from utils.distributed import UserError, get_world_size
from utils.weights import FrozenBatchNorm


def fsdp_options(cfg, device, model):
    """Keyword arguments for fully_shard(), for a block and for the whole model: the ranks, the
    precision, where the shards live. The whole model's outputs are float32 in any case.

    With cfg.fsdp_dtype the model's BatchNorms, which need float32, are sharded here, on their own.
    (https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html)
    """
    if device.type == "cpu":
        atexit.register(_skip_teardown)
    options = {"mesh": init_device_mesh(device.type, (get_world_size(),))}
    if cfg.fsdp_offload and cfg.clip_norm and device.type == "cuda":
        raise UserError(
            "--fsdp-offload has gradients on the CPU, where NCCL cannot add up their norm: pass "
            "--clip-norm 0, or --no-fsdp-offload"
        )
    if cfg.fsdp_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    if cfg.fsdp_dtype == "none":
        return options, options
    for module in model.modules():
        if isinstance(module, _BatchNorm | FrozenBatchNorm):
            fully_shard(
                module, **options, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False)
            )
    compute = {"param_dtype": getattr(torch, cfg.fsdp_dtype), "reduce_dtype": torch.float32}
    block, whole = (MixedPrecisionPolicy(**compute, output_dtype=t) for t in (None, torch.float32))
    return options | {"mp_policy": block}, options | {"mp_policy": whole}


def _skip_teardown():
    """End a process that has come to its end, with exit code 0.

    fully_shard() over gloo leaves threads behind that destroy_process_group() does not join (torch
    2.15): about one exit in a hundred then aborts in C++'s teardown (pytorch/pytorch#190489).
    """
    if dist.is_initialized():  # not destroyed: the script has failed, with an exit code of its own
        return
    atexit.unregister(_skip_teardown)
    atexit._run_exitfuncs()  # all others
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
