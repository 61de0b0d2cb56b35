"""--text-file FOLDER: texts in shards, one after another, as pieces of one length."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sources.packing import Packed
from sources.shards import Shards, find_shards
from sources.tokens import TokenFiles
from utils.distributed import main_process_first
from utils.errors import UserError

END = b"\0"  # after each document; a text has no such byte
KINDS = (".jsonl", ".txt")


class PackedText:
    """Pieces of size + 1 bytes, as bytes. See sources.packing.Packed.

    documents: with `lengths`, and 1-dim tensors of bytes, each of which ends with END.
    """

    def __init__(self, documents: Shards, size: int) -> None:
        self.documents = documents
        self.packed = Packed(documents, documents.lengths + len(END), size)

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, index: int) -> bytes:
        return self.packed[index].numpy().tobytes()

    def __iter__(self) -> Iterator[bytes]:
        return (self[index] for index in range(len(self)))

    def describe(self, name: str) -> dict[str, str]:
        """Facts about the files, for the data that a checkpoint describes. name: of the split."""
        return self.documents.describe(name)

    @property
    def shard_sizes(self) -> list[int]:
        """The number of pieces that start in each file, for sources.samplers.ShardOrder."""
        return self.packed.shard_sizes(self.documents.shard_sizes)


def packed_splits(
    folder: str, size: int, cache_dir: str = "", vocabulary: int = 256
) -> tuple[PackedText | TokenFiles, PackedText | TokenFiles]:
    """The training split from folder/train-*, and the validation split from folder/val-*.

    The files are JSON lines, of objects with a "text", or texts in UTF-8, whose paragraphs are the
    documents. One process per node reads them, once. If there are train*.bin, the files are tokens:
    of uint16, or of uint32 for a vocabulary that needs it. Raises UserError if there are none, or
    if they are of several kinds or damaged.
    """
    tokens = {name: sorted(Path(folder).glob(f"{name}*.bin")) for name in ("train", "val")}
    if any(tokens.values()):
        files = [file for name in tokens for file in sorted(Path(folder).glob(f"{name}-*"))]
        if texts := [file.name for file in files if file.suffix in KINDS]:
            raise UserError(
                f"{folder} holds tokens and texts, {texts[0]}: keep them in two folders"
            )
        if missing := [name for name in tokens if not tokens[name]]:
            raise UserError(f"there are no files {folder}/{missing[0]}*.bin")
        dtype = "uint16" if vocabulary <= 2**16 else "uint32"
        train_files, val_files = (TokenFiles(t, size, dtype, vocabulary) for t in tokens.values())
        return train_files, val_files
    with main_process_first():
        train, val = (_documents(folder, name, cache_dir) for name in ("train", "val"))
    return PackedText(train, size), PackedText(val, size)


def _documents(folder, split, cache_dir):
    paths = find_shards(folder, split, KINDS)
    if not paths:
        names = sorted(path.name for path in Path(folder).glob("[!.]*"))[:3]
        raise UserError(
            f"there are no files {folder}/{split}-*.jsonl, {split}-*.txt (python -m tools.shards "
            f"makes them of a text) or {split}*.bin, but {', '.join(names) or 'none'}"
        )
    is_text = paths[0].suffix == ".txt"
    return Shards(paths, _encode, cache_dir, paragraphs=is_text, length="text")


def _encode(document: Any) -> Tensor:
    text = document if isinstance(document, str) else document["text"]
    return torch.frombuffer(bytearray(text.encode() + END), dtype=torch.uint8)
