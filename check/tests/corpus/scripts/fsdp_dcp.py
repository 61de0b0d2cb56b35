"""fully_shard with mixed precision and accumulation, and a sharded checkpoint per folder."""

import os
import re

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

SEQ, BATCH, ACCUM, STEPS, SAVE_EVERY = 16, 4, 2, 40, 3


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        return x + self.mlp(x)


class LM(nn.Module):
    def __init__(self, vocab=40, dim=32, layers=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(layers))
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class TrainState(Stateful):
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]


class Tokens:
    """Windows of a long text: window i of a permutation of all belongs to rank i % world_size."""

    def __init__(self, text, rank, world_size):
        windows = text[: len(text) // (SEQ + 1) * (SEQ + 1)].view(-1, SEQ + 1)
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(3))
        self.windows = windows[order[rank::world_size]]

    def batch(self, number):
        start = number * BATCH % (len(self.windows) - BATCH)
        rows = self.windows[start : start + BATCH]
        return rows[:, :-1].cuda(), rows[:, 1:].cuda()


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cuda", (world_size,), mesh_dim_names=("dp",))
    torch.manual_seed(1)
    model = LM().cuda()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    schedule = [min(1.0, (i + 1) / 5) for i in range(STEPS)]
    text = torch.randint(0, 40, (9000,), generator=torch.Generator().manual_seed(0))
    tokens = Tokens(text, rank, world_size)
    state = TrainState(model, optimizer)
    folders = os.listdir("checkpoints") if os.path.isdir("checkpoints") else []
    steps = [int(m[1]) for name in folders if (m := re.fullmatch(r"step-(\d+)", name))]
    steps = [n for n in steps if os.path.exists(f"checkpoints/step-{n}/.metadata")]
    if steps:
        dcp.load({"app": state}, checkpoint_id=f"checkpoints/step-{max(steps)}")
    while state.step < STEPS:
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * schedule[state.step]
        for micro in range(ACCUM):
            inputs, targets = tokens.batch(state.step * ACCUM + micro)
            model.set_requires_gradient_sync(micro == ACCUM - 1)
            logits = model(inputs)
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()) / ACCUM
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        state.step += 1
        if state.step % SAVE_EVERY == 0:
            dcp.save({"app": state}, checkpoint_id=f"checkpoints/step-{state.step}")
            if rank == 0:
                print(f"step {state.step}: loss {loss.item() * ACCUM:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
