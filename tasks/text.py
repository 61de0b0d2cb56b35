"""A small GPT that predicts the next byte of a text. The loss is a mean over bytes, whose number
differs from batch to batch and from rank to rank.

The model is GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"),
without dropout of attention weights. By default, it predicts the 256 values of a byte: any file is
a text, and no tokenizer is needed. A folder of token files has a larger vocabulary.
"""

import math
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, pad, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from utils.config import Config, ConfigError, free_setting, setting
from utils.data import describe_datasets
from utils.errors import UserError, required_by

BEST = ("perplexity", min)
IGNORED = -100  # a target that pads a batch: it is not predicted and does not count
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Settings(Config):
    """What to train: the text task."""

    text_file: str = setting(
        "",
        "any file, or a folder of train-*.jsonl (or .txt, or tokens in .bin) and val-*.jsonl, "
        "which is packed; empty: the documentation and code of this project",
    )
    vocabulary: int = setting(256, "values of a byte, or of a token in a .bin file", low=256)
    cache_dir: str = free_setting("", "for the indices of a folder; empty: text_file/.cache")
    context: int = setting(128, "bytes that the model sees", low=2)
    layers: int = setting(4, "transformer blocks", low=1)
    heads: int = setting(4, "attention heads per block", low=1)
    width: int = setting(128, "features per byte; a multiple of heads", low=1)
    dropout: float = setting(0.0, "fraction of the features that is dropped, below 1")
    stochastic_depth: float = setting(
        0.0,
        "fraction of the samples that skip the last block's branches, below 1; linearly fewer "
        "skip earlier ones",
    )
    padding: str = free_setting(
        "context",
        "of every batch to this length, as a pipeline and a CUDA graph need; longest: to the "
        "length of its longest sample",
        choices=("context", "longest"),
    )
    global_batch_size: int = 32
    optimizer: str = "adamw"
    lr: float = 3e-3
    weight_decay: float = 0.1
    clip_norm: float = 1.0

    def resolved(self) -> Self:
        """See BaseSettings. Raises ConfigError if values contradict each other."""
        if self.width % self.heads:
            raise ConfigError(f"width {self.width} is not a multiple of heads {self.heads}")
        for name in ("dropout", "stochastic_depth"):
            if getattr(self, name) >= 1:
                raise ConfigError(f"{name} must be below 1, not {getattr(self, name)}")
        return super().resolved()


class Documents(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text, each with its next bytes.

    pieces: each of length 2 to context + 1, in a list or a PackedText. padding: as in Settings.
    """

    def __init__(self, pieces: Any, context: int, padding: str = "longest") -> None:
        self.pieces = pieces
        self.shortest_batch = context if padding == "context" else 1

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """inputs and targets: int64 (length - 1,); targets[i] is the byte that follows inputs[i]"""
        piece = self.pieces[index]
        values = piece if isinstance(piece, Tensor) else torch.tensor(list(piece))
        return values[:-1], values[1:]

    def collate_fn(self, samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """int64 (n, length): inputs padded with 0 and targets with IGNORED, on the right.

        The model is causal, so that no byte sees the padding that follows it.
        """
        inputs, targets = zip(*samples, strict=True)
        inputs = pad_sequence(list(inputs), batch_first=True)
        targets = pad_sequence(list(targets), batch_first=True, padding_value=IGNORED)
        missing = max(0, self.shortest_batch - inputs.shape[1])
        return pad(inputs, (0, missing)), pad(targets, (0, missing), value=IGNORED)


def build_datasets(cfg: Settings) -> tuple[Documents, Documents]:
    """The training set and the validation set: of a file, every tenth paragraph, however it is cut.

    Raises UserError if the text cannot be read, or has fewer than ten paragraphs.
    """
    if cfg.text_file and Path(cfg.text_file).is_dir():
        with required_by("--text-file FOLDER"):
            from tasks.text_folder import packed_splits
        parts = packed_splits(cfg.text_file, cfg.context, cfg.cache_dir, cfg.vocabulary)
        train_set, val_set = (Documents(part, cfg.context, cfg.padding) for part in parts)
        return train_set, val_set
    text = _read(cfg.text_file)
    paragraphs = [p for p in re.split(rb"\r?\n\s*\n", text) if len(p) >= 2]
    if len(paragraphs) < 10:
        raise UserError(
            f"{cfg.text_file or ROOT} has {len(paragraphs)} paragraphs, separated by blank lines, "
            f"and needs 10 at least, for training and validation: pass another --text-file"
        )
    train, val = [], []
    for number, paragraph in enumerate(paragraphs, start=1):
        pieces = val if number % 10 == 0 else train
        pieces += _cut(paragraph, cfg.context)
    train_set = Documents(train, cfg.context, cfg.padding)
    return train_set, Documents(val, cfg.context, cfg.padding)


def _read(text_file):
    """The bytes of the file, or of this project's documentation and code."""
    try:
        if text_file:
            return Path(text_file).read_bytes()
        return b"\n\n".join(path.read_bytes() for path in _project_files())
    except OSError as error:
        raise UserError(
            f"cannot read {error.filename}: {error.strerror}. Pass another --text-file"
        ) from None


def _project_files():
    paths = list(ROOT.glob("*"))
    for folder in ("docs", "sources", "tasks", "utils"):
        paths += (ROOT / folder).rglob("*")
    return sorted(path for path in paths if path.suffix in (".md", ".py") and not _is_hidden(path))


def _is_hidden(path):
    return any(part.startswith(".") for part in path.relative_to(ROOT).parts)


def _cut(paragraph, context):
    """Pieces of at most context + 1 bytes. The last byte of a piece is the first of the next, so
    that every byte but the paragraph's first is predicted once."""
    starts = range(0, len(paragraph) - 1, context)
    return [paragraph[start : start + context + 1] for start in starts]


class GPT(nn.Module):
    """GPT-2's architecture: embeddings, pre-norm transformer blocks, a norm, and an output layer
    whose weight is the embedding's. width must be a multiple of heads."""

    def __init__(
        self,
        context: int,
        layers: int,
        heads: int,
        width: int,
        dropout: float = 0.0,
        vocabulary: int = 256,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(heads, width, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, nn.Embedding | nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for name, weight in self.named_parameters():
            # The sum of all blocks then has the same scale at any depth.
            if name.endswith(("attention.output.weight", "mlp.2.weight")):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs: int64 (n, length), length <= context -> outputs (n, length, vocabulary)."""
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.predict(hidden)

    def embed(self, inputs: Tensor) -> Tensor:
        """int64 (n, length) -> (n, length, width)."""
        return self.dropout(self.embedding(inputs) + self.positions.weight[: inputs.shape[1]])

    def predict(self, hidden: Tensor) -> Tensor:
        """(n, length, width) -> (n, length, vocabulary)."""
        weight = self.embedding.weight
        return linear(self.norm(hidden).to(weight.device), weight)  # perhaps on the first device


class Block(nn.Module):
    """Attention and an MLP, each added to its input."""

    def __init__(self, heads: int, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(heads, width)
        self.dropout = nn.Dropout(dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """(n, length, width) -> the same shape."""
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        return hidden + self.mlp(self.mlp_norm(hidden))


class Attention(nn.Module):
    """Causal self-attention. Query, key and value are separate layers, so that tensor parallelism
    can give each rank the rows of its heads."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.head_width = width // heads
        self.query = nn.Linear(width, width)
        # A bias of the keys would add the same to all scores of a query: its gradient is 0, and
        # Adam would scale up what rounding leaves of it.
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """(n, length, width) -> the same shape."""
        queries = self._split_heads(self.query(hidden))
        keys = self._split_heads(self.key(hidden))
        values = self._split_heads(self.value(hidden))
        mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _split_heads(self, features):
        """(n, length, features) -> (n, heads, length, head width); a rank may have some heads."""
        return features.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


def build_model(cfg: Settings, train_set: Documents) -> GPT:
    """A GPT with random weights from the global seed."""
    model = GPT(cfg.context, cfg.layers, cfg.heads, cfg.width, cfg.dropout, cfg.vocabulary)
    return drop_by_sample(model, cfg)


def drop_by_sample(model: GPT, cfg: Settings) -> GPT:
    """The model with the dropout and the stochastic depth of the settings, by sample."""
    if cfg.dropout:
        with required_by("--dropout"):
            from utils.sample_random import convert_dropout
        convert_dropout(model)  # the same elements on any number of ranks
    if cfg.stochastic_depth:
        skip_branches(model, cfg.stochastic_depth)
    return model


def skip_branches(model: GPT, last: float) -> None:
    """Stochastic depth. last: the fraction of samples that skip each branch of the last block; the
    fraction grows linearly from the first block to there."""
    with required_by("--stochastic-depth"):
        from utils.sample_random import StochasticDepth
    blocks: Any = model.blocks
    for number, block in enumerate(blocks, start=1):
        p = last * number / len(blocks)
        block.dropout = nn.Sequential(block.dropout, StochasticDepth(p, f"attention {number}"))
        block.mlp.append(StochasticDepth(p, f"mlp {number}"))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The sum over all targets. outputs: (n, length, vocabulary); targets: int64 (n, length)."""
    outputs, targets = outputs.flatten(0, 1), targets.flatten()
    return cross_entropy(outputs, targets, ignore_index=IGNORED, reduction="sum")


def count(targets: Tensor) -> Tensor:
    """The number of targets, a tensor: it varies, because padding does not count."""
    return (targets != IGNORED).sum()


def measure(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Nothing: the perplexity follows from the loss."""
    return {}


def summarize(sums: dict[str, Tensor]) -> dict[str, float]:
    """The loss in nats per byte, and its exponential, the perplexity."""
    mean = sums["loss"] / sums["count"]
    return {"loss": mean.item(), "perplexity": mean.exp().item()}


def describe(train_set: Documents, val_set: Documents) -> dict[str, Any]:
    """The sizes and a checksum of the text, or of the files in its folder."""
    facts = describe_datasets(train_set, val_set)
    if not isinstance(train_set.pieces, list):
        return facts | train_set.pieces.describe("train") | val_set.pieces.describe("val")
    checksum = 0
    for piece in train_set.pieces + val_set.pieces:
        checksum = zlib.crc32(piece, checksum)
    return facts | {"text_checksum": checksum}


def blocks(model: GPT) -> list[nn.Module]:
    """The transformer blocks."""
    return list(model.blocks)


def layers(model: GPT) -> list[tuple[Callable[[Tensor], Tensor], list[nn.Module]]]:
    """(function, parts) for the embeddings, each block, and the output layer, whose weight is the
    first layer's."""
    return [
        (model.embed, [model.embedding, model.positions]),
        *((block, [block]) for block in model.blocks),
        (model.predict, [model.norm, model.embedding]),
    ]


def tensor_parallel_plan(model: GPT, ranks: int) -> list[tuple[nn.Module, dict[str, Any]]]:
    """A plan for parallelize_module(): each rank computes some heads and MLP columns of each block.

    Follows https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html. Raises UserError if
    the ranks cannot have the same number.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    first: Any = model.blocks[0]
    heads, columns = first.attention.heads, first.mlp[0].out_features
    if heads % ranks or columns % ranks:
        raise UserError(
            f"{heads} attention heads and {columns} MLP columns cannot both be divided evenly "
            f"among {ranks} ranks: pass a different --heads or --width"
        )
    split = ("attention.query", "attention.key", "attention.value", "mlp.0")
    plan: dict[str, Any] = {name: ColwiseParallel() for name in split}
    plan |= {"attention.output": RowwiseParallel(), "mlp.2": RowwiseParallel()}
    return [(block, plan) for block in model.blocks]
