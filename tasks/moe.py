"""A small GPT with a mixture of experts in each block: a router gives each byte to two of the MLPs.

The data is the same as in tasks/text.py. The mixture is Mixtral's (Jiang et al. 2024, "Mixtral of
Experts"), without a limit of what an expert takes: no byte is dropped. A loss balances the experts
(Fedus et al. 2022, "Switch Transformers"), over the whole global batch.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

import tasks.text as text
from tasks.text import BEST as BEST
from tasks.text import GPT, IGNORED, Block, Documents
from tasks.text import blocks as blocks
from tasks.text import build_datasets as build_datasets
from tasks.text import count as count
from tasks.text import describe as describe
from utils.config import setting
from utils.distributed import all_reduce, is_main_process
from utils.errors import UserError, say

CHOSEN = 2  # experts of a byte


@dataclass(frozen=True)
class Settings(text.Settings):
    """What to train: the task of experts."""

    experts: int = setting(4, "MLPs in each block, of which every byte uses two", low=CHOSEN)
    shared_expert: bool = setting(False, "an MLP more in each block, which every byte uses")
    balance: float = setting(0.01, "weight of the loss that gives all experts as many bytes")


class Experts(nn.Module):
    """MLPs, the parameters of each at its index of the first dimension, so that ranks can divide
    them (docs/own-task.md)."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, width, 4 * width))
        self.up_bias = nn.Parameter(torch.empty(experts, 4 * width))
        self.down = nn.Parameter(torch.empty(experts, 4 * width, width))
        self.down_bias = nn.Parameter(torch.empty(experts, width))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """(n, width), the first expert's tokens first -> the same shape. counts: int64 (experts,),
        how many each has; an expert that has none gets gradients of 0."""
        parts = tokens.split(counts.tolist())  # the host waits for the numbers
        weights = (p.to(tokens.dtype).unbind() for p in self.parameters())  # FSDP casts tokens
        outputs = [
            gelu(part @ up + up_bias) @ down + down_bias
            for part, up, up_bias, down, down_bias in zip(parts, *weights, strict=True)
        ]
        return torch.cat(outputs)


class Mixture(nn.Module):
    """Each token's outputs of two experts, added up with the router's weights."""

    def __init__(self, experts: int, width: int, shared: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width)
        self.shared = Experts(1, width) if shared else None

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(n, length, width) -> the same shape, and the router's probabilities, (n, length,
        experts)."""
        probabilities = self.router(hidden).softmax(-1)
        tokens = hidden.flatten(0, 1)
        weights, chosen = probabilities.flatten(0, 1).topk(CHOSEN)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)  # by expert
        counts = chosen.flatten().bincount(minlength=probabilities.shape[-1])
        outputs = self.experts(tokens.repeat_interleave(CHOSEN, 0)[order], counts)
        outputs = outputs[order.argsort()].unflatten(0, (-1, CHOSEN))
        mixed = (weights.unsqueeze(-1) * outputs).sum(1)
        if self.shared is not None:
            mixed = mixed + self.shared(tokens, counts.new_full((1,), len(tokens)))
        return mixed.view_as(hidden), probabilities


class MixtureBlock(Block):
    """The block of a GPT, with a mixture in place of its MLP."""

    def __init__(self, cfg: Settings) -> None:
        super().__init__(cfg.heads, cfg.width, cfg.dropout)
        self.mixture = Mixture(cfg.experts, cfg.width, cfg.shared_expert)
        self.mlp = nn.Sequential(nn.Dropout(cfg.dropout))  # what follows the mixture

    def forward(self, hidden: Tensor) -> Any:
        """(n, length, width) -> what Mixture.forward() returns."""
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        mixed, probabilities = self.mixture(self.mlp_norm(hidden))
        return hidden + self.mlp(mixed), probabilities


class MixtureGPT(GPT):
    """A GPT of MixtureBlocks."""

    def __init__(self, cfg: Settings) -> None:
        super().__init__(cfg.context, 0, cfg.heads, cfg.width, cfg.dropout, cfg.vocabulary)
        self.balance = cfg.balance
        self.blocks = nn.ModuleList(MixtureBlock(cfg) for _ in range(cfg.layers))
        for name, weight in self.blocks.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(weight)
            elif weight.dim() > 1:
                is_last = name.endswith(("output.weight", "down"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * cfg.layers) if is_last else 0.02)

    def forward(self, inputs: Tensor) -> Any:
        """inputs: int64 (n, length) -> {"logits": (n, length, vocabulary)}, and in training
        "router": the probabilities of all routers, (n, length, blocks, experts), times `balance`.
        """
        hidden, routers = self.embed(inputs), []
        for block in self.blocks:
            hidden, probabilities = block(hidden)
            routers.append(self.balance * probabilities)
        outputs = {"logits": self.predict(hidden)}
        if self.training and self.balance:
            outputs["router"] = torch.stack(routers, 2)
        return outputs


def build_model(cfg: Settings, train_set: Documents) -> GPT:
    """A GPT with random weights from the global seed."""
    if cfg.balance and getattr(cfg, "micro_batches", 1) > 1 and is_main_process():
        say(
            "each micro-batch balances the experts by itself, so that the weights depend on "
            "--micro-batches: with --balance 0, they do not"
        )
    return text.drop_by_sample(MixtureGPT(cfg), cfg)


def loss(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    """The sum over all targets; in training, with what balances the experts."""
    total = text.loss(outputs["logits"], targets)
    return total + balance_loss(outputs["router"], targets) if "router" in outputs else total


def balance_loss(router: Tensor, targets: Tensor) -> Tensor:
    """The sum over this rank's targets, and the mean over the blocks, of what balances the experts:
    the sum over the experts of an expert's probability times the fraction of all choices that
    chose it, times the number of experts.

    The fraction is counted over the global batch. Counted over each rank's share, or each sequence,
    it would ask for balance within each, and depend on the number of ranks.
    router: as in the model's outputs.
    """
    experts, is_target = router.shape[-1], (targets != IGNORED)[..., None, None]
    chosen = torch.zeros_like(router).scatter_(-1, router.topk(CHOSEN).indices, 1.0)
    uses = all_reduce((chosen * is_target).sum((0, 1), dtype=torch.float64))  # (blocks, experts)
    fractions = uses / uses.sum(-1, keepdim=True)
    products = fractions.to(router.dtype) * (router * is_target).sum((0, 1))
    return experts * products.sum(-1).mean()


def measure(outputs: dict[str, Tensor], targets: Tensor) -> dict[str, Tensor]:
    """The loss without what balances the experts, in training."""
    if "router" not in outputs:
        return {}
    return {"cross_entropy": text.loss(outputs["logits"].detach(), targets)}


def summarize(sums: dict[str, Tensor]) -> dict[str, float]:
    """The loss in nats per byte; in training, also the part of it that balances the experts; and
    the perplexity, which leaves that out."""
    if "cross_entropy" not in sums:
        return text.summarize(sums)
    loss, cross_entropy = (sums[name] / sums["count"] for name in ("loss", "cross_entropy"))
    balance = (loss - cross_entropy).item()
    return {"loss": loss.item(), "perplexity": cross_entropy.exp().item(), "balance": balance}


def experts(model: MixtureGPT) -> list[Experts]:
    """The modules whose experts ranks can divide. A module of shared experts is not among them."""
    mixtures: Iterable[Any] = (block.mixture for block in model.blocks)
    return [mixture.experts for mixture in mixtures]


def layers(model: MixtureGPT) -> NoReturn:
    """Raises UserError: there are none."""
    raise UserError(
        "a GPT with experts is not a sequence of layers, because the loss needs the outputs of "
        "each block's router: use a script that keeps the model whole, or train_ep.py"
    )


def tensor_parallel_plan(model: MixtureGPT, ranks: int) -> list[tuple[nn.Module, dict[str, Any]]]:
    """A plan for parallelize_module(): each rank has some heads of each block. The experts stay
    whole. Raises UserError if the ranks cannot have the same number of heads."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    first: Any = model.blocks[0]
    if first.attention.heads % ranks:
        raise UserError(
            f"{first.attention.heads} attention heads cannot be divided evenly among {ranks} "
            f"ranks: pass a different --heads"
        )
    plan: dict[str, Any] = {f"attention.{n}": ColwiseParallel() for n in ("query", "key", "value")}
    plan["attention.output"] = RowwiseParallel()
    return [(block, plan) for block in model.blocks]
