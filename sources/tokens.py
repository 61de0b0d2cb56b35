"""Files of tokens, as nanoGPT and Megatron-LM write them: pieces of one length, read by mmap.

For the text task with a folder (tasks/text_folder.py), and for tasks of your own: docs/streams.md.
`python -m tools.tokens` makes such files of texts.
"""

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from utils.errors import UserError

# Megatron-LM's index, FILE.idx beside FILE.bin, begins with this, a version and a code of the type.
MAGIC = b"MMIDIDX\x00\x00"
KINDS = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
BLOCKS, BLOCK = 64, 4096  # what a checksum reads of a file: how many parts, of how many bytes


class TokenFiles(Dataset[Tensor]):
    """The tokens in files, cut into pieces of size + 1, so that no batch is padded.

    The last token of a piece is the first of the next piece in its file, so that all but the first
    of a file are predicted once. A file's last piece may be shorter. A piece may hold the end of a
    document and the start of the next: whoever writes the files puts a token at their ends.

    paths: files of numbers without anything else, in the order of this machine's bytes. dtype:
    theirs, such as "uint16", unless a file FILE.idx of Megatron-LM says it. limit: no token is as
    large, such as the size of the vocabulary.

    Raises UserError if a file cannot be read, is empty, is not a multiple of the dtype's size, or,
    as far as parts of it tell, has tokens of another type or above the limit.
    """

    def __init__(
        self, paths: Sequence[str | Path], size: int, dtype: str = "uint16", limit: int = 2**31
    ) -> None:
        self.paths, self.size, self.limit = [str(path) for path in paths], size, limit
        self.dtypes = [_dtype_of(path, dtype) for path in self.paths]
        self.lengths = [
            _length_of(path, kind) for path, kind in zip(self.paths, self.dtypes, strict=True)
        ]
        self.shard_sizes = [-(-(length - 1) // size) for length in self.lengths]  # in pieces
        self.ends = numpy.cumsum(self.shard_sizes)
        self.maps: dict[int, numpy.ndarray] = {}  # by file, as it is read
        for number, path in enumerate(self.paths):
            for block in self._blocks(number):
                self._check(path, numpy.frombuffer(block, self.dtypes[number]))

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> Tensor:
        """int64 (size + 1,), or shorter at the end of a file."""
        index = range(len(self))[index]
        number = int(numpy.searchsorted(self.ends, index, side="right"))
        start = (index - int(self.ends[number]) + self.shard_sizes[number]) * self.size
        piece = self._map(number)[start : start + self.size + 1].astype(numpy.int64)
        self._check(self.paths[number], piece)
        return torch.from_numpy(piece)

    def __getstate__(self) -> dict[str, object]:
        """For a process that is spawned, which would get a copy of what is mapped."""
        return vars(self) | {"maps": {}}

    def describe(self, name: str) -> dict[str, str]:
        """For the data that a checkpoint describes: names (without folders) and sizes of the files,
        and a checksum of parts of their contents. name: of the split, such as "train"."""
        checksum = 0
        for number, path in enumerate(self.paths):
            checksum = zlib.crc32(f"{Path(path).name} {self.lengths[number]}".encode(), checksum)
            for block in self._blocks(number):
                checksum = zlib.crc32(block, checksum)
        facts = f"{len(self.paths)} files, {sum(self.lengths)} tokens, checksum {checksum:08x}"
        return {f"{name}_tokens": facts}

    def _blocks(self, number):
        """Parts of a file, from its start to its end, as bytes."""
        data, size = self._map(number), BLOCK // self.dtypes[number].itemsize
        starts = numpy.linspace(0, max(0, len(data) - size), BLOCKS, dtype=numpy.int64)
        return [data[start : start + size].tobytes() for start in starts]

    def _check(self, path, tokens):
        if tokens.dtype == numpy.uint16 and len(tokens) > 16 and tokens[1::2].max() <= 1:
            raise UserError(
                f"{path} seems to hold uint32: every other uint16 is 0 or 1. Tokens of uint32 are "
                f"read with a vocabulary of more than 65,536"
            )
        if tokens.min() < 0 or tokens.max() >= self.limit:
            raise UserError(
                f"{path} holds the token {tokens.max()}, and the model knows those below "
                f"{self.limit}: pass the size of the tokenizer's vocabulary, or the files have "
                f"tokens of another type than {numpy.result_type(*self.dtypes)}"
            )

    def _map(self, number):
        if number not in self.maps:
            self.maps[number] = numpy.memmap(self.paths[number], self.dtypes[number], mode="r")
        return self.maps[number]


def _dtype_of(path, dtype):
    index = Path(path).with_suffix(".idx")
    if not index.exists():
        return numpy.dtype(dtype)
    with open(index, "rb") as file:
        head = file.read(len(MAGIC) + 9)
    if not head.startswith(MAGIC) or len(head) < len(MAGIC) + 9:
        raise UserError(f"{index} is not an index of Megatron-LM: remove it, or write it again")
    version, code = struct.unpack("<QB", head[len(MAGIC) :])
    if version != 1 or code not in KINDS:
        raise UserError(f"{index} has version {version} and type {code}, which are not known here")
    return numpy.dtype(KINDS[code])


def _length_of(path, dtype):
    try:
        size = Path(path).stat().st_size
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if size % dtype.itemsize:
        raise UserError(
            f"{path} has {size} bytes, which {dtype} tokens do not fill: it is cut off, or its "
            f"tokens are of another type"
        )
    if size < 2 * dtype.itemsize:
        raise UserError(f"{path} holds nothing to predict: two tokens are needed")
    return size // dtype.itemsize
