"""sources/packing.py: documents of any lengths in pieces of one length."""

import re
from types import SimpleNamespace

import pytest
import torch

from sources.packing import Packed
from tests.recipes import import_new
from tools.lib.ladder import ROOT
from tools.shards import write_json_lines
from tools.verify.run import project_with_task
from utils.errors import UserError


@pytest.mark.parametrize("lengths", [[3, 0, 9, 1, 1, 4], [2], [0, 0, 5, 0], [7, 6]], ids=str)
@pytest.mark.parametrize("size", [1, 4, 30])
def test_pieces_are_those_of_the_whole_text(lengths, size):
    everything = torch.arange(sum(lengths))
    packed = Packed(everything.split(lengths), torch.tensor(lengths), size)
    pieces = [piece.tolist() for piece in packed]
    expected = [everything[i : i + size + 1] for i in range(0, len(everything) - 1, size)]
    assert pieces == [piece.tolist() for piece in expected]
    assert len(packed) == len(pieces)


def test_empty_document_changes_no_dtype():
    """torch.tensor([]) is float32, which torch.cat() would make of all, rounded."""
    documents = [torch.tensor([2**24 + 1, 1]), torch.tensor([]), torch.tensor([3])]
    piece = Packed(documents, torch.tensor([2, 0, 1]), 4)[0]
    assert piece.dtype == torch.int64 and piece.tolist() == [2**24 + 1, 1, 3]


def test_wrong_lengths_are_refused():
    documents = [torch.arange(3), torch.arange(4)]
    with pytest.raises(UserError, match=r"document 1 has 4 .* 5$"):
        Packed(documents, [3, 5], 4)[0]
    with pytest.raises(UserError, match="2 documents, but 1 lengths"):
        Packed(documents, [3], 4)
    for empty in ([], [torch.arange(1)]):
        with pytest.raises(UserError, match="nothing to predict"):
            Packed(empty, [len(document) for document in empty], 4)


def test_tokens_as_the_page_packs_them(monkeypatch, tmp_path):
    """With the code of the page: batches, of which the last piece is padded."""
    page = (ROOT / "docs" / "streams.md").read_text()
    (code,) = re.findall(r"```python\n([^`]*Packed\([^`]*)```", page)
    folder = project_with_task("text", tmp_path / "copy")
    (folder / "tasks" / "packed_ids.py").write_text(f"from tasks.text import *\n{code}")
    task = import_new("tasks.packed_ids", folder, monkeypatch)
    for split, count in (("train", 40), ("val", 9)):
        write_json_lines(tmp_path, split, [{"ids": [n] * n, "tokens": n} for n in range(count)])
    cfg = SimpleNamespace(text_file=tmp_path, context=7, padding="longest")
    train, val = task.build_datasets(cfg)
    assert (len(train), len(val)) == (112, 5) and len(train[111][0]) == 2
    inputs, targets = train.collate_fn([train[0], train[111]])
    assert inputs.tolist() == [[1, 2, 2, 3, 3, 3, 4], [39, 39, 0, 0, 0, 0, 0]]
    assert targets.tolist() == [[2, 2, 3, 3, 3, 4, 4], [39, 39, *[task.IGNORED] * 5]]
    facts = task.describe(train, val)
    assert facts["train_shards"].startswith("1 files, 40 samples") and "val_shards" in facts
    pieces = train.pieces
    assert "`pieces.shard_sizes(pieces.documents.shard_sizes)`" in page
    assert pieces.shard_sizes(pieces.documents.shard_sizes) == [112]
