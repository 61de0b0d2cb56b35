"""Packing: documents of any lengths, cut into pieces of one length.

For the text task with a folder (tasks/text_folder.py), and for tasks of your own: docs/streams.md.
"""

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from utils.errors import UserError


class Packed(Dataset[Tensor]):
    """Documents, one after another, cut into pieces, so that one batch at most is padded.

    A piece has size + 1 elements. Its last element is the first of the next piece, so that, if each
    element is predicted from those before it in its piece, all but the very first are predicted
    once. The last piece may be shorter, so that its batch must be padded, as tasks.text.Documents
    does. A piece may hold the end of a document and the start of the next: put a separator at their
    ends.

    documents: a map-style dataset of 1-dim tensors; lengths: theirs, known without reading them.
    """

    def __init__(self, documents: Any, lengths: Sequence[int] | Tensor, size: int) -> None:
        self.documents, self.size = documents, size
        self.ends = numpy.cumsum(numpy.asarray(lengths, numpy.int64))
        if len(documents) != len(self.ends):
            raise UserError(f"there are {len(documents)} documents, but {len(self.ends)} lengths")
        if not len(self):
            raise UserError("the documents hold nothing to predict: two elements are needed")

    def __len__(self) -> int:
        total = int(self.ends[-1]) if len(self.ends) else 0
        return max(0, -(-(total - 1) // self.size))

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.size
        stop = min(start + self.size + 1, int(self.ends[-1]))
        first = int(numpy.searchsorted(self.ends, start, side="right"))
        last = int(numpy.searchsorted(self.ends, stop, side="left"))
        numbers = range(first, last + 1)
        sizes = numpy.diff(self.ends[first : last + 1], prepend=0)  # an empty document has size 0
        parts = [self._document(n) for n, size in zip(numbers, sizes, strict=True) if size]
        skipped = start - int(self.ends[first]) + len(parts[0])
        return torch.cat(parts)[skipped:][: stop - start]

    def _document(self, number):
        document = self.documents[number]
        length = int(self.ends[number] - (self.ends[number - 1] if number else 0))
        if len(document) != length:
            raise UserError(
                f"document {number} has {len(document)} elements, but its length is given as "
                f"{length}"
            )
        return document

    def shard_sizes(self, documents: Sequence[int]) -> list[int]:
        """The number of pieces that start in each file, for ShardOrder. documents: how many
        documents each file has."""
        ends = numpy.concatenate([[0], self.ends])[numpy.cumsum(documents)]
        pieces = numpy.minimum(-(-ends // self.size), len(self))
        return numpy.diff(pieces, prepend=0).tolist()
