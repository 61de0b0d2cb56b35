"""Llama 3.1 8B with FSDP2, as torchtitan trained it for its published figures of December 2024.

    python -m tools.fit --gpus 8 128 --memory 95 -- lab/fit/llama.py --batch-size 2

Follows commit 9dec370 of https://github.com/pytorch/torchtitan (train_configs/llama3_8b.toml): what
takes memory is the same, and the rest is left out.
"""

import argparse
import os
from collections import defaultdict
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

VOCABULARY, WIDTH, LAYERS, HEADS, KEY_HEADS, HIDDEN = 128256, 4096, 32, 32, 8, 14336
aten = torch.ops.aten
SAVED = {
    aten.mm.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
}


class Norm(nn.Module):
    """RMSNorm in float32, operation by operation."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return wide.type_as(x) * self.weight


def rotate(x, rotation):
    """Rotary embedding of (batch, length, heads, head width)."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation).flatten(3).type_as(x)


def repeat(x, times):
    """Keys or values, once for each query head that shares them."""
    batch, length, heads, width = x.shape
    wide = x.unsqueeze(3).expand(batch, length, heads, times, width)
    return wide.reshape(batch, length, heads * times, width)


class Attention(nn.Module):
    """Causal attention in which several query heads share a key head."""

    def __init__(self):
        super().__init__()
        narrow = WIDTH // HEADS * KEY_HEADS
        self.query, self.key = linear(WIDTH, WIDTH), linear(WIDTH, narrow)
        self.value, self.output = linear(WIDTH, narrow), linear(WIDTH, WIDTH)

    def forward(self, x, rotation):
        heads = (*x.shape[:2], -1, WIDTH // HEADS)
        query, key, value = (f(x).view(heads) for f in (self.query, self.key, self.value))
        query, key = rotate(query, rotation), rotate(key, rotation)
        key, value = (repeat(part, HEADS // KEY_HEADS) for part in (key, value))
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).contiguous().view(x.shape))


class Block(nn.Module):
    """Attention and a gated MLP, each added to its input."""

    def __init__(self):
        super().__init__()
        self.attention, self.attention_norm, self.mlp_norm = Attention(), Norm(), Norm()
        self.gate, self.up, self.down = (
            linear(WIDTH, HIDDEN),
            linear(WIDTH, HIDDEN),
            linear(HIDDEN, WIDTH),
        )

    def forward(self, x, rotation):
        x = x + self.attention(self.attention_norm(x), rotation)
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """The model."""

    def __init__(self, length):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.output = Norm(), linear(WIDTH, VOCABULARY)
        shape = (length, 1, WIDTH // HEADS // 2)
        self.register_buffer("rotation", torch.empty(shape, dtype=torch.complex64))

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, self.rotation)
        return self.output(self.norm(hidden))


linear = partial(nn.Linear, bias=False)


def contexts():
    """Selective checkpointing: attention and every other matrix product are kept."""
    counts = defaultdict(int)

    def policy(ctx, function, *args, **kwargs):
        if function == aten.mm.default:
            counts[ctx.is_recompute] += 1
        is_second = function == aten.mm.default and counts[ctx.is_recompute] % 2 == 0
        is_kept = function in SAVED and not is_second
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--compile", action="store_true", help="each block, as a whole")
    args = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    with torch.device("meta"):
        model = Llama(args.length)
    for number, layer in enumerate(model.layers):
        wrapped = checkpoint_wrapper(layer, context_fn=contexts, preserve_rng_state=False)
        model.layers[number] = torch.compile(wrapped, fullgraph=True) if args.compile else wrapped
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for number, layer in enumerate(model.layers):
        again = number < LAYERS - 1
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=again)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    model.to_empty(device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=True)
    for _ in range(args.steps):
        tokens = torch.zeros(args.batch_size, args.length + 1, dtype=torch.int64).to(device)
        optimizer.zero_grad()
        outputs = model(tokens[:, :-1])
        loss = F.cross_entropy(outputs.flatten(0, 1).float(), tokens[:, 1:].flatten())
        del outputs
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()


if __name__ == "__main__":
    main()
