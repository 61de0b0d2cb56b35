"""sources/packing.py: documents of any lengths in pieces of one length."""

import json

import pytest
import torch

from sources.packing import Packed
from sources.samplers import ShardOrder
from sources.shards import Shards
from utils.errors import UserError


@pytest.mark.parametrize("lengths", [[3, 0, 9, 1, 1, 4], [2], [0, 0, 5, 0], [7, 6]], ids=str)
@pytest.mark.parametrize("size", [1, 4, 5, 30])
def test_pieces_are_those_of_the_whole_text(lengths, size):
    everything = torch.arange(sum(lengths))
    documents = list(everything.split(lengths))
    packed = Packed(documents, torch.tensor(lengths), size)
    pieces = [packed[index] for index in range(len(packed))]
    expected = [everything[i : i + size + 1] for i in range(0, len(everything) - 1, size)]
    assert [piece.tolist() for piece in pieces] == [piece.tolist() for piece in expected]
    predicted = torch.cat([piece[1:] for piece in pieces])
    assert torch.equal(predicted, everything[1:])
    with pytest.raises(IndexError):
        packed[len(packed)]


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


def test_the_lines_of_the_page(tmp_path):
    """Of shards, with an order that has locality."""
    texts = [["one", "two t\u00e9"], ["three"], [], ["four four", "", "five", "six"]]
    for number, lines in enumerate(texts):
        rows = "".join(json.dumps({"text": line}) + "\n" for line in lines)
        (tmp_path / f"train-{number}.jsonl").write_text(rows)
    documents = Shards(sorted(tmp_path.glob("*.jsonl")), transform=encode, length="text")
    packed = Packed(documents, documents.lengths + 1, 5)
    parts = ["".join(line + "\n" for line in lines).encode() for lines in texts]
    whole = b"".join(parts)
    assert bytes(torch.cat([piece[1:] for piece in packed]).tolist()) == whole[1:]
    sizes = packed.shard_sizes(documents.shard_sizes)
    first = [sum(map(len, parts[:number])) for number in range(5)]
    expected = [range(0, len(whole) - 1, 5)] * 4
    for number in range(4):
        starts = [i for i in expected[number] if first[number] <= i < first[number + 1]]
        assert sizes[number] == len(starts)
    assert sorted(ShardOrder(sizes)) == list(range(len(packed)))


def test_tokens_as_the_page_packs_them(tmp_path):
    lines = [{"ids": ids, "tokens": len(ids)} for ids in ([3, 1, 4], [1, 5, 9, 2], [6])]
    (tmp_path / "train-0.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    paths = sorted(tmp_path.glob("train-*.jsonl"))
    documents = Shards(paths, transform=lambda line: torch.tensor(line["ids"]), label="tokens")
    packed = Packed(documents, documents.labels, 3)
    assert [piece.tolist() for piece in packed] == [[3, 1, 4, 1], [1, 5, 9, 2], [2, 6]]


def encode(value):
    return torch.tensor(list((value["text"] + "\n").encode()))
