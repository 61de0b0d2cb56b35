"""Files of tokens, as nanoGPT and Megatron-LM write them: pieces or documents, read by mmap.

For the text task with a folder (tasks/text_folder.py), and for tasks of your own: docs/streams.md.
`python -m tools.tokens` makes such files of texts.
"""

import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from utils.errors import UserError

# Megatron-LM's index, FILE.idx beside FILE.bin, begins with MAGIC, a version, a code of the type,
# and the numbers of sequences and of bounds. Then come the lengths of the sequences (int32), their
# places in bytes (int64), which are not read here, and the bounds (int64): the first sequence of
# each document, and the end.
MAGIC = b"MMIDIDX\x00\x00"
HEAD = struct.Struct("<9sQBQQ")
KINDS = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
BLOCKS, BLOCK = 64, 4096  # what a checksum reads of a file: how many parts, of how many bytes
UPPER = 4  # the upper half of a token in uint32, of vocabularies up to 327,680


class TokenFiles(Dataset[Tensor]):
    """The tokens in files, cut into pieces of size + 1, so that few batches are padded.

    The last token of a piece is the first of the next piece in its file, so that all but the first
    of a file are predicted once. A file's last piece may be shorter, so that its batch must be
    padded, as tasks.text.Documents does. A piece may hold the end of a document and the start of
    the next: whoever writes the files puts a token at their ends.

    paths: files of numbers without anything else, in the order of this machine's bytes. dtype:
    theirs, such as "uint16", unless a file FILE.idx of Megatron-LM says it. limit: no token is as
    large, such as the size of the vocabulary.

    Raises UserError if a file is empty, is not a multiple of the dtype's size, does not fit its
    FILE.idx, or, as far as parts of it tell, has tokens of another type or above the limit.
    """

    def __init__(
        self, paths: Sequence[str | Path], size: int, dtype: str = "uint16", limit: int = 2**31
    ) -> None:
        self.paths, self.size, self.limit = [str(path) for path in paths], size, limit
        if not self.paths:
            raise UserError("there are no files of tokens: pass at least one path")
        self.dtypes = [_dtype_of(path, dtype) for path in self.paths]
        self.tokens = [
            _length_of(path, kind) for path, kind in zip(self.paths, self.dtypes, strict=True)
        ]
        self.shard_sizes = [-(-(length - 1) // size) for length in self.tokens]  # in pieces
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
        start, stop = self._place(number, index - int(self.ends[number]) + self.shard_sizes[number])
        piece = self._map(number)[start:stop].astype(numpy.int64)
        self._check(self.paths[number], piece)
        return torch.from_numpy(piece)

    def _place(self, number, index):
        """The first token of a sample in its file, and the one after its last."""
        return index * self.size, (index + 1) * self.size + 1

    def __getstate__(self) -> dict[str, object]:
        """What a spawned process gets, without the maps, which would be copied."""
        return vars(self) | {"maps": {}}

    def describe(self, name: str) -> dict[str, str]:
        """What a checkpoint stores about the data: names (without folders) and sizes of the files,
        and a checksum of parts of their contents. name: of the split, such as "train"."""
        checksum = 0
        for number, path in enumerate(self.paths):
            checksum = zlib.crc32(f"{Path(path).name} {self.tokens[number]}".encode(), checksum)
            for block in self._blocks(number):
                checksum = zlib.crc32(block, checksum)
        facts = f"{len(self.paths)} files, {sum(self.tokens)} tokens, checksum {checksum:08x}"
        return {f"{name}_tokens": facts}

    def _blocks(self, number):
        """Parts of a file, from its start to its end, as bytes."""
        data, size = self._map(number), BLOCK // self.dtypes[number].itemsize
        starts = numpy.linspace(0, max(0, len(data) - size), BLOCKS, dtype=numpy.int64)
        return [data[start : start + size].tobytes() for start in starts]

    def _check(self, path, tokens):
        if not len(tokens):  # an empty document
            return
        for width in (4, 2) if tokens.dtype.kind == "u" and len(tokens) > 32 else ():
            parts = tokens[: len(tokens) // width * width].reshape(-1, width)  # of wider tokens
            if parts[:, 1:].max() <= UPPER < numpy.median(parts[:, 0]):  # not if most are padding
                raise UserError(
                    f"{path} seems to hold tokens of {8 * width * tokens.itemsize} bits (NumPy's "
                    f"default is int64), and is read as {tokens.dtype}: write them with "
                    f"astype('uint16'), or with a vocabulary of more than 65,536 as 'uint32'"
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


class TokenDocuments(TokenFiles):
    """The documents in files of tokens, which FILE.idx of Megatron-LM tells apart, as tensors.

    lengths: of all documents, int64 (documents,), for sources.packing.Packed or LengthBuckets.
    shard_sizes: how many of them each file has. Raises UserError as TokenFiles does, and if a file
    has no FILE.idx.
    """

    def __init__(self, paths: Sequence[str | Path], limit: int = 2**31) -> None:
        super().__init__(paths, size=1, limit=limit)
        self.bounds = [_bounds_of(path) for path in self.paths]  # in tokens
        self.lengths = numpy.concatenate([numpy.diff(bounds) for bounds in self.bounds])
        self.shard_sizes = [len(bounds) - 1 for bounds in self.bounds]
        self.ends = numpy.cumsum(self.shard_sizes)

    def _place(self, number, index):
        return self.bounds[number][index : index + 2]


class Index(NamedTuple):
    """What FILE.idx holds, mapped: see MAGIC."""

    dtype: numpy.dtype[Any]
    lengths: Any
    bounds: Any


def write_index(path: Path, dtype: Any, lengths: Sequence[int]) -> None:
    """Write an index for Megatron-LM, which reads uint32 as int32. lengths: of the documents, in
    tokens, each a sequence."""
    kind = {"uint32": "int32"}.get(numpy.dtype(dtype).name, numpy.dtype(dtype).name)
    code = next(code for code, name in KINDS.items() if name == kind)
    sizes = numpy.array(lengths, numpy.int64) * numpy.dtype(dtype).itemsize
    with open(path, "wb") as file:
        file.write(HEAD.pack(MAGIC, 1, code, len(lengths), len(lengths) + 1))
        file.write(numpy.array(lengths, "<i4").tobytes())
        file.write((sizes.cumsum() - sizes).astype("<i8").tobytes())
        file.write(numpy.arange(len(lengths) + 1, dtype="<i8").tobytes())
        file.flush()
        os.fsync(file.fileno())


def _read_index(path):
    """The Index of a file, or None if it has none."""
    index = Path(path).with_suffix(".idx")
    if not index.exists():
        return None
    with open(index, "rb") as file:
        head = file.read(HEAD.size).ljust(HEAD.size)
    magic, version, code, sequences, documents = HEAD.unpack(head)
    if magic != MAGIC or version != 1 or code not in KINDS:
        raise UserError(f"{index} is not an index of Megatron-LM: remove it, or write it again")
    end = HEAD.size + 12 * sequences  # of the lengths and the places
    if index.stat().st_size != end + 8 * documents:
        raise UserError(
            f"{index} has not the bytes that its {sequences} sequences and {documents} bounds of "
            f"documents take: it is cut off, or of a multimodal dataset"
        )
    lengths = numpy.memmap(index, "<i4", "r", HEAD.size, (sequences,))
    bounds = numpy.memmap(index, "<i8", "r", end, (documents,))
    dtype, size = numpy.dtype(KINDS[code]), Path(path).stat().st_size
    told = int(lengths.sum(dtype=numpy.int64)) * dtype.itemsize
    if told != size:
        raise UserError(
            f"{index} tells of {told} bytes in {path}, which has {size}: one of them is cut off or "
            f"of a different dataset"
        )
    return Index(dtype, lengths, bounds)


def _bounds_of(path):
    """The first token of each document of a file, and the end of the last one: int64."""
    index = _read_index(path)
    if index is None:
        raise UserError(f"there is no {Path(path).with_suffix('.idx')}, which tells of documents")
    return numpy.append(0, index.lengths.cumsum(dtype=numpy.int64))[index.bounds]


def _dtype_of(path, dtype):
    index = _read_index(path)
    return numpy.dtype(dtype) if index is None else index.dtype


def _length_of(path, dtype):
    size = Path(path).stat().st_size
    if not size or size % dtype.itemsize:
        raise UserError(
            f"{path} has {size} bytes, which {dtype} tokens do not fill: it is cut off, or its "
            f"tokens are of another type"
        )
    return size // dtype.itemsize
